"""A whole answer to a request: plans side by side, what decides their steps, what memory and space force."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from dlrm_scale.errors import PlanError
from dlrm_scale.planning.plan.cost_models import CostModel, OurCosts, TorchRecModel
from dlrm_scale.planning.plan.explain import Bottleneck, explain
from dlrm_scale.planning.plan.memory_caps import MemoryCaps, what_memory_forces
from dlrm_scale.planning.plan.no_fit import nothing_fits
from dlrm_scale.planning.plan.proposal import Comparison, OtherPlanner, compare_planners
from dlrm_scale.planning.plan.request import PlanRequest
from dlrm_scale.planning.plan.shapes import assignment_of
from dlrm_scale.planning.solver.choose import take_in
from dlrm_scale.planning.solver.infeasible import NoFeasiblePlan
from dlrm_scale.planning.solver.problem import Problem
from dlrm_scale.planning.solver.solve import Solution, solve
from dlrm_scale.sharding.shard_shapes import TableShape

__all__ = ["Analysis", "Effort", "WideSpace", "analyze"]

_AGAIN = 0.2
"""Effort of planning again, of that of the plan itself."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WideSpace:
    """The request planned again with types that cut columns.

    Attributes:
        step_ms: of the best plan found.
        bound_ms: of its problem.
    """

    step_ms: float
    bound_ms: float


@dataclass(frozen=True, kw_only=True)
class Analysis:
    """What `dlrm-scale plan` tells.

    Attributes:
        comparison: the plans.
        bottlenecks: by planner, in our costs.
        memory_caps: None where it wasn't asked for.
        wide: None where it wasn't asked for or the request is wide.
    """

    comparison: Comparison
    bottlenecks: Mapping[str, Bottleneck] = field(default_factory=dict)
    memory_caps: MemoryCaps | None = None
    wide: WideSpace | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Effort:
    """How much the solver works: a multiple of its default; 0 places longest first and stops."""

    of_default: float = 1.0

    def solve(self, problem: Problem) -> Solution:
        """Plan."""
        return solve(problem, effort=self.of_default)

    def again(self, problem: Problem) -> Solution:
        """Plan with less effort, for a comparison."""
        return solve(problem, effort=self.of_default * _AGAIN)

    def quick(self, problem: Problem) -> Solution:
        """Find out whether something fits."""
        return solve(problem, effort=0.0)


def analyze(
    request: PlanRequest,
    others: Mapping[str, OtherPlanner],
    *,
    given: Sequence[TableShape] | None = None,
    effort: Effort | None = None,
    torchrec_costs: bool = True,
    what_if: bool = True,
    say: Callable[[str], None] = lambda line: None,
) -> Analysis:
    """Plan, compare and explain.

    Args:
        request: what is planned.
        others: other planners by name.
        given: a plan that was made elsewhere.
        effort: of our solver.
        torchrec_costs: rate all plans by TorchRec's model too, and plan for it.
        what_if: plan again with more memory and in the wide space.
        say: told what begins.

    Raises:
        NothingFits: no plan fits, with what would make one fit.
    """
    effort = effort or Effort()
    models: list[CostModel] = [OurCosts(request)]
    if torchrec_costs:
        models.append(TorchRecModel(request))
    try:
        comparison = compare_planners(request, models, effort.solve, others, given, say, effort=effort.of_default)
    except NoFeasiblePlan as error:
        raise nothing_fits(request, error, lambda r: OurCosts(r).problem, effort.quick, say) from None
    bottlenecks = {p.planner: explain(p, models[0]) for p in comparison.proposals}
    if not what_if:
        return Analysis(comparison=comparison, bottlenecks=bottlenecks)
    ours = next((p for p in comparison.proposals if p.planner == "dlrm_scale"), None)
    caps, wide = None, None
    if ours is not None:
        problem = models[0].problem
        rating = ours.ratings[models[0].name]
        say("planning again with more memory")
        caps = what_memory_forces(problem, ours.shapes, rating.bottleneck_ms, effort.again)
        if not request.wide and request.ranks > 1:
            say("planning again with types that cut columns")
            wide = _wide(request, ours.shapes, effort)
    return Analysis(comparison=comparison, bottlenecks=bottlenecks, memory_caps=caps, wide=wide)


def _wide(request: PlanRequest, now: Sequence[TableShape], effort: Effort) -> WideSpace | None:
    try:
        problem = OurCosts(replace(request, wide=True)).problem
        solution = effort.again(problem)
    except PlanError:
        return None
    # The plan as it is lies in that space too.
    solution = take_in(problem, solution, [assignment_of(problem, now)], 0.0)
    return WideSpace(step_ms=solution.step_ms, bound_ms=solution.bound_ms)
