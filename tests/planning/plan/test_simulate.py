"""Numbers of devices: throughput, efficiency, the knee by its rule."""

from dataclasses import replace

import pytest

from dlrm_scale.planning.plan.cost_models import OurCosts
from dlrm_scale.planning.plan.simulate import Scale, Simulation, _knee, simulate, sizes_between
from dlrm_scale.planning.report.plan_text import describe_knee, describe_simulation
from dlrm_scale.planning.solver.problem import Problem
from dlrm_scale.planning.solver.solve import Solution, solve
from dlrm_scale.units import GIB
from tests.planning.plan.small_requests import small_request


def _quick(problem: Problem) -> Solution:
    return solve(problem, effort=0.0)


def test_sizes_double_and_end_with_the_last() -> None:
    assert sizes_between(8, 64) == [8, 16, 32, 64]
    assert sizes_between(8, 48) == [8, 16, 32, 48]
    assert sizes_between(8, 8) == [8]


def _scales(*speeds: float | None) -> list[Scale]:
    return [Scale(ranks=8 << i, samples_per_second=speed) for i, speed in enumerate(speeds)]


@pytest.mark.parametrize(
    ("speeds", "knee"),
    [
        ((100.0, 200.0, 290.0, 330.0), 16),  # 1.45 times is less than half of what doubling can bring
        ((100.0, 150.0, 225.0, 337.5), 64),
        ((100.0, 130.0, 210.0, 220.0), 32),  # crossing hosts costs once, and more hosts pay again
        ((None, 100.0, 120.0), 16),
        ((None, None), None),
    ],
)
def test_the_knee_is_the_last_doubling_that_pays(speeds: tuple[float | None, ...], knee: int | None) -> None:
    assert _knee(_scales(*speeds)) == knee


def test_efficiency_counts_from_the_smallest_number_that_fits() -> None:
    request = small_request(ranks=2, ranks_per_host=2, memory_bytes=3 * GIB)
    found = simulate(request, [2, 4, 8], OurCosts, _quick)
    first, second, third = found.scales
    assert first.step_ms is None
    assert "no sharding plan fits" in first.reason
    assert second.efficiency == 1.0
    assert second.samples_per_second == pytest.approx(1000 * 4 * 1024 / (second.step_ms or 0))
    assert third.efficiency == pytest.approx(
        (third.samples_per_second or 0) / 8 / ((second.samples_per_second or 0) / 4)
    )
    for scale in (second, third):
        assert 0 < (scale.balance or 0) <= 1
        assert (scale.memory_bytes or 0) <= (scale.memory_limit_bytes or 0)
        assert (scale.bound_ms or 0) <= (scale.step_ms or 0) * (1 + 1e-9)
        assert sum(count for _, count in scale.types) == 5


def test_the_wide_space_is_planned_beside_the_default_at_the_knee_and_large_gaps_are_marked() -> None:
    request = small_request(ranks=8)
    found = simulate(request, [8, 16], OurCosts, _quick)
    assert found.wide_at_knee is not None
    assert found.wide_at_knee.ranks == found.knee
    wide = simulate(small_request(ranks=8, wide=True), [8], OurCosts, _quick)
    assert wide.wide_at_knee is None
    assert not wide.space_limits
    text = describe_simulation(found)
    assert f"on {found.knee} devices the default space takes" in text
    assert "a100x8: data sheets and assumptions, nothing measured" in text
    far = replace(found.scales[0], gap=0.0501)
    near = replace(found.scales[0], gap=0.0499)
    assert "5.0% !" in describe_simulation(replace(found, scales=(far,)))
    assert "!" not in describe_simulation(replace(found, scales=(near,)))


@pytest.mark.parametrize(("wide_ms", "limits"), [(9.0, True), (9.95, False)])
def test_the_space_is_the_limit_where_the_wide_one_is_shorter_at_the_knee(wide_ms: float, limits: bool) -> None:
    ours = Scale(ranks=8, step_ms=10.0, bound_ms=9.0, gap=0.1, samples_per_second=1.0)
    found = Simulation(request=small_request(), scales=(ours,), knee=8, wide_at_knee=replace(ours, step_ms=wide_ms))
    assert found.space_limits == limits
    told = " ".join(describe_knee(found))
    assert ("the space is the limit" in told, "the space isn't the limit" in told) == (limits, not limits)
