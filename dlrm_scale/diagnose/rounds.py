"""One timed round of a few steps, or of the loader alone, on every rank."""

import resource
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import torch
import torch.distributed as dist

from dlrm_scale.batch import Batch
from dlrm_scale.config import Config
from dlrm_scale.data.dataset.dataset import Dataset
from dlrm_scale.data.loading.loader import TrainLoader
from dlrm_scale.diagnose.data import Source, Storage, TimedBatches, draw_batches, few_streams, open_loader
from dlrm_scale.errors import TrainingError
from dlrm_scale.layout import ShardLayout
from dlrm_scale.sharding.pipeline import make_train_pipeline
from dlrm_scale.sharding.ranks import Ranks
from dlrm_scale.sharding.step_phases import mark_phases
from dlrm_scale.telemetry import StepClock
from dlrm_scale.train.agreement import StepAgreement
from dlrm_scale.train.setup import build_on_ranks, compile_layers, pipeline_kind, set_threads
from dlrm_scale.train.stop import StopRequest

__all__ = ["Lengths", "Rehearsal", "Round", "Rounds"]

_AFTER_STEPS = 2
"""Steps after the timed ones: a pipeline that takes batches ahead is still full when the clock stops."""


@dataclass(frozen=True, kw_only=True)
class Lengths:
    """How long a round is.

    Attributes:
        warmup_steps: before the clock starts.
        steps: timed.
    """

    warmup_steps: int
    steps: int

    @property
    def all_steps(self) -> int:
        """Batches that a round takes."""
        return self.warmup_steps + self.steps + _AFTER_STEPS


@dataclass(frozen=True, kw_only=True)
class Round:
    """What all ranks measured; seconds and faults are a step's.

    Attributes:
        seconds: of the slowest rank.
        busy_seconds_per_rank: CPU time of the main thread.
        collective_seconds_per_rank: in exchanges of ids and vectors, and in the backward pass without using CPU time;
            less the time for which it could have run and had no core.
        delay_seconds: longest time for which a main thread could have run and had no core.
        wait_seconds: longest wait for batches.
        major_faults: most of any rank.
        still_cached_share: of the files, when they were dropped before a cold round.
    """

    seconds: float
    busy_seconds_per_rank: tuple[float, ...]
    collective_seconds_per_rank: tuple[float, ...]
    delay_seconds: float
    wait_seconds: float
    major_faults: float
    still_cached_share: float | None

    @property
    def undisturbed_seconds(self) -> float:
        """Without what other programs took from the rank that they hindered most."""
        return self.seconds - self.delay_seconds


@dataclass(frozen=True)
class _OnRank:
    seconds: float
    busy_seconds: float
    collective_seconds: float
    delay_seconds: float
    wait_seconds: float
    major_faults: int
    still_cached_share: float | None


class Rehearsal:
    """A model whose steps are timed and whose weights nobody keeps.

    Args:
        config: of the run.
        dataset: sets the tables' rows.
        ranks: the process group.
        before_allocation: as `build_on_ranks` takes it.

    Attributes:
        config: as given.
        sharded: this rank's part of the model.
        notes: what became of `train.compile`.
        clock: charged with the parts of its steps.
    """

    def __init__(
        self,
        config: Config,
        dataset: Dataset,
        ranks: Ranks,
        before_allocation: Callable[[ShardLayout], None] = lambda layout: None,
    ) -> None:
        self.config = config
        model = build_on_ranks(config, dataset, ranks, before_allocation)
        # rows that were never written cost page faults in the first steps
        model.fill_initial_rows(config.model.seed)
        self.sharded = model.sharded
        self.notes = compile_layers(model, config, ranks)
        self.sharded.set_learning_rates(
            dense=config.dense_optimizer.learning_rate, sparse=config.sparse_optimizer.learning_rate
        )
        self.clock = StepClock()
        self._pipeline = make_train_pipeline(self.sharded, pipeline_kind(config, ranks.device), self.clock)
        mark_phases(self.sharded, self.clock)

    @property
    def collective_seconds(self) -> float:
        """Seconds so far in which the main thread exchanged with other ranks or waited for them.

        The backward pass mixes work and waiting: what it takes without using CPU time is waiting.
        """
        seconds = self.clock.seconds
        in_backward = seconds.get("backward", 0.0) - self.clock.busy_seconds["backward"]
        return seconds.get("input_all_to_all", 0.0) + seconds.get("output_all_to_all", 0.0) + max(0.0, in_backward)

    def steps(self, batches: Iterator[Batch]) -> Iterator[None]:
        """Train on batches until there are none; yields after every step."""
        while True:
            try:
                self._pipeline.progress(batches)
            except StopIteration:
                return
            yield


class Rounds:
    """Runs rounds on this rank, together with the others.

    Args:
        dataset: where rows come from.
        storage: of its files.
        ranks: the process group.
        stop: ends a round after a step, on all ranks.
    """

    def __init__(self, dataset: Dataset, storage: Storage, ranks: Ranks, stop: StopRequest) -> None:
        self._dataset = dataset
        self._storage = storage
        self._ranks = ranks
        self._stop = stop
        self._drawn: dict[tuple[int, int], list[Batch]] = {}

    def train(self, rehearsal: Rehearsal, config: Config, source: Source, lengths: Lengths) -> Round:
        """Time steps of a model; a collective.

        Args:
            rehearsal: the model.
            config: how data is read, and how many threads compute.
            source: where batches come from.
            lengths: of the round.

        Raises:
            TrainingError: a rank was told to stop.
        """
        set_threads(config, self._ranks.local_ranks)
        still_cached = self._begin(source)
        if source == "warm":
            self._read_through(config, lengths)
        batches = TimedBatches(self._batches(config, source, lengths), lengths.all_steps)
        agreement = StepAgreement(self._ranks.rank, self._ranks.ranks, self._ranks.control_group)
        steps = rehearsal.steps(batches)

        def advance(count: int) -> None:
            for _ in islice(steps, count):
                # as in training; it also ends all ranks after the same step
                if agreement.exchange(stop=self._stop.requested, nonfinite_step=None).stop:
                    raise self._interrupted()

        try:
            advance(lengths.warmup_steps)
            measured = self._timed(lambda: advance(lengths.steps), batches, still_cached, rehearsal)
            advance(_AFTER_STEPS)
            for _ in steps:
                raise AssertionError("a round has steps to spare")
            if agreement.settle(stop=self._stop.requested, nonfinite_step=None).stop:
                raise self._interrupted()
        finally:
            batches.close()
        return self._gather(measured, lengths.steps)

    def load(self, config: Config, source: Source, lengths: Lengths) -> Round:
        """Time the loader alone, on all ranks at once; a collective.

        Raises:
            TrainingError: a rank was told to stop.
        """
        still_cached = self._begin(source)
        if source == "warm":
            self._read_through(config, lengths)
        batches = TimedBatches(self._loader(config), lengths.all_steps)
        try:
            for _ in islice(batches, lengths.warmup_steps):
                pass

            def take() -> None:
                for _ in islice(batches, lengths.steps):
                    if self._stop.requested:
                        return

            measured = self._timed(take, batches, still_cached)
        finally:
            batches.close()
        return self._gather(measured, lengths.steps)

    def first_batch(self, config: Config, source: Source) -> Round:
        """Time the wait for the first batch of an epoch, with all the streams that the run has; a collective.

        Raises:
            TrainingError: a rank was told to stop.
        """
        still_cached = self._begin(source)
        loader = open_loader(self._dataset, config.data, self._ranks)
        batches = TimedBatches(loader, 1)
        try:
            measured = self._timed(lambda: next(batches), batches, still_cached)
        finally:
            batches.close()
        return self._gather(measured, 1)

    def lookups_per_table(self, config: Config, lengths: Lengths) -> dict[str, float]:
        """Count the ids that a step looks up in each table, over all ranks; a collective."""
        drawn = self._draw(config, lengths)
        sums: dict[str, float] = {}
        for batch in drawn:
            features = batch.sparse_features
            for key, ids in zip(features.keys(), features.length_per_key(), strict=True):
                sums[key] = sums.get(key, 0.0) + ids / len(drawn)
        total: dict[str, float] = {}
        for part in self._ranks.gather_objects(sums):
            assert isinstance(part, dict)
            for key, ids in part.items():
                total[key] = total.get(key, 0.0) + ids
        return total

    def forget_batches(self) -> None:
        """Give back the memory of synthetic batches."""
        self._drawn.clear()

    def _begin(self, source: Source) -> float | None:
        still_cached = self._storage.begin(source)
        self._barrier()
        return still_cached

    def _loader(self, config: Config) -> TrainLoader:
        return open_loader(self._dataset, few_streams(config.data, self._ranks.ranks), self._ranks)

    def _batches(self, config: Config, source: Source, lengths: Lengths) -> TrainLoader | list[Batch]:
        return self._draw(config, lengths) if source == "synthetic" else self._loader(config)

    def _draw(self, config: Config, lengths: Lengths) -> list[Batch]:
        key = (config.data.batch_size, lengths.all_steps)
        if key not in self._drawn:
            data = few_streams(config.data, self._ranks.ranks)
            self._drawn[key] = draw_batches(self._dataset, data, self._ranks, lengths.all_steps)
        return self._drawn[key]

    def _read_through(self, config: Config, lengths: Lengths) -> None:
        """Bring what a round reads into the page cache, with the batches that a loader reads ahead."""
        loader = self._loader(config)
        try:
            for _ in islice(loader, lengths.all_steps + config.data.prefetch_batches):
                if self._stop.requested:
                    break
        finally:
            loader.close()

    def _timed(
        self,
        work: Callable[[], object],
        batches: TimedBatches,
        still_cached: float | None,
        rehearsal: Rehearsal | None = None,
    ) -> _OnRank:
        self._barrier()
        in_collectives = rehearsal.collective_seconds if rehearsal else 0.0
        waited, faults = batches.wait_seconds, resource.getrusage(resource.RUSAGE_SELF).ru_majflt
        self._synchronize()
        delayed = _delay_seconds()
        started, busy = time.perf_counter(), time.thread_time()
        work()
        self._synchronize()
        return _OnRank(
            seconds=time.perf_counter() - started,
            busy_seconds=time.thread_time() - busy,
            delay_seconds=_delay_seconds() - delayed,
            collective_seconds=rehearsal.collective_seconds - in_collectives if rehearsal else 0.0,
            wait_seconds=batches.wait_seconds - waited,
            major_faults=resource.getrusage(resource.RUSAGE_SELF).ru_majflt - faults,
            still_cached_share=still_cached,
        )

    def _gather(self, mine: _OnRank, steps: int) -> Round:
        views = self._ranks.gather_objects((mine, self._stop.requested))
        ranks: list[_OnRank] = []
        for view in views:
            assert isinstance(view, tuple)
            if view[1]:
                raise self._interrupted()
            ranks.append(view[0])
        shares = [r.still_cached_share for r in ranks if r.still_cached_share is not None]
        return Round(
            seconds=max(r.seconds for r in ranks) / steps,
            busy_seconds_per_rank=tuple(r.busy_seconds / steps for r in ranks),
            collective_seconds_per_rank=tuple(max(0.0, r.collective_seconds - r.delay_seconds) / steps for r in ranks),
            delay_seconds=max(r.delay_seconds for r in ranks) / steps,
            wait_seconds=max(r.wait_seconds for r in ranks) / steps,
            major_faults=max(r.major_faults for r in ranks) / steps,
            still_cached_share=max(shares) if shares else None,
        )

    def _interrupted(self) -> TrainingError:
        error = TrainingError(f"stopped by {self._stop.signal_name or 'a signal to another rank'}")
        error.exit_code = 130
        return error

    def _barrier(self) -> None:
        dist.barrier(group=self._ranks.control_group)

    def _synchronize(self) -> None:
        if self._ranks.device.type == "cuda":
            torch.cuda.synchronize(self._ranks.device)


def _delay_seconds() -> float:
    """How long this thread has waited for a core so far; 0 where the kernel doesn't say."""
    try:
        return int(Path("/proc/thread-self/schedstat").read_text().split()[1]) / 1e9
    except (OSError, IndexError, ValueError):
        return 0.0
