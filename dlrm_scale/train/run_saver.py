"""Saves a run: when a checkpoint is due, what goes into it, how it ended, and what that means for the run."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial

import torch

from dlrm_scale.checkpoint import CheckpointEngine, SaveOutcome
from dlrm_scale.checkpoint.saving.cadence import Cadence
from dlrm_scale.config import CheckpointConfig
from dlrm_scale.errors import SaveError, TrainingError
from dlrm_scale.sharding.ranks import Ranks
from dlrm_scale.sharding.shard import ShardedModel
from dlrm_scale.telemetry import StepClock
from dlrm_scale.touched_rows import TouchedRows
from dlrm_scale.train.best_checkpoint import BestKeeper
from dlrm_scale.train.random_state import capture_random_state
from dlrm_scale.train.report import RunReport
from dlrm_scale.units import format_bytes

__all__ = ["INTERVAL_KEY", "RunSaver"]

INTERVAL_KEY = "checkpoint_interval_steps"
"""In a checkpoint's `extra`: the interval that the run had reached, from which a resumed one goes on."""

_NOT_STEPS = ("checkpoint", "evaluation", "profile")
"""Intervals of the clock that no step's time contains."""

_NUMBER = re.compile(r"[0-9]+")


@dataclass(kw_only=True)
class RunSaver:
    """Every method is called on every rank alike.

    Attributes:
        config: when saves are due, and what a failed one does.
        engine: writes them.
        cadence: decides when, and adds up what they cost.
        ranks: the process group.
        sharded: what is saved.
        touched: rows since the last save.
        best: on rank 0 decides which checkpoint is the best.
        record: JSON-ready values that every checkpoint of the run carries.
        clock: charged with the stalls.
        report: on rank 0.
        saved_step: step of the newest checkpoint tried, of which this start began at first.
        saved_as: its manifest, or "".
    """

    config: CheckpointConfig
    engine: CheckpointEngine
    cadence: Cadence
    ranks: Ranks
    sharded: ShardedModel
    touched: TouchedRows
    best: BestKeeper
    record: Mapping[str, object]
    clock: StepClock
    report: RunReport | None
    saved_step: int
    saved_as: str

    def __post_init__(self) -> None:
        """Nothing has been tried yet."""
        self.outcomes: list[SaveOutcome] = []
        self.spoiled: SaveOutcome | None = None
        self._stall_seconds: dict[str, float] = {}
        self._failed = False
        self._wanted = False
        self._said: set[str] = set()
        self._repeats: dict[str, tuple[str, int]] = {}
        """The last failure and the last warning of saves, without numbers, and how often they have come on end."""

    def begin(self) -> None:
        """Before the first step."""
        self.touched.enabled = True
        self.cadence.begin(step=self.saved_step, now_seconds=self.clock.elapsed())

    def stepped(self) -> None:
        """After each step."""
        seconds = self.clock.elapsed() - self.clock.seconds_of(*_NOT_STEPS)
        self.cadence.stepped(training_seconds=seconds, saving=self.engine.is_saving)

    def wishes(self, step: int) -> bool:
        """Whether a save is due by rank 0's clock; the ranks' agreement then has all of them call `want`."""
        if self.ranks.rank != 0:
            return False
        return self.cadence.wishes(step=step, now_seconds=self.clock.elapsed(), saving=self.engine.is_saving)

    def want(self) -> None:
        """All ranks have agreed on a save."""
        self._wanted = True

    def is_due(self, step: int) -> bool:
        """Whether to save after this step."""
        if self.config.interval == "steps":
            every_steps = self.config.every_steps
            return every_steps > 0 and step % every_steps == 0 and step != self.saved_step
        wanted, self._wanted = self._wanted, False
        # the wish is a step old; a save since then has fulfilled it
        return wanted and self.saved_step < step - 1

    def save(
        self,
        step: int,
        cursor: Mapping[str, object] | None,
        rows_consumed: int,
        log_window: Mapping[str, torch.Tensor],
    ) -> None:
        """Begin to save this step.

        Args:
            step: completed ones.
            cursor: data position of the last applied step, or None before the first.
            rows_consumed: training rows so far.
            log_window: this rank's part of what is logged next; see `LogWindow.state`.
        """
        with self.clock.interval("checkpoint"):
            began_seconds = self.clock.elapsed()
            self.cadence.saved(step=step, now_seconds=began_seconds)
            self.sharded.union_replicated(self.touched)
            self.saved_as = self.engine.save(
                step=step,
                cursor=dict(cursor or {}),
                dense=self.sharded.dense_state(),
                rank_state={**capture_random_state(), **log_window},
                extra={
                    **self.record,
                    "best": self.best.record,
                    "table_iterations": self.sharded.table_iterations(),
                    INTERVAL_KEY: self.cadence.interval_steps,
                },
                rows_consumed=rows_consumed,
            )
            self._stall_seconds[self.saved_as] = self.clock.elapsed() - began_seconds
        self.saved_step = step

    def poll(self) -> None:
        """Take in what has ended."""
        with self.clock.interval("checkpoint"):
            self._take(self.engine.poll())

    def wait(self) -> None:
        """Wait for the save in flight, if there is one."""
        with self.clock.interval("checkpoint"):
            outcomes = self.engine.wait()
        self._take(outcomes)

    @property
    def wants_to_stop(self) -> bool:
        """A save has failed that the run mustn't survive: all ranks end after the same step."""
        return self.spoiled is not None or (self._failed and self.config.on_failure == "stop")

    def keep_best(self) -> None:
        """The newest checkpoint is the best; on rank 0."""
        self._settle_best(lambda: self.best.named(self.saved_as))
        self.engine.pin(self.best.pinned)

    def require_finite_values(self) -> None:
        """Weights that were refused once won't become finite again; all ranks have heard of it alike.

        Raises:
            TrainingError: a checkpoint was refused because a value is NaN or infinite, naming table and row.
        """
        if self.spoiled is not None:
            raise TrainingError(
                f"the checkpoint of step {self.spoiled.step} is refused, the model is spoiled: {self.spoiled.error}",
                remedy="lower the learning rates and continue from the checkpoint before it with --resume auto",
            )

    def require_last(self) -> None:
        """A run may go on without a checkpoint, but it must not end well without its last one.

        Raises:
            SaveError: it isn't saved.
        """
        last = self.outcomes[-1] if self.outcomes else None
        if last is not None and not last.committed:
            raise SaveError(
                f"the last checkpoint, of step {last.step}, is not saved: {last.error}",
                remedy="mend what the message names, then continue from the checkpoint before it with --resume auto",
            )

    def _take(self, outcomes: list[SaveOutcome]) -> None:
        for ended in outcomes:
            # what comes before the engine's part stalls training as well: replicated tables' marks go to all ranks
            stall_seconds = self._stall_seconds.pop(ended.manifest, ended.stall_seconds)
            outcome = replace(ended, stall_seconds=stall_seconds)
            self.outcomes.append(outcome)
            if self.ranks.rank == 0:
                self._settle_best(partial(self.best.note, outcome))
            self._failed = self._failed or not outcome.committed
            if outcome.not_finite:
                self.spoiled = self.spoiled or outcome
            costs = self.cadence.ended(outcome)
            if self.report is not None:
                self._tell(outcome, costs, self.report)

    def _tell(self, outcome: SaveOutcome, costs: Mapping[str, object], report: RunReport) -> None:
        report.record(
            "checkpoint",
            outcome.step,
            {
                "kind": outcome.kind,
                "manifest": outcome.manifest,
                "policy": self.config.policy,
                "committed": outcome.committed,
                "bytes": outcome.bytes,
                "rows": outcome.rows,
                "stall_seconds": outcome.stall_seconds,
                "persist_seconds": outcome.persist_seconds,
                **costs,
                "unstaged_bytes": sum(outcome.unstaged_bytes),
                "error": outcome.error,
                "warning": outcome.warning,
            },
        )
        self._say_unless_repeated("warning", outcome, outcome.warning, "")
        error = None if outcome.committed else str(outcome.error)
        self._say_unless_repeated("failed", outcome, error, "; its rows stay marked for the next one")
        if any(outcome.unstaged_bytes):
            rank = max(range(len(outcome.unstaged_bytes)), key=outcome.unstaged_bytes.__getitem__)
            self._say_once(
                "unstaged",
                f"training waited {outcome.stall_seconds:.1f} s while the checkpoint of step {outcome.step} "
                f"({outcome.kind}) was written: {format_bytes(outcome.unstaged_bytes[rank])} of rows on rank {rank} "
                "don't fit into the memory set aside for copies; a larger checkpoint.staging_memory avoids that (said "
                "once)",
            )
        conflict = self.cadence.conflict()
        if conflict is not None:
            self._say_once("conflict", conflict)

    def _say_unless_repeated(self, what: str, outcome: SaveOutcome, text: str | None, hint: str) -> None:
        """Say what is wrong in full once, and then for as long as it lasts a short line with the count."""
        if text is None:
            self._repeats.pop(what, None)
            return
        told = _NUMBER.sub("#", text)  # of steps, files and bytes
        before, count = self._repeats.get(what, ("", 0))
        count = count + 1 if told == before else 1
        self._repeats[what] = told, count
        failed = " failed" if what == "failed" else ""
        if self.report is not None and count == 1:
            self.report.say(f"warning: checkpoint of step {outcome.step}{failed}: {text}{hint}")
        elif self.report is not None:
            self.report.say(f"warning: checkpoint of step {outcome.step}{failed}: as before, {count} in a row")

    def _say_once(self, what: str, text: str) -> None:
        if what not in self._said and self.report is not None:
            self._said.add(what)
            self.report.say(f"warning: {text}")

    def _settle_best(self, settle: Callable[[], bool]) -> None:
        try:
            settled = settle()
        except OSError as error:
            settled = True
            if self.report is not None:
                self.report.say(f"warning: the best checkpoint isn't written down: {error}")
        best = self.best.best
        if settled and best is not None:
            self.engine.pin(self.best.pinned)
            if self.report is not None:
                self.report.record("best", best.step, best.as_dict())
                self.report.say(f"best checkpoint so far: step {best.step}, {best.metric} {best.value:.5f}")
