"""What a collective costs a group of ranks: as measured, between measured sizes of groups, or computed from links."""

import math
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dlrm_scale.errors import ConfigError
from dlrm_scale.planning.cluster.cluster import Cluster, Collective, Curve, Links

__all__ = ["CostCurve", "Group", "LineBelow", "collective_curve"]

_STAND_IN: dict[Collective, Collective] = {
    "vectors_all_to_all": "all_to_all",
    "gradients_all_to_all": "all_to_all",
}
_TOUCH = 1 - 1e-9
"""A line is laid a billionth below the curve, so that rounding can't lift it above."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Group:
    """Ranks that take part in a collective, equally many on each host."""

    ranks: int
    hosts: int

    @property
    def ranks_per_host(self) -> int:
        """Of the group."""
        return self.ranks // self.hosts


@dataclass(frozen=True, kw_only=True, slots=True)
class LineBelow:
    """A straight line that nowhere lies above a curve: `start_ms + slope * bytes`, both at least 0."""

    start_ms: float
    ms_per_byte: float


@dataclass(frozen=True, kw_only=True)
class CostCurve:
    """Milliseconds by bytes: straight lines between points, and beyond the last by the slope before it.

    Attributes:
        sizes_bytes: `[points]`, rising, from 0.
        times_ms: `[points]`, never falling.
    """

    sizes_bytes: NDArray[np.float64]
    times_ms: NDArray[np.float64]

    def milliseconds(self, sizes_bytes: NDArray[np.float64] | float) -> NDArray[np.float64]:
        """Of each size; a rank without bytes still takes part, and pays the first point's time."""
        sizes = np.asarray(sizes_bytes, dtype=np.float64)
        found = np.interp(sizes, self.sizes_bytes, self.times_ms)
        return np.asarray(found + self._last_slope * np.maximum(0.0, sizes - self.sizes_bytes[-1]))

    def line_below(self, usual_bytes: float, most_bytes: float) -> LineBelow:
        """Find the line that is highest at `usual_bytes` among those below the curve from 0 to `most_bytes`.

        It lies along the lower convex hull of the curve, so that sums of lines bound sums of curves from below. Where
        the hull's piece there would start below 0 ms, the line starts at 0 instead.
        """
        most = max(most_bytes, usual_bytes, 1.0)
        inner = self.sizes_bytes[(self.sizes_bytes > 0) & (self.sizes_bytes < most)]
        sizes = np.concatenate(([0.0], inner, [most]))
        times = self.milliseconds(sizes)
        hull = _lower_hull(sizes, times)
        piece = min(int(np.searchsorted(sizes[hull], usual_bytes, side="right")), len(hull) - 1)
        left, right = hull[piece - 1], hull[piece]
        slope = float((times[right] - times[left]) / (sizes[right] - sizes[left]))
        start = float(times[left] - slope * sizes[left])
        if start < 0:
            start, slope = 0.0, float((times[1:] / sizes[1:]).min())
        return LineBelow(start_ms=start * _TOUCH, ms_per_byte=max(0.0, slope) * _TOUCH)

    @property
    def _last_slope(self) -> float:
        if len(self.sizes_bytes) < 2:
            return 0.0
        (a, b), (start, end) = self.sizes_bytes[-2:], self.times_ms[-2:]
        return float((end - start) / (b - a))


def collective_curve(cluster: Cluster, collective: Collective, group: Group) -> CostCurve:
    """Find what a collective costs.

    Measured over such a group: as measured. Between two measured sizes of group, all on one host or all on several: by
    straight lines in the logarithm of the ranks. Beyond them: as computed from the links, times what the nearest
    measured group took over what the links say of it. Nothing measured: as computed. A group of one costs nothing.

    Args:
        cluster: with the costs.
        collective: which.
        group: who takes part.

    Raises:
        ConfigError: the cluster has neither measured nor computed costs for such a group.
    """
    if group.ranks < 2:
        return CostCurve(sizes_bytes=np.zeros(1), times_ms=np.zeros(1))
    measured = _measured(cluster, collective, several_hosts=group.hosts > 1)
    by_ranks = {ranks: curve for (ranks, hosts), curve in measured.items() if hosts == group.hosts or group.hosts > 1}
    if (group.ranks, group.hosts) in measured:
        return measured[group.ranks, group.hosts]
    below = max((n for n in by_ranks if n < group.ranks), default=None)
    above = min((n for n in by_ranks if n > group.ranks), default=None)
    if below is not None and above is not None:
        share = math.log(group.ranks / below) / math.log(above / below)
        return _between(by_ranks[below], by_ranks[above], share)
    links = cluster.links
    if links is None or (group.hosts > 1 and links.network is None):
        raise ConfigError(_missing(cluster, collective, group), remedy=_remedy(group))
    computed = _computed(links, collective, group)
    near = below if below is not None else above
    if near is None:
        return computed
    nearest = next(Group(ranks=ranks, hosts=hosts) for ranks, hosts in measured if ranks == near)
    return _corrected(computed, by_ranks[near], _computed(links, collective, nearest))


def _measured(cluster: Cluster, collective: Collective, *, several_hosts: bool) -> dict[tuple[int, int], CostCurve]:
    for name in (collective, _STAND_IN.get(collective)):
        found = {
            (costs.ranks, costs.hosts): _from_zero(costs.curve)
            for costs in cluster.collectives
            if costs.collective == name and (costs.hosts > 1) == several_hosts
        }
        if found:
            return found
    return {}


def _from_zero(curve: Curve) -> CostCurve:
    """A smaller message than the smallest measured takes as long."""
    points = [(0, curve.points[0][1]), *curve.points] if curve.points[0][0] else list(curve.points)
    sizes, times = zip(*points, strict=True)
    return CostCurve(sizes_bytes=np.array(sizes, dtype=np.float64), times_ms=np.array(times, dtype=np.float64))


def _between(below: CostCurve, above: CostCurve, share: float) -> CostCurve:
    sizes = np.union1d(below.sizes_bytes, above.sizes_bytes)
    sizes = np.append(sizes, 2 * sizes[-1])
    times = (1 - share) * below.milliseconds(sizes) + share * above.milliseconds(sizes)
    return CostCurve(sizes_bytes=sizes, times_ms=times)


def _corrected(computed: CostCurve, measured: CostCurve, computed_there: CostCurve) -> CostCurve:
    sizes = np.append(measured.sizes_bytes, 2 * measured.sizes_bytes[-1])
    ratio = measured.milliseconds(sizes) / np.maximum(computed_there.milliseconds(sizes), 1e-12)
    times = np.maximum.accumulate(computed.milliseconds(sizes) * ratio)
    return CostCurve(sizes_bytes=sizes, times_ms=times)


def _computed(links: Links, collective: Collective, group: Group) -> CostCurve:
    """Latency and bandwidth.

    All-to-all: a message to every other rank; NVLink and network work at once, and each rank has its own share of the
    network, which no other rank of its host can lend it. Reduce-scatter and all-gather: rings through all ranks; what
    crosses hosts is summed within them first, so that all their shares carry it. All-reduce: both, or a tree.
    """
    n, hosts, local = group.ranks, group.hosts, group.ranks_per_host
    host, network = links.host, links.network
    assert network is not None or hosts == 1
    size = 1e9
    if collective in ("all_to_all", "vectors_all_to_all", "gradients_all_to_all"):
        latency = (local - 1) * host.message_ms.value
        time = size * (local - 1) / n / host.bytes_per_ms
        if network is not None and hosts > 1:
            latency += (n - local) * network.message_ms.value
            time = max(time, size * (n - local) / n / network.bytes_per_ms)
    else:
        passes = 2 if collective == "all_reduce" else 1
        network_steps = math.ceil(math.log2(hosts)) if collective == "all_reduce" else hosts - 1
        host_steps = local - 1 if collective == "all_reduce" else n - hosts
        latency = passes * host_steps * host.step_ms.value
        time = passes * size * (n - 1) / n / host.bytes_per_ms if local > 1 else 0.0
        if network is not None and hosts > 1:
            latency += passes * network_steps * network.step_ms.value
            time = max(time, passes * size * (hosts - 1) / hosts / (local * network.bytes_per_ms))
    start = links.start_ms.value + latency
    return CostCurve(sizes_bytes=np.array([0.0, size]), times_ms=np.array([start, start + time]))


def _missing(cluster: Cluster, collective: Collective, group: Group) -> str:
    known = sorted({(c.ranks, c.hosts) for c in cluster.collectives})
    listed = ", ".join(f"{ranks} ranks on {hosts} host{'s' if hosts > 1 else ''}" for ranks, hosts in known)
    where = f"{group.ranks} ranks on {group.hosts} host{'s' if group.hosts > 1 else ''}"
    return (
        f"cluster {cluster.name} doesn't say what {collective} costs over {where}: measured is "
        f"{listed or 'nothing'}, and there are no links to compute it from"
    )


def _remedy(group: Group) -> str:
    section = "[links.network]" if group.hosts > 1 else "[links]"
    return (
        f"add {section} to its file (see a100x8), plan for measured groups, or measure such ranks with "
        "`dlrm-scale calibrate`"
    )


def _lower_hull(sizes: NDArray[np.float64], times: NDArray[np.float64]) -> list[int]:
    """Indices of the lower convex hull of points with rising sizes (Andrew's monotone chain)."""
    hull: list[int] = []
    for i in range(len(sizes)):
        while len(hull) > 1:
            a, b = hull[-2], hull[-1]
            if (times[b] - times[a]) * (sizes[i] - sizes[a]) < (times[i] - times[a]) * (sizes[b] - sizes[a]):
                break
            hull.pop()
        hull.append(i)
    return hull
