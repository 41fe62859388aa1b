"""Every kind of plan is made where it is possible, and where it isn't the reason is told."""

import pytest

from dlrm_scale.errors import ConfigError, PlanError
from dlrm_scale.planning.measuring.best_predicted import best_predicted
from dlrm_scale.planning.measuring.plan_matrix import PLAN_NAMES, longest_first, make_plans
from dlrm_scale.planning.plan.cost_models import OurCosts
from dlrm_scale.sharding.shard_shapes import table_layout
from tests.planning.measuring.small_bench import small_bench
from tests.planning.plan.small_requests import small_request

GENERATED = [name for name in PLAN_NAMES if name not in ("torchrec", "ours", "ours_2", "ours_3")]


def test_every_generated_plan_of_four_ranks_places_every_cell_once() -> None:
    request = small_bench(ranks=4, ranks_per_host=2, wide=True, names=["longest_first"]).planned
    for plan in make_plans(request, GENERATED):
        assert plan.shapes is not None, (plan.name, plan.reason)
        for table, shape in zip(request.tables.tables, plan.shapes, strict=True):
            layout = table_layout(table.spec, shape, ranks=4, ranks_per_host=2)
            cells = sum(region.rows * region.columns for region in layout.regions)
            assert cells == table.rows * table.dim, plan.name


def test_plans_of_one_type_have_that_type_alone() -> None:
    request = small_bench(ranks=4, ranks_per_host=2, wide=True, names=["longest_first"]).planned
    kinds = ["row_wise", "column_wise", "table_row_wise", "table_column_wise", "grid_shard"]
    for plan in make_plans(request, kinds):
        assert {shape.sharding_type for shape in plan.shapes or ()} == {plan.name}


def test_types_that_split_a_rows_state_are_listed_with_the_reason_and_the_others_stay() -> None:
    found = {plan.name: plan for plan in make_plans(small_request(ranks=4, ranks_per_host=2), GENERATED)}
    for kind in ("column_wise", "table_column_wise", "grid_shard"):
        assert found[kind].shapes is None
        assert "row state of its own" in found[kind].reason
        assert "table large" in found[kind].reason
    assert found["row_wise"].shapes is not None


def test_a_grid_on_one_host_is_refused_by_what_it_lacks() -> None:
    request = small_bench(wide=True, names=["longest_first"]).planned
    (grid,) = make_plans(request, ["grid_shard"])
    assert grid.shapes is None
    assert "one place for its column shards" in grid.reason


def test_longest_first_gives_the_largest_work_a_rank_of_its_own() -> None:
    request = small_request(ranks=2, ranks_per_host=2)
    places = [shape.places[0] for shape in longest_first(request)]
    assert places[0] != places[1], "1,280 values a sample against 1,024 of all others together"
    assert places[1:] == [places[1]] * 4


def test_equal_plans_are_measured_once() -> None:
    request = small_bench(names=["longest_first"]).planned
    given = longest_first(request)
    found = make_plans(request, ["longest_first"], [("mine", given), ("theirs", PlanError("for other tables"))])
    assert [(plan.name, plan.same_as, plan.reason) for plan in found] == [
        ("mine", "", ""),
        ("theirs", "", "for other tables"),
        ("longest_first", "mine", ""),
    ]


def test_an_unknown_name_is_refused_with_the_nearest() -> None:
    with pytest.raises(ConfigError, match="row_wis: no plan") as error:
        make_plans(small_request(ranks=2), ["row_wis"])
    assert "row_wise" in str(error.value.remedy)


def test_the_best_predicted_plans_differ_in_their_types_and_come_in_order() -> None:
    request = small_bench(wide=True, names=["longest_first"]).planned
    found = best_predicted(request, 3)
    assert len(found) == 3
    assert len({frozenset(shape.sharding_type for shape in shapes) for shapes in found}) == 3
    steps = [OurCosts(request).load(shapes).step_ms for shapes in found]
    assert steps == sorted(steps)
    others = [plan.shapes for plan in make_plans(request, GENERATED) if plan.shapes is not None]
    assert steps[0] <= min(OurCosts(request).load(shapes).step_ms for shapes in others) * 1.001
