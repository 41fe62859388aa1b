"""Changes of a plan that is rated exactly: one table sharded otherwise or elsewhere, and one sharding type given up."""

import itertools
from collections.abc import Collection, Iterator
from dataclasses import dataclass

import numpy as np

from dlrm_scale.planning.solver.plan_state import PlanState
from dlrm_scale.planning.solver.problem import Option, Problem

__all__ = ["Move", "Work", "all_places", "best_move", "improve", "moves_of", "without_type"]

_PLACES = 8
"""Ranks or hosts that a single shard or host is tried on: those with least to do."""
_GAIN = 1e-9
"""Share of the step below which a gain is rounding."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Move:
    """One table sharded otherwise or elsewhere.

    Attributes:
        table: its position.
        index: of the option that it gets.
        ranks: of its shards then, as in `Assignment`.
        step_ms: of the plan then.
        fullest_bytes: what the fullest rank then holds.
    """

    table: int
    index: int
    ranks: tuple[int, ...]
    step_ms: float
    fullest_bytes: int


class Work:
    """Counts ratings of whole plans.

    Args:
        most: how many may be spent.
    """

    def __init__(self, most: int) -> None:
        self.most, self.spent = most, 0

    def left(self) -> bool:
        """Whether there are any."""
        return self.spent < self.most


def moves_of(
    state: PlanState, table: int, work: Work, *, without: Collection[str] = (), places: int = _PLACES
) -> Iterator[Move]:
    """Rate the other ways to shard one table, on the ranks that have least to do without it."""
    loads = state.without(table)
    for index, option in enumerate(state.problem.options[table]):
        if option.sharding_type in without:
            continue
        for ranks in _places(state.problem, option, loads, places):
            work.spent += 1
            step_ms, fullest = state.rated(table, index, ranks)
            yield Move(table=table, index=index, ranks=ranks, step_ms=step_ms, fullest_bytes=fullest)


def best_move(state: PlanState, table: int, work: Work, *, without: Collection[str] = ()) -> Move | None:
    """The move of one table that leaves the shortest step and fits; None where none fits."""
    fitting = (
        m for m in moves_of(state, table, work, without=without) if m.fullest_bytes <= state.problem.memory_bytes
    )
    return min(fitting, key=lambda move: move.step_ms, default=None)


def without_type(state: PlanState, sharding_type: str, work: Work) -> PlanState | None:
    """Shard all tables of a type otherwise, one after another, the costliest first; None where one can't be."""
    changed = state.copy()
    own = [t for t, part in enumerate(state.parts) if part.sharding_type == sharding_type]
    for table in sorted(own, key=lambda t: (-float(state.parts[t].added_ms.max(axis=1).sum()), t)):
        move = best_move(changed, table, work, without=(sharding_type,))
        if move is None:
            return None
        changed.change(table, move.index, move.ranks)
    return changed


def improve(state: PlanState, work: Work) -> PlanState:
    """Make moves and give up types as long as that shortens the step and work is left.

    Args:
        state: a plan that fits; may be changed.
        work: to spend.

    Returns:
        The best plan found.
    """
    improved = True
    while improved and work.left():
        improved = False
        weight = [-float(part.added_ms.max(axis=1).sum()) for part in state.parts]
        for table in sorted(range(len(weight)), key=lambda t: (weight[t], t)):
            if not work.left():
                break
            move = best_move(state, table, work)
            if move is not None and move.step_ms < state.step_ms * (1 - _GAIN):
                state.change(table, move.index, move.ranks)
                improved = True
        for kind in state.types if len(state.problem.options) > 1 else ():
            if not work.left():
                break
            other = without_type(state, kind, work)
            if other is not None and other.step_ms < state.step_ms * (1 - _GAIN):
                state, improved = other, True
    return state


def all_places(problem: Problem, option: Option) -> Iterator[tuple[int, ...]]:
    """Every choice of ranks for an option's shards; ranks that swap places among equal shards count once."""
    local = problem.ranks_per_host
    hosts = range(problem.ranks // local)
    if option.placement == "all_ranks":
        yield ()
    elif option.placement == "hosts":
        for chosen in itertools.combinations(hosts, option.shards // local):
            yield tuple(host * local + rank for host in chosen for rank in range(local))
    elif option.placement == "one_host":
        for host in hosts:
            own = range(host * local, (host + 1) * local)
            yield from itertools.combinations_with_replacement(own, option.shards)
    else:
        yield from itertools.combinations_with_replacement(range(problem.ranks), option.shards)


def _places(problem: Problem, option: Option, loads: np.ndarray, places: int) -> list[tuple[int, ...]]:
    """Places for an option's shards, those with least to do first."""
    local = problem.ranks_per_host
    if option.placement == "all_ranks":
        return [()]
    by_host = loads.reshape(-1, local)
    if option.placement == "ranks":
        order = [int(rank) for rank in np.argsort(loads, kind="stable")[: max(option.shards, places)]]
        if option.shards == 1:
            return [(rank,) for rank in order[:places]]
        return [tuple(sorted(order[i % len(order)] for i in range(option.shards)))]
    hosts = [int(host) for host in np.argsort(by_host.max(axis=1), kind="stable")]
    if option.placement == "one_host":
        orders = [(host, np.argsort(by_host[host], kind="stable")) for host in hosts[:places]]
        return [
            tuple(sorted(host * local + int(order[i % local]) for i in range(option.shards))) for host, order in orders
        ]
    count = option.shards // local
    chosen = [[host] for host in hosts[:places]] if count == 1 else [hosts[:count]]
    return [tuple(host * local + rank for host in sorted(some) for rank in range(local)) for some in chosen]
