"""What is printed of a plan holds for the exact step: the bound, the gap, the choice, and what decides."""

import json

import numpy as np
import pytest

from dlrm_scale.planning.cluster.cluster import Cluster, Constant
from dlrm_scale.planning.cluster.cluster_file import load_cluster
from dlrm_scale.planning.costs.step_model import make_problem, predict
from dlrm_scale.planning.plan.analysis import Effort, analyze
from dlrm_scale.planning.plan.request import PlanRequest, plan_request
from dlrm_scale.planning.plan.shapes import assignment_of, shapes_of
from dlrm_scale.planning.report.plan_text import describe_analysis
from dlrm_scale.planning.report.plan_values import analysis_values
from dlrm_scale.planning.solver.flat_problem import flatten
from dlrm_scale.planning.solver.infeasible import NoFeasiblePlan
from dlrm_scale.planning.solver.lower_bound import lower_bound
from dlrm_scale.planning.solver.moves import Work, improve
from dlrm_scale.planning.solver.plan_state import PlanState
from dlrm_scale.planning.solver.problem import Problem
from dlrm_scale.planning.solver.solve import _suggest, solve
from dlrm_scale.planning.tables.built_in import built_in_tables
from dlrm_scale.planning.tables.table_set import TableSet, TableStats
from dlrm_scale.sharding.shard_shapes import TableShape
from tests.planning.costs.small_cluster import bent_cluster, small_cluster
from tests.support.placement_problems import every_plan

_TYPES = ("table_wise", "row_wise", "table_row_wise", "data_parallel")


def _hot_tables(random: np.random.Generator, count: int) -> TableSet:
    """Tables whose first rows, or last ones, get most of the lookups; some have fewer rows than ranks."""
    tables = []
    for i in range(count):
        rows = int(random.choice([3, 50, 1_000, 30_001, 400_000]))
        hot = max(1, rows // int(random.choice([1, 10, 1000])))
        share = float(random.choice([0.1, 0.5, 0.95]))
        before = ((hot, share), (rows, 1.0)) if hot < rows else ()
        tables.append(
            TableStats(
                name=f"C{i}",
                rows=rows,
                dim=int(random.choice([16, 64])),
                lookups_per_sample=float(random.choice([1, 5, 30])),
                lookups_before_row=before,
            )
        )
    return TableSet(name="hot", tables=tuple(tables))


def _exact_best(tables: TableSet, cluster: Cluster, problem: Problem, where: dict[str, int]) -> float | None:
    steps = []
    for plan in every_plan(problem):
        found = predict(tables, cluster, shapes_of(problem, plan), **where)
        if found.fits:
            steps.append(found.step_ms)
    return min(steps, default=None)


@pytest.mark.parametrize("seed", range(24))
def test_no_plan_rated_exactly_is_under_the_bound_whatever_its_hot_rows_and_curves(seed: int) -> None:
    random = np.random.default_rng(seed)
    ranks, local, cluster = [(2, 2, bent_cluster()), (4, 4, bent_cluster()), (4, 2, small_cluster())][seed % 3]
    tables = _hot_tables(random, 3 if ranks == 2 else 2)
    where = {"ranks": ranks, "ranks_per_host": local, "batch_size_per_rank": int(2 ** random.integers(4, 12))}
    cluster = cluster.model_copy(update={"memory_bytes": int(random.choice([1 << 22, 1 << 25, 1 << 30]))})
    problem = make_problem(tables, cluster, **where)
    best = _exact_best(tables, cluster, problem, where)
    bounded = lower_bound(flatten(problem))
    if best is None:
        return
    assert bounded is not None, "the program's memory excludes a plan that fits"
    assert bounded[0] <= best * (1 + 1e-9)
    proven = []
    try:
        suggestion = _suggest(problem, 0.05, np.inf)
        solution = solve(problem, effort=0.05)
    except NoFeasiblePlan as error:
        proven.append(error.shortfall.proven)
    if proven:
        assert proven == [False], "a plan fits, rated shard by shard"
        return
    assert suggestion is not None
    assert suggestion.solution.bound_ms <= best * (1 + 1e-9)
    assert solution.bound_ms <= best * (1 + 1e-9)
    exact = predict(tables, cluster, shapes_of(problem, solution.assignment), **where)
    assert exact.fits
    assert solution.step_ms == pytest.approx(exact.step_ms, rel=1e-12)
    assert solution.gap == pytest.approx((exact.step_ms - solution.bound_ms) / solution.bound_ms, abs=1e-12)
    if solution.optimal:
        assert exact.step_ms == pytest.approx(best, rel=1e-9)


def test_a_rated_change_is_the_changed_plans_rating() -> None:
    random = np.random.default_rng(3)
    tables = _hot_tables(random, 4)
    where = {"ranks": 4, "ranks_per_host": 2, "batch_size_per_rank": 128}
    problem = make_problem(tables, small_cluster(), **where, wide=True)
    state = PlanState(problem, solve(problem, effort=0.0).assignment)
    for table in range(4):
        for index, option in enumerate(problem.options[table]):
            ranks = () if option.placement == "all_ranks" else tuple(range(option.shards))
            if option.shards > 4:
                continue
            step_ms, fullest = state.rated(table, index, ranks)
            changed = state.copy()
            changed.change(table, index, ranks)
            found = predict(tables, small_cluster(), shapes_of(problem, changed.assignment), **where)
            assert step_ms == pytest.approx(found.step_ms, rel=1e-12)
            own_ids = found.memory_bytes[found.memory_parts.index("own_ids")]
            assert fullest == int((found.bytes_per_rank - own_ids).max())


def _criteo(count: int) -> TableSet:
    tables = built_in_tables("criteo_kaggle")
    return tables.model_copy(update={"tables": tables.tables[:count]})


_CASES = {
    "cpu2": lambda: (_criteo(12), load_cluster("cpu2"), 2, 2048),
    "cpu2 hot": lambda: (_hot_tables(np.random.default_rng(1), 7), load_cluster("cpu2"), 2, 1024),
    "a100x8": lambda: (_criteo(12), load_cluster("a100x8"), 8, 4096),
    "a100x8 hot": lambda: (_hot_tables(np.random.default_rng(2), 7), load_cluster("a100x8"), 8, 4096),
    "bent hot": lambda: (_hot_tables(np.random.default_rng(5), 7), bent_cluster(), 4, 512),
}


def _request(case: str, kind: str | None = None) -> PlanRequest:
    tables, cluster, ranks, batch = _CASES[case]()
    types = {table.name: (kind,) for table in tables.tables} if kind is not None else {}
    return plan_request(tables, cluster, ranks=ranks, ranks_per_host=ranks, batch_size_per_rank=batch, types=types)


@pytest.mark.parametrize("case", _CASES)
def test_no_plan_of_one_type_alone_beats_ours(case: str) -> None:
    effort = Effort(of_default=0.1)

    def planned(kind: str | None) -> float:
        found = analyze(_request(case, kind), {}, effort=effort, torchrec_costs=False, what_if=False)
        rating = found.comparison.chosen.ratings["dlrm_scale"]
        assert rating.load.fits
        assert rating.bound_ms <= rating.bottleneck_ms * (1 + 1e-12)
        return rating.bottleneck_ms

    ours = planned(None)
    for kind in _TYPES:
        assert ours <= planned(kind) * (1 + 1e-9), kind


def test_a_peers_plan_within_the_space_is_never_better_than_ours() -> None:
    request = _request("cpu2 hot")
    problem = make_problem(
        request.tables, request.cluster, ranks=2, ranks_per_host=2, batch_size_per_rank=request.batch_size_per_rank
    )
    best = improve(PlanState(problem, solve(problem, effort=1.0).assignment), Work(10_000))
    peer = shapes_of(problem, best.assignment)
    found = analyze(
        request, {"peer": lambda asked: peer}, effort=Effort(of_default=0.0), torchrec_costs=False, what_if=False
    )
    ours, theirs = (proposal.ratings["dlrm_scale"].bottleneck_ms for proposal in found.comparison.proposals)
    assert ours <= theirs * (1 + 1e-12)


def test_a_plan_is_optimal_only_if_the_printed_step_is_the_printed_bound() -> None:
    for kind in (None, "row_wise"):
        request = _request("cpu2 hot", kind)
        found = analyze(request, {}, effort=Effort(of_default=0.1), torchrec_costs=False, what_if=False)
        proposal = found.comparison.chosen
        rating = proposal.ratings["dlrm_scale"]
        assert proposal.optimal == (rating.bottleneck_ms <= rating.bound_ms * (1 + 1e-9))
        # by rows there is one plan alone, which is the best
        assert proposal.optimal or kind is None
        text = describe_analysis(found)
        assert ("0.00%" in text) == proposal.optimal
        assert "as counted" not in text
        assert "objective" not in json.dumps(analysis_values(found))


def test_constants_of_types_in_use_are_named_as_what_decides_and_giving_up_their_type_as_the_relief() -> None:
    cluster = load_cluster("cpu2")
    slow = {kind: Constant(value=0.0, source="by hand") for kind in cluster.type_ms}
    slow["row_wise"] = Constant(value=77.0, source="by hand")
    tables = _criteo(6)
    request = plan_request(
        tables, cluster.model_copy(update={"type_ms": slow}), ranks=2, ranks_per_host=2, batch_size_per_rank=64
    )
    rows = [TableShape(sharding_type="row_wise", columns=table.dim) for table in tables.tables]
    found = analyze(request, {}, given=rows, effort=Effort(of_default=0.0), torchrec_costs=False, what_if=False)
    bottleneck = found.bottlenecks["forced"]
    load = found.comparison.chosen.ratings["dlrm_scale"].load
    assert bottleneck.phase == "overhead"
    assert bottleneck.share > 0.7
    assert sum(bottleneck.phases_ms.values()) == pytest.approx(load.step_ms)
    assert bottleneck.types_step_ms[0].milliseconds > 77
    assert bottleneck.type_dropped is not None
    assert bottleneck.type_dropped.sharding_type == "row_wise"
    assert bottleneck.type_dropped.step_ms < load.step_ms - 70
    text = describe_analysis(found)
    assert "overhead takes longest" in text
    assert "row_wise in use 77.000 ms" in text
    assert "it would help to give up row_wise: its 6 tables as" in text


@pytest.mark.parametrize("case", ["cpu2 hot", "bent hot"])
def test_shares_of_types_and_tables_add_up_to_the_phase_and_phases_to_the_step(case: str) -> None:
    found = analyze(_request(case), {}, effort=Effort(of_default=0.0), torchrec_costs=False, what_if=False)
    bottleneck = found.bottlenecks["dlrm_scale"]
    load = found.comparison.chosen.ratings["dlrm_scale"].load
    told = [share.milliseconds for share in (*bottleneck.types, *bottleneck.tables)]
    assert sum(told) + bottleneck.rest_ms == pytest.approx(bottleneck.phase_ms)
    assert sum(bottleneck.phases_ms.values()) == pytest.approx(load.step_ms)
    assert bottleneck.phases_ms[bottleneck.phase] == max(
        ms for name, ms in bottleneck.phases_ms.items() if name != "dense"
    )


def test_the_wide_space_is_never_told_to_be_slower_than_the_plan_that_it_holds() -> None:
    found = analyze(_request("cpu2 hot"), {}, effort=Effort(of_default=0.05), torchrec_costs=False)
    assert found.wide is not None
    assert found.wide.step_ms <= found.comparison.chosen.ratings["dlrm_scale"].bottleneck_ms * (1 + 1e-12)
    assert found.wide.bound_ms <= found.wide.step_ms


def test_shapes_of_a_solution_are_found_again_in_the_problem() -> None:
    request = _request("a100x8 hot")
    problem = make_problem(
        request.tables, request.cluster, ranks=8, ranks_per_host=8, batch_size_per_rank=request.batch_size_per_rank
    )
    solution = solve(problem, effort=0.05)
    again = assignment_of(problem, shapes_of(problem, solution.assignment))
    assert PlanState(problem, again).step_ms == pytest.approx(solution.step_ms, rel=1e-12)
