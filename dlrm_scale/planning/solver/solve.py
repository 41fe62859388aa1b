"""From a problem to a plan and a proof of how good it is.

A linear program bounds the step and says which options pay. Its choices at several thresholds, placed longest first,
are the first plans; a search improves the best of them. The same program with whole options lifts the bound and gives
another start. Where the problem is small enough, CP-SAT polishes the result and may prove it. Every stage stops on
counted work, never on a clock.
"""

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from dlrm_scale.planning.solver.choose import Solution, choose, only_type, single_types
from dlrm_scale.planning.solver.construct import construct, construct_small
from dlrm_scale.planning.solver.flat_problem import FlatProblem, flatten
from dlrm_scale.planning.solver.infeasible import NoFeasiblePlan, shortfall
from dlrm_scale.planning.solver.loads import Loads, Plan
from dlrm_scale.planning.solver.lower_bound import Relaxation, lower_bound, relax
from dlrm_scale.planning.solver.problem import Assignment, Problem
from dlrm_scale.planning.solver.rate import rate

__all__ = ["Solution", "solve"]

_THRESHOLDS = (1.0, 1.02, 1.05, 1.1, 1.2, 1.35, 1.5, 2.0, 3.0, np.inf)
"""Of the bound: no option alone may take longer. Tight ones balance, loose ones save total work."""
_STARTS = 3
"""How many of the first plans are improved."""
_TRIES = 60_000
"""Of the search, for each start, at most."""
_TRY_COSTS = 400_000_000
"""Costs that the search may look at, for each start: ranks times phases for every option of two tables a try."""
_WORTH_WHOLE = 1e-3
"""Gap from which on the program with whole options is solved; 26 tables take it a tenth of a second."""
_EXACT_VARIABLES = 4_000
"""Placement decisions up to which CP-SAT gets anywhere; among 7,000 (64 ranks, wide) its work found nothing."""
_EXACT_WORK = 6.0
"""CP-SAT's deterministic time, about seconds."""
_TOLERANCE = 1e-5
"""A plan this close to the bound counts as optimal; rounding in CP-SAT takes up to 3e-5."""


_SINGLE_EFFORT = 0.2
"""Of the effort for plans of one sharding type alone; those that come close get all of it."""
_CLOSE = 1.02


def solve(problem: Problem, *, effort: float = 1.0) -> Solution:
    """Find a plan with a short step. Equal problems give equal plans.

    Where the options' costs are lines below the exact ones (`Problem.exact`), they only suggest plans: the exact step
    chooses among them and among plans of one sharding type alone, and moves of single tables improve the choice.

    Args:
        problem: every table has at least one option.
        effort: work to spend on search and polish, as a multiple of the default; 0 places longest first and stops.

    Raises:
        NoFeasiblePlan: nothing fits the ranks' memory; says in numbers what is missing.
    """
    found = _solve(problem, effort, np.inf)
    assert found is not None
    return found


def _solve(problem: Problem, effort: float, give_up_ms: float) -> Solution | None:
    """As `solve`; None where no plan can be as short as `give_up_ms`."""
    linear = _suggest(problem, effort, give_up_ms)
    if linear is None or problem.exact is None:
        return None if linear is None else linear.solution
    solution = choose(problem, linear.solution, linear.suggested, effort)
    if solution.optimal:
        return solution
    others: list[tuple[float, Assignment]] = []
    spent = 0
    for kind in single_types(problem):
        narrowed, back = only_type(problem, kind)
        if effort == 0.0 and any(option.placement != "all_ranks" for of in narrowed.options for option in of):
            continue
        best_ms = min([solution.step_ms, *(ms for ms, _ in others)])
        try:
            found = _solve(narrowed, effort * _SINGLE_EFFORT, best_ms)
            if found is not None and effort and not found.optimal and found.step_ms < best_ms * _CLOSE:
                spent += found.work_units
                found = _solve(narrowed, effort, best_ms)
        except NoFeasiblePlan:
            continue
        if found is not None:
            spent += found.work_units
            others.append((found.step_ms, back(found.assignment)))
    close = [assignment for step_ms, assignment in others if step_ms < solution.step_ms * _CLOSE]
    if close:
        solution = choose(problem, solution, close, effort)
    return replace(solution, work_units=solution.work_units + spent)


@dataclass(frozen=True, kw_only=True)
class _Suggestion:
    """What the options' costs lead to.

    Attributes:
        solution: the best plan by them; the bound is one of exact steps too.
        suggested: all plans on the way to it.
    """

    solution: Solution
    suggested: tuple[Assignment, ...]


def _suggest(problem: Problem, effort: float, give_up_ms: float) -> _Suggestion | None:
    flat = flatten(problem)
    bounded = lower_bound(flat)
    if bounded is None:
        raise NoFeasiblePlan(shortfall(problem, proven=True))
    bound_ms, relaxed = bounded
    if bound_ms >= give_up_ms:
        return None
    scale = np.maximum(relaxed.shares @ (flat.costs_ms * flat.shards[:, None]) / flat.ranks, 1e-9)
    loads = Loads(flat, scale)
    work = 0
    plans = _first_plans(flat, loads, bound_ms)
    if not plans:
        only, work = _any_plan(problem, flat, loads, bound_ms)
        plans = [only]
    step_ms, best = plans[0]
    suggested = [plan for _, plan in plans]
    tries = round(_tries(flat) * effort)
    for seed, (_, plan) in enumerate(plans[:_STARTS]):
        if step_ms <= bound_ms * (1 + _TOLERANCE):
            break
        loads.set_plan(plan)
        found_ms = loads.search(tries, seed, bound_ms * (1 + _TOLERANCE))
        suggested.append(loads.plan())
        work += tries
        if found_ms < step_ms:
            step_ms, best = found_ms, suggested[-1]
    if effort and step_ms > bound_ms * (1 + _WORTH_WHOLE):
        whole = relax(flat, step_ms, whole_options=True)
        if whole is not None:
            bound_ms = max(bound_ms, min(step_ms, whole.step_ms))
            if construct(loads, _most_of(flat, whole)):
                found_ms = loads.search(tries, _STARTS, bound_ms * (1 + _TOLERANCE))
                suggested.append(loads.plan())
                work += tries
                if found_ms < step_ms:
                    step_ms, best = found_ms, suggested[-1]
    proven = step_ms <= bound_ms * (1 + _TOLERANCE)
    if not proven and effort:
        best, polished_ms, proven, spent = _polish(flat, loads, best, step_ms, bound_ms, _EXACT_WORK * effort)
        suggested.append(best)
        # CP-SAT counts shards that differ as the largest, which bounds nothing.
        bound_ms = polished_ms if flat.alike else bound_ms
        work += spent
    assignment = flat.assignment(*best)
    step_ms = rate(problem, assignment).step_ms
    bound_ms = min(bound_ms, step_ms)
    solution = Solution(
        assignment=assignment,
        step_ms=step_ms,
        bound_ms=bound_ms,
        gap=step_ms / bound_ms - 1 if bound_ms else 0.0,
        optimal=proven and problem.exact is None,
        work_units=work,
    )
    return _Suggestion(solution=solution, suggested=tuple(flat.assignment(*plan) for plan in [best, *suggested]))


def _first_plans(flat: FlatProblem, loads: Loads, bound_ms: float) -> list[tuple[float, Plan]]:
    """Build plans at all thresholds, the shortest step first, each once."""
    found: dict[tuple[int, ...], tuple[float, Plan]] = {}
    for threshold in _THRESHOLDS:
        relaxed = relax(flat, bound_ms * threshold)
        if relaxed is None:
            continue
        options = _most_of(flat, relaxed)
        if tuple(options) not in found and construct(loads, options):
            found[tuple(options)] = (loads.step_ms(), loads.plan())
    return sorted(found.values(), key=lambda plan: plan[0])


def _most_of(flat: FlatProblem, relaxed: Relaxation) -> NDArray[np.int64]:
    """Each table's option with the largest share."""
    spans = zip(flat.first[:-1], flat.first[1:], strict=True)
    return np.array([begin + int(np.argmax(relaxed.shares[begin:end])) for begin, end in spans])


def _tries(flat: FlatProblem) -> int:
    options_a_table = len(flat.table) / flat.tables
    costs_a_try = 2 * options_a_table * flat.ranks * len(flat.costs_ms[0])
    return min(_TRIES, round(_TRY_COSTS / costs_a_try))


def _any_plan(problem: Problem, flat: FlatProblem, loads: Loads, bound_ms: float) -> tuple[tuple[float, Plan], int]:
    """Look for a plan by memory alone, then by CP-SAT."""
    if construct_small(loads):
        return (loads.step_ms(), loads.plan()), 0
    from dlrm_scale.planning.solver.exact import placement_variables, solve_exactly

    if placement_variables(flat, np.inf) > _EXACT_VARIABLES:
        raise NoFeasiblePlan(shortfall(problem, proven=False))
    # No plan is slower than every table's slowest option on one rank.
    worst = float(np.maximum.reduceat(flat.costs_ms.sum(axis=1) * flat.shards, flat.first[:-1]).sum())
    worst += float(flat.charge_ms.sum()) + flat.base_ms
    exact = solve_exactly(flat, None, worst, bound_ms=bound_ms, work=_EXACT_WORK)
    if exact.plan is None:
        raise NoFeasiblePlan(shortfall(problem, proven=exact.proven and flat.alike))
    loads.set_plan(exact.plan)
    return (loads.step_ms(), exact.plan), exact.work_units


def _polish(
    flat: FlatProblem, loads: Loads, best: Plan, step_ms: float, bound_ms: float, work: float
) -> tuple[Plan, float, bool, int]:
    """Hand the best plan to CP-SAT where the problem is small enough."""
    # OR-tools takes a third of a second to import.
    from dlrm_scale.planning.solver.exact import placement_variables, solve_exactly

    if placement_variables(flat, step_ms) > _EXACT_VARIABLES:
        return best, bound_ms, False, 0
    exact = solve_exactly(flat, best, step_ms, bound_ms=bound_ms, work=work)
    if exact.plan is not None:
        loads.set_plan(exact.plan)
        if loads.step_ms() < step_ms:
            best = exact.plan
    return best, exact.bound_ms, exact.proven, exact.work_units
