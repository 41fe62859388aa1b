"""The placement problem in numbers alone: options of tables, ranks with memory, and the step time to make small.

    step_ms(plan) = sum over phases of (max over ranks of the rank's load in that phase) + charges of types in use

An option is compact: its shards are equal, so that one number a phase describes all of them however many ranks there
are. Where shards differ (a table's last row-wise shard, hot rows first) the number is the largest shard's, and
`RowParts` says what the others cost, for a bound counts no shard as more than it is. Where costs don't add up over
tables (curves of collectives) the options' costs lie below them, and `Problem.exact` rates whole plans.
"""

from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Literal, Protocol

import numpy as np
from numpy.typing import NDArray

__all__ = ["Assignment", "Charge", "Option", "Part", "Placement", "PlanRater", "Problem", "RowParts"]

Placement = Literal["all_ranks", "hosts", "one_host", "ranks"]
"""Where an option's shards may go.

all_ranks: one on every rank (row_wise, data_parallel).
hosts: one on every rank of `shards / ranks_per_host` hosts (table_row_wise: one host; grid_shard: one a column shard).
one_host: anywhere within one host (table_column_wise).
ranks: anywhere (table_wise, column_wise).
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class RowParts:
    """Shards that differ: every plan has each of them once, on the ranks of a host or on all ranks, in their order.

    Attributes:
        mean_ms: of the shards, by phase.
        least_ms: of each phase, the smallest shard's.
        first_ms: the first shard's, which rank 0 has where every rank has one.
        mean_bytes: of the shards.
        least_bytes: of the smallest.
    """

    mean_ms: tuple[float, ...]
    least_ms: tuple[float, ...]
    first_ms: tuple[float, ...]
    mean_bytes: float
    least_bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Option:
    """One way to shard one table.

    Attributes:
        sharding_type: TorchRec's name.
        kernel: `fused`, or `dense` for data-parallel tables.
        placement: see `Placement`.
        shards: how many.
        columns: of one shard.
        costs_ms: load of one shard on its rank, by phase of the problem; of shards that differ, the largest.
        memory_bytes: of one shard; of shards that differ, the largest.
        parts: what shards that differ cost; None where they are alike.
    """

    sharding_type: str
    kernel: Literal["fused", "dense"]
    placement: Placement
    shards: int
    columns: int
    costs_ms: tuple[float, ...]
    memory_bytes: int
    parts: RowParts | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Charge:
    """A constant that a step pays as soon as one table uses one of these types."""

    sharding_types: frozenset[str]
    milliseconds: float


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Part:
    """What one table of a plan adds. P phases of the rater, W ranks.

    Attributes:
        sharding_type: of the table.
        added_ms: `[P, W]`, what adds up over tables.
        sizes: `[sizes, W]`, bytes that the exchanges of its type carry.
        memory_bytes: `[parts of memory, W]` int64.
    """

    sharding_type: str
    added_ms: NDArray[np.float64]
    sizes: NDArray[np.float64]
    memory_bytes: NDArray[np.int64]


class PlanRater(Protocol):
    """Rates whole plans exactly: a phase takes its base, what tables add, and what the types in use take."""

    @property
    def phases(self) -> tuple[str, ...]:
        """Names; may be more than the problem's."""

    @property
    def base_ms(self) -> NDArray[np.float64]:
        """`[P]`: of every plan."""

    def part(self, table: int, option: Option, ranks: tuple[int, ...]) -> Part:
        """What a table adds. `ranks` as in `Assignment`."""

    def type_ms(self, sharding_type: str, sizes: NDArray[np.float64]) -> NDArray[np.float64]:
        """`[P, W]`: what a type in use takes, its tables' sizes added up."""

    def step_ms(self, phase_ms: NDArray[np.float64], types: Collection[str]) -> float:
        """The step, from `[P, W]` and the types in use."""


@dataclass(frozen=True, kw_only=True)
class Problem:
    """What a solver gets.

    Attributes:
        ranks: all of them.
        ranks_per_host: divides `ranks`, or equals it on one host.
        memory_bytes: that the tables of one rank may take.
        phases: names, in the order of `Option.costs_ms`; one phase for an additive model as TorchRec's.
        tables: names.
        options: by table, each with at least one.
        charges: of types in use.
        base_ms: what every plan costs alike.
        exact: rates whole plans; no plan's exact step lies below what the options' costs and parts bound it by. None
            where the options' costs are exact.
    """

    ranks: int
    ranks_per_host: int
    memory_bytes: int
    phases: tuple[str, ...]
    tables: tuple[str, ...]
    options: tuple[tuple[Option, ...], ...]
    charges: tuple[Charge, ...] = ()
    base_ms: float = 0.0
    exact: PlanRater | None = field(default=None, compare=False, repr=False)


@dataclass(frozen=True, kw_only=True, slots=True)
class Assignment:
    """A whole plan of a problem.

    Attributes:
        chosen: index of the option, by table.
        ranks: ranks of the option's shards, by table, in the order of the shards; () for `all_ranks`.
    """

    chosen: tuple[int, ...]
    ranks: tuple[tuple[int, ...], ...]
