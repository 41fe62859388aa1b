"""What a reader of an input format offers: rows of one file in pieces that are read in order and parsed in parallel."""

from collections.abc import Iterator
from types import TracebackType
from typing import Any, Protocol, Self

from dlrm_scale.data.source.raw_block import RawBlock

__all__ = ["RowSource"]


class RowSource(Protocol):
    """One opened input file; a context manager that closes it."""

    @property
    def position_bytes(self) -> int:
        """How many of its stored bytes have been read, for progress."""

    def pieces(self) -> Iterator[Any]:
        """Yield the file cut into pieces of about 8,000 rows, in order, by reading (and decompressing) alone.

        Used by one thread, once.

        Raises:
            DataError: the file is cut off or damaged.
        """

    def parse(self, piece: Any) -> RawBlock:
        """Turn a piece into rows; any thread, in any order, without the GIL where it takes long.

        Raises:
            DataError: the layout isn't the one that was asked for.
        """

    def __enter__(self) -> Self: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...
