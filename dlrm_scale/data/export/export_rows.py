"""Which rows an export takes, and reading them part by part."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import numpy as np

from dlrm_scale.data.dataset.dataset import ROWS_PER_RECORD_BATCH, Dataset, RowRange, Rows
from dlrm_scale.data.source.raw_block import Bags
from dlrm_scale.errors import DatasetError

__all__ = ["ExportedPart", "exported_parts", "read_rows", "record_batch_slices"]


@dataclass(frozen=True, kw_only=True)
class ExportedPart:
    """The rows of one part of a dataset that are exported.

    Attributes:
        index: the part's number in the dataset; names of exported files keep it.
        source: the raw file that the part was made from.
        ranges: rows inside the part, ascending.
    """

    index: int
    source: str
    ranges: tuple[RowRange, ...]

    @property
    def rows(self) -> int:
        """How many rows are exported."""
        return sum(r.end - r.start for r in self.ranges)


def exported_parts(dataset: Dataset, split: str | None) -> list[ExportedPart]:
    """List the parts that hold rows of a split, or of all splits and none for None.

    Raises:
        DatasetError: there is no such split, or no row in it.
    """
    ranges = (RowRange(start=0, end=dataset.rows),) if split is None else dataset.split_ranges(split)
    parts, start = [], 0
    for index, part in enumerate(dataset.manifest.parts):
        end = start + part.rows
        inside = tuple(
            RowRange(start=max(r.start, start) - start, end=min(r.end, end) - start)
            for r in ranges
            if max(r.start, start) < min(r.end, end)
        )
        if inside:
            parts.append(ExportedPart(index=index, source=part.source, ranges=inside))
        start = end
    if not parts:
        what = "no rows" if split is None else f"no rows in split {split}"
        held = ", ".join(f"{name} {dataset.split_rows(name):,}" for name in dataset.manifest.split)
        raise DatasetError(f"{dataset.path} has {what} ({held})", remedy="name another split, or leave out --split")
    return parts


def read_rows(dataset: Dataset, part: ExportedPart) -> Iterator[Rows]:
    """Read a part's exported rows in order, at most a record batch at a time.

    Raises:
        DatasetError: as `Dataset.read`.
    """
    for index, start, end in record_batch_slices(part):
        yield _sliced(dataset.read(part.index, index), start, end)


def record_batch_slices(part: ExportedPart) -> Iterator[tuple[int, int, int]]:
    """Yield (record batch, first row in it, row after the last) for a part's exported rows."""
    for r in part.ranges:
        for start in range(r.start - r.start % ROWS_PER_RECORD_BATCH, r.end, ROWS_PER_RECORD_BATCH):
            yield (
                start // ROWS_PER_RECORD_BATCH,
                max(r.start - start, 0),
                min(r.end - start, ROWS_PER_RECORD_BATCH),
            )


def _sliced(rows: Rows, start: int, end: int) -> Rows:
    if (start, end) == (0, len(rows.labels)):
        return rows
    bags: Mapping[str, Bags] = {
        name: Bags(
            values=bag.values[bag.offsets[start] : bag.offsets[end]],
            offsets=(bag.offsets[start : end + 1] - bag.offsets[start]).astype(np.int32),
        )
        for name, bag in rows.bags.items()
    }
    return Rows(rows.labels[start:end], rows.dense[:, start:end], rows.ids[:, start:end], bags)
