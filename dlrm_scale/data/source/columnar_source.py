"""What readers of files of columns share: the files say how many rows they have, and progress follows the rows."""

from types import TracebackType
from typing import Self

from dlrm_scale.data.source.inputs import InputFile
from dlrm_scale.data.source.row_layout import RowLayout

__all__ = ["ColumnarSource"]


class ColumnarSource:
    """Base of a `RowSource`; a context manager that closes it.

    Args:
        input_file: what is read.

    Attributes:
        path: the file, or the one that stands for several.
        rows: number of rows.
        multi_hot: names of the columns with several ids a row.
        gives_features: I1..I13 are ready-made, and no transform is applied again.
    """

    rows: int
    multi_hot: tuple[str, ...]
    gives_features: bool

    def __init__(self, input_file: InputFile) -> None:
        self.path = input_file.path
        self._size_bytes = input_file.size_bytes
        self._rows_read = 0

    @property
    def layout(self) -> RowLayout:
        """What must agree among the files of one command."""
        return RowLayout(path=self.path, rows=self.rows, multi_hot=self.multi_hot, gives_features=self.gives_features)

    @property
    def position_bytes(self) -> int:
        """How many stored bytes have been read, of all files together, estimated by the rows."""
        return self._size_bytes * self._rows_read // max(1, self.rows)

    def close(self) -> None:
        """Close the files; harmless when repeated."""
        raise NotImplementedError

    def __enter__(self) -> Self:
        """Return itself."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close the files."""
        self.close()
