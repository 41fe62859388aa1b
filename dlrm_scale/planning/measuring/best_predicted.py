"""The few plans that are worth measuring: the best predicted ones that differ in more than details.

A cost model errs alike on plans of the same sharding types, so that among those its first choice is nearly as good as
any. Where it errs is in what each type costs by being in use. So the solver plans for each mixture of types, and of
every mixture the best plan stays.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace

from dlrm_scale.errors import PlanError
from dlrm_scale.planning.costs.space import DEFAULT_TYPES, WIDE_TYPES
from dlrm_scale.planning.plan.cost_models import CostModel, OurCosts
from dlrm_scale.planning.plan.request import PlanRequest
from dlrm_scale.planning.plan.shapes import shapes_of
from dlrm_scale.planning.solver.solve import solve
from dlrm_scale.sharding.rules import objection
from dlrm_scale.sharding.shard_shapes import TableShape

__all__ = ["best_predicted"]

_MIXTURES = (
    ("table_wise",),
    ("row_wise",),
    ("table_wise", "data_parallel"),
    ("table_wise", "row_wise"),
    ("row_wise", "data_parallel"),
    ("table_wise", "row_wise", "data_parallel"),
    ("table_wise", "table_row_wise", "data_parallel"),
    ("table_wise", "column_wise"),
    ("table_wise", "column_wise", "data_parallel"),
)
_WHOLE_EFFORT, _EFFORT = 0.25, 0.05
"""Of the solver for the whole space and for a mixture: models err by percents; more work would win per mille."""


def best_predicted(
    request: PlanRequest,
    count: int,
    make_model: Callable[[PlanRequest], CostModel] = OurCosts,
) -> list[tuple[TableShape, ...]]:
    """Plan for each mixture of types and sort by what is predicted of the whole step.

    Args:
        request: what is planned.
        count: at most so many plans.
        make_model: gives the costs.

    Returns:
        Plans that fit, fastest predicted first, no two with the same types in use; the solver's plan for the whole
        space is among those compared.

    Raises:
        PlanError: nothing fits.
    """
    model = make_model(request)
    best: dict[frozenset[str], tuple[float, tuple[TableShape, ...]]] = {}

    def compare(shapes: tuple[TableShape, ...]) -> None:
        load = model.load(shapes)
        types = frozenset(shape.sharding_type for shape in shapes)
        if load.fits and (types not in best or load.step_ms < best[types][0]):
            best[types] = (load.step_ms, shapes)

    compare(_solved(model, _WHOLE_EFFORT))
    for mixture in _MIXTURES if request.ranks > 1 else ():
        narrowed = _narrowed(request, mixture)
        if narrowed is None:
            continue
        try:
            compare(_solved(make_model(narrowed), _EFFORT))
        except PlanError:
            continue
    if not best:
        raise PlanError("no plan fits by the exact rating", remedy="`dlrm-scale plan` says what is missing")
    ordered = sorted(best.items(), key=lambda item: (item[1][0], sorted(item[0])))
    return [shapes for _, (_, shapes) in ordered[:count]]


def _solved(model: CostModel, effort: float) -> tuple[TableShape, ...]:
    problem = model.problem
    return shapes_of(problem, solve(problem, effort=effort).assignment)


def _narrowed(request: PlanRequest, mixture: Sequence[str]) -> PlanRequest | None:
    """Ask for the same with fewer types; None where a table would be left with none, or nothing is left out."""
    space = WIDE_TYPES if request.wide else DEFAULT_TYPES
    if not set(mixture) <= set(space):
        return None
    types = {}
    for table in request.tables.tables:
        offered = request.types.get(table.name, space)
        kept = tuple(
            kind
            for kind in mixture
            if kind in offered
            and objection(kind, table.spec, optimizer=request.tables.optimizer, allow_split_row_state=request.wide)
            is None
        )
        if not kept:
            return None
        types[table.name] = kept
    return replace(request, types=types)
