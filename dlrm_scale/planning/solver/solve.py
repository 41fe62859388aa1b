"""From a problem to a plan and a proof of how good it is.

A linear program bounds the step and says which options pay. Its choices at several thresholds, placed longest first,
are the first plans; a search improves the best of them. The same program with whole options lifts the bound and gives
another start. Where the problem is small enough, CP-SAT polishes the result and may prove it. Every stage stops on
counted work, never on a clock.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

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


@dataclass(frozen=True, kw_only=True)
class Solution:
    """A plan with what bounds it.

    Attributes:
        assignment: the plan.
        step_ms: its predicted step.
        bound_ms: no plan of the problem has a shorter predicted step.
        gap: `step_ms / bound_ms - 1`, at least 0.
        optimal: proven, within the solver's tolerance.
        work_units: spent: tries of the search and milliseconds of CP-SAT's deterministic time; equal inputs spend
            equally many.
    """

    assignment: Assignment
    step_ms: float
    bound_ms: float
    gap: float
    optimal: bool
    work_units: int


def solve(problem: Problem, *, effort: float = 1.0) -> Solution:
    """Find a plan with a short step. Equal problems give equal plans.

    Args:
        problem: every table has at least one option.
        effort: work to spend on search and polish, as a multiple of the default; 0 places longest first and stops.

    Raises:
        NoFeasiblePlan: nothing fits the ranks' memory; says in numbers what is missing.
    """
    flat = flatten(problem)
    bounded = lower_bound(flat)
    if bounded is None:
        raise NoFeasiblePlan(shortfall(problem, proven=True))
    bound_ms, relaxed = bounded
    scale = np.maximum(relaxed.shares @ (flat.costs_ms * flat.shards[:, None]) / flat.ranks, 1e-9)
    loads = Loads(flat, scale)
    work = 0
    plans = _first_plans(flat, loads, bound_ms)
    if not plans:
        only, work = _any_plan(problem, flat, loads, bound_ms)
        plans = [only]
    step_ms, best = plans[0]
    tries = round(_tries(flat) * effort)
    for seed, (_, plan) in enumerate(plans[:_STARTS]):
        if step_ms <= bound_ms * (1 + _TOLERANCE):
            break
        loads.set_plan(plan)
        found_ms = loads.search(tries, seed, bound_ms * (1 + _TOLERANCE))
        work += tries
        if found_ms < step_ms:
            step_ms, best = found_ms, loads.plan()
    if effort and step_ms > bound_ms * (1 + _WORTH_WHOLE):
        whole = relax(flat, step_ms, whole_options=True)
        if whole is not None:
            bound_ms = max(bound_ms, min(step_ms, whole.step_ms))
            if construct(loads, _most_of(flat, whole)):
                found_ms = loads.search(tries, _STARTS, bound_ms * (1 + _TOLERANCE))
                work += tries
                if found_ms < step_ms:
                    step_ms, best = found_ms, loads.plan()
    proven = step_ms <= bound_ms * (1 + _TOLERANCE)
    if not proven and effort:
        best, bound_ms, proven, spent = _polish(flat, loads, best, step_ms, bound_ms, _EXACT_WORK * effort)
        work += spent
    assignment = flat.assignment(*best)
    step_ms = rate(problem, assignment).step_ms
    bound_ms = min(bound_ms, step_ms)
    return Solution(
        assignment=assignment,
        step_ms=step_ms,
        bound_ms=bound_ms,
        gap=step_ms / bound_ms - 1 if bound_ms else 0.0,
        optimal=proven,
        work_units=work,
    )


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
        raise NoFeasiblePlan(shortfall(problem, proven=exact.proven))
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
