"""A run's saves on the clock: when the next one is due, and what they cost so far.

Every rank keeps one. With `checkpoint.interval = steps` all find the same steps by counting. Otherwise rank 0's clock
decides: its wish reaches the others with the flags that ranks exchange after every step, so nobody waits for it.
"""

from collections import deque
from collections.abc import Mapping, Sequence
from statistics import fmean, median
from typing import Any

from dlrm_scale.checkpoint.saving.engine import SaveOutcome
from dlrm_scale.checkpoint.saving.interval import Chosen, IntervalTuner, SaveCost
from dlrm_scale.config import CheckpointConfig

__all__ = ["Cadence", "of_slowest_rank"]

_FIRST_STEPS = 100
_WARM_UP_STEPS = 5
"""The first steps of a process compile and allocate: taken for usual ones they would hide what saves cost."""
_STEPS_REMEMBERED = 200
"""Of each kind, the newest: step times drift with the data and the machine."""
_QUIET_STEPS_TO_COMPARE = 16
"""From fewer steps without a save nothing is said of how much slower those beside one are."""

_OF_ONE_RANK = ("stall_seconds", "interference_seconds", "persist_seconds", "stall_share", "measured_overhead")


def of_slowest_rank(summaries: Sequence[Mapping[str, Any]]) -> dict[str, object]:
    """One summary of all ranks: rank 0's, with the costs of the rank that lost most, named in `slowest_rank`.

    Steps end together, so what one rank loses all lose. Intervals, and what they were expected to cost, are rank 0's,
    whose clock decides.

    Args:
        summaries: `Cadence.summary()` of every rank, by rank.
    """
    lost = [summary["stall_seconds"] + summary["interference_seconds"] for summary in summaries]
    slowest = lost.index(max(lost))
    costs = {name: summaries[slowest][name] for name in _OF_ONE_RANK}
    return {**summaries[0], **costs, "slowest_rank": slowest}


class Cadence:
    """See the module. Times are passed in; none is read here.

    Args:
        config: when saves are due.
        first_steps: the interval that a resumed run had reached; 0 for that of the config.
    """

    def __init__(self, config: CheckpointConfig, *, first_steps: int = 0) -> None:
        self._config = config
        self._tuner = IntervalTuner(
            first_steps=first_steps or config.every_steps or _FIRST_STEPS,
            overhead_budget=config.overhead_budget,
            recovery_point_seconds=config.recovery_point_seconds,
        )
        self._steps_seen = 0
        self._training_seconds = 0.0
        self._quiet: deque[float] = deque(maxlen=_STEPS_REMEMBERED)
        self._beside: deque[float] = deque(maxlen=_STEPS_REMEMBERED)
        self._beside_count, self._beside_seconds = 0, 0.0
        self._since_step, self._since_seconds = 0, 0.0
        self._persist_seconds = 0.0
        self._outcomes: list[SaveOutcome] = []
        self._interference_seconds = 0.0
        self._chosen: list[tuple[int, Chosen]] = []
        self._lengths_steps: list[int] = []
        self._predicted, self._predicted_over, self._noisy_over = 0.0, 0.0, 0.0

    @property
    def interval_steps(self) -> int | None:
        """Steps to the next save; None if seconds decide, or only the end."""
        if self._config.interval == "auto":
            return self._tuner.steps
        return self._config.every_steps or None if self._config.interval == "steps" else None

    def begin(self, *, step: int, now_seconds: float) -> None:
        """The first step is about to begin; `now_seconds` is by the clock that `wishes` and `saved` are told of."""
        self._since_step, self._since_seconds = step, now_seconds

    def stepped(self, *, training_seconds: float, saving: bool) -> None:
        """A step has ended.

        Args:
            training_seconds: that steps have taken so far; stalls by saves, evaluation and profiles excluded.
            saving: a save was being written when it began.
        """
        seconds, self._training_seconds = training_seconds - self._training_seconds, training_seconds
        self._steps_seen += 1
        if self._steps_seen <= _WARM_UP_STEPS:
            return
        (self._beside if saving else self._quiet).append(seconds)
        if saving:
            self._beside_count += 1
            self._beside_seconds += seconds

    def wishes(self, *, step: int, now_seconds: float, saving: bool) -> bool:
        """Whether a save is due by this rank's clock; never while one is being written.

        Args:
            step: completed ones.
            now_seconds: see `begin`.
            saving: a save is being written.
        """
        if self._config.interval == "steps" or saving:
            return False
        passed_seconds = now_seconds - self._since_seconds
        if self._config.interval == "seconds":
            return passed_seconds >= self._config.every_seconds
        late = passed_seconds + self._persist_seconds >= self._config.recovery_point_seconds
        return late or step - self._since_step >= self._tuner.steps

    def saved(self, *, step: int, now_seconds: float) -> None:
        """A save of `step` has begun, due or not."""
        self._lengths_steps.append(step - self._since_step)
        if self._chosen:
            chosen, passed_seconds = self._chosen[-1][1], now_seconds - self._since_seconds
            self._predicted += chosen.cost_seconds
            self._predicted_over += passed_seconds
            self._noisy_over += passed_seconds if chosen.noisy else 0.0
        self._since_step, self._since_seconds = step, now_seconds
        self._beside_count, self._beside_seconds = 0, 0.0

    def ended(self, outcome: SaveOutcome) -> dict[str, object]:
        """A save has ended; choose the next interval.

        Returns:
            What its log line says besides the outcome, None where it isn't known: `interference_seconds`,
            `interval_steps` and `interval_reason` for the next, and its `predicted_overhead`, None as well where
            it is `too_noisy_to_predict`.
        """
        self._outcomes.append(outcome)
        self._persist_seconds = outcome.persist_seconds
        interference = chosen = predicted = None
        if len(self._quiet) >= _QUIET_STEPS_TO_COMPARE:
            # means, as a mean is what the steps would have taken; the tuner takes medians over saves
            interference = self._beside_seconds - self._beside_count * fmean(self._quiet)
            self._interference_seconds += interference
        step_seconds = self._step_seconds()
        if step_seconds is not None and outcome.committed:
            chosen = self._choose(outcome, interference, step_seconds)
            predicted = self._predict(chosen, step_seconds)
        return {
            "interference_seconds": interference,
            "interval_steps": self.interval_steps,
            "too_noisy_to_predict": chosen.noisy if chosen is not None else None,
            "interval_reason": chosen.reason if chosen is not None and self._config.interval == "auto" else None,
            "predicted_overhead": predicted,
        }

    def conflict(self) -> str | None:
        """Say that the wanted recovery point can't be kept, or costs more than the budget; None if neither."""
        config = self._config
        if config.interval != "auto" or not self._chosen:
            return None
        if self._persist_seconds > config.recovery_point_seconds:
            return (
                f"writing a checkpoint takes {self._persist_seconds:.1f} s, so a crash may cost more than "
                f"checkpoint.recovery_point_seconds = {config.recovery_point_seconds:g}"
            )
        if self._chosen[-1][1].reason == "recovery point":
            return (
                f"checkpoint.recovery_point_seconds = {config.recovery_point_seconds:g} asks for more checkpoints than "
                f"checkpoint.overhead_budget = {config.overhead_budget:g} has room for; the recovery point goes first"
            )
        return None

    def summary(self) -> dict[str, object]:
        """JSON-ready, of this rank: what was saved, when, and what it cost; shares are None before there is something.

        A stall is a wait of training for a save (`SaveOutcome.stall_seconds`): for what goes into it, the copy of the
        rows, and the save before where that isn't done. `stall_share` and `measured_overhead`, stalls and slower steps
        together, are over the training time: of steps and stalls, without evaluation, start-up and the wait for the
        last save at the end of the run. `predicted_overhead` is what each interval was expected to lose to its save;
        None also if for most of the time it was `too_noisy_to_predict`.
        """
        committed = [outcome for outcome in self._outcomes if outcome.committed]
        stall_seconds = sum(outcome.stall_seconds for outcome in self._outcomes)
        interference_seconds = max(0.0, self._interference_seconds)
        total_seconds = self._training_seconds + stall_seconds
        lost = stall_seconds + interference_seconds
        noisy = self._noisy_over > self._predicted_over / 2
        return {
            "policy": self._config.policy,
            "interval": self._config.interval,
            "baselines": sum(outcome.kind == "baseline" for outcome in committed),
            "deltas": sum(outcome.kind != "baseline" for outcome in committed),
            "failed": len(self._outcomes) - len(committed),
            "bytes": sum(outcome.bytes for outcome in committed),
            "rows": sum(outcome.rows for outcome in committed),
            "stall_seconds": stall_seconds,
            "interference_seconds": interference_seconds,
            "persist_seconds": sum(outcome.persist_seconds for outcome in self._outcomes),
            "stall_share": stall_seconds / total_seconds if total_seconds else None,
            "predicted_overhead": self._predicted / self._predicted_over
            if self._predicted_over and not noisy
            else None,
            "too_noisy_to_predict": noisy,
            "measured_overhead": lost / total_seconds if total_seconds else None,
            "fewest_steps_between": min(self._lengths_steps, default=None),
            "most_steps_between": max(self._lengths_steps, default=None),
            "chosen_intervals": [[step, chosen.steps] for step, chosen in self._changes()],
        }

    def _step_seconds(self) -> float | None:
        """Of a usual step without a save beside it.

        After a job has become faster there may be no such step for long, as saves that were apart then touch: what
        steps take beside one is at least as much.
        """
        kinds = [steps for steps in (self._quiet, self._beside) if len(steps) >= _QUIET_STEPS_TO_COMPARE]
        if not kinds:
            kinds = [self._quiet] if self._quiet else []
        return min((median(steps) for steps in kinds), default=None)

    def _choose(self, outcome: SaveOutcome, interference: float | None, step_seconds: float) -> Chosen:
        cost = SaveCost(
            stall_seconds=outcome.stall_seconds,
            interference_seconds=interference,
            persist_seconds=outcome.persist_seconds,
        )
        chosen = self._tuner.note(cost, step_seconds=step_seconds, baseline=outcome.kind == "baseline")
        self._chosen.append((outcome.step, chosen))
        return chosen

    def _predict(self, chosen: Chosen, step_seconds: float) -> float | None:
        if chosen.noisy:
            return None
        if self._config.interval == "seconds":
            return chosen.cost_seconds / self._config.every_seconds
        return chosen.cost_seconds / (self.interval_steps * step_seconds) if self.interval_steps else None

    def _changes(self) -> list[tuple[int, Chosen]]:
        """The saves after which another interval was chosen, under auto."""
        if self._config.interval != "auto":
            return []
        before = [None, *(chosen.steps for _, chosen in self._chosen)]
        return [found for found, steps in zip(self._chosen, before, strict=False) if found[1].steps != steps]
