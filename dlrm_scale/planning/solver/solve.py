"""From a problem to a plan and a proof of how good it is."""

from dataclasses import dataclass

from dlrm_scale.planning.solver.problem import Assignment, Problem

__all__ = ["Solution", "solve"]


@dataclass(frozen=True, kw_only=True)
class Solution:
    """A plan with what bounds it.

    Attributes:
        assignment: the plan.
        step_ms: its predicted step.
        bound_ms: no plan of the problem has a shorter predicted step.
        gap: `step_ms / bound_ms - 1`, at least 0.
        optimal: proven, within the solver's tolerance.
        work_units: spent; equal inputs spend equally many.
    """

    assignment: Assignment
    step_ms: float
    bound_ms: float
    gap: float
    optimal: bool
    work_units: int


def solve(problem: Problem) -> Solution:
    """Find a plan with a short step. Equal problems give equal plans.

    Args:
        problem: every table has at least one option.

    Raises:
        NoFeasiblePlan: nothing fits the ranks' memory; says in numbers what is missing.
    """
    raise NotImplementedError
