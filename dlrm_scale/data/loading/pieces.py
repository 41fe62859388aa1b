"""Which pieces of record batches a split is made of.

A split is ranges of rows, a file is record batches of 8,192 rows; the ranges start and end anywhere:

```
rows      0      8192     16384     24576            part 0 | part 1 …
batches   |   0    |   1    |   2     |    0 …
split          [--------------)      [----)
pieces         [---)[-----)[--)      [----)
```
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from dlrm_scale.data.dataset.dataset import ROWS_PER_RECORD_BATCH, Dataset, RowRange

__all__ = ["Pieces", "pieces_of", "split_pieces"]

Int64s = npt.NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class Pieces:
    """P pieces in file order; each lies in one record batch.

    Attributes:
        part: `[P]` index of the part.
        record_batch: `[P]` index of the record batch in its part.
        skip: `[P]` rows of the record batch before the piece.
        rows: `[P]` rows of the piece, at least 1.
        start_global: `[P]` number of its first row in the dataset.
    """

    part: Int64s
    record_batch: Int64s
    skip: Int64s
    rows: Int64s
    start_global: Int64s

    @property
    def total_rows(self) -> int:
        """Rows of all pieces."""
        return int(self.rows.sum())

    def __len__(self) -> int:
        return len(self.rows)


def split_pieces(dataset: Dataset, split: str) -> Pieces:
    """Pieces of a dataset's split."""
    return pieces_of([part.rows for part in dataset.manifest.parts], dataset.split_ranges(split))


def pieces_of(part_rows: Sequence[int], ranges: Sequence[RowRange]) -> Pieces:
    """Cut ranges of rows where parts and record batches end.

    Args:
        part_rows: rows of each part.
        ranges: ascending ranges of the rows of all parts.
    """
    part_starts = np.concatenate([[0], np.cumsum(part_rows, dtype=np.int64)])
    columns: list[list[Int64s]] = [[np.empty(0, np.int64)] for _ in range(5)]
    for r in ranges:
        for part in range(len(part_rows)):
            first = max(r.start, int(part_starts[part])) - int(part_starts[part])
            last = min(r.end, int(part_starts[part + 1])) - int(part_starts[part])
            if first >= last:
                continue
            batches = np.arange(first // ROWS_PER_RECORD_BATCH, (last - 1) // ROWS_PER_RECORD_BATCH + 1)
            starts = np.maximum(batches * ROWS_PER_RECORD_BATCH, first)
            ends = np.minimum((batches + 1) * ROWS_PER_RECORD_BATCH, last)
            piece = (
                np.full(len(batches), part),
                batches,
                starts - batches * ROWS_PER_RECORD_BATCH,
                ends - starts,
                starts + part_starts[part],
            )
            for column, values in zip(columns, piece, strict=True):
                column.append(values)
    part_, batch, skip, rows, start = (np.concatenate(column) for column in columns)
    return Pieces(part=part_, record_batch=batch, skip=skip, rows=rows, start_global=start)
