"""Plans side by side: within memory, above their bounds, every cell placed once, the same each time."""

from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dlrm_scale.errors import PlanError
from dlrm_scale.planning.cluster.cluster_file import load_cluster
from dlrm_scale.planning.plan.analysis import Analysis, Effort, analyze
from dlrm_scale.planning.plan.cost_models import OurCosts
from dlrm_scale.planning.plan.proposal import compare_planners, given_shapes, plan_file_of
from dlrm_scale.planning.plan.request import PlanRequest, plan_request
from dlrm_scale.planning.plan.torchrec_peer import plan_with_torchrec
from dlrm_scale.planning.report.plan_values import analysis_values
from dlrm_scale.planning.solver.infeasible import NoFeasiblePlan
from dlrm_scale.planning.tables.table_set import TableSet, TableStats
from dlrm_scale.sharding.plan_file import PlanFile, by_rank, format_plan
from tests.planning.plan.small_requests import SMALL_TABLES, small_request

_EFFORT = Effort(of_default=0.0)


def _analysis(wide: bool = False, **values: object) -> Analysis:
    request = small_request(ranks=16, wide=wide, **values)  # type: ignore[arg-type]
    return analyze(request, {"torchrec": plan_with_torchrec}, effort=_EFFORT, what_if=False)


def _placed_once(plan: PlanFile) -> None:
    for table in plan.layout().tables:
        if table.replicated:
            continue
        rows = sorted({edge for r in table.regions for edge in (r.row_start, r.row_end)})
        columns = sorted({edge for r in table.regions for edge in (r.column_start, r.column_end)})
        held = torch.zeros(len(rows), len(columns), dtype=torch.int64)
        for r in table.regions:
            held[
                rows.index(r.row_start) : rows.index(r.row_end),
                columns.index(r.column_start) : columns.index(r.column_end),
            ] += 1
        assert (rows[0], rows[-1], columns[0], columns[-1]) == (0, table.spec.rows, 0, table.spec.dim)
        assert (held[:-1, :-1] == 1).all()


@pytest.mark.parametrize("wide", [False, True])
def test_plans_fit_lie_above_their_bounds_and_place_every_cell_once(wide: bool) -> None:
    analysis = _analysis(wide)
    comparison = analysis.comparison
    assert [p.planner for p in comparison.proposals] == [
        "dlrm_scale",
        "dlrm_scale, for the costs of torchrec",
        "torchrec",
    ]
    for proposal in comparison.proposals:
        for rating in proposal.ratings.values():
            assert rating.load.fits
            assert rating.bottleneck_ms >= rating.bound_ms * (1 - 1e-9)
            assert rating.load.step_ms == pytest.approx(sum(rating.load.slowest_ms.values()))
    ours, for_torchrec, _ = comparison.proposals
    # each is the better one in the costs that it was made for
    assert ours.ratings["dlrm_scale"].bottleneck_ms <= for_torchrec.ratings["dlrm_scale"].bottleneck_ms
    assert for_torchrec.ratings["torchrec"].bottleneck_ms <= ours.ratings["torchrec"].bottleneck_ms
    _placed_once(plan_file_of(comparison))


@st.composite
def _requests(draw: st.DrawFn) -> PlanRequest:
    """Draw tables of all sizes, a few hosts, and memory that is just enough or plenty."""
    tables = [
        TableStats(
            name=f"t{i}",
            rows=draw(st.one_of(st.integers(1, 9), st.integers(10, 3_000_000))),
            dim=draw(st.sampled_from([4, 16, 20, 64])),
            lookups_per_sample=draw(st.sampled_from([0.5, 1.0, 7.0, 60.0])),
            pooling=draw(st.sampled_from(["sum", "mean"])),
        )
        for i in range(draw(st.integers(1, 6)))
    ]
    optimizer = draw(st.sampled_from(["sgd", "rowwise_adagrad", "adam"]))
    ranks, hosts = draw(st.sampled_from([1, 2, 3, 4])), draw(st.integers(1, 3))
    memory_bytes = draw(st.sampled_from([1 << 28, 1 << 30, 1 << 36]))
    cluster = load_cluster("h100x8").model_copy(update={"memory_bytes": memory_bytes})
    return plan_request(
        TableSet(name="drawn", optimizer=optimizer, tables=tuple(tables)),
        cluster,
        ranks=ranks * hosts,
        ranks_per_host=ranks,
        batch_size_per_rank=draw(st.sampled_from([1, 64, 2048])),
        wide=draw(st.booleans()),
    )


@settings(max_examples=40, deadline=None)
@given(_requests())
def test_any_plan_that_is_found_fits_lies_above_its_bound_and_places_every_cell_once(request_: PlanRequest) -> None:
    try:
        found = compare_planners(request_, [OurCosts(request_)], _EFFORT.quick, {})
    except NoFeasiblePlan:
        return
    rating = found.chosen.ratings["dlrm_scale"]
    assert rating.load.fits
    assert rating.bottleneck_ms >= rating.bound_ms * (1 - 1e-9)
    plan = plan_file_of(found)
    _placed_once(plan)
    assert [table.spec for table in plan.tables] == [table.spec for table in request_.tables.tables]


def test_equal_requests_give_equal_files_and_values_but_for_the_timing() -> None:
    first, second = _analysis(), _analysis()
    assert format_plan(plan_file_of(first.comparison)) == format_plan(plan_file_of(second.comparison))
    values = [analysis_values(analysis) for analysis in (first, second)]
    for found in values:
        plans = found["plans"]
        assert isinstance(plans, list)
        for plan in plans:
            plan.pop("solve_seconds")
    assert values[0] == values[1]
    assert values[0]["timing_fields"] == ["plans[].solve_seconds"]


def test_a_written_plan_has_the_prediction_by_rank_and_what_it_was_made_for() -> None:
    analysis = _analysis()
    plan = plan_file_of(analysis.comparison)
    rating = analysis.comparison.chosen.ratings["dlrm_scale"]
    assert plan.prediction is not None
    assert plan.prediction.step_ms == pytest.approx(rating.bottleneck_ms, rel=1e-5)
    for name, times in rating.load.phases_ms.items():
        assert by_rank(plan.prediction.phases_ms[name]) == pytest.approx(list(times), rel=1e-5)
    for name, sizes in rating.load.memory_bytes.items():
        assert by_rank(plan.prediction.memory_bytes[name]) == list(sizes)
    assert plan.inputs["tables"] == analysis.comparison.request.tables.fingerprint()
    assert (plan.ranks, plan.ranks_per_host, plan.batch_size_per_rank) == (16, 8, 1024)


def test_constraints_hold_in_all_plans() -> None:
    types = {"large": ("row_wise",), "tiny": ("table_wise",)}
    for proposal in _analysis(types=types).comparison.proposals:
        assert proposal.shapes[0].sharding_type == "row_wise"
        assert proposal.shapes[4].sharding_type == "table_wise"


def test_a_given_plan_goes_first_and_is_rated_against_the_same_bounds() -> None:
    free = _analysis()
    forced = small_request(ranks=16, types={t.name: ("table_wise",) for t in SMALL_TABLES})
    whole = plan_file_of(analyze(forced, {}, effort=_EFFORT, torchrec_costs=False, what_if=False).comparison)
    shapes = given_shapes(whole, free.comparison.request)
    found = analyze(free.comparison.request, {}, given=shapes, effort=_EFFORT, what_if=False).comparison
    assert found.chosen.planner == "forced"
    assert {shape.sharding_type for shape in found.chosen.shapes} == {"table_wise"}
    given, ours = (p.ratings["dlrm_scale"] for p in found.proposals[:2])
    assert given.bound_ms == ours.bound_ms
    assert given.bottleneck_ms > ours.bottleneck_ms
    with pytest.raises(PlanError, match="ranks: the plan's 16, here 8"):
        given_shapes(whole, small_request(ranks=8))


def test_a_planner_that_finds_nothing_is_told_and_the_others_are_rated() -> None:
    def failing(request: PlanRequest) -> Sequence[object]:
        raise PlanError("found nothing")

    found = analyze(
        small_request(),
        {"other": failing},  # type: ignore[dict-item]
        effort=_EFFORT,
        torchrec_costs=False,
        what_if=False,
    ).comparison
    assert [p.planner for p in found.proposals] == ["dlrm_scale"]
    assert found.failures == {"other": "found nothing"}
