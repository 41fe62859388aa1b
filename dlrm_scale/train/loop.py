"""The training loop: read `TrainingLoop.run` from top to bottom."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from typing import Literal

import torch

from dlrm_scale.batch import Batch
from dlrm_scale.checkpoint import SaveOutcome
from dlrm_scale.config import Config
from dlrm_scale.data.loading.loader import TrainLoader
from dlrm_scale.errors import CheckpointError, TrainingError
from dlrm_scale.sharding.pipeline import TrainPipeline
from dlrm_scale.sharding.ranks import Ranks
from dlrm_scale.sharding.shard import ShardedModel
from dlrm_scale.telemetry import StepClock
from dlrm_scale.train.agreement import StepAgreement, Verdict
from dlrm_scale.train.attribution.attribution import RankTime
from dlrm_scale.train.attribution.gpu_intervals import GpuIntervals
from dlrm_scale.train.attribution.profile import StepProfiler
from dlrm_scale.train.finite import FiniteWatch
from dlrm_scale.train.finite_cause import FiniteCause
from dlrm_scale.train.log_window import LogWindow, idle_seconds
from dlrm_scale.train.metrics.collapse import collapse_warning
from dlrm_scale.train.metrics.metrics import ClickMetrics
from dlrm_scale.train.report import RunReport
from dlrm_scale.train.run_saver import RunSaver
from dlrm_scale.train.schedule import multiplier
from dlrm_scale.train.stop import StopRequest

__all__ = ["LoopEnd", "TrainingLoop"]


@dataclass(kw_only=True)
class LoopEnd:
    """How the loop ended.

    Attributes:
        state: `finished`, or `stopped` by a signal.
        step: completed steps.
        rows: training rows of this start, over all ranks.
        seconds: wall time of the loop, without evaluation.
        data_wait_seconds: of it, waiting for batches on this rank.
        outcomes: of every checkpoint tried.
        checkpoints: what they cost on this rank; see `Cadence.summary`.
        final_loss: mean loss of the last log window.
    """

    state: Literal["finished", "stopped"]
    step: int
    rows: int
    seconds: float
    data_wait_seconds: float
    outcomes: list[SaveOutcome]
    checkpoints: dict[str, object]
    final_loss: float | None


@dataclass(kw_only=True)
class TrainingLoop:
    """Everything a step needs, on one rank.

    Attributes:
        clock: charged with all that the main thread does; it starts anew with the first step.
        profiler: traces `train.profile_steps`.
        gpu: the clock's intervals on the GPU, if there is one.
        cause: tells what made a loss not finite.
        start_step: completed steps before this start.
        rows_before: training rows before this start.
        cursor: data position of the last applied step, or None before the first.
        rank_state: this rank's own tensors in the checkpoint that it goes on from; empty if they aren't known.
        saver: of the run's checkpoints.
        validate: evaluates on the given number of rows (0: all) without disturbing training; None when a signal
            ended it.
        report: on rank 0.
    """

    config: Config
    ranks: Ranks
    sharded: ShardedModel
    loader: TrainLoader
    pipeline: TrainPipeline
    stop: StopRequest
    cause: FiniteCause
    validate: Callable[[int], ClickMetrics | None]
    report: RunReport | None
    clock: StepClock
    profiler: StepProfiler
    gpu: GpuIntervals | None
    start_step: int
    rows_before: int
    cursor: Mapping[str, object] | None
    rank_state: Mapping[str, torch.Tensor]
    saver: RunSaver

    def run(self) -> LoopEnd:
        """Train until the epochs or `train.max_steps` are over, or a rank is asked to stop.

        Raises:
            TrainingError: a loss that isn't finite, naming step, rank and cause; or a checkpoint refused because a
                value isn't, naming table and row.
            CheckpointError: a failed save under `checkpoint.on_failure = stop`, or the last one under any setting.
        """
        self._begin()
        batches: Iterator[Batch] = iter(self.loader)
        while not self._stopping and not self._at_limit():
            self.profiler.before(self.step + 1)
            with self.clock.interval("dense_optimizer"):
                self._set_learning_rates()
            try:
                batch, row_loss_sum, logits = self.pipeline.progress(batches)
            except StopIteration:
                break
            self.step += 1
            self.cursor = batch.cursor
            with self.clock.interval("logging"):
                self._note(batch, row_loss_sum, logits)
            with self.clock.interval("agreement"):
                verdict = self._agreement.exchange(
                    stop=self._wants_to_stop(),
                    nonfinite_step=self._nonfinite_step,
                    save=self.saver.wishes(self.step),
                )
            self._obey(verdict)
            if self.profiler.after(self.step):
                self._tell_of_profiles()
            if self._due(self.config.train.log_every_steps):
                self._log()
            if self._due(self.config.train.validate_every_steps):
                self._validate()
            if self.saver.is_due(self.step):
                self._save()
            self.saver.poll()
        return self._end()

    def _begin(self) -> None:
        self.step = self.start_step
        self._judged_step = -1
        self._start_up_seconds = self.clock.restart()
        self._window = LogWindow(self.clock, self.loader, self.config, self.gpu)
        self._window.go_on_from(self.rank_state, self.ranks.device)
        self._agreement = StepAgreement(self.ranks.rank, self.ranks.ranks, self.ranks.control_group)
        self._stopping = False
        self._watch = FiniteWatch()
        self._nonfinite_step: int | None = None
        self._rows = 0
        self.saver.begin()

    def _at_limit(self) -> bool:
        return bool(self.config.train.max_steps) and self.step >= self.config.train.max_steps

    def _due(self, every_steps: int) -> bool:
        return every_steps > 0 and self.step % every_steps == 0

    def _set_learning_rates(self) -> None:
        factor = self._rate_factor(self.step)
        self.sharded.set_learning_rates(
            dense=self.config.dense_optimizer.learning_rate * factor,
            sparse=self.config.sparse_optimizer.learning_rate * factor,
        )

    def _rate_factor(self, step: int) -> float:
        return multiplier(self.config.schedule, step, self.loader.total_steps)

    def _note(self, batch: Batch, row_loss_sum: torch.Tensor, logits: torch.Tensor) -> None:
        self._rows += batch.rows_global
        self.saver.stepped()
        self._window.note(batch, row_loss_sum, logits, self.sharded.gradient_norm)
        self._nonfinite_step = self._watch.note(self.step, row_loss_sum)
        if self.report is not None:
            self.report.advance(self.step)

    def _obey(self, verdict: Verdict) -> None:
        if verdict.nonfinite is not None:
            step, rank = verdict.nonfinite
            cause = self.ranks.broadcast_object(self.cause.describe(), source=rank)
            with suppress(CheckpointError):  # a sound step that is still being written is worth resuming from
                self.saver.wait()
            raise TrainingError(
                f"step {step}: the loss on rank {rank} is not finite: {cause}",
                remedy="lower the learning rates, or look at the rows of this step; if the newest checkpoint leads "
                "here again, continue from an older one with --resume STEP (`checkpoint ls` lists them)",
            )
        self._stopping = self._stopping or verdict.stop
        if verdict.save:
            self.saver.want()

    def _settle(self) -> None:
        """Know of every step so far that its loss is finite, on all ranks: nothing else is logged or committed."""
        newest = self._watch.settle()
        bad = self._nonfinite_step if newest is None else newest
        with self.clock.interval("agreement"):
            verdict = self._agreement.settle(stop=self._wants_to_stop(), nonfinite_step=bad)
        self._obey(verdict)

    def _wants_to_stop(self) -> bool:
        return self.stop.requested or self.saver.wants_to_stop

    def _log(self, *, go_on: bool = False) -> None:
        self._settle()
        with self.clock.interval("logging"):
            if self.gpu is not None:
                self.gpu.read()  # the newest loss was just waited for, so all events before it have passed
            values = self._window.close(self.ranks, go_on=go_on)
            if self.report is None:
                return
            factor = self._rate_factor(self.step - 1)
            values |= {
                "epoch": (self.cursor or {}).get("epoch"),
                "rows": self._rows,
                "dense_learning_rate": self.config.dense_optimizer.learning_rate * factor,
                "sparse_learning_rate": self.config.sparse_optimizer.learning_rate * factor,
            }
            self.report.record("train", self.step, values)
            self.report.show_step(self.step, values)

    def _validate(self) -> None:
        with self.clock.whole("evaluation"):
            metrics = self.validate(self.config.train.validation_rows)
        if metrics is None:
            self._stopping = True  # a signal ended it early, on all ranks
            return
        if self.report is not None:
            self.report.record("validation", self.step, metrics.as_dict())
            auc = "undefined" if metrics.auc is None else f"{metrics.auc:.5f}"
            logloss = "undefined" if metrics.logloss is None else f"{metrics.logloss:.5f}"
            self.report.say(f"validation at step {self.step}: AUC {auc}, logloss {logloss}, {metrics.rows:,} rows")
            warning = collapse_warning(metrics.as_dict())
            if warning is not None:
                self.report.say(f"warning: {warning}")
        self._judge(metrics)

    def judge_last(self, metrics: ClickMetrics) -> None:
        """Compare the validation after the last step; a collective.

        Args:
            metrics: over the whole split. Where validations during training take fewer rows, so does one more here.
        """
        train = self.config.train
        if train.validate_every_steps and 0 < train.validation_rows < metrics.rows:
            if self._judged_step == self.step or train.best_metric == "none":
                return
            with self.clock.whole("evaluation"):
                fewer = self.validate(train.validation_rows)
            if fewer is None:
                return
            metrics = fewer
        self._judge(metrics)

    def _judge(self, metrics: ClickMetrics) -> None:
        """Keep the checkpoint of this step if no validation was better; rank 0's word counts."""
        self._judged_step = self.step
        with self.clock.interval("agreement"):
            improved = self.ranks.broadcast_object(self.saver.best.improved_by(metrics, self.step))
        if not improved:
            return
        if self.step != self.saver.saved_step:
            self._save()
        if self.ranks.rank == 0:
            self.saver.keep_best()

    def _save(self) -> None:
        self._settle()
        self.saver.save(self.step, self.cursor, self.rows_before + self._rows, self._window.state())

    def _tell_of_profiles(self) -> None:
        for note in self.profiler.take_notes():
            if self.report is not None:
                self.report.say(note)

    def rank_time(self) -> RankTime:
        """Where this rank's time went since the first step, up to now."""
        if self.gpu is not None:
            self.gpu.read()
        return RankTime(
            seconds=self.clock.seconds,
            busy_backward_seconds=self.clock.busy_seconds["backward"],
            hidden_seconds={
                "fetch": self.loader.fetch_seconds,
                "prep": self.loader.prep_seconds,
                "persist": sum(outcome.persist_seconds for outcome in self.saver.outcomes),
            },
            gpu_seconds=dict(self.gpu.seconds) if self.gpu is not None else {},
            start_up_seconds=self._start_up_seconds,
        )

    def _end(self) -> LoopEnd:
        self._settle()
        self.profiler.end()
        self._tell_of_profiles()
        if self._window.steps and self._rows:
            self._log(go_on=True)
        self.saver.wait()
        self.saver.require_finite_values()
        if self.step != self.saver.saved_step or self._saved_nothing():
            self._save()
        self.saver.wait()
        self.saver.touched.enabled = False
        self.saver.require_finite_values()
        self.saver.require_last()
        return LoopEnd(
            state="stopped" if self._stopping else "finished",
            step=self.step,
            rows=self._rows,
            seconds=self.clock.elapsed() - idle_seconds(self.clock),
            data_wait_seconds=self.loader.wait_seconds,
            outcomes=self.saver.outcomes,
            checkpoints=self.saver.cadence.summary(),
            final_loss=self._window.loss,
        )

    def _saved_nothing(self) -> bool:
        """A run that ends before its first step still leaves a checkpoint to resume from."""
        return self.start_step == 0 and self.step == 0
