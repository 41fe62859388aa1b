"""Plans of one request side by side: ours, TorchRec's, a given one, each rated by our costs and by TorchRec's."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from dlrm_scale.errors import DlrmScaleError, PlanError, PlanFileError
from dlrm_scale.planning.plan.cost_models import CostModel, PlanLoad
from dlrm_scale.planning.plan.request import PlanRequest
from dlrm_scale.planning.plan.shapes import assignment_of, shapes_of
from dlrm_scale.planning.solver.choose import OPTIMAL_GAP, take_in
from dlrm_scale.planning.solver.problem import Assignment, Problem
from dlrm_scale.planning.solver.solve import Solution
from dlrm_scale.sharding.plan_file import PlanFile, Prediction, package_versions, planned_table, runs_of
from dlrm_scale.sharding.shard_shapes import TableShape

__all__ = ["Comparison", "Proposal", "Rating", "compare_planners", "given_shapes", "plan_file_of"]

_ROUNDING = 1e-12
"""Of sums in another order."""

Solver = Callable[[Problem], Solution]
OtherPlanner = Callable[[PlanRequest], Sequence[TableShape]]


@dataclass(frozen=True, kw_only=True)
class Rating:
    """One plan by one model.

    Attributes:
        load: of every rank.
        bound_ms: no plan of the request's space has a shorter step; 0 where there is none.
    """

    load: PlanLoad
    bound_ms: float

    @property
    def bottleneck_ms(self) -> float:
        """The step: what the slowest ranks take, over all phases."""
        return self.load.step_ms

    @property
    def gap(self) -> float:
        """How far the step lies above the bound; plans outside the space may lie below it."""
        found = (self.bottleneck_ms - self.bound_ms) / self.bound_ms if self.bound_ms else 0.0
        return 0.0 if abs(found) < _ROUNDING else found

    @property
    def optimal(self) -> bool:
        """No plan of the request's space is better: the step is its bound."""
        return self.bound_ms > 0 and self.gap <= OPTIMAL_GAP


@dataclass(frozen=True, kw_only=True)
class Proposal:
    """One plan.

    Attributes:
        planner: who made it, and for whose costs.
        shapes: by table.
        ratings: by model.
        solve_seconds: what planning took here and now; None for given plans.
        work_units: of our solver.
        optimal: proven in the costs that it was made for; None for plans of others.
    """

    planner: str
    shapes: tuple[TableShape, ...]
    ratings: Mapping[str, Rating]
    solve_seconds: float | None = None
    work_units: int | None = None
    optimal: bool | None = None


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """All plans of a request.

    Attributes:
        request: what was asked.
        proposals: ours first.
        failures: planners that found no plan, with the reason.
    """

    request: PlanRequest
    proposals: tuple[Proposal, ...]
    failures: Mapping[str, str] = field(default_factory=dict)

    @property
    def chosen(self) -> Proposal:
        """The plan that is written: a given one, else ours."""
        return self.proposals[0]


def compare_planners(
    request: PlanRequest,
    models: Sequence[CostModel],
    solver: Solver,
    others: Mapping[str, OtherPlanner],
    given: Sequence[TableShape] | None = None,
    say: Callable[[str], None] = lambda line: None,
    effort: float = 0.0,
) -> Comparison:
    """Plan with our solver for each model, take others' plans, and rate all by all models.

    Where another's plan, or the given one, is within the request's space and shorter by our costs, ours starts from it.

    Args:
        request: what is planned.
        models: ours first.
        solver: ours.
        others: other planners by name.
        given: a plan that was made elsewhere; goes first.
        say: told what begins.
        effort: to improve another's plan with; see `solve`.

    Raises:
        NoFeasiblePlan: no plan fits by our own model.
    """
    made: list[_Made] = []
    bounds: dict[str, float] = {}
    failures: dict[str, str] = {}
    solved: list[tuple[CostModel, Solution, _Made]] = []
    if given is not None:
        made.append(_Made(planner="forced", shapes=tuple(given)))
    for number, model in enumerate(models):
        name = "dlrm_scale" if number == 0 else f"dlrm_scale, for the costs of {model.name}"
        say(f"planning with {name}")
        try:
            problem = model.problem
            started = time.perf_counter()
            solution = solver(problem)
        except PlanError as error:
            if number == 0 and given is None:
                raise
            failures[name] = error.message
            continue
        seconds = time.perf_counter() - started
        ours = _Made(planner=name, shapes=(), seconds=seconds, costs=model.name)
        made.append(ours)
        solved.append((model, solution, ours))
    for name, plan in others.items():
        say(f"planning with {name}")
        started = time.perf_counter()
        try:
            shapes = tuple(plan(request))
        except DlrmScaleError as error:
            failures[name] = error.message
            continue
        made.append(_Made(planner=name, shapes=shapes, seconds=time.perf_counter() - started))
    peers = [one.shapes for one in made if one.shapes]
    for model, solution, ours in solved:
        started = time.perf_counter()
        chosen = take_in(model.problem, solution, _within(model.problem, peers), effort)
        ours.shapes, ours.work_units = shapes_of(model.problem, chosen.assignment), chosen.work_units
        ours.seconds = (ours.seconds or 0.0) + time.perf_counter() - started
        bounds[model.name] = chosen.bound_ms
    proposals = []
    for one in made:
        ratings = {m.name: Rating(load=m.load(one.shapes), bound_ms=bounds.get(m.name, 0.0)) for m in models}
        proposals.append(
            Proposal(
                planner=one.planner,
                shapes=one.shapes,
                ratings=ratings,
                solve_seconds=one.seconds,
                work_units=one.work_units,
                optimal=None if one.costs is None else ratings[one.costs].optimal,
            )
        )
    return Comparison(request=request, proposals=tuple(proposals), failures=failures)


@dataclass(kw_only=True)
class _Made:
    """A plan on its way to a proposal."""

    planner: str
    shapes: tuple[TableShape, ...]
    seconds: float | None = None
    work_units: int | None = None
    costs: str | None = None


def _within(problem: Problem, plans: Sequence[Sequence[TableShape]]) -> list[Assignment]:
    """Those plans that the problem offers: its space and its constraints."""
    found = []
    for shapes in plans:
        try:
            found.append(assignment_of(problem, shapes))
        except ValueError:
            continue
    return found


def given_shapes(plan: PlanFile, request: PlanRequest) -> tuple[TableShape, ...]:
    """Take a plan file's shapes for the tables of a request, in their order.

    Raises:
        PlanFileError: it is for other tables, ranks, hosts or another optimizer; each is named.
    """
    from dlrm_scale.sharding.given_plan import differences

    changed = differences(
        plan,
        [table.spec for table in request.tables.tables],
        optimizer=request.tables.optimizer,
        ranks=request.ranks,
        ranks_per_host=request.ranks_per_host,
    )
    if changed:
        raise PlanFileError(
            "the forced plan was made for something else:\n  " + "\n  ".join(changed[:8]),
            remedy="ask for the tables, ranks and hosts that it was made for",
        )
    by_name = {table.name: table.shape for table in plan.tables}
    return tuple(by_name[table.name] for table in request.tables.tables)


def plan_file_of(comparison: Comparison, model: str = "dlrm_scale") -> PlanFile:
    """Write the chosen plan down, with what one model predicts of it."""
    request, proposal = comparison.request, comparison.chosen
    rating = proposal.ratings[model]
    return PlanFile(
        planner=proposal.planner,
        ranks=request.ranks,
        ranks_per_host=request.ranks_per_host,
        optimizer=request.tables.optimizer,
        batch_size_per_rank=request.batch_size_per_rank,
        inputs={
            "tables": request.tables.fingerprint(),
            "cluster": request.cluster_fingerprint(),
            "space": request.space,
        },
        tables=tuple(
            planned_table(table.spec, shape)
            for table, shape in zip(request.tables.tables, proposal.shapes, strict=True)
        ),
        prediction=Prediction(
            costs=request.cluster.name,
            step_ms=float(f"{rating.bottleneck_ms:.6g}"),
            bound_ms=float(f"{rating.bound_ms:.6g}") if rating.bound_ms else None,
            gap=round(rating.gap, 6) if rating.bound_ms else None,
            phases_ms={name: runs_of(values) for name, values in rating.load.phases_ms.items()},
            memory_bytes={name: runs_of(values) for name, values in rating.load.memory_bytes.items()},
        ),
        versions=package_versions(),
    )
