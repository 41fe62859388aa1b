"""A set of tables as the planner sees it: sizes, and how their rows are looked up."""

import hashlib
from typing import Annotated, Literal

import numpy as np
from pydantic import BaseModel, ConfigDict, Field

from dlrm_scale.schema import Pooling, TableSpec

__all__ = ["SparseOptimizer", "TableSet", "TableStats"]

SparseOptimizer = Literal["sgd", "rowwise_adagrad", "adam"]

_Rows = Annotated[int, Field(ge=1, lt=2**62)]
_Lookups = Annotated[float, Field(ge=0, allow_inf_nan=False)]
_Share = Annotated[float, Field(ge=0, le=1)]


class _Record(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


class TableStats(_Record):
    """One table and the lookups into it.

    Attributes:
        name: unique in its set.
        rows: of the whole table.
        dim: columns, float32.
        pooling: how the rows of one bag become one vector.
        lookups_per_sample: mean ids in a bag.
        lookups_per_sample_p99: 99th percentile of ids in a bag.
        unique_rows: (samples, mean distinct rows that as many samples look up), by rising samples; empty where unknown,
            which counts as rows drawn evenly.
        hot_rows: (rows, share of lookups that hit the first as many rows of the table), by rising rows; empty where
            unknown, which counts as even. A frequency vocabulary puts hot rows first, so that the first row-wise shard
            gets most lookups.
    """

    name: Annotated[str, Field(min_length=1, max_length=200)]
    rows: _Rows
    dim: Annotated[int, Field(ge=1, lt=2**20)]
    pooling: Pooling = "sum"
    lookups_per_sample: _Lookups = 1.0
    lookups_per_sample_p99: _Lookups | None = None
    unique_rows: tuple[tuple[_Rows, Annotated[float, Field(ge=0)]], ...] = ()
    hot_rows: tuple[tuple[_Rows, _Share], ...] = ()

    @property
    def spec(self) -> TableSpec:
        """The table without its lookups."""
        return TableSpec(name=self.name, rows=self.rows, dim=self.dim, pooling=self.pooling)

    def unique_rows_of(self, samples: float) -> float:
        """Distinct rows that a batch of `samples` looks up, in the mean.

        Between measured points by straight lines in log-log; beyond the last point by its slope, at most what the even
        draw gives; never more than the lookups or the rows.
        """
        lookups = samples * self.lookups_per_sample
        even = self.rows * -np.expm1(lookups * np.log1p(-1.0 / self.rows)) if self.rows > 1 else min(lookups, 1.0)
        if not self.unique_rows:
            return float(min(even, lookups))
        x = np.log([max(1.0, s) for s, _ in self.unique_rows])
        y = np.log([max(1e-9, u) for _, u in self.unique_rows])
        at = np.log(max(samples, 1e-9))
        if at <= x[0]:
            value = np.exp(y[0]) * samples / np.exp(x[0])
        elif at >= x[-1]:
            slope = (y[-1] - y[-2]) / (x[-1] - x[-2]) if len(x) > 1 else 1.0
            value = np.exp(y[-1] + slope * (at - x[-1]))
        else:
            value = np.exp(np.interp(at, x, y))
        return float(min(value, lookups, self.rows))

    def share_of_rows(self, start: int, end: int) -> float:
        """Share of the lookups that hit rows `[start, end)`."""
        if not self.hot_rows:
            return (min(end, self.rows) - min(start, self.rows)) / self.rows
        rows = [0, *(r for r, _ in self.hot_rows)]
        shares = [0.0, *(s for _, s in self.hot_rows)]
        if rows[-1] < self.rows:
            rows.append(self.rows)
            shares.append(1.0)
        low, high = np.interp([start, end], rows, shares)
        return float(high - low)


class TableSet(_Record):
    """Tables that are planned together.

    Attributes:
        name: for people.
        optimizer: of the tables; decides their state and which types are allowed.
        tables: in the model's order.
        source: where the figures come from.
    """

    name: str
    optimizer: SparseOptimizer = "rowwise_adagrad"
    tables: Annotated[tuple[TableStats, ...], Field(min_length=1)]
    source: str = ""

    def fingerprint(self) -> str:
        """Hash of what a plan depends on in the tables themselves: names, sizes, pooling and optimizer."""
        parts = repr((self.optimizer, [(t.name, t.rows, t.dim, t.pooling) for t in self.tables]))
        return hashlib.sha256(parts.encode()).hexdigest()[:32]
