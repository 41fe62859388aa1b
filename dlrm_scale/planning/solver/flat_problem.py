"""A problem as arrays, one entry an option, with the symmetries of its ranks used.

Options that another one of their table beats in everything are left out, and on one host a placement by hosts is one by
ranks.

P phases, W ranks, H hosts of L ranks, O options of all tables together, C charges.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import get_args

import numpy as np
from numpy.typing import NDArray

from dlrm_scale.planning.solver.problem import Assignment, Option, Placement, Problem, RowParts

__all__ = ["FlatProblem", "flatten"]


@dataclass(frozen=True, kw_only=True)
class FlatProblem:
    """See the module.

    Attributes:
        ranks: W.
        ranks_per_host: L.
        capacity_bytes: of one rank.
        first: `[tables + 1]`: options of table t are `first[t]` to `first[t + 1]`.
        table: `[O]` of each option.
        index: `[O]`: the option's place among its table's in the problem.
        placement: of each option; on one host `all_ranks` or `ranks`.
        listed: of each option: the problem's plans name its ranks, which they don't for `all_ranks`.
        shards: `[O]`.
        costs_ms: `[O, P]` of one shard; of shards that differ, the largest.
        memory_bytes: `[O]` of one shard; of shards that differ, the largest.
        mean_ms: `[O, P]` of the shards; a bound may count no more of all of them together.
        least_ms: `[O, P]` of the smallest shard.
        first_ms: `[O, P]` of the first shard, on rank 0 where every rank has one.
        mean_bytes: `[O]` float64 of the shards.
        least_bytes: `[O]` of the smallest shard.
        alike: no option has shards that differ.
        stacked: `[O]`: how many shards some rank must hold; 1 unless there are more shards than ranks to hold them.
        charged: `[O, C]` bool.
        charge_ms: `[C]`.
        base_ms: of every plan.
    """

    ranks: int
    ranks_per_host: int
    capacity_bytes: int
    first: NDArray[np.int64]
    table: NDArray[np.int64]
    index: NDArray[np.int64]
    placement: tuple[Placement, ...]
    listed: tuple[bool, ...]
    shards: NDArray[np.int64]
    costs_ms: NDArray[np.float64]
    memory_bytes: NDArray[np.int64]
    mean_ms: NDArray[np.float64]
    least_ms: NDArray[np.float64]
    first_ms: NDArray[np.float64]
    mean_bytes: NDArray[np.float64]
    least_bytes: NDArray[np.int64]
    alike: bool
    stacked: NDArray[np.int64]
    charged: NDArray[np.bool_]
    charge_ms: NDArray[np.float64]
    base_ms: float

    @property
    def tables(self) -> int:
        """How many."""
        return len(self.first) - 1

    @property
    def hosts(self) -> int:
        """H."""
        return self.ranks // self.ranks_per_host

    @property
    def uniform(self) -> NDArray[np.bool_]:
        """`[O]`: one shard on every rank."""
        return np.array([p == "all_ranks" for p in self.placement])

    @property
    def least_step_ms(self) -> NDArray[np.float64]:
        """`[O]`: no plan with this option has a shorter step: its shards on one rank, and its charges."""
        alone: NDArray[np.float64] = self.costs_ms.sum(axis=1) * self.stacked
        return alone + self.charged @ self.charge_ms + self.base_ms

    def options_of(self, table: int) -> range:
        """Positions of a table's options."""
        return range(int(self.first[table]), int(self.first[table + 1]))

    def ranks_of(self, hosts: NDArray[np.int64]) -> NDArray[np.int64]:
        """All ranks of some hosts, host by host."""
        ranks: NDArray[np.int64] = hosts[:, None] * self.ranks_per_host + np.arange(self.ranks_per_host)
        return ranks.ravel()

    def assignment(self, chosen: Sequence[int], ranks: Sequence[NDArray[np.int64]]) -> Assignment:
        """Go back to the problem.

        Args:
            chosen: option of each table, counted over all tables.
            ranks: of its shards, in their order.
        """
        return Assignment(
            chosen=tuple(int(self.index[o]) for o in chosen),
            ranks=tuple(
                tuple(int(r) for r in where) if self.listed[o] else () for o, where in zip(chosen, ranks, strict=True)
            ),
        )


def flatten(problem: Problem) -> FlatProblem:
    """Make the arrays, in the order of tables and options."""
    one_host = problem.ranks == problem.ranks_per_host
    kept: list[tuple[int, int, Option, Placement]] = []
    first = [0]
    for table, options in enumerate(problem.options):
        places = [_on_one_host(option.placement) if one_host else option.placement for option in options]
        charges = [_charges(option, problem) for option in options]
        for i, option in enumerate(options):
            if not any(
                _beats(options[j], places[j], charges[j], option, places[i], charges[i], on_a_tie=j < i)
                for j in range(len(options))
                if j != i
            ):
                kept.append((table, i, option, places[i]))
        first.append(len(kept))
    kept_options = [option for _, _, option, _ in kept]
    parts = [_parts(option) for option in kept_options]

    def by_phase(rows: list[tuple[float, ...]]) -> NDArray[np.float64]:
        return np.array(rows, dtype=np.float64).reshape(len(kept), len(problem.phases))

    room = {p: problem.ranks_per_host if p == "one_host" else problem.ranks for p in get_args(Placement)}
    return FlatProblem(
        ranks=problem.ranks,
        ranks_per_host=problem.ranks_per_host,
        capacity_bytes=problem.memory_bytes,
        first=np.array(first),
        table=np.array([t for t, _, _, _ in kept]),
        index=np.array([i for _, i, _, _ in kept]),
        placement=tuple(p for _, _, _, p in kept),
        listed=tuple(o.placement != "all_ranks" for o in kept_options),
        shards=np.array([o.shards for o in kept_options]),
        costs_ms=by_phase([o.costs_ms for o in kept_options]),
        memory_bytes=np.array([o.memory_bytes for o in kept_options], dtype=np.int64),
        mean_ms=by_phase([p.mean_ms for p in parts]),
        least_ms=by_phase([p.least_ms for p in parts]),
        first_ms=by_phase([p.first_ms for p in parts]),
        mean_bytes=np.array([p.mean_bytes for p in parts], dtype=np.float64),
        least_bytes=np.array([p.least_bytes for p in parts], dtype=np.int64),
        alike=all(option.parts is None for option in kept_options),
        stacked=np.array([-(-o.shards // room[p]) for _, _, o, p in kept]),
        charged=np.array([_charges(o, problem) for o in kept_options], dtype=bool).reshape(
            len(kept), len(problem.charges)
        ),
        charge_ms=np.array([c.milliseconds for c in problem.charges], dtype=np.float64),
        base_ms=problem.base_ms,
    )


def _on_one_host(placement: Placement) -> Placement:
    return "all_ranks" if placement in ("all_ranks", "hosts") else "ranks"


def _parts(option: Option) -> RowParts:
    if option.parts is not None:
        return option.parts
    return RowParts(
        mean_ms=option.costs_ms,
        least_ms=option.costs_ms,
        first_ms=option.costs_ms,
        mean_bytes=option.memory_bytes,
        least_bytes=option.memory_bytes,
    )


def _numbers(option: Option) -> tuple[float, ...]:
    """All that an option costs, whichever of its shards count."""
    own: tuple[float, ...] = (*option.costs_ms, option.memory_bytes)
    if option.parts is None:
        return own
    parts = option.parts
    return (*own, *parts.mean_ms, *parts.least_ms, *parts.first_ms, parts.mean_bytes, parts.least_bytes)


def _charges(option: Option, problem: Problem) -> tuple[bool, ...]:
    return tuple(option.sharding_type in charge.sharding_types for charge in problem.charges)


def _beats(
    better: Option,
    better_placement: Placement,
    better_charges: tuple[bool, ...],
    worse: Option,
    worse_placement: Placement,
    worse_charges: tuple[bool, ...],
    on_a_tie: bool,
) -> bool:
    """Whether one option can stand wherever the other does, at no higher cost."""
    freer = better_placement == worse_placement or (better_placement, worse_placement) == ("ranks", "one_host")
    if not freer or better.shards != worse.shards:
        return False
    if better.parts is not None or worse.parts is not None:
        better, worse = replace(better, parts=_parts(better)), replace(worse, parts=_parts(worse))
    ours = (*_numbers(better), *better_charges)
    theirs = (*_numbers(worse), *worse_charges)
    no_worse = all(a <= b for a, b in zip(ours, theirs, strict=True))
    # Of two that are alike the freer stays, or the first.
    alike = ours == theirs and better_placement == worse_placement
    return no_worse and (on_a_tie if alike else True)
