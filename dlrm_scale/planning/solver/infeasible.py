"""Why nothing fits, in numbers."""

from dataclasses import dataclass
from typing import Literal

from dlrm_scale.errors import PlanError
from dlrm_scale.planning.solver.problem import Problem
from dlrm_scale.units import format_bytes

__all__ = ["NoFeasiblePlan", "Shortfall", "SmallestShard", "shortfall"]

Cause = Literal["total", "single_shard", "fragmentation"]


@dataclass(frozen=True, kw_only=True, slots=True)
class SmallestShard:
    """The least that one rank must hold of a table, by the option that cuts it finest.

    Attributes:
        table: its name.
        sharding_type: of that option.
        shard_bytes: of one shard.
        total_bytes: of all its shards.
    """

    table: str
    sharding_type: str
    shard_bytes: int
    total_bytes: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Shortfall:
    """What is missing.

    Attributes:
        cause: `single_shard`: a table can't be cut into shards that fit one rank. `total`: all tables together need
            more than all ranks have. `fragmentation`: in total it would fit, but shards don't share out.
        needed_bytes: the least that all tables take together.
        available_bytes: of all ranks.
        needed_per_rank_bytes: `needed_bytes` shared out evenly.
        available_per_rank_bytes: of one rank.
        largest: tables by the least that one rank must hold of them, largest first.
        proven: no plan exists; else the search found none.
    """

    cause: Cause
    needed_bytes: int
    available_bytes: int
    needed_per_rank_bytes: int
    available_per_rank_bytes: int
    largest: tuple[SmallestShard, ...]
    proven: bool


class NoFeasiblePlan(PlanError):
    """No plan of a problem fits its ranks' memory.

    Args:
        shortfall: in numbers, for whoever words the message.
    """

    def __init__(self, shortfall: Shortfall) -> None:
        """Word the message; see the class."""
        self.shortfall = shortfall
        super().__init__(_message(shortfall), remedy="use more ranks, or ranks with more memory")

    def __reduce__(self) -> tuple[object, ...]:
        """Keep the numbers when the error crosses a process."""
        return NoFeasiblePlan, (self.shortfall,)


def shortfall(problem: Problem, *, proven: bool, largest: int = 5) -> Shortfall:
    """Say what a problem lacks for which no plan was found.

    Args:
        problem: of that search.
        proven: that there is none.
        largest: how many tables to list.
    """
    needed = 0
    smallest: list[SmallestShard] = []
    for table, options in zip(problem.tables, problem.options, strict=True):
        needed += min(o.memory_bytes * o.shards for o in options)
        finest = min(options, key=lambda o: (o.memory_bytes, o.memory_bytes * o.shards))
        smallest.append(
            SmallestShard(
                table=table,
                sharding_type=finest.sharding_type,
                shard_bytes=finest.memory_bytes,
                total_bytes=finest.memory_bytes * finest.shards,
            )
        )
    smallest.sort(key=lambda s: (-s.shard_bytes, s.table))
    available = problem.ranks * problem.memory_bytes
    cause: Cause = "fragmentation"
    if smallest[0].shard_bytes > problem.memory_bytes:
        cause = "single_shard"
    elif needed > available:
        cause = "total"
    return Shortfall(
        cause=cause,
        needed_bytes=needed,
        available_bytes=available,
        needed_per_rank_bytes=-(-needed // problem.ranks),
        available_per_rank_bytes=problem.memory_bytes,
        largest=tuple(smallest[:largest]),
        proven=proven,
    )


def _message(short: Shortfall) -> str:
    first = short.largest[0]
    if short.cause == "single_shard":
        why = (
            f"the smallest shard of table {first.table} takes {format_bytes(first.shard_bytes)} ({first.sharding_type})"
        )
    elif short.cause == "total":
        why = f"all tables together take {format_bytes(short.needed_bytes)}"
    else:
        found = "can" if short.proven else "could"
        why = (
            f"all tables together take {format_bytes(short.needed_bytes)}, which {found}not be shared out: the largest "
            f"of the smallest shards is {first.table}'s, {format_bytes(first.shard_bytes)}"
        )
    return (
        f"no sharding plan fits: {why}; there are {format_bytes(short.available_per_rank_bytes)} for tables on each "
        f"rank, {format_bytes(short.available_bytes)} in all"
    )
