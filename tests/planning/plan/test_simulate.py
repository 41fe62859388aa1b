"""Numbers of devices: throughput, efficiency, the knee by its rule."""

import pytest

from dlrm_scale.planning.plan.cost_models import OurCosts
from dlrm_scale.planning.plan.simulate import Scale, _knee, simulate, sizes_between
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
