"""Plans are measured on ranks: the same work, the hopeless listed, finished rounds kept."""

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from dlrm_scale.errors import ConfigError, PlanError
from dlrm_scale.planning.measuring import plan_rounds
from dlrm_scale.planning.measuring.bench_setup import prepare_bench
from dlrm_scale.planning.measuring.bench_summary import summarize
from dlrm_scale.planning.measuring.plan_bench import BenchRequest, bench_rank
from dlrm_scale.planning.measuring.plan_matrix import PLAN_NAMES
from dlrm_scale.planning.measuring.plan_rounds import LOSS_TOLERANCE, RoundsResult
from dlrm_scale.planning.measuring.plan_steps import PlanSteps
from dlrm_scale.planning.tables.table_set import TableSet, TableStats
from dlrm_scale.units import MIB
from tests.planning.costs.small_cluster import small_cluster
from tests.planning.measuring.small_bench import SMALL_SET, small_bench
from tests.support.rank_runner import run_ranks


class Stop:
    """Asks to stop once it was asked so many times."""

    def __init__(self, after: int = 10**9) -> None:
        self._left = after

    @property
    def requested(self) -> bool:
        self._left -= 1
        return self._left < 0


def run(request: BenchRequest, stop_after: int = 10**9, ranks_per_host: int | None = None) -> RoundsResult:
    ranks = request.planned.ranks
    return run_ranks(ranks, bench_rank, request, Stop(stop_after), ranks_per_host=ranks_per_host)[0]


def test_every_plan_does_the_same_work_and_gets_as_many_rounds() -> None:
    request = small_bench(wide=True, names=[name for name in PLAN_NAMES if name != "torchrec"])
    result = run(request)
    measured = set(request.feasible)
    assert len(measured) >= 9
    assert result.refused == {}
    assert Counter(turn.plan for turn in result.turns) == dict.fromkeys(measured, 4)
    losses = np.array([result.losses[name] for name in measured])
    first = losses[:, 0]
    np.testing.assert_allclose(first, first[0], rtol=LOSS_TOLERANCE)
    assert result.worst_loss_difference < 1e-4
    assert losses[0, 0] != losses[0, 2], "it learns, and batches differ"
    assert all(min(turn.wall_ms, turn.cpu_ms) > 0 for turn in result.turns)
    orders = [[t.plan for t in result.turns if t.number == number] for number in range(4)]
    assert orders[0] != orders[1], "rounds are shuffled"
    summary = summarize(request, result, cores=2)
    assert summary.ours is not None
    assert summary.rounds == 4


def test_two_of_six_plans_that_do_not_fit_are_listed_and_the_others_ranked() -> None:
    tables = TableSet(
        name="one large",
        tables=(
            TableStats(name="large", rows=120_000, dim=16),
            TableStats(name="small", rows=500, dim=16, lookups_per_sample=2.0),
        ),
    )
    # Half of 12 MiB is reserved; the large table has 7.3 MiB, half of it a rank as row_wise.
    names = ["longest_first", "round_robin", "row_wise", "table_row_wise", "random_1", "random_2"]
    request = small_bench(tables=tables, cluster_memory_bytes=12 * MIB, names=names)
    assert "longest_first" not in request.feasible
    assert "row_wise" in request.feasible
    summary = summarize(request, run(request), cores=2)
    by_name = {row.name: row for row in summary.rows}
    assert by_name["row_wise"].time is not None
    reason = by_name["longest_first"].reason
    for words in (
        "would need 8.1 MiB",
        "6.0 MiB are there",
        "12.0 MiB less 50% reserve",
        "table large",
        "as table_wise",
    ):
        assert words in reason
    assert summary.rows[0].time is not None


def test_it_fails_with_3_only_where_no_plan_is_feasible() -> None:
    with pytest.raises(PlanError, match="none of the plans is feasible") as error:
        small_bench(cluster_memory_bytes=1 << 10, names=["longest_first", "row_wise"])
    assert error.value.exit_code == 3
    assert "longest_first: rank" in error.value.message
    assert "row_wise: rank" in error.value.message


@pytest.mark.parametrize(("of_cluster", "of_bench"), [("processor", "elapsed"), ("elapsed", "processor")])
def test_a_cluster_that_was_measured_by_another_clock_is_refused(of_cluster: str, of_bench: str) -> None:
    cluster = small_cluster().model_copy(update={"clock": of_cluster})
    with pytest.raises(ConfigError, match=f"was calibrated by {of_cluster} time, .* compared by {of_bench} time"):
        prepare_bench(SMALL_SET, cluster, ranks=2, device="cpu", batch_size_per_rank=16, clock=of_bench)


def test_a_signal_keeps_the_rounds_that_were_finished() -> None:
    request = small_bench(names=["longest_first", "row_wise"], rounds=50)
    result = run(request, stop_after=3)
    assert result.stopped
    assert Counter(turn.plan for turn in result.turns) == {"longest_first": 4, "row_wise": 4}
    assert summarize(request, result, cores=2).rounds == 4


def test_plans_that_do_not_fit_together_are_measured_in_groups_with_an_anchor() -> None:
    request = small_bench(names=["longest_first", "row_wise", "table_row_wise"])
    sizes = {name: sum(request.predictions[name].ours.memory_by_rank) for name in request.feasible}
    limit = sizes["longest_first"] + max(sizes.values())
    result = run(replace(request, memory_bytes=limit))
    groups = {group: {t.plan for t in result.turns if t.group == group} for group in (0, 1)}
    assert groups == {0: {"longest_first", "row_wise"}, 1: {"longest_first", "table_row_wise"}}


def test_a_plan_that_a_library_refuses_is_listed_with_its_words_and_the_others_stay() -> None:
    request = small_bench(names=["longest_first", "row_wise"])
    result = run_ranks(2, _bench_with_broken_row_wise, request)[0]
    assert result.refused == {"row_wise": "not supported here: no reduce_scatter on this device"}
    assert {turn.plan for turn in result.turns} == {"longest_first"}


def test_a_plan_that_does_other_work_is_told_by_its_losses() -> None:
    request = small_bench(names=["longest_first", "row_wise"])
    result = run_ranks(2, _bench_with_other_batches, request)[0]
    assert "doesn't do the same work" in result.refused["row_wise"]
    assert {turn.plan for turn in result.turns} == {"longest_first"}


def test_ranks_with_different_requests_are_refused() -> None:
    with pytest.raises(ConfigError, match="different tables, plans or rounds"):
        run_ranks(2, _bench_with_own_rounds, small_bench(names=["longest_first"]))


def _bench_with_own_rounds(request: BenchRequest) -> RoundsResult:
    import os

    return bench_rank(replace(request, rounds=4 + int(os.environ["RANK"])), Stop())


def _bench_with_broken_row_wise(request: BenchRequest) -> RoundsResult:
    made = PlanSteps.__init__

    def broken(self: PlanSteps, workload: object, shapes: list[object], *rest: object) -> None:
        if shapes[0].sharding_type == "row_wise":  # type: ignore[attr-defined]
            raise NotImplementedError("no reduce_scatter on this device\nand a long stack")
        made(self, workload, shapes, *rest)  # type: ignore[arg-type]

    plan_rounds.PlanSteps.__init__ = broken  # type: ignore[method-assign]
    try:
        return bench_rank(request, Stop())
    finally:
        plan_rounds.PlanSteps.__init__ = made  # type: ignore[method-assign]


def _bench_with_other_batches(request: BenchRequest) -> RoundsResult:
    made = PlanSteps.__init__

    def other(self: PlanSteps, workload: object, shapes: list[object], batches: list[object], *rest: object) -> None:
        chosen = batches[1:] if shapes[0].sharding_type == "row_wise" else batches  # type: ignore[attr-defined]
        made(self, workload, shapes, chosen, *rest)  # type: ignore[arg-type]

    plan_rounds.PlanSteps.__init__ = other  # type: ignore[method-assign]
    try:
        return bench_rank(request, Stop())
    finally:
        plan_rounds.PlanSteps.__init__ = made  # type: ignore[method-assign]
