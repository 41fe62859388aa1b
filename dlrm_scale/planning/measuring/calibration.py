"""Measuring the ranks at hand: micro-benchmarks, steps of small models, a cluster file.

Micro-benchmarks alone ranked plans of unseen models with a Kendall tau of 0.69 to 0.89 and 11 to 16 % error in a
prototype on two ranks. They miss what a sharding type costs by being in use, and how much of each part is left when all
run together: steps of small models add that. On GPUs the same code times with synchronisation; it hasn't run on one.
"""

import platform
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal, Protocol

import torch

from dlrm_scale.errors import ConfigError, TrainingError
from dlrm_scale.host_cores import usable_cores
from dlrm_scale.host_memory import host_memory
from dlrm_scale.planning.cluster.cluster import Cluster
from dlrm_scale.planning.measuring.calibration_noise import Noise, judge_noise, load_average
from dlrm_scale.planning.measuring.micro_collectives import (
    MeasuredGroup,
    collective_sizes,
    groups_of,
    measure_collectives,
)
from dlrm_scale.planning.measuring.micro_dense import measure_dense
from dlrm_scale.planning.measuring.micro_input import measure_input
from dlrm_scale.planning.measuring.micro_lookups import lookup_shapes, measure_lookups
from dlrm_scale.planning.measuring.micro_replicas import measure_replicas
from dlrm_scale.planning.measuring.micro_timing import Clock, RankTimer, Timing
from dlrm_scale.planning.measuring.probe_models import probe_models
from dlrm_scale.planning.measuring.probe_steps import apply_probes, measure_probes, type_evidence
from dlrm_scale.sharding.hosts import ranks_per_host as settle_ranks_per_host
from dlrm_scale.sharding.memory_pages import keep_freed_memory
from dlrm_scale.sharding.ranks import Ranks, close_ranks, init_ranks

__all__ = ["Calibration", "CalibrationRequest", "calibrate", "calibrate_rank"]

_TIMEOUT_SECONDS = 300.0
_UNIT: dict[Clock, str] = {
    "elapsed": "Elapsed times",
    "processor": "Processor times of the slowest rank, which miss what ranks wait for one another and the network,",
}


@dataclass(frozen=True, kw_only=True)
class CalibrationRequest:
    """What a user asked for; the same on every rank.

    Attributes:
        name: of the cluster.
        device: of the ranks.
        quick: fewer shapes and repeats: shows that it works, and no more.
        allow_noise: write what would mislead too.
        clock: what is measured; `processor` for a machine that others use.
        ranks_per_host: ranks that count as one host, as with `sharding.ranks_per_host`; None for the real ones.
    """

    name: str
    device: Literal["cpu", "cuda"]
    quick: bool = False
    allow_noise: bool = False
    clock: Clock = "elapsed"
    ranks_per_host: int | None = None


@dataclass(frozen=True, kw_only=True)
class Calibration:
    """What was measured.

    Attributes:
        cluster: with the fitted costs, and the errors of the fits.
        noise: while it was measured.
        seconds: all of it took.
    """

    cluster: Cluster
    noise: Noise
    seconds: float


class _Stop(Protocol):
    @property
    def requested(self) -> bool: ...


@dataclass(frozen=True, kw_only=True)
class _Effort:
    passes: int
    repeats: int
    probes: int
    rounds: int


_FULL = _Effort(passes=3, repeats=9, probes=64, rounds=25)
_QUICK = _Effort(passes=1, repeats=3, probes=8, rounds=3)


def calibrate_rank(request: CalibrationRequest, stop: _Stop) -> Calibration:
    """Calibrate on this rank; called on every rank with the same request.

    Raises:
        ConfigError: one rank alone, which exchanges nothing.
        TrainingError: the constants would mislead, or a signal (exit code 130).
    """
    ranks = init_ranks(request.device, _TIMEOUT_SECONDS)
    try:
        return calibrate(request, ranks, stop)
    finally:
        close_ranks()


def calibrate(request: CalibrationRequest, ranks: Ranks, stop: _Stop) -> Calibration:
    """Measure and fit everything. A collective.

    Args:
        request: the same on every rank.
        ranks: the process group.
        stop: set by a signal; looked at between the parts.

    Returns:
        Rank 0's is the one to use; others differ in the last digits, as their ids do.

    Raises:
        ConfigError: see `calibrate_rank`, as TrainingError.
    """
    started = time.perf_counter()
    if ranks.ranks < 2:
        raise ConfigError("one rank exchanges nothing: there must be at least two", remedy="use --ranks 2 or more")
    load = max(_numbers(ranks.gather_objects(load_average())))
    memory = _memory(ranks)
    effort = _QUICK if request.quick else _FULL
    torch.set_num_threads(max(1, usable_cores() // ranks.local_ranks))
    if ranks.device.type == "cpu":
        keep_freed_memory()
    # From here on hosts are what they are asked to be; memory and cores are those of the real ones.
    ranks = replace(ranks, local_ranks=settle_ranks_per_host(request.ranks_per_host or 0, ranks))

    def progress(text: str) -> None:
        if ranks.rank == 0:
            sys.stderr.write(f"{time.perf_counter() - started:6.1f} s  {text}\n")
            sys.stderr.flush()
        if any(_numbers(ranks.gather_objects(float(stop.requested)))):
            interrupted = TrainingError("stopped by a signal; nothing was written")
            interrupted.exit_code = 130
            raise interrupted

    cores = usable_cores()
    if request.clock == "elapsed" and load > cores / 2:
        progress(f"other programs run here (load average {load:.1f} on {cores} cores); they may spoil all of it")
    timer = RankTimer(ranks, effort.repeats, request.clock)
    timings: dict[str, list[Timing]] = {}
    groups = groups_of(ranks)
    for number in range(1, effort.passes + 1):
        timer.begin_pass()
        which = f"pass {number} of {effort.passes}: " if effort.passes > 1 else ""

        def told(text: str, which: str = which) -> None:
            progress(which + text)

        cluster = _from_parts(request, ranks, timer, memory, groups, told, timings)
    # TorchRec's classes are loaded and its buffers made with the first models: they are measured after micro-benchmarks
    # so that those see a process as it is in a run.
    probes = probe_models(effort.probes, ranks=ranks.ranks, ranks_per_host=ranks.local_ranks)
    steps = measure_probes(probes, cluster, ranks, timer, rounds=effort.rounds, progress=progress)
    cluster, error = apply_probes(cluster, steps)
    _keep_new(timings, "whole steps", timer)
    fit_error = {**cluster.fit_error, "step": round(error, 4)}
    # Ids differ from rank to rank, and fits in their last digits: all go by what rank 0 found.
    agreed = ranks.broadcast_object((type_evidence(steps), fit_error))
    assert isinstance(agreed, tuple)
    types, fit_error = agreed
    noise = judge_noise(
        timings,
        load,
        cores,
        clock=request.clock,
        fit_errors=fit_error,
        types=types,
        rough=request.quick,
        allowed=request.allow_noise,
    )
    cluster = cluster.model_copy(
        update={"fit_error": fit_error, "notes": f"{cluster.notes} {noise.text}", "noise": noise.reason}
    )
    cluster = _rounded(cluster)
    return Calibration(cluster=cluster, noise=noise, seconds=time.perf_counter() - started)


def _from_parts(
    request: CalibrationRequest,
    ranks: Ranks,
    timer: RankTimer,
    memory: tuple[int, str],
    groups: list[MeasuredGroup],
    progress: Callable[[str], None],
    timings: dict[str, list[Timing]],
) -> Cluster:
    quick = request.quick
    forward, backward, errors = measure_lookups(ranks, timer, lookup_shapes(quick=quick), progress)
    _keep_new(timings, "lookups and updates", timer)
    collectives = measure_collectives(ranks, timer, groups, collective_sizes(quick=quick), progress)
    _keep_new(timings, "collectives", timer)
    world = next(c for c in collectives if c.collective == "all_to_all" and c.ranks == ranks.ranks)
    ids, more = measure_input(ranks, timer, world.curve, quick=quick, progress=progress)
    errors |= more
    _keep_new(timings, "exchange of ids", timer)
    replicas, more = measure_replicas(ranks, timer, quick=quick, progress=progress)
    errors |= more
    _keep_new(timings, "data-parallel tables", timer)
    dense, more = measure_dense(ranks, timer, quick=quick, progress=progress)
    errors |= more
    _keep_new(timings, "dense part", timer)
    memory_bytes, source = memory
    return Cluster(
        name=request.name,
        device=request.device,
        clock=request.clock,
        hosts=ranks.ranks // ranks.local_ranks,
        ranks_per_host=ranks.local_ranks,
        memory_bytes=memory_bytes,
        memory_source=source,
        notes=(
            f"{_UNIT[request.clock]} of dlrm-scale calibrate{' --quick' if quick else ''} on {_machine(ranks)}, "
            f"{datetime.now(UTC):%Y-%m-%d}."
        ),
        forward=forward,
        backward=backward,
        input=ids,
        replicas=replicas,
        dense=dense,
        collectives=tuple(collectives),
        fit_error={name: round(error, 4) for name, error in errors.items()},
    )


def _keep_new(timings: dict[str, list[Timing]], part: str, timer: RankTimer) -> None:
    """Put what was timed since the last part under this one's name."""
    timings.setdefault(part, []).extend(timer.timings[sum(len(of_part) for of_part in timings.values()) :])


def _rounded(cluster: Cluster) -> Cluster:
    """Leave four digits of every time: more would only look exact."""

    def rounded(value: object) -> object:
        if isinstance(value, dict):
            return {key: float(f"{inner:.4g}") if key == "value" else rounded(inner) for key, inner in value.items()}
        return value

    content = rounded(cluster.model_dump())
    assert isinstance(content, dict)
    for costs in content["collectives"]:
        points = costs["curve"]["points"]
        costs["curve"]["points"] = tuple((size, float(f"{ms:.4g}")) for size, ms in points)
    return Cluster.model_validate(content)


def _memory(ranks: Ranks) -> tuple[int, str]:
    """The least memory that a rank has."""
    if ranks.device.type == "cuda":
        mine = int(torch.cuda.get_device_properties(ranks.device).total_memory)
    else:
        mine = host_memory().total_bytes // ranks.local_ranks
    least = int(min(_numbers(ranks.gather_objects(float(mine)))))
    shared = "of the device" if ranks.device.type == "cuda" else f"of a host, by its {ranks.local_ranks} ranks"
    return least, f"calibrate: memory {shared}"


def _machine(ranks: Ranks) -> str:
    if ranks.device.type == "cuda":
        kind = torch.cuda.get_device_name(ranks.device)
    else:
        kind = _processor()
    backend = "nccl" if ranks.device.type == "cuda" else "gloo"
    threads = torch.get_num_threads()
    each = f"{backend}, {threads} thread{'s'[: threads > 1]} each"
    return f"{ranks.ranks} ranks ({each}) of {kind}, torch {torch.__version__}"


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.is_file() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.machine()


def _numbers(values: list[object]) -> list[float]:
    return [value for value in values if isinstance(value, float)]
