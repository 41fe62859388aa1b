"""Collectives computed by hand, between measured groups, and the highest line below a curve."""

import numpy as np
import pytest

from dlrm_scale.errors import ConfigError
from dlrm_scale.planning.costs.collective_costs import CostCurve, Group, collective_curve
from tests.planning.costs.small_cluster import bent_cluster, small_cluster

MEGABYTE = 1_000_000


@pytest.mark.parametrize(
    ("collective", "group", "latency_ms", "megabyte_ms"),
    [
        # one message of 0.03 ms; half of a megabyte over 1 GB/s
        ("all_to_all", Group(ranks=2, hosts=1), 0.1 + 0.03, 0.5),
        # one message within, two between; a quarter of it at 1 GB/s is done within half of it at 0.1 GB/s
        ("all_to_all", Group(ranks=4, hosts=2), 0.1 + 0.03 + 2 * 0.3, 5.0),
        ("gradients_all_to_all", Group(ranks=4, hosts=2), 0.1 + 0.03 + 2 * 0.3, 5.0),
        # one rank of each host
        ("vectors_all_to_all", Group(ranks=2, hosts=2), 0.1 + 0.3, 5.0),
        ("reduce_scatter", Group(ranks=2, hosts=1), 0.1 + 0.02, 0.5),
        # a ring of four: two steps within, one between; half of it crosses, carried by the host's two ranks
        ("all_gather", Group(ranks=4, hosts=2), 0.1 + 2 * 0.02 + 0.2, 2.5),
        ("all_reduce", Group(ranks=4, hosts=2), 0.1 + 2 * (0.02 + 0.2), 5.0),
        ("all_reduce", Group(ranks=2, hosts=1), 0.1 + 2 * 0.02, 1.0),
        ("all_reduce", Group(ranks=1, hosts=1), 0.0, 0.0),
    ],
)
def test_links_give_latency_and_bandwidth(collective: str, group: Group, latency_ms: float, megabyte_ms: float) -> None:
    curve = collective_curve(small_cluster(), collective, group)
    assert float(curve.milliseconds(0.0)) == pytest.approx(latency_ms)
    assert float(curve.milliseconds(float(MEGABYTE))) == pytest.approx(latency_ms + megabyte_ms)
    assert float(curve.milliseconds(5000.0 * MEGABYTE)) == pytest.approx(latency_ms + 5000 * megabyte_ms)


def test_a_measured_group_costs_what_was_measured() -> None:
    curve = collective_curve(bent_cluster(), "reduce_scatter", Group(ranks=4, hosts=1))
    sizes = np.array([0.0, 1 << 10, 1 << 20, 1.5 * (1 << 20), 1 << 24, 1 << 25])
    per_byte = (30.0 - 4.0) / ((1 << 24) - (1 << 22))
    expected = np.array([0.2, 0.2, 1.4, 1.4 + 2.6 / 6, 30.0, 30.0 + per_byte * (1 << 24)])
    assert curve.milliseconds(sizes) == pytest.approx(2.2 * 4 * expected)


def test_a_group_between_two_measured_ones_costs_something_between() -> None:
    middle = collective_curve(bent_cluster(), "all_to_all", Group(ranks=3, hosts=1))
    share = np.log(1.5) / np.log(2)
    assert float(middle.milliseconds(float(1 << 20))) == pytest.approx(1.4 * 2 * (1 + share))


def test_beyond_measured_groups_links_say_by_how_much_it_grows() -> None:
    cluster = small_cluster(collectives=bent_cluster().collectives)
    large = float(1 << 24)
    computed = [
        float(collective_curve(small_cluster(), "all_gather", Group(ranks=n, hosts=1)).milliseconds(large))
        for n in (4, 8)
    ]
    found = collective_curve(cluster, "all_gather", Group(ranks=8, hosts=1))
    assert float(found.milliseconds(large)) == pytest.approx(30.0 * 4 * 1.7 * computed[1] / computed[0])
    assert (np.diff(found.times_ms) >= 0).all()


def test_what_was_neither_measured_nor_can_be_computed_is_told() -> None:
    with pytest.raises(ConfigError, match="what all_to_all costs over 8 ranks on 1 host: measured is 2 ranks") as told:
        collective_curve(bent_cluster(), "all_to_all", Group(ranks=8, hosts=1))
    assert "[links]" in str(told.value.remedy)
    lone_host = small_cluster(links=small_cluster().links.model_copy(update={"network": None}))
    with pytest.raises(ConfigError, match="over 4 ranks on 2 hosts") as told:
        collective_curve(lone_host, "all_to_all", Group(ranks=4, hosts=2))
    assert "[links.network]" in str(told.value.remedy)


def _random_curve(random: np.random.Generator) -> CostCurve:
    points = random.integers(1, 7)
    sizes = np.concatenate(([0.0], np.cumsum(random.exponential(1e6, points))))
    return CostCurve(sizes_bytes=sizes, times_ms=np.cumsum(random.exponential(1.0, points + 1)))


@pytest.mark.parametrize("seed", range(40))
def test_a_line_is_nowhere_above_its_curve_and_touches_it(seed: int) -> None:
    random = np.random.default_rng(seed)
    curve = _random_curve(random)
    most = float(random.exponential(3e6)) + 1
    line = curve.line_below(float(random.uniform(0, most)), most)
    assert line.start_ms >= 0
    assert line.ms_per_byte >= 0
    sizes = np.concatenate((np.linspace(0, most, 999), curve.sizes_bytes[curve.sizes_bytes < most]))
    room = curve.milliseconds(sizes) - (line.start_ms + line.ms_per_byte * sizes)
    assert room.min() >= 0
    assert room.min() <= 1e-8 * curve.milliseconds(most)


def test_the_line_below_a_straight_curve_is_that_curve() -> None:
    curve = CostCurve(sizes_bytes=np.array([0.0, 100.0]), times_ms=np.array([2.0, 7.0]))
    line = curve.line_below(50.0, 1e6)
    assert (line.start_ms, line.ms_per_byte) == (pytest.approx(2.0), pytest.approx(0.05))
