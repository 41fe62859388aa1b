"""Plans of one request side by side: ours, TorchRec's, a given one, each rated by our costs and by TorchRec's."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from dlrm_scale.errors import DlrmScaleError, PlanError, PlanFileError
from dlrm_scale.planning.plan.cost_models import CostModel, PlanLoad
from dlrm_scale.planning.plan.request import PlanRequest
from dlrm_scale.planning.plan.shapes import shapes_of
from dlrm_scale.planning.solver.problem import Problem
from dlrm_scale.planning.solver.solve import Solution
from dlrm_scale.sharding.plan_file import PlanFile, Prediction, package_versions, planned_table, runs_of
from dlrm_scale.sharding.shard_shapes import TableShape

__all__ = ["Comparison", "Proposal", "Rating", "compare_planners", "given_shapes", "plan_file_of"]

Solver = Callable[[Problem], Solution]
OtherPlanner = Callable[[PlanRequest], Sequence[TableShape]]


@dataclass(frozen=True, kw_only=True)
class Rating:
    """One plan by one model.

    Attributes:
        load: of every rank, exactly.
        objective_ms: the step as the solver counts it, with times that add up over tables; where collectives are
            measured curves it lies a little below `load.step_ms`, else they are the same.
        bound_ms: no plan of the request's space has a smaller objective.
    """

    load: PlanLoad
    objective_ms: float
    bound_ms: float

    @property
    def bottleneck_ms(self) -> float:
        """The step: what the slowest ranks take, over all phases."""
        return self.load.step_ms

    @property
    def gap(self) -> float:
        """How far the objective lies above its bound; plans outside the space may lie below it."""
        return self.objective_ms / self.bound_ms - 1 if self.bound_ms else 0.0


@dataclass(frozen=True, kw_only=True)
class Proposal:
    """One plan.

    Attributes:
        planner: who made it, and for whose costs.
        shapes: by table.
        ratings: by model.
        solve_seconds: what planning took here and now; None for given plans.
        work_units: of our solver.
        optimal: proven in the costs that it was made for; None where nothing was proven.
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
) -> Comparison:
    """Plan with our solver for each model, take others' plans, and rate all by all models.

    Args:
        request: what is planned.
        models: ours first.
        solver: ours.
        others: other planners by name.
        given: a plan that was made elsewhere; goes first.
        say: told what begins.

    Raises:
        NoFeasiblePlan: no plan fits by our own model.
    """
    made: list[tuple[str, tuple[TableShape, ...], float | None, Solution | None]] = []
    bounds: dict[str, float] = {}
    failures: dict[str, str] = {}
    if given is not None:
        made.append(("forced", tuple(given), None, None))
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
        bounds[model.name] = solution.bound_ms
        made.append((name, shapes_of(problem, solution.assignment), seconds, solution))
    for name, plan in others.items():
        say(f"planning with {name}")
        started = time.perf_counter()
        try:
            shapes = tuple(plan(request))
        except DlrmScaleError as error:
            failures[name] = error.message
            continue
        made.append((name, shapes, time.perf_counter() - started, None))
    proposals = [
        Proposal(
            planner=name,
            shapes=shapes,
            ratings={m.name: _rating(m, shapes, bounds.get(m.name, 0.0)) for m in models},
            solve_seconds=seconds,
            work_units=None if solution is None else solution.work_units,
            optimal=None if solution is None else solution.optimal,
        )
        for name, shapes, seconds, solution in made
    ]
    return Comparison(request=request, proposals=tuple(proposals), failures=failures)


def _rating(model: CostModel, shapes: Sequence[TableShape], bound_ms: float) -> Rating:
    return Rating(load=model.load(shapes), objective_ms=model.objective_ms(shapes), bound_ms=bound_ms)


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
