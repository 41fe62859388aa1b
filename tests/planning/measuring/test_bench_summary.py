"""What is concluded from rounds: medians, order, agreement, groups brought together, memory."""

from dataclasses import replace

import pytest

from dlrm_scale.planning.measuring.bench_summary import summarize
from dlrm_scale.planning.measuring.plan_rounds import PlanRound, RoundsResult
from dlrm_scale.planning.report.bench_page import bench_page
from dlrm_scale.planning.report.bench_text import describe_bench
from tests.planning.measuring.small_bench import small_bench

NAMES = ["longest_first", "round_robin", "row_wise", "table_row_wise"]


def turns(times: dict[str, float], group: int = 0, rounds: int = 8, factor: float = 1.0) -> list[PlanRound]:
    return [
        PlanRound(
            plan=name,
            number=number,
            group=group,
            wall_ms=factor * ms * (1 + 0.001 * ((7 * number) % 5)),
            cpu_ms=0.5 * factor * ms,
            delay_ms=0.0,
            slowest_rank=0,
            load_average=1.0 + number,
        )
        for number in range(rounds)
        for name, ms in times.items()
    ]


def test_plans_come_fastest_first_with_ties_and_what_was_predicted() -> None:
    request = small_bench(names=NAMES)
    times = {"longest_first": 10.0, "round_robin": 10.01, "row_wise": 20.0, "table_row_wise": 30.0}
    summary = summarize(request, RoundsResult(turns=turns(times)), cores=2)
    measured = [row for row in summary.rows if row.time is not None]
    assert [row.name for row in measured] == list(times)
    assert [row.time.ties_with_best for row in measured if row.time] == [True, True, False, False]
    assert measured[2].wall_ms == pytest.approx(20.0, rel=0.01)
    assert measured[2].cpu_ms == pytest.approx(10.0)
    assert measured[2].ours_ms == request.predictions["row_wise"].ours.step_ms
    assert summary.busy, "the median load of 4.5 is above two cores"
    assert summary.noise is not None
    assert summary.noise.tau > 0.6


def test_a_later_group_is_scaled_by_the_anchor_that_both_have() -> None:
    request = small_bench(names=NAMES)
    first = turns({"longest_first": 10.0, "round_robin": 12.0})
    second = turns({"longest_first": 10.0, "row_wise": 20.0}, group=1, factor=3.0)
    summary = summarize(request, RoundsResult(turns=first + second), cores=64)
    by_name = {row.name: row for row in summary.rows}
    assert by_name["row_wise"].time is not None
    assert by_name["row_wise"].time.median_ms == pytest.approx(20.0, rel=0.01), (
        "60 measured while all was 3 times slower"
    )
    assert by_name["longest_first"].time is not None
    assert by_name["longest_first"].time.median_ms == pytest.approx(10.0, rel=0.01)
    assert summary.groups == 2


def test_predictions_that_are_right_but_for_a_factor_have_no_error_after_the_anchor() -> None:
    request = small_bench(names=NAMES)
    times = {name: 3 * request.predictions[name].ours.step_ms for name in request.feasible}
    exact = [replace(turn, wall_ms=times[turn.plan]) for turn in turns(times)]
    summary = summarize(request, RoundsResult(turns=exact), cores=2)
    assert summary.ours is not None
    assert summary.ours.error == pytest.approx(2 / 3)
    assert summary.ours.anchored_error == pytest.approx(0.0, abs=1e-9)
    assert summary.ours.tau == pytest.approx(1.0)
    assert summary.ours.regret == 0.0


def test_the_processor_clock_compares_processor_time() -> None:
    request = small_bench(names=NAMES, clock="processor")
    summary = summarize(request, RoundsResult(turns=turns({"longest_first": 10.0, "row_wise": 20.0})), cores=2)
    assert summary.best is not None
    assert summary.best.time is not None
    assert summary.best.time.median_ms == pytest.approx(5.0)


def test_memory_is_compared_on_the_fullest_rank() -> None:
    request = small_bench(names=NAMES)
    predicted = request.predictions["row_wise"].measurable_bytes
    result = RoundsResult(
        turns=turns({"longest_first": 10.0, "row_wise": 20.0}),
        peak_bytes={"row_wise": (predicted[0] // 2, predicted[1])},
    )
    summary = summarize(request, result, cores=2)
    row = next(row for row in summary.rows if row.name == "row_wise")
    assert row.memory_error == pytest.approx(0.0, abs=1e-6), "rank 1 is the fullest, and right"
    assert summary.memory_error == pytest.approx(0.0, abs=1e-6)


def test_text_and_page_have_every_plan_and_reason_and_load_nothing() -> None:
    request = small_bench(names=[*NAMES, "column_wise"])
    result = RoundsResult(turns=turns({"longest_first": 10.0, "row_wise": 20.0}), refused={"round_robin": "no luck"})
    summary = summarize(request, result, cores=2)
    text = describe_bench(summary, "about it")
    page = bench_page(summary, "title", "about it")
    for words in ("row_wise", "no luck", "row state of its own", "regret"):
        assert words in text
        assert words in page
    assert page.count("<svg") == 2, "no memory was measured"
    assert "http://" not in page.replace("http://www.w3.org", "").replace("http://creativecommons", "").replace(
        "http://purl.org", ""
    )
