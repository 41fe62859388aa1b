"""Collectives as a step uses them, by bytes and by group of ranks, TorchRec's copies included."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torchrec.distributed.dist_data import PooledEmbeddingsAllToAll, PooledEmbeddingsReduceScatter

from dlrm_scale.planning.cluster.cluster import Collective, CollectiveCosts, Curve
from dlrm_scale.planning.measuring.calibration_fit import rising
from dlrm_scale.planning.measuring.micro_timing import RankTimer
from dlrm_scale.sharding.ranks import Ranks
from dlrm_scale.units import KIB, MIB

__all__ = ["MeasuredGroup", "collective_sizes", "groups_of", "measure_collectives"]

_COLUMNS = 256
"""Of pooled vectors; their number of rows gives the size."""


@dataclass(frozen=True, kw_only=True)
class MeasuredGroup:
    """A group that this rank is in; the other ranks are in others of the same size at the same time.

    Attributes:
        process_group: of torch.
        ranks: members.
        hosts: that they are on.
    """

    process_group: dist.ProcessGroup
    ranks: int
    hosts: int


def collective_sizes(*, quick: bool) -> list[int]:
    """Bytes of a rank's larger side; gloo's bandwidth falls beyond 4 MB, so there are points on both sides."""
    if quick:
        return [16 * KIB, 512 * KIB, 4 * MIB]
    return [4 * KIB, 32 * KIB, 128 * KIB, 512 * KIB, *(n * MIB for n in (1, 2, 4, 8, 16, 32))]


def groups_of(ranks: Ranks) -> list[MeasuredGroup]:
    """Make groups of 2, 4, 8, … ranks of a host, of one rank of every host, and of all. A collective."""
    local, hosts = ranks.local_ranks, ranks.ranks // ranks.local_ranks
    whole = dist.group.WORLD
    assert whole is not None
    sizes = [n for n in (2**i for i in range(1, local.bit_length())) if local % n == 0]
    sizes = sorted({*sizes, local} - {1})
    found = [
        _mine([list(range(first, first + n)) for first in range(0, ranks.ranks, n)], ranks, hosts=1)
        for n in sizes
        if n < ranks.ranks
    ]
    if hosts > 1 and local > 1:
        across = [list(range(first, ranks.ranks, local)) for first in range(local)]
        found.append(_mine(across, ranks, hosts=hosts))
    if ranks.ranks > 1:
        found.append(MeasuredGroup(process_group=whole, ranks=ranks.ranks, hosts=hosts))
    return found


def measure_collectives(
    ranks: Ranks, timer: RankTimer, groups: list[MeasuredGroup], sizes: list[int], progress: Callable[[str], None]
) -> list[CollectiveCosts]:
    """Measure every collective over every group. A collective."""
    found = []
    for group in groups:
        times: dict[Collective, list[float]] = {}
        for size in sizes:
            for collective, milliseconds in _of_size(ranks, timer, group, size).items():
                times.setdefault(collective, []).append(milliseconds)
        source = f"calibrate: {len(sizes)} sizes over {group.ranks} ranks on {group.hosts} host{'s'[: group.hosts > 1]}"
        for collective, measured in times.items():
            points = tuple(zip(sizes, rising(measured), strict=True))
            found.append(
                CollectiveCosts(
                    collective=collective,
                    ranks=group.ranks,
                    hosts=group.hosts,
                    curve=Curve(points=points, source=source),
                )
            )
        progress(f"collectives over {group.ranks} ranks on {group.hosts} host{'s'[: group.hosts > 1]}")
    return found


def _of_size(ranks: Ranks, timer: RankTimer, group: MeasuredGroup, size: int) -> dict[Collective, float]:
    n, device = group.ranks, ranks.device
    rows = max(1, size // (4 * _COLUMNS * n)) * n  # of all ranks' samples
    bare = torch.zeros(max(n, size // 4 // n * n), device=device)
    received = torch.empty_like(bare)
    exchange = PooledEmbeddingsAllToAll(group.process_group, [_COLUMNS] * n)
    scatter = PooledEmbeddingsReduceScatter(group.process_group)
    vectors = torch.zeros(rows, _COLUMNS, device=device, requires_grad=True)
    kept: list[torch.Tensor] = []

    def forward(of: torch.nn.Module) -> Callable[[], None]:
        return lambda: kept.append(of(vectors).wait())

    def backward() -> None:
        output = kept.pop()
        vectors.grad = None
        output.backward(torch.ones_like(output))  # type: ignore[no-untyped-call]

    (to_all,) = timer.time(lambda: dist.all_to_all_single(received, bare, group=group.process_group))
    (reduced,) = timer.time(lambda: dist.all_reduce(bare, group=group.process_group))
    out, back = timer.time(forward(exchange), backward)
    scattered, gathered = timer.time(forward(scatter), backward)
    return {
        "all_to_all": to_all.milliseconds,
        "vectors_all_to_all": out.milliseconds,
        "gradients_all_to_all": back.milliseconds,
        "reduce_scatter": scattered.milliseconds,
        "all_gather": gathered.milliseconds,
        "all_reduce": reduced.milliseconds,
    }


def _mine(members: list[list[int]], ranks: Ranks, hosts: int) -> MeasuredGroup:
    mine: dist.ProcessGroup | None = None
    for group in members:  # every rank makes every group
        made = dist.new_group(group)
        if ranks.rank in group:
            mine = made
    assert mine is not None
    return MeasuredGroup(process_group=mine, ranks=len(members[0]), hosts=hosts)
