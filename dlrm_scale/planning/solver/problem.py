"""The placement problem in numbers alone: options of tables, ranks with memory, and the step time to make small.

    step_ms(plan) = sum over phases of (max over ranks of the rank's load in that phase) + charges of types in use

An option is compact: its shards are equal, so that one number a phase describes all of them however many ranks there
are. Where shards differ (a table's last row-wise shard, hot rows first) the number is the largest shard's.
"""

from dataclasses import dataclass
from typing import Literal

__all__ = ["Assignment", "Charge", "Option", "Placement", "Problem"]

Placement = Literal["all_ranks", "hosts", "one_host", "ranks"]
"""Where an option's shards may go.

all_ranks: one on every rank (row_wise, data_parallel).
hosts: one on every rank of `shards / ranks_per_host` hosts (table_row_wise: one host; grid_shard: one a column shard).
one_host: anywhere within one host (table_column_wise).
ranks: anywhere (table_wise, column_wise).
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class Option:
    """One way to shard one table.

    Attributes:
        sharding_type: TorchRec's name.
        kernel: `fused`, or `dense` for data-parallel tables.
        placement: see `Placement`.
        shards: how many.
        columns: of one shard.
        costs_ms: load of one shard on its rank, by phase of the problem.
        memory_bytes: of one shard.
    """

    sharding_type: str
    kernel: Literal["fused", "dense"]
    placement: Placement
    shards: int
    columns: int
    costs_ms: tuple[float, ...]
    memory_bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Charge:
    """A constant that a step pays as soon as one table uses one of these types."""

    sharding_types: frozenset[str]
    milliseconds: float


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
    """

    ranks: int
    ranks_per_host: int
    memory_bytes: int
    phases: tuple[str, ...]
    tables: tuple[str, ...]
    options: tuple[tuple[Option, ...], ...]
    charges: tuple[Charge, ...] = ()
    base_ms: float = 0.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Assignment:
    """A whole plan of a problem.

    Attributes:
        chosen: index of the option, by table.
        ranks: ranks of the option's shards, by table, in the order of the shards; () for `all_ranks`.
    """

    chosen: tuple[int, ...]
    ranks: tuple[tuple[int, ...], ...]
