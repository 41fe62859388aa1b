"""Timing a piece of work on all ranks at once, as a step does it."""

import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import numpy as np
import torch
import torch.distributed as dist

from dlrm_scale.sharding.ranks import Ranks

__all__ = ["Clock", "RankTimer", "Timing"]

Clock = Literal["elapsed", "processor"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Timing:
    """How long something took on the slowest rank.

    Attributes:
        milliseconds: median of the repeats.
        spread: the middle half of the repeats over their median.
        delay_share: of the elapsed time, in which a rank's thread was ready but had no core.
    """

    milliseconds: float
    spread: float
    delay_share: float


class RankTimer:
    """Times work that all ranks do together, so that they share memory bandwidth and wait as in a step.

    Elapsed time includes that in which a rank's thread was ready but had no core: gloo's and autograd's threads take it
    from one another in every step, where there are no more cores than ranks, and other programs spoil it on a busy
    machine. Processor time, of all threads of a rank, has no such waits; but it misses what a network takes.

    Work that is done again in a later pass, in the same order, is told as the median over the passes: repeats that
    follow one another share what the machine does in that second.

    Args:
        ranks: the process group.
        repeats: of every piece of work in a pass.
        clock: what is measured.
        warmup: repeats before them that don't count.

    Attributes:
        timings: of everything timed so far.
    """

    def __init__(self, ranks: Ranks, repeats: int, clock: Clock = "elapsed", warmup: int = 2) -> None:
        self._ranks, self._repeats, self._warmup, self._clock = ranks, repeats, warmup, clock
        self.timings: list[Timing] = []
        self._passes: list[list[float]] = []
        """Milliseconds of each piece of work of a pass, by pass."""
        self._next = 0

    def begin_pass(self) -> None:
        """Start over with the first piece of work."""
        self._next = 0

    def time(self, *works: Callable[[], object]) -> tuple[Timing, ...]:
        """Time pieces of work that follow one another in each repeat. A collective.

        Args:
            works: each is begun by all ranks at once.

        Returns:
            One timing a piece, equal on all ranks.
        """
        seconds = np.zeros((3, self._repeats, len(works)))
        for repeat in range(-self._warmup, self._repeats):
            for index, work in enumerate(works):
                measured = self.once(work)
                if repeat >= 0:
                    seconds[:, repeat, index] = measured
        timings = tuple(self.summary(seconds[:, :, index]) for index in range(len(works)))
        self.timings += timings
        return tuple(self._over_passes(timing) for timing in timings)

    def _over_passes(self, timing: Timing) -> Timing:
        if self._next == len(self._passes):
            self._passes.append([])
        of_work = self._passes[self._next]
        of_work.append(timing.milliseconds)
        self._next += 1
        return replace(timing, milliseconds=float(np.median(of_work)))

    def once(self, work: Callable[[], object]) -> tuple[float, float, float]:
        """Do a piece of work that all ranks begin at once.

        Returns:
            Seconds that this rank took; of them those without a core; and those of its processor time.
        """
        self._finish()
        dist.barrier(group=self._ranks.control_group)
        delayed, busy, started = _delay_seconds(), time.process_time(), time.perf_counter()
        work()
        self._finish()
        return time.perf_counter() - started, _delay_seconds() - delayed, time.process_time() - busy

    def summary(self, seconds: np.ndarray) -> Timing:
        """Bring all ranks' repeats of one piece together. A collective.

        Args:
            seconds: `[3, repeats]` float64, as from `once`.
        """
        mine = torch.from_numpy(np.ascontiguousarray(seconds))
        everyone = [torch.empty_like(mine) for _ in range(self._ranks.ranks)]
        dist.all_gather(everyone, mine, group=self._ranks.control_group)
        elapsed, delayed, busy = torch.stack(everyone).numpy().transpose(1, 0, 2)
        counted = elapsed if self._clock == "elapsed" else busy
        low, middle, high = np.percentile(counted.max(axis=0), [25, 50, 75])
        return Timing(
            milliseconds=max(1e-6, 1e3 * float(middle)),
            spread=float((high - low) / max(middle, 1e-9)),
            delay_share=float(delayed.sum() / max(elapsed.sum(), 1e-9)),
        )

    def _finish(self) -> None:
        if self._ranks.device.type == "cuda":
            torch.cuda.synchronize(self._ranks.device)


def _delay_seconds() -> float:
    """How long this thread has waited for a core so far; 0 where the kernel doesn't say."""
    try:
        return int(Path("/proc/thread-self/schedstat").read_text().split()[1]) / 1e9
    except (OSError, IndexError, ValueError):
        return 0.0
