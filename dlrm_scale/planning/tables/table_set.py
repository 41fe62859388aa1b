"""A set of tables as the planner sees it: sizes, and how their rows are looked up."""

import hashlib
import math
from collections.abc import Callable, Sequence
from functools import lru_cache
from itertools import pairwise
from typing import Annotated, Literal, NamedTuple, Self

import numpy as np
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, field_validator, model_validator
from scipy.interpolate import PchipInterpolator

from dlrm_scale.models.tables import DIM_MULTIPLE, MAX_TABLE_ROWS
from dlrm_scale.planning.findings import check_name
from dlrm_scale.schema import Pooling, TableSpec

__all__ = ["SparseOptimizer", "TableSet", "TableStats", "check_dim"]

SparseOptimizer = Literal["sgd", "rowwise_adagrad", "adam"]

_Count = Annotated[int, Field(ge=1, lt=2**62)]
_Lookups = Annotated[float, Field(ge=0, le=1e6)]
"""Ids in a bag. A million is far beyond any model, and keeps sums of bytes in 64 bits."""
_Rows = Annotated[float, Field(ge=0, le=MAX_TABLE_ROWS)]
_Share = Annotated[float, Field(ge=0, le=1)]

_MAX_DIM = 2**20

_ROUNDING = 1e-4
"""Relative slack of the rules on curves: files hold six digits."""


class _Record(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


class TableStats(_Record):
    """One table and the lookups into it.

    Attributes:
        name: unique in its set, of one line.
        rows: of the whole table.
        dim: columns; a multiple of 4.
        pooling: how the rows of one bag become one vector.
        lookups_per_sample: mean ids in a bag; at most a million.
        lookups_per_sample_p99: 99th percentile of ids in a bag.
        unique_rows: (samples, mean distinct rows that a batch of as many samples looks up), by rising samples; empty
            where unknown, which counts as rows drawn evenly.
        hot_rows: (rows, share of the lookups that hit the as many hottest rows), by rising rows and falling share a
            row; empty where unknown, which counts as even. It says nothing about where these rows lie.
        lookups_before_row: (row, share of the lookups that hit the rows before it), by rising row; empty where unknown,
            which counts as even. Vocabularies are in hash order, so that hot rows lie scattered; rows 0 and 1 (missing,
            out of vocabulary) are hot in many columns, and single hot ids load one row-wise shard.
    """

    name: Annotated[str, Field(min_length=1, max_length=200), AfterValidator(check_name)]
    rows: int
    dim: int
    pooling: Pooling = "sum"
    lookups_per_sample: _Lookups = 1.0
    lookups_per_sample_p99: _Lookups | None = None
    unique_rows: tuple[tuple[_Count, _Rows], ...] = ()
    hot_rows: tuple[tuple[_Count, _Share], ...] = ()
    lookups_before_row: tuple[tuple[_Count, _Share], ...] = ()

    @field_validator("rows")
    @classmethod
    def _check_rows(cls, rows: int) -> int:
        if not 1 <= rows <= MAX_TABLE_ROWS:
            raise ValueError(f"allowed are 1 to {MAX_TABLE_ROWS:,}")
        return rows

    @field_validator("dim")
    @classmethod
    def _check_dim(cls, dim: int) -> int:
        found = check_dim(dim)
        if found:
            raise ValueError(found)
        return dim

    @model_validator(mode="after")
    def _check_curves(self) -> Self:
        for key in ("unique_rows", "hot_rows", "lookups_before_row"):
            _check_rising(key, getattr(self, key))
        for samples, unique in self.unique_rows:
            lookups = samples * self.lookups_per_sample
            if unique > lookups * (1 + _ROUNDING):
                raise ValueError(f"unique_rows: {samples} samples have {lookups:.6g} lookups, and {unique:.6g} rows")
            if unique > self.rows * (1 + _ROUNDING):
                raise ValueError(f"unique_rows: {samples} samples look up {unique:.6g} rows of {self.rows}")
        for key in ("hot_rows", "lookups_before_row"):
            for row, share in getattr(self, key):
                if row > self.rows or (row == self.rows and share < 1 - _ROUNDING):
                    raise ValueError(f"{key}: [{row}, {share}] in a table of {self.rows} rows, which have all lookups")
        self._check_hottest_first()
        return self

    def _check_hottest_first(self) -> None:
        points = [(0, 0.0), *self.hot_rows]
        if self.hot_rows and points[-1][0] < self.rows:
            points.append((self.rows, 1.0))
        bands = [(b[0] - a[0], (b[1] - a[1]) / (b[0] - a[0])) for a, b in pairwise(points)]
        for (row, _), ((n, before), (m, after)) in zip(points[1:], pairwise(bands), strict=False):
            # Shares near 1 are rounded in the sixth digit.
            if after > before * (1 + _ROUNDING) + 2e-6 * (1 / n + 1 / m):
                raise ValueError(f"hot_rows: rows after the hottest {row} get more lookups a row than those before")

    @property
    def spec(self) -> TableSpec:
        """The table without its lookups."""
        return TableSpec(name=self.name, rows=self.rows, dim=self.dim, pooling=self.pooling)

    def unique_rows_of(self, samples: float) -> float:
        """Distinct rows that a batch of `samples` looks up, in the mean.

        Between points by monotone cubics in log-log (straight lines are up to 8 % low between batch sizes 4 times
        apart); before the first in proportion; beyond the last by the slope of the last two; never more than the
        lookups or the rows. Without points as rows drawn evenly.
        """
        lookups = samples * self.lookups_per_sample
        if not self.unique_rows:
            even = self.rows * -np.expm1(lookups * np.log1p(-1.0 / self.rows)) if self.rows > 1 else 1.0
            return float(min(even, lookups))
        at = math.log(max(samples, 1e-9))
        curve = _log_curve(self.unique_rows)
        if at <= curve.x[0]:
            value = math.exp(curve.y[0] + at - curve.x[0])
        elif at >= curve.x[-1]:
            value = math.exp(curve.y[-1] + curve.last_slope * (at - curve.x[-1]))
        else:
            value = math.exp(curve.between(at))
        return float(min(value, lookups, self.rows))

    def share_of_hottest(self, rows: int) -> float:
        """Share of the lookups that hit the `rows` hottest rows, wherever they lie; what a cache of them serves."""
        return self._share(self.hot_rows, rows)

    def _share(self, curve: Sequence[tuple[int, float]], row: int) -> float:
        rows = [0, *(r for r, _ in curve)]
        shares = [0.0, *(s for _, s in curve)]
        if rows[-1] < self.rows:
            rows.append(self.rows)
            shares.append(1.0)
        return float(np.interp(row, rows, shares))


class TableSet(_Record):
    """Tables that are planned together.

    Attributes:
        name: for people.
        optimizer: of the tables; decides their state and which types are allowed.
        dtype: of weights and state; the trainer has no other.
        tables: in the model's order.
        source: where the figures come from.
    """

    name: Annotated[str, Field(min_length=1), AfterValidator(check_name)]
    optimizer: SparseOptimizer = "rowwise_adagrad"
    dtype: Literal["fp32"] = "fp32"
    tables: Annotated[tuple[TableStats, ...], Field(min_length=1)]
    source: str = ""

    @field_validator("tables")
    @classmethod
    def _check_names(cls, tables: tuple[TableStats, ...]) -> tuple[TableStats, ...]:
        seen: dict[str, int] = {}
        for number, table in enumerate(tables, 1):
            if table.name in seen:
                raise ValueError(f"tables {seen[table.name]} and {number} are both named {table.name!r}")
            seen[table.name] = number
        return tables

    def fingerprint(self) -> str:
        """Hash of what a plan depends on in the tables themselves: names, sizes, pooling and optimizer."""
        parts = repr((self.optimizer, [(t.name, t.rows, t.dim, t.pooling) for t in self.tables]))
        return hashlib.sha256(parts.encode()).hexdigest()[:32]


class _LogCurve(NamedTuple):
    x: list[float]
    y: list[float]
    last_slope: float
    between: Callable[[float], float]


@lru_cache(maxsize=1 << 14)
def _log_curve(points: tuple[tuple[int, float], ...]) -> _LogCurve:
    x = [math.log(samples) for samples, _ in points]
    y = [math.log(max(1e-9, rows)) for _, rows in points]
    if len(points) == 1:
        return _LogCurve(x, y, 1.0, lambda at: y[0])
    return _LogCurve(x, y, (y[-1] - y[-2]) / (x[-1] - x[-2]), PchipInterpolator(x, y))


def check_dim(dim: int) -> str | None:
    """Say what is wrong with a number of columns, with the nearest that are allowed; None if nothing is."""
    if 1 <= dim <= _MAX_DIM and dim % DIM_MULTIPLE == 0:
        return None
    if dim > _MAX_DIM:
        return f"at most {_MAX_DIM:,} are allowed"
    below = dim // DIM_MULTIPLE * DIM_MULTIPLE
    near = f"{below} or {below + DIM_MULTIPLE}" if dim > DIM_MULTIPLE else f"{DIM_MULTIPLE}"
    return f"must be a multiple of {DIM_MULTIPLE} (the nearest allowed: {near})"


def _check_rising(key: str, points: Sequence[tuple[int, float]]) -> None:
    for a, b in pairwise(points):
        if b[0] <= a[0] or b[1] < a[1]:
            raise ValueError(f"{key} must rise, but {list(b)} follows {list(a)}")
