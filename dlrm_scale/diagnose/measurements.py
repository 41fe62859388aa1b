"""What the rounds of a diagnosis measured, and shares of a step made of it."""

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

__all__ = ["Interval", "Measurements", "interval", "paired_differences", "paired_ratios"]


@dataclass(frozen=True, kw_only=True)
class Interval:
    """A median with the quartiles around it.

    Attributes:
        median: of the rounds.
        low: lower quartile.
        high: upper quartile.
    """

    median: float
    low: float
    high: float

    def scaled(self, factor: float) -> "Interval":
        """Multiply by a positive factor."""
        return Interval(median=self.median * factor, low=self.low * factor, high=self.high * factor)


def interval(values: Sequence[float]) -> Interval:
    """Sum up rounds; at least one."""
    if len(values) == 1:
        return Interval(median=values[0], low=values[0], high=values[0])
    low, median, high = statistics.quantiles(values, n=4, method="inclusive")
    return Interval(median=median, low=low, high=high)


def paired_differences(first: Sequence[float], second: Sequence[float]) -> list[float]:
    """Subtract `first` from `second` round by round: what disturbs the machine for a while disturbs both alike."""
    return [b - a for a, b in zip(first, second, strict=True)]


def paired_ratios(first: Sequence[float], second: Sequence[float]) -> list[float]:
    """Divide `first` by `second` round by round."""
    return [a / b for a, b in zip(first, second, strict=True)]


@dataclass(frozen=True, kw_only=True)
class Measurements:
    """Seconds are a step's, one value a round, of the slowest rank.

    Attributes:
        rows_per_step: rows of a global batch.
        synthetic_seconds: batches are in memory already.
        warm_seconds: batches come from the loader, files from the page cache.
        cold_seconds: files come from storage.
        synthetic_wait_seconds: of it, the main thread's wait for batches.
        warm_wait_seconds: likewise.
        cold_wait_seconds: likewise.
        warm_loader_seconds: the loader alone, without training, files from the page cache.
        cold_loader_seconds: the loader alone, files from storage.
        busy_seconds_per_rank: CPU time of each rank's main thread in a synthetic step; it waits for others without
            using any. Empty where a GPU computes.
        collective_seconds_per_rank: time that each rank's main thread spent in collectives, waiting for slower ranks
            included, and for a core not. Empty where it isn't known.
        delay_share: share of synthetic steps in which a main thread waited for a core that other programs had.
        major_faults_per_step: pages that a synthetic step had to fetch from disk, of the worst rank.
        peak_memory_bytes_per_rank: resident host memory at most.
        host_memory_bytes: what the host has for all ranks of rank 0's host.
        local_ranks: how many ranks share it.
        epoch_start_seconds: warm and cold wait for the first batch of an epoch.
        steps_per_epoch: global batches of an epoch.
        still_cached_share: share of the files that stayed in memory when they were dropped for a cold round; None
            where the kernel doesn't say.
        dataset_bytes: of all part files.
        bytes_per_row: of a row on disk.
    """

    rows_per_step: int
    synthetic_seconds: tuple[float, ...]
    warm_seconds: tuple[float, ...]
    cold_seconds: tuple[float, ...]
    synthetic_wait_seconds: tuple[float, ...]
    warm_wait_seconds: tuple[float, ...]
    cold_wait_seconds: tuple[float, ...]
    warm_loader_seconds: tuple[float, ...]
    cold_loader_seconds: tuple[float, ...]
    busy_seconds_per_rank: tuple[float, ...]
    collective_seconds_per_rank: tuple[float, ...]
    delay_share: float
    major_faults_per_step: float
    peak_memory_bytes_per_rank: tuple[int, ...]
    host_memory_bytes: int
    local_ranks: int
    epoch_start_seconds: tuple[float, float]
    steps_per_epoch: int
    still_cached_share: float | None
    dataset_bytes: int
    bytes_per_row: float

    @property
    def step_seconds(self) -> float:
        """A step of a real run: from cold storage."""
        return interval(self.cold_seconds).median

    @property
    def compute_seconds(self) -> float:
        """A synthetic step, without what other programs took."""
        return interval(self.synthetic_seconds).median * (1 - self.delay_share)

    @property
    def prep_stall(self) -> Interval:
        """Share of a step that batches cost although files are in memory: waiting, and cores that the loader takes."""
        return self._shares(self.synthetic_seconds, self.warm_seconds)

    @property
    def fetch_stall(self) -> Interval:
        """Share of a step that storage costs."""
        return self._shares(self.warm_seconds, self.cold_seconds)

    @property
    def prep_wait(self) -> float:
        """Share of a step that waits for batches although files are in memory; steadier than the difference."""
        return self._shares(self.synthetic_wait_seconds, self.warm_wait_seconds).median

    @property
    def fetch_wait(self) -> float:
        """Share of a step that waits for storage."""
        return self._shares(self.warm_wait_seconds, self.cold_wait_seconds).median

    def _shares(self, first: Sequence[float], second: Sequence[float]) -> Interval:
        return interval(paired_differences(first, second)).scaled(1 / self.step_seconds)

    @property
    def busy_imbalance(self) -> tuple[int, float, float] | None:
        """Slowest rank, its busy time over the mean, and the share of a synthetic step that perfect balance would save.

        None where it isn't known, or with one rank.
        """
        busy = self.busy_seconds_per_rank
        if len(busy) < 2:
            return None
        mean, largest = statistics.fmean(busy), max(busy)
        return busy.index(largest), largest / mean, (largest - mean) / self.compute_seconds

    @property
    def exposed_communication(self) -> float | None:
        """Share of a synthetic step in collectives that is nobody's waiting for a slower rank.

        The last rank to arrive waits for nothing but the transfer, so it is the least of the ranks' times. Where
        collectives aren't timed it is what a synthetic step takes beyond the busiest rank's CPU time, and includes
        what other programs of the host took away. None where neither is known.
        """
        if len(self.peak_memory_bytes_per_rank) < 2:
            return 0.0
        if self.collective_seconds_per_rank:
            return min(self.collective_seconds_per_rank) / self.compute_seconds
        if not self.busy_seconds_per_rank:
            return None
        return max(0.0, 1 - max(self.busy_seconds_per_rank) / self.compute_seconds)
