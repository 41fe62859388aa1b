"""Rows of a split in file order, record batch by record batch."""

from collections.abc import Callable, Iterator
from itertools import islice

import numpy as np

from dlrm_scale.data.dataset.dataset import Dataset, Rows
from dlrm_scale.data.loading.pieces import Pieces, split_pieces
from dlrm_scale.data.loading.readers import Readers

__all__ = ["FileRows"]

Ranges = Callable[[], Iterator[tuple[int, int]]]


class FileRows:
    """Reads ranges of a split's rows; each record batch once for ranges that follow one another.

    Args:
        dataset: where rows come from.
        split: its split.
        ranges: makes an iterator over the ranges `[first, last)`, ascending, that will be read; they may be empty.
        readers: threads that read ahead, two record batches each; with one, `read` reads.
    """

    def __init__(self, dataset: Dataset, split: str, ranges: Ranges, *, readers: int = 1) -> None:
        pieces = split_pieces(dataset, split)
        self._pieces = pieces
        self._ends = np.cumsum(pieces.rows)
        self._piece = -1
        self._readers: Readers[Rows] | None = None
        if readers == 1:
            self._rows = _read(dataset, pieces, _needed(pieces, ranges()))
            return
        self._rows = self._readers = Readers(
            [
                _read(dataset, pieces, islice(_needed(pieces, ranges()), number, None, readers))
                for number in range(readers)
            ],
            name="file-reader",
        )
        self._readers.start()

    def read(self, first: int, last: int) -> Iterator[tuple[Rows, int, int, int]]:
        """Yield rows `[first, last)` of the split, the next of the ranges.

        Yields:
            Record batch, rows to skip in it, rows to take, rows of the range before them.
        """
        pieces, ends, position = self._pieces, self._ends, first
        while position < last:
            k = int(np.searchsorted(ends, position, side="right"))
            if k != self._piece:
                self._piece, self._latest = k, next(self._rows)
            n = min(int(ends[k]), last) - position
            skip = int(pieces.skip[k]) + position - int(ends[k] - pieces.rows[k])
            yield self._latest, skip, n, position - first
            position += n

    def close(self) -> None:
        """End the threads, if there are any."""
        if self._readers is not None:
            self._readers.close()


def _needed(pieces: Pieces, ranges: Iterator[tuple[int, int]]) -> Iterator[int]:
    """Yield the pieces that ranges lie in, each once."""
    ends, next_piece = np.cumsum(pieces.rows), 0
    for first, last in ranges:
        if first < last:
            of_first, of_last = np.searchsorted(ends, [first, last - 1], side="right").tolist()
            yield from range(max(of_first, next_piece), of_last + 1)
            next_piece = max(next_piece, of_last + 1)


def _read(dataset: Dataset, pieces: Pieces, needed: Iterator[int]) -> Iterator[Rows]:
    for k in needed:
        yield dataset.read(int(pieces.part[k]), int(pieces.record_batch[k]))
