"""From suggested plans to the one with the shortest exact step, and a gap between that step and its bound."""

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from dlrm_scale.planning.solver.moves import Work, all_places, improve
from dlrm_scale.planning.solver.plan_state import PlanState
from dlrm_scale.planning.solver.problem import Assignment, Option, Part, Problem

__all__ = ["OPTIMAL_GAP", "Solution", "choose", "only_type", "single_types", "take_in"]

OPTIMAL_GAP = 1e-9
"""A plan this close above its bound is the best there is."""
_STARTS = 3
"""How many of the suggested plans are improved."""
_RATINGS = 6_000
"""Of whole plans, for each start, at most."""
_RATING_TIMES = 60_000_000
"""Ranks times phases that ratings may look at, for each start."""
_FEW_PLANS = 2_000
"""So many plans in all are rated one by one, which proves the best of them."""


@dataclass(frozen=True, kw_only=True)
class Solution:
    """A plan with what bounds it.

    Attributes:
        assignment: the plan.
        step_ms: its predicted step, exact.
        bound_ms: no plan of the problem has a shorter predicted step.
        gap: `step_ms / bound_ms - 1`, at least 0.
        optimal: proven: by `OPTIMAL_GAP`, or, where the options' costs are exact, within the solver's tolerance.
        work_units: spent: tries of the search, milliseconds of CP-SAT's deterministic time and ratings of whole plans;
            equal inputs spend equally many.
    """

    assignment: Assignment
    step_ms: float
    bound_ms: float
    gap: float
    optimal: bool
    work_units: int


def choose(problem: Problem, solution: Solution, suggested: Sequence[Assignment], effort: float) -> Solution:
    """Choose by the exact step and improve the choice.

    Args:
        problem: with an exact rater; without one the solution stays as it is.
        solution: gives the bound; its plan is one of those compared.
        suggested: other plans of the problem.
        effort: as of `solve`; 0 chooses alone.

    Returns:
        A plan that fits and is not slower than any of those compared that fit; its step is exact.
    """
    if problem.exact is None or solution.optimal:
        return solution
    if effort and _count_plans(problem) <= _FEW_PLANS:
        return _best_of_all(problem, solution)
    plans = dict.fromkeys([solution.assignment, *suggested])
    states = sorted((s for s in (PlanState(problem, plan) for plan in plans) if s.fits), key=lambda s: s.step_ms)
    ranks = problem.ranks * len(problem.exact.phases)
    most = round(min(_RATINGS, _RATING_TIMES / ranks) * effort)
    spent = len(plans)
    best = states[0]
    for state in states[:_STARTS]:
        work = Work(most)
        found = improve(state.copy(), work)
        spent += work.spent
        if found.step_ms < best.step_ms:
            best = found
    return _solution(best, solution.bound_ms, solution.work_units + spent)


def take_in(problem: Problem, solution: Solution, peers: Sequence[Assignment], effort: float) -> Solution:
    """Start again from plans that others made, if one is shorter.

    Args:
        problem: as of `choose`.
        solution: ours.
        peers: plans of the problem; those that don't fit are left out.
        effort: as of `solve`.
    """
    if problem.exact is None or solution.optimal:
        return solution
    states = [PlanState(problem, peer) for peer in peers]
    shorter = [s.assignment for s in states if s.fits and s.step_ms < solution.step_ms]
    return choose(problem, solution, shorter, effort) if shorter else solution


def single_types(problem: Problem) -> list[str]:
    """Sharding types that every table may have, where some table may have another one too."""
    offered = [{option.sharding_type for option in options} for options in problem.options]
    everywhere = sorted(set.intersection(*offered))
    return everywhere if any(len(kinds) > 1 for kinds in offered) else []


def only_type(problem: Problem, sharding_type: str) -> tuple[Problem, Callable[[Assignment], Assignment]]:
    """Leave every table one type; also returns the way from a plan of that back to one of the problem."""
    kept = [
        [i for i, option in enumerate(options) if option.sharding_type == sharding_type] for options in problem.options
    ]
    options = tuple(tuple(of[i] for i in own) for of, own in zip(problem.options, kept, strict=True))

    def back(assignment: Assignment) -> Assignment:
        chosen = tuple(own[index] for own, index in zip(kept, assignment.chosen, strict=True))
        return replace(assignment, chosen=chosen)

    return replace(problem, options=options), back


def _solution(state: PlanState, bound_ms: float, work_units: int) -> Solution:
    step_ms = state.step_ms
    bound_ms = min(bound_ms, step_ms)
    gap = step_ms / bound_ms - 1 if bound_ms else 0.0
    return Solution(
        assignment=state.assignment,
        step_ms=step_ms,
        bound_ms=bound_ms,
        gap=gap,
        optimal=bound_ms > 0 and gap <= OPTIMAL_GAP,
        work_units=work_units,
    )


def _count_plans(problem: Problem) -> int:
    return math.prod(sum(_count_places(problem, option) for option in options) for options in problem.options)


def _count_places(problem: Problem, option: Option) -> int:
    local = problem.ranks_per_host
    hosts = problem.ranks // local
    if option.placement == "all_ranks":
        return 1
    if option.placement == "hosts":
        return math.comb(hosts, option.shards // local)
    within, groups = (local, hosts) if option.placement == "one_host" else (problem.ranks, 1)
    return groups * math.comb(within + option.shards - 1, option.shards)


def _best_of_all(problem: Problem, solution: Solution) -> Solution:
    """Rate every plan."""
    assert problem.exact is not None
    ways: list[list[tuple[int, tuple[int, ...], Part]]] = []
    for table, options in enumerate(problem.options):
        places = [(i, ranks) for i, option in enumerate(options) for ranks in all_places(problem, option)]
        ways.append([(i, ranks, problem.exact.part(table, options[i], ranks)) for i, ranks in places])
    best: PlanState | None = None
    count = 0
    for state in _states(problem, ways):
        count += 1
        if state.fits and (best is None or state.step_ms < best.step_ms):
            best = state
    assert best is not None, "the solution itself is one of the plans"
    return _solution(best, best.step_ms, solution.work_units + count)


def _states(problem: Problem, ways: Sequence[Sequence[tuple[int, tuple[int, ...], Part]]]) -> Iterator[PlanState]:
    for plan in itertools.product(*ways):
        assignment = Assignment(chosen=tuple(i for i, _, _ in plan), ranks=tuple(ranks for _, ranks, _ in plan))
        yield PlanState(problem, assignment, [part for _, _, part in plan])
