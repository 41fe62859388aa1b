"""Table sets of datasets: distinct rows and bags from sampled training batches, hot rows from vocabularies.

The samples are the first batches that training would get: its order mixes the whole training split. A batch of s
samples is every k-th sample of a large one, so that it too has its share of every stream.

Memory: one large batch's ids (4 bytes each, all tables), distinct rows of the samples with their counts for columns
without a frequency vocabulary (12 bytes each), and the loader's windows (250 MB, and 25 MB a stream where rows have 200
ids).
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np
import numpy.typing as npt

from dlrm_scale.config import DataConfig
from dlrm_scale.data.dataset.dataset import ColumnInfo, Dataset
from dlrm_scale.data.vocabulary.vocabulary import FIRST_ID_ROW
from dlrm_scale.data.vocabulary.vocabulary_file import read_counts
from dlrm_scale.errors import ConfigError, DatasetError
from dlrm_scale.planning.tables.distinct_rows import count_distinct_rows
from dlrm_scale.planning.tables.popularity import Curve, concave, rounded
from dlrm_scale.planning.tables.row_counts import RowCounts
from dlrm_scale.planning.tables.table_set import SparseOptimizer, TableSet, TableStats
from dlrm_scale.schema import CATEGORY_COLUMNS, Pooling

__all__ = ["SAMPLES", "Sampling", "measure_tables"]

Int32s = npt.NDArray[np.int32]
Int64s = npt.NDArray[np.int64]
Progress = Callable[[str, int, int], None]
"""Gets what is being done, how much is, and of how much."""

SAMPLES = 262_144
"""Training rows that are looked at unless another number is asked for."""

_SMALLEST_BATCH = 64
_LARGEST_BATCH = 65_536
_LOADED_ROWS = 8192
_SURE_COUNT = 8
"""Lookups of a row in the samples from which on its rank is believed."""


@dataclass(frozen=True, kw_only=True)
class Sampling:
    """What to measure.

    Attributes:
        samples: training rows to look at, in whole batches of the largest size.
        batch_sizes: that the curves must have points at; 64 times powers of 4, up to the largest of these or 65,536,
            are added.
    """

    samples: int = SAMPLES
    batch_sizes: tuple[int, ...] = ()


def measure_tables(
    dataset: Dataset,
    *,
    dim: int,
    pooling: Pooling = "sum",
    optimizer: SparseOptimizer = "rowwise_adagrad",
    sampling: Sampling | None = None,
    order: DataConfig | None = None,
    on_progress: Progress = lambda what, done, total: None,
) -> TableSet:
    """Measure how a dataset's training rows look up their tables.

    Args:
        dataset: what `dlrm-scale preprocess` wrote.
        dim: columns of all tables.
        pooling: of all tables.
        optimizer: of the tables.
        sampling: how much to look at.
        order: seed, streams and windows of the order of rows; a run's own, or the default.
        on_progress: told now and then.

    Returns:
        A set that depends on the arguments alone.

    Raises:
        DatasetError: the dataset has no training rows, or is damaged.
        ConfigError: a batch size is larger than the training split.
    """
    sampling, order = sampling or Sampling(), order or DataConfig()
    rows = dataset.split_rows("train")
    if rows == 0:
        raise DatasetError(
            f"{dataset.path} has no training rows", remedy="preprocess with a smaller --validation or more files"
        )
    sizes = _batch_sizes(sampling, rows)
    batches = min(-(-sampling.samples // sizes[-1]), rows // sizes[-1])
    seen = [_Seen(by_row=info.method != "frequency") for info in dataset.manifest.columns]
    looked_at = 0
    for columns in _large_batches(dataset, order, sizes[-1], batches):
        for one, (ids, lengths) in zip(seen, columns, strict=True):
            one.add(ids, lengths, sizes)
        looked_at += sizes[-1]
        on_progress("sampling batches", looked_at, batches * sizes[-1])
    tables = []
    for number, (info, one) in enumerate(zip(dataset.manifest.columns, seen, strict=True)):
        tables.append(_table(dataset, info, one, sizes, dim, pooling))
        on_progress("reading counts", number + 1, len(seen))
    return TableSet(
        name=dataset.path.resolve().name,
        optimizer=optimizer,
        tables=tuple(tables),
        source=f"measured on {looked_at:,} of {rows:,} training rows of dataset {dataset.fingerprint[:12]}",
    )


def _batch_sizes(sampling: Sampling, rows: int) -> tuple[int, ...]:
    for size in sampling.batch_sizes:
        if size > rows:
            raise ConfigError(
                f"a batch of {size:,} samples can't be measured: the dataset has {rows:,} training rows",
                remedy=f"ask for at most {rows:,}",
            )
    largest = max(sampling.batch_sizes, default=_LARGEST_BATCH)
    sizes = {*sampling.batch_sizes}
    size = _SMALLEST_BATCH
    while size <= min(largest, rows):
        sizes.add(size)
        size *= 4
    return tuple(sorted(sizes)) or (rows,)


def _large_batches(
    dataset: Dataset, order: DataConfig, size: int, batches: int
) -> Iterator[list[tuple[Int32s, Int32s]]]:
    """Yield each batch as (ids, lengths of its bags) by column; put together from the loader's smaller ones."""
    # torchrec takes seconds to import: mistakes are found before it
    from dlrm_scale.data.loading.loader import TrainLoader

    # The same streams in smaller steps give the same rows.
    power = size & -size
    streams = order.streams if order.streams and size % order.streams == 0 else min(power, 64)
    loaded = max(streams, min(power, _LOADED_ROWS))
    changed = {"batch_size": loaded, "streams": streams, "prefetch_batches": 1, "drop_last": False, "readers": 1}
    loader = TrainLoader(dataset, order.model_copy(update=changed), rank=0, ranks=1, epochs=1)
    try:
        for _ in range(batches):
            pieces: list[list[tuple[Int32s, Int32s]]] = [[] for _ in CATEGORY_COLUMNS]
            for _ in range(size // loaded):
                features = next(loader).sparse_features
                values = features.values().numpy().astype(np.int32)
                lengths = features.lengths().numpy().astype(np.int32).reshape(len(CATEGORY_COLUMNS), -1)
                ids = np.split(values, np.cumsum(lengths.sum(axis=1))[:-1])
                for mine, some, of_bags in zip(pieces, ids, lengths, strict=True):
                    mine.append((some, of_bags))
            yield [
                (np.concatenate([ids for ids, _ in mine]), np.concatenate([lengths for _, lengths in mine]))
                for mine in pieces
            ]
    finally:
        loader.close()


@dataclass(slots=True)
class _Seen:
    """What the samples say of one table.

    Attributes:
        by_row: count all rows, and not only those of missing and unknown ids.
        bags: by number of ids.
        distinct: sums of distinct rows over batches, by batch size.
        batches: how many of each size.
        rows: distinct rows so far, ascending; those that are counted.
        counts: of these.
        lookups: of all rows.
    """

    by_row: bool
    bags: Int64s = field(default_factory=lambda: np.zeros(1, np.int64))
    distinct: dict[int, int] = field(default_factory=dict)
    batches: dict[int, int] = field(default_factory=dict)
    rows: Int32s = field(default_factory=lambda: np.empty(0, np.int32))
    counts: Int64s = field(default_factory=lambda: np.empty(0, np.int64))
    lookups: int = 0

    def add(self, ids: Int32s, lengths: Int32s, sizes: tuple[int, ...]) -> None:
        bags = np.bincount(lengths, minlength=len(self.bags))
        bags[: len(self.bags)] += self.bags
        self.bags = bags
        found = count_distinct_rows(ids, lengths, sizes)
        for size, distinct in zip(sizes, found.by_size, strict=True):
            self.distinct[size] = self.distinct.get(size, 0) + distinct
            self.batches[size] = self.batches.get(size, 0) + len(lengths) // size
        self.lookups += len(ids)
        kept = slice(None) if self.by_row else found.rows < FIRST_ID_ROW
        self.rows, place = np.unique(np.concatenate([self.rows, found.rows[kept]]), return_inverse=True)
        counts = np.zeros(len(self.rows), np.int64)
        np.add.at(counts, place, np.concatenate([self.counts, found.counts[kept]]))
        self.counts = counts

    @property
    def mean(self) -> float:
        """Ids a bag."""
        return float(self.bags @ np.arange(len(self.bags)) / self.bags.sum())

    @property
    def p99(self) -> int:
        """99th percentile of ids a bag: the least number that 99 % of the bags don't exceed."""
        return int(np.searchsorted(np.cumsum(self.bags), 0.99 * self.bags.sum()))


def _table(
    dataset: Dataset, info: ColumnInfo, seen: _Seen, sizes: tuple[int, ...], dim: int, pooling: Pooling
) -> TableStats:
    mean = seen.mean
    counts = RowCounts(info.table_rows)
    ranks = [2**k for k in range(31) if 2**k < info.table_rows]
    hot: Curve
    if info.method == "frequency":
        _add_vocabulary(dataset, info, seen, counts)
        hot = counts.hot_rows(ranks)
    else:
        counts.add(seen.rows.astype(np.int64), seen.counts)
        hot = _sampled_hot_rows(info, counts, ranks)
    return TableStats(
        name=info.name,
        rows=info.table_rows,
        dim=dim,
        pooling=pooling,
        lookups_per_sample=mean,
        lookups_per_sample_p99=float(seen.p99),
        unique_rows=tuple((s, rounded(min(seen.distinct[s] / seen.batches[s], s * mean))) for s in sizes),
        hot_rows=concave(hot, info.table_rows),
        lookups_before_row=counts.lookups_before_row(),
    )


def _add_vocabulary(dataset: Dataset, info: ColumnInfo, seen: _Seen, counts: RowCounts) -> None:
    """Add the counts of a column's vocabulary, and rows 0 and 1 as often as the samples have them.

    A vocabulary may come from another dataset, so that its counts say how hot its rows are among each other.
    """
    special = int(seen.counts.sum())
    others = seen.lookups - special
    if others > 0:
        row = FIRST_ID_ROW
        for _, some in read_counts(dataset.path, info.name):
            counts.add(np.arange(row, row + len(some), dtype=np.int64), some)
            row += len(some)
    scale = counts.lookups / others if counts.lookups else 1.0
    counts.add(seen.rows.astype(np.int64), np.rint(seen.counts * scale).astype(np.int64))


def _sampled_hot_rows(info: ColumnInfo, counts: RowCounts, ranks: list[int]) -> Curve:
    """The curve of the samples where these are enough, and the manifest's, of all training rows, beyond."""
    known = cast(Mapping[str, Any], info.statistics.get("hot_row_curve") or {})
    beyond = tuple(
        (max(1, -int(-float(share) * info.table_rows // 1)), float(lookups))
        for share, lookups in known.items()
        if lookups is not None
    )
    sure = counts.rows_with(_SURE_COUNT) if beyond else info.table_rows
    return (*counts.hot_rows([k for k in ranks if k <= sure]), *(point for point in beyond if point[0] > sure))
