"""Where nothing fits: what is missing, and changes that really make it fit (B23)."""

import pickle
from dataclasses import replace

import pytest

from dlrm_scale.errors import ConfigError, PlanError
from dlrm_scale.planning.cluster.cluster_file import load_cluster
from dlrm_scale.planning.plan.analysis import Effort, analyze
from dlrm_scale.planning.plan.cost_models import OurCosts
from dlrm_scale.planning.plan.no_fit import NothingFits, nothing_fits
from dlrm_scale.planning.plan.request import PlanRequest, plan_request
from dlrm_scale.planning.solver.infeasible import NoFeasiblePlan
from dlrm_scale.planning.solver.problem import Problem
from dlrm_scale.planning.solver.solve import solve
from dlrm_scale.units import GIB, parse_bytes
from tests.planning.plan.small_requests import small_request, small_tables


def _refused(request: PlanRequest) -> NothingFits:
    with pytest.raises(NothingFits) as caught:
        analyze(request, {}, effort=Effort(of_default=0.0), torchrec_costs=False, what_if=False)
    return caught.value


def _fits(request: PlanRequest) -> bool:
    try:
        solve(OurCosts(request).problem, effort=0.0)
    except PlanError:
        return False
    return True


def _changed(request: PlanRequest, what: str, value: object) -> PlanRequest:
    if what == "ranks":
        return replace(request, ranks=value)
    if what == "memory_bytes":
        assert isinstance(value, int)
        return request.with_memory(value)
    if what == "reserve":
        assert isinstance(value, float)
        return request.with_reserve(value)
    if what == "batch_size_per_rank":
        return replace(request, batch_size_per_rank=value)
    if what == "space":
        return replace(request, wide=True)
    if what == "optimizer":
        return replace(request, tables=request.tables.model_copy(update={"optimizer": value}))
    assert what == "types"
    return replace(request, types={n: t for n, t in request.types.items() if n != value and value != "all"})


_SHORT = (
    # in all 6 GiB with state, on 2 ranks of 3 GiB less 15 %
    small_request(ranks=2, ranks_per_host=2, memory_bytes=3 * GIB),
    # large alone is 5 GiB, and may not be cut
    small_request(memory_bytes=4 * GIB, types={"large": ("table_wise",), "tiny": ("row_wise",)}),
    # vectors and ids of a large batch
    small_request(memory_bytes=12 * GIB, batch_size_per_rank=1 << 21),
)


@pytest.mark.parametrize("request_", _SHORT, ids=["total", "single shard", "batch"])
def test_every_change_that_is_suggested_makes_it_fit_and_most_are_the_least(request_: PlanRequest) -> None:
    error = _refused(request_)
    assert error.exit_code == 3
    assert error.changes
    for change in error.changes:
        assert _fits(_changed(request_, change.what, change.value)), change
        if change.what == "ranks":
            assert isinstance(change.value, int)
            assert not _fits(replace(request_, ranks=change.value - request_.ranks_per_host))
        if change.what == "reserve":
            assert isinstance(change.value, float)
            assert not _fits(request_.with_reserve(change.value + 0.01))


def test_the_message_has_what_is_missing_the_largest_tables_and_the_cause() -> None:
    error = _refused(_SHORT[0])
    assert "no sharding plan fits: the 5 tables of small need at least 5.9 GiB, 3.0 GiB a rank" in error.message
    assert "2 x 2." in error.message
    assert "(3.0 GiB a rank, less 15% reserve" in error.message
    assert "cause: the total:" in error.message
    lines = error.message.splitlines()
    assert lines[3].strip().startswith("large: 2.4 GiB as row_wise, 4.9 GiB in all")
    assert lines[4].strip().startswith("wide: ")
    remedy = error.remedy or ""
    assert "each tried by planning again" in remedy
    assert "--world-size 4\n" in remedy
    assert "ms" not in remedy, "times of a quick try aren't those of the plan that would be made"
    assert "--memory 3." in remedy


def test_a_table_that_may_not_be_cut_is_the_cause_and_its_constraint_the_remedy() -> None:
    error = _refused(_SHORT[1])
    assert "cause: a single shard: large can't be cut finer than" in error.message
    assert "(table_wise)" in error.message
    assert "without --constrain large=table_wise" in (error.remedy or "")
    assert "without --constrain tiny" not in (error.remedy or "")
    assert all(change.what != "ranks" for change in error.changes)


@pytest.mark.parametrize("memory_bytes", [1, 1000, GIB // 3])
def test_the_memory_that_is_needed_is_found_from_any_smaller_one(memory_bytes: int) -> None:
    request = small_request(memory_bytes=memory_bytes)
    (memory,) = [change for change in _refused(request).changes if change.what == "memory_bytes"]
    assert isinstance(memory.value, int)
    assert _fits(request.with_memory(memory.value))
    assert not _fits(request.with_memory(int(memory.value * 0.98))), "and no more than that"
    assert parse_bytes(memory.option.removeprefix("--memory ")) == memory.value


def test_a_forced_kind_is_left_out_as_a_whole_and_named_as_it_was_asked_for() -> None:
    request = plan_request(
        small_tables(),
        load_cluster("a100x8").model_copy(update={"memory_bytes": 4 * GIB}),
        ranks=8,
        batch_size_per_rank=1024,
        forced_kind="table_wise",
    )
    error = _refused(request)
    assert "without --force-kind table_wise" in (error.remedy or "")
    assert "--constrain" not in str(error)
    assert [change.value for change in error.changes if change.what == "types"] == ["all"]


def test_a_batch_that_is_too_large_is_among_the_changes() -> None:
    error = _refused(_SHORT[2])
    (batch,) = [change for change in error.changes if change.what == "batch_size_per_rank"]
    assert isinstance(batch.value, int)
    assert 1 <= batch.value < 1 << 21


def test_values_and_the_error_itself_travel_as_they_are() -> None:
    error = _refused(_SHORT[0])
    values = error.as_dict()
    assert values["cause"] == "total"
    assert values["missing_bytes"] == error.shortfall.needed_bytes - error.shortfall.available_bytes
    again = pickle.loads(pickle.dumps(error))
    assert (again.message, again.remedy, again.as_dict()) == (error.message, error.remedy, values)


def test_a_constraint_that_leaves_no_type_names_the_table_and_the_reason() -> None:
    with pytest.raises(PlanError, match=r"table mean: .*grid_shard with mean pooling"):
        analyze(small_request(wide=True, types={"mean": ("grid_shard",)}), {}, torchrec_costs=False, what_if=False)
    with pytest.raises(PlanError, match=r"table large: .*column_wise would give each column shard a row state"):
        analyze(small_request(types={"large": ("column_wise",)}), {}, torchrec_costs=False, what_if=False)


def test_a_cluster_without_costs_for_more_ranks_hides_no_other_change() -> None:
    request = _SHORT[0]

    def measured_on_two_ranks(changed: PlanRequest) -> Problem:
        if changed.ranks != 2:
            raise ConfigError("no costs for so many ranks")
        return OurCosts(changed).problem

    with pytest.raises(NoFeasiblePlan) as caught:
        solve(OurCosts(request).problem, effort=0.0)
    found = nothing_fits(request, caught.value, measured_on_two_ranks, Effort().quick)
    kinds = [change.what for change in found.changes]
    assert "ranks" not in kinds
    assert "memory_bytes" in kinds
