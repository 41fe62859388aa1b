"""Batches of ids that behave like a table set's lookups, for measuring plans without a dataset.

Pooling, distinct rows, hot rows and where they lie are those of the `TableStats`; ids of one bag may repeat. A table's
ids depend on (seed, the table's number in its set, batch number, samples) alone, so that ranks can draw their own
tables and agree.
"""

import math
from collections.abc import Iterable
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from scipy.optimize import brentq
from scipy.stats import nbinom, poisson

from dlrm_scale.planning.tables.popularity import fit_popularity, segments_of
from dlrm_scale.planning.tables.table_set import TableSet, TableStats

__all__ = ["BatchDrawer", "DrawnBags"]

_GOLDEN = (math.sqrt(5) - 1) / 2


class DrawnBags(NamedTuple):
    """One table's bags of one batch.

    Attributes:
        ids: `[sum of lengths]` int64, bag after bag, each in `[0, rows)`.
        lengths: `[samples]` int32.
    """

    ids: npt.NDArray[np.int64]
    lengths: npt.NDArray[np.int32]


class BatchDrawer:
    """Draws batches.

    Args:
        tables: whose lookups are imitated.
        seed: of the ids, in `[0, 2^64)`.
    """

    def __init__(self, tables: TableSet, *, seed: int = 0) -> None:
        self._seed = seed
        self._names = {table.name: number for number, table in enumerate(tables.tables)}
        self._tables = tables.tables
        self._makers: dict[int, _TableDrawer] = {}

    def draw(self, samples: int, batch: int = 0, tables: Iterable[str] | None = None) -> dict[str, DrawnBags]:
        """Draw the bags of one batch.

        Args:
            samples: bags a table.
            batch: its number, in `[0, 2^32)`.
            tables: names; all by default.

        Returns:
            Bags by the table's name.
        """
        drawn = {}
        for name in self._names if tables is None else tables:
            number = self._names[name]
            maker = self._makers.get(number)
            if maker is None:
                maker = self._makers[number] = _TableDrawer(self._tables[number])
            bits = np.random.Philox(
                key=np.array([self._seed, number], np.uint64), counter=np.array([0, 0, batch, samples], np.uint64)
            )
            drawn[name] = maker.draw(samples, np.random.Generator(bits))
        return drawn


class _TableDrawer:
    def __init__(self, table: TableStats) -> None:
        self._lengths = _Lengths(table.lookups_per_sample, table.lookups_per_sample_p99)
        popularity = fit_popularity(table)
        ends = np.concatenate([[0.0], np.cumsum(popularity.rows)])
        # A popularity's inverse distribution function: from an even number to a row's rank as a share of all rows.
        self._shares, self._ranks = popularity.cumulative_share, ends / ends[-1]
        segments = [s for s in segments_of(table) if s.share > 0]
        self._starts = np.array([s.start for s in segments], np.int64)
        self._rows = np.array([s.rows for s in segments], np.int64)
        self._even = np.array([s.is_even for s in segments])
        self._ends = np.cumsum([s.share for s in segments])
        self._factors = np.array([_coprime_factor(s.rows) for s in segments], np.int64)

    def draw(self, samples: int, random: np.random.Generator) -> DrawnBags:
        lengths = self._lengths.draw(samples, random)
        count = int(lengths.sum())
        at = random.random(count)
        if len(self._rows) == 1 and not self._even[0]:
            return DrawnBags(self._of_segment(0, np.interp(at, self._shares, self._ranks)), lengths)
        segment = np.searchsorted(self._ends[:-1] / self._ends[-1], random.random(count), side="right")
        ranks = np.where(self._even[segment], at, np.interp(at, self._shares, self._ranks))
        return DrawnBags(self._of_segment(segment, ranks), lengths)

    def _of_segment(
        self, segment: int | npt.NDArray[np.int64], ranks: npt.NDArray[np.float64]
    ) -> npt.NDArray[np.int64]:
        """Scatter ranks over their segments' rows, one to one: rank 0 isn't at the start of every table."""
        rows = self._rows[segment]
        rank = np.minimum((ranks * rows).astype(np.int64), rows - 1)
        ids: npt.NDArray[np.int64] = self._starts[segment] + (rank * self._factors[segment] + rows // 3) % rows
        return ids


def _coprime_factor(rows: int) -> int:
    """A number near the golden section of `rows` without a common divisor, so that multiples of it visit all rows."""
    factor = max(1, round(rows * _GOLDEN))
    while math.gcd(factor, rows) != 1:
        factor += 1
    return factor


class _Lengths:
    """Ids a bag with a given mean and 99th percentile.

    As even as the mean allows where the percentile asks for no more; Poisson, or negative binomial, where it does.
    """

    def __init__(self, mean: float, p99: float | None) -> None:
        self._mean = mean
        self._shape: float | None = None
        self._even = p99 is None or p99 <= math.ceil(mean)
        if p99 is None or self._even or p99 <= poisson.ppf(0.99, mean):
            return

        def over(log_shape: float) -> float:
            shape = math.exp(log_shape)
            return float(nbinom.ppf(0.99, shape, shape / (shape + mean)) - p99) + 1e-3

        # The percentile falls as the shape rises; below the first shape nearly all bags are empty.
        low, high = math.log(0.05), math.log(1e4)
        self._shape = math.exp(brentq(over, low, high)) if over(low) > 0 > over(high) else math.exp(low)

    def draw(self, samples: int, random: np.random.Generator) -> npt.NDArray[np.int32]:
        if self._even:
            whole = math.floor(self._mean)
            more = random.random(samples) < self._mean - whole if self._mean > whole else np.zeros(samples, np.bool_)
            return np.full(samples, whole, np.int32) + more.astype(np.int32)
        if self._shape is None:
            return random.poisson(self._mean, samples).astype(np.int32)
        return random.negative_binomial(self._shape, self._shape / (self._shape + self._mean), samples).astype(np.int32)
