"""Rating a whole plan of a problem by its options' costs: the load and memory of every rank, and its step."""

from collections.abc import Collection
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dlrm_scale.planning.solver.problem import Assignment, Problem

__all__ = ["Rating", "charged_ms", "rate"]


@dataclass(frozen=True, kw_only=True)
class Rating:
    """What a plan asks of every rank.

    Attributes:
        load_ms: `[phases, ranks]` float64.
        memory_bytes: `[ranks]` int64.
        charges_ms: of types in use.
        step_ms: sum over phases of the slowest rank, plus charges and what every plan costs alike.
    """

    load_ms: NDArray[np.float64]
    memory_bytes: NDArray[np.int64]
    charges_ms: float
    step_ms: float


def rate(problem: Problem, assignment: Assignment) -> Rating:
    """Rate a plan. Memory may be exceeded; the caller compares it with `problem.memory_bytes`.

    Args:
        problem: with the costs.
        assignment: a plan of it, whoever made it.
    """
    load = np.zeros((len(problem.phases), problem.ranks))
    memory = np.zeros(problem.ranks, dtype=np.int64)
    chosen = [options[index] for options, index in zip(problem.options, assignment.chosen, strict=True)]
    for option, ranks in zip(chosen, assignment.ranks, strict=True):
        costs = np.asarray(option.costs_ms)[:, None]
        if option.placement == "all_ranks":
            load += costs
            memory += option.memory_bytes
        else:
            where = np.asarray(ranks, dtype=np.int64)
            # A rank may hold several shards of one table.
            shards = np.bincount(where, minlength=problem.ranks)
            load += costs * shards
            memory += option.memory_bytes * shards
    charges = charged_ms(problem, {option.sharding_type for option in chosen})
    step = float(load.max(axis=1).sum()) + charges + problem.base_ms
    return Rating(load_ms=load, memory_bytes=memory, charges_ms=charges, step_ms=step)


def charged_ms(problem: Problem, types: Collection[str]) -> float:
    """Add up the charges of types in use."""
    return sum(charge.milliseconds for charge in problem.charges if not charge.sharding_types.isdisjoint(types))
