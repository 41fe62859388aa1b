"""Which slice of an evaluation a row belongs to: the file it came from, or the value of one column.

A row is in one slice, so the slices add up to all rows. Columns whose rows have several ids are therefore refused.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from dlrm_scale.batch import Batch
from dlrm_scale.data.dataset.dataset import Dataset
from dlrm_scale.data.loading.pieces import split_pieces
from dlrm_scale.data.preprocess.transforms import DENSE_RULE, dense_features
from dlrm_scale.data.vocabulary.vocabulary import FIRST_ID_ROW
from dlrm_scale.data.vocabulary.vocabulary_file import read_counts
from dlrm_scale.errors import ConfigError, DatasetError
from dlrm_scale.schema import CATEGORY_COLUMNS, INTEGER_COLUMNS, MISSING_ROW, OUT_OF_VOCABULARY_ROW

__all__ = ["BucketSlices", "DaySlices", "RowSlices", "ValueSlices", "make_slices"]

_SAMPLED_RECORD_BATCHES = 128
_POWERS = 31
"""Of two, that an int32 reaches."""


class RowSlices(Protocol):
    """Says for each row of a batch which slice it is in."""

    @property
    def names(self) -> tuple[str, ...]:
        """Names of the slices, in the order in which they are shown."""
        ...

    def of(self, batch: Batch, first_row: int) -> torch.Tensor:
        """Slice of each true row, `[rows_local]` int64, on the batch's device or the CPU.

        Args:
            batch: this rank's share of a global batch.
            first_row: number in the split of the share's first row.
        """
        ...


@dataclass(frozen=True, kw_only=True)
class DaySlices:
    """One slice a part of the dataset, which is one raw file.

    Attributes:
        names: the raw files.
        ends: rows of the split up to the end of each slice, `[S]`.
    """

    names: tuple[str, ...]
    ends: tuple[int, ...]

    def of(self, batch: Batch, first_row: int) -> torch.Tensor:
        """Slice of each true row."""
        rows = np.arange(first_row, first_row + batch.rows_local)
        return torch.from_numpy(np.searchsorted(self.ends, rows, side="right"))


@dataclass(frozen=True, kw_only=True)
class ValueSlices:
    """One slice for each of the most frequent values of a category column, and one for the rest.

    Attributes:
        names: of the values, then `rest`.
        column: the category column.
        table_rows: the values' rows in its table, `[S - 1]` int64, ascending.
        places: place among the names of each of `table_rows`, `[S - 1]` int64.
    """

    names: tuple[str, ...]
    column: str
    table_rows: torch.Tensor
    places: torch.Tensor

    def of(self, batch: Batch, first_row: int) -> torch.Tensor:
        """Slice of each true row."""
        ids = batch.sparse_features[self.column].values()[: batch.rows_local].long()
        known = self.table_rows.to(ids.device)
        at = torch.searchsorted(known, ids).clamp(max=len(known) - 1)
        return torch.where(known[at] == ids, self.places.to(ids.device)[at], len(known))


@dataclass(frozen=True, kw_only=True)
class BucketSlices:
    """Slices of an integer column: one for each power of two, from which on it reaches to the next.

    A dataset holds log1p(max(x, 0)) with 0 for a missing integer, so integers below 1 and missing ones can't be told
    apart and are one slice. Features are float32: an integer beyond 2^20 that is nearer than two millionths to
    the next power may count as that.

    Attributes:
        names: that slice, then the powers.
        column_index: of the column among the integer columns.
        starts: feature of each power, `[S - 1]` float32, ascending.
    """

    names: tuple[str, ...]
    column_index: int
    starts: torch.Tensor

    def of(self, batch: Batch, first_row: int) -> torch.Tensor:
        """Slice of each true row."""
        features = batch.dense_features[: batch.rows_local, self.column_index].contiguous()
        return torch.searchsorted(self.starts.to(features.device), features, right=True)


def make_slices(by: str, dataset: Dataset, split: str, values: int) -> RowSlices:
    """Prepare slices.

    The most frequent values are those of up to 1,048,576 rows that lie evenly over the split.

    Args:
        by: `day`, or a column.
        dataset: what is evaluated.
        split: the split of it.
        values: how many values of a category column have slices of their own.

    Raises:
        ConfigError: no such column, a multi-hot one, an integer column whose integers aren't known, or no value.
    """
    if by == "day":
        return _day_slices(dataset, split)
    if by in INTEGER_COLUMNS:
        return _bucket_slices(by, dataset)
    if by not in CATEGORY_COLUMNS:
        raise ConfigError(f"--by {by} is not allowed (allowed: day, or a column I1 to I13, C1 to C26)")
    if by in dataset.multi_hot:
        raise ConfigError(
            f"--by {by}: a row has several ids there, and slices are to add up to all rows",
            remedy="slice by a column with one id a row",
        )
    if values < 1:
        raise ConfigError(f"--top {values} leaves no value", remedy="give 1 or more")
    return _value_slices(by, dataset, split, values)


def _day_slices(dataset: Dataset, split: str) -> DaySlices:
    pieces = split_pieces(dataset, split)
    rows = np.bincount(pieces.part, weights=pieces.rows, minlength=len(dataset.manifest.parts)).astype(np.int64)
    parts = [part for part, count in enumerate(rows.tolist()) if count]
    named = [dataset.manifest.parts[part] for part in parts]
    sources = [part.source for part in named]
    return DaySlices(
        names=tuple(
            part.source if part.source and sources.count(part.source) == 1 else f"{part.source} ({part.file})"
            for part in named
        ),
        ends=tuple(np.cumsum(rows[parts]).tolist()),
    )


def _bucket_slices(column: str, dataset: Dataset) -> BucketSlices:
    if dataset.manifest.transforms.get("dense") != DENSE_RULE:
        raise ConfigError(
            f"--by {column}: {dataset.path} took its dense features ready-made, so their integers aren't known",
            remedy="slice by day or by a category column",
        )
    powers = 1 << np.arange(_POWERS, dtype=np.int64)
    starts = dense_features(np.tile(powers.astype(np.int32), (len(INTEGER_COLUMNS), 1)))[0]
    spans = [f"{low:,}" if low == 1 else f"{low:,} to {2 * low - 1:,}" for low in powers.tolist()]
    return BucketSlices(
        names=(f"{column} below 1 or missing", *(f"{column} {span}" for span in spans)),
        column_index=INTEGER_COLUMNS.index(column),
        starts=torch.from_numpy(starts.copy()),
    )


def _value_slices(column: str, dataset: Dataset, split: str, values: int) -> ValueSlices:
    pieces = split_pieces(dataset, split)
    chosen = np.unique(np.linspace(0, max(0, len(pieces) - 1), _SAMPLED_RECORD_BATCHES).astype(np.int64))
    index = CATEGORY_COLUMNS.index(column)
    sample = [np.empty(0, np.int32)]
    for k in chosen.tolist() if len(pieces) else []:
        skip, rows = int(pieces.skip[k]), int(pieces.rows[k])
        sample.append(dataset.read(int(pieces.part[k]), int(pieces.record_batch[k])).ids[index, skip : skip + rows])
    found, counts = np.unique(np.concatenate(sample), return_counts=True)
    top = found[np.lexsort((found, -counts))[:values]].astype(np.int64)
    if not len(top):
        top = np.zeros(1, np.int64)
    order = np.argsort(top)
    return ValueSlices(
        names=(*_value_names(dataset, column, top.tolist()), "rest"),
        column=column,
        table_rows=torch.from_numpy(top[order].copy()),
        places=torch.from_numpy(order),
    )


def _value_names(dataset: Dataset, column: str, rows: Sequence[int]) -> list[str]:
    """Names of table rows: the raw id where the dataset still knows it."""
    method = dataset.manifest.columns[CATEGORY_COLUMNS.index(column)].method
    if method == "given":
        return [f"{column} row {row}" for row in rows]
    names = {MISSING_ROW: f"{column} missing"}
    if method == "frequency":
        names |= {OUT_OF_VOCABULARY_ROW: f"{column} unknown", **_raw_ids(dataset, column, rows)}
    return [names.get(row, f"{column} row {row}") for row in rows]


def _raw_ids(dataset: Dataset, column: str, rows: Sequence[int]) -> dict[int, str]:
    found: dict[int, str] = {}
    first = FIRST_ID_ROW
    try:
        for ids, _ in read_counts(dataset.path, column):
            inside = [row for row in rows if first <= row < first + len(ids)]
            found |= {row: f"{column} {int(ids[row - first]):08x}" for row in inside}
            first += len(ids)
    except DatasetError:
        # the metrics don't need it
        return {}
    return found
