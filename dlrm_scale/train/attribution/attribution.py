"""Where a run's time went, rank by rank: exclusive intervals of each main thread, and work hidden in other threads.

A slow rank shows in two places. It computes longest; and the others wait for it, in the exchanges. What a rank computes
is its lookup, dense forward, dense optimizer, copy, and that part of the backward pass in which a core worked for its
main thread: the rest of the backward pass was waiting, for the gradients' all-to-all and the all-reduce.

Under SparseDist a step's exchange of ids is for a later batch and in flight under other work; what is charged is what
the main thread spends on it.

Cost by `bench/attribution.py`, steps with and without alternating on a busy machine of 2 cores: 45 us elapsed and 63 us
of CPU a step (medians of 600 pairs), 0.4 ms a log line. That is 0.1 % of a step of 60 ms with 20 steps between lines,
and 1 % of one of 7 ms.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
import torch.distributed as dist

from dlrm_scale.sharding.ranks import Ranks
from dlrm_scale.telemetry import INTERVALS, OTHER, StepClock
from dlrm_scale.train.attribution.gpu_intervals import GpuIntervals

__all__ = [
    "COMPUTE",
    "EXCHANGES",
    "Attribution",
    "IntervalWindow",
    "RankTime",
    "compute_seconds",
    "exchange_seconds",
    "share_values",
]

COMPUTE = ("copy", "lookup", "dense_forward", "dense_optimizer")
"""Intervals in which a rank works alone; the busy part of `backward` belongs to them."""

EXCHANGES = ("input_all_to_all", "output_all_to_all", "agreement")
"""Intervals that wait for other ranks; the idle part of `backward` belongs to them."""


def compute_seconds(seconds: Mapping[str, float], busy_backward_seconds: float) -> float:
    """Add up what a rank computed.

    Args:
        seconds: by interval, on the CPU.
        busy_backward_seconds: for which a core worked in the backward pass.
    """
    return sum(seconds.get(name, 0.0) for name in COMPUTE) + busy_backward_seconds


def exchange_seconds(seconds: Mapping[str, float], busy_backward_seconds: float) -> float:
    """Add up what a rank spent in exchanges, waiting for slower ranks and packing included; see `compute_seconds`."""
    idle = max(0.0, seconds.get("backward", 0.0) - busy_backward_seconds)
    return sum(seconds.get(name, 0.0) for name in EXCHANGES) + idle


@dataclass(frozen=True, kw_only=True)
class RankTime:
    """Where one rank's time went.

    Attributes:
        seconds: by interval of the main thread, `OTHER` included; they add up to the wall time of training.
        busy_backward_seconds: for which a core worked for the main thread in the backward pass.
        hidden_seconds: of threads beside the main one: `fetch` and `prep` of the loader, `persist` of checkpoints.
        gpu_seconds: by interval on the GPU's timeline; empty without one.
        start_up_seconds: before the first step: building, sharding, restoring.
    """

    seconds: dict[str, float]
    busy_backward_seconds: float = 0.0
    hidden_seconds: dict[str, float] = field(default_factory=dict)
    gpu_seconds: dict[str, float] = field(default_factory=dict)
    start_up_seconds: float = 0.0

    @property
    def wall_seconds(self) -> float:
        """All intervals."""
        return sum(self.seconds.values())

    @property
    def compute_seconds(self) -> float:
        """What this rank computed. With a GPU its timeline counts, but for the backward pass, which mixes in waits."""
        if self.gpu_seconds:
            return compute_seconds(self.gpu_seconds, 0.0)
        return compute_seconds(self.seconds, self.busy_backward_seconds)

    @property
    def exchange_seconds(self) -> float:
        """What this rank spent in exchanges."""
        if self.gpu_seconds:
            return exchange_seconds(self.gpu_seconds, self.gpu_seconds.get("backward", 0.0))
        return exchange_seconds(self.seconds, self.busy_backward_seconds)


class IntervalWindow:
    """The seconds of each interval since the last look.

    Args:
        clock: what is looked at.
        gpu: likewise, so far as it was read; None without a GPU. Its seconds, and no seconds of a main thread that only
            queues work, tell which rank computes longest.
    """

    def __init__(self, clock: StepClock, gpu: GpuIntervals | None = None) -> None:
        self._clock = clock
        self._gpu = gpu
        self._before = self._now()

    def take(self) -> list[float]:
        """Return the seconds since the last `take`, in an order that is the same on all ranks."""
        now = self._now()
        values = [after - before for after, before in zip(now, self._before, strict=True)]
        self._before = now
        return values

    def _now(self) -> list[float]:
        seconds, on_gpu = self._clock.seconds, {} if self._gpu is None else self._gpu.seconds
        return [
            *(seconds.get(name, 0.0) for name in _WINDOW_NAMES),
            self._clock.busy_seconds["backward"],
            *(on_gpu.get(name, 0.0) for name in _WINDOW_NAMES),
        ]

    @staticmethod
    def rank_time(values: Sequence[float]) -> RankTime:
        """Name what `take` returned; intervals that didn't occur are left out."""
        count = len(_WINDOW_NAMES)
        seconds, gpu_seconds = (
            {name: value for name, value in zip(_WINDOW_NAMES, part, strict=True) if value > 0}
            for part in (values[:count], values[count + 1 :])
        )
        return RankTime(seconds=seconds, busy_backward_seconds=values[count], gpu_seconds=gpu_seconds)


_WINDOW_NAMES = (*INTERVALS, OTHER)


def share_values(values: Sequence[float], ranks: Ranks) -> list[list[float]]:
    """Give every rank each rank's values, by rank, in one small all-reduce. A collective.

    Each value has a place of its own that the others add zeros to, so it arrives bit for bit.
    """
    if ranks.ranks == 1:
        return [list(values)]
    table = torch.zeros((ranks.ranks, len(values)), dtype=torch.float64)
    table[ranks.rank] = torch.tensor(values, dtype=torch.float64)
    dist.all_reduce(table, group=ranks.control_group)
    rows: list[list[float]] = table.tolist()
    return rows


@dataclass(frozen=True, kw_only=True)
class Attribution:
    """Where the time of all ranks went.

    Attributes:
        times: by rank.
    """

    times: tuple[RankTime, ...]

    @property
    def slowest_rank(self) -> int:
        """The rank that computes longest."""
        computed = [time.compute_seconds for time in self.times]
        return computed.index(max(computed))

    @property
    def compute_imbalance(self) -> float:
        """The longest computing time over the mean."""
        return _imbalance([time.compute_seconds for time in self.times])

    def as_dict(self) -> dict[str, object]:
        """JSON-ready: `intervals` in the order of a step, each with mean seconds, share and slowest rank."""
        wall_seconds = _mean([time.wall_seconds for time in self.times])
        named = [*INTERVALS, OTHER]
        named += sorted({name for time in self.times for name in time.seconds} - set(named))
        return {
            "wall_seconds": wall_seconds,
            "start_up_seconds": _mean([time.start_up_seconds for time in self.times]),
            "intervals": {
                name: entry
                for name in named
                if (entry := _entry([time.seconds.get(name, 0.0) for time in self.times], wall_seconds)) is not None
            },
            "hidden_seconds": _means([time.hidden_seconds for time in self.times]),
            "gpu_seconds": _means([time.gpu_seconds for time in self.times]),
            "compute_seconds_per_rank": [time.compute_seconds for time in self.times],
            "exchange_seconds_per_rank": [time.exchange_seconds for time in self.times],
            "slowest_rank": self.slowest_rank,
            "compute_imbalance": self.compute_imbalance,
        }


def _entry(seconds_per_rank: list[float], wall_seconds: float) -> dict[str, float] | None:
    largest = max(seconds_per_rank)
    if largest <= 0:
        return None
    mean = _mean(seconds_per_rank)
    return {
        "seconds": mean,
        "share": mean / wall_seconds,
        "slowest_rank": seconds_per_rank.index(largest),
        "slowest_rank_seconds": largest,
        "imbalance": largest / mean,
    }


def _means(seconds_per_rank: Sequence[Mapping[str, float]]) -> dict[str, float]:
    names = dict.fromkeys(name for seconds in seconds_per_rank for name in seconds)
    return {name: _mean([seconds.get(name, 0.0) for seconds in seconds_per_rank]) for name in names}


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)


def _imbalance(values: Sequence[float]) -> float:
    mean = _mean(values)
    return max(values) / mean if mean > 0 else 1.0
