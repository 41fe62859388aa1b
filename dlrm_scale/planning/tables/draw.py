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

from dlrm_scale.planning.tables.placement import place_rows
from dlrm_scale.planning.tables.popularity import fit_popularity
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
        placed = place_rows(table, fit_popularity(table))
        self._ends = placed.share_ends
        self._begins = np.concatenate([[0.0], self._ends[:-1]])
        self._rows, self._first = placed.rows, placed.first_rank
        self._segment = placed.segment
        self._starts, self._sizes = placed.segment_starts, placed.segment_rows
        self._factors = np.array([_coprime_factor(int(rows)) for rows in self._sizes], np.int64)

    def draw(self, samples: int, random: np.random.Generator) -> DrawnBags:
        lengths = self._lengths.draw(samples, random)
        at = random.random(int(lengths.sum()))
        block = np.minimum(np.searchsorted(self._ends, at, side="right"), len(self._ends) - 1)
        within = (at - self._begins[block]) / (self._ends - self._begins)[block]
        rows = self._rows[block]
        rank = self._first[block] + np.minimum((within * rows).astype(np.int64), rows - 1)
        # Ranks are scattered over their segment's rows, one to one: hot rows don't lie side by side.
        segment = self._segment[block]
        size = self._sizes[segment]
        return DrawnBags(self._starts[segment] + (rank * self._factors[segment] + size // 3) % size, lengths)


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
