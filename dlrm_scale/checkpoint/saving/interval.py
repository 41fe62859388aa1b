"""When to save, after CheckFreq (Mohan et al., FAST'21): what saving costs is measured, and the interval follows.

    interval = max( persist time / step time,                            one save is written at a time
                    (stall + interference) / (budget * step time) )      saving takes at most its share

in steps, at most what the wanted recovery point allows: a crash just before a commit costs the interval and the time
that the save was being written. stall is how long the training thread stands; interference how much longer the steps
take while a save is written in the background than without one.

Stalls and persist times are measured directly. Interference is a small difference of large sums: where steps take 5 ms
or 50 ms by turns it comes out anywhere between -40 and 40 s. So it is taken with its error, from the last saves:

* stalls and persist times alone bound the interval from below, whatever the interference is said to be;
* the interval grows for interference only as far as the interference exceeds twice its standard error;
* it shrinks only to where twice the standard error is paid for as well, and not before `_SAVES_TO_SHRINK` saves;
* it at most doubles or halves at a time.

Differs from CheckFreq, beside that: a baseline costs many times a delta, so its cost is spread over the saves up to the
next one; and there is no profiling phase, the first interval is given.
"""

import math
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from statistics import fmean, median, quantiles

__all__ = ["Chosen", "IntervalTuner", "SaveCost", "wanted_steps"]

_SAVES_REMEMBERED = 12
_SAVES_TO_SHRINK = 4
_ERRORS = 2.0
"""Standard errors that a change must exceed."""
_SAVES_WITH_SPREAD = 4
"""From fewer, a spread says nothing."""
_QUARTILES_TO_DEVIATION = 1.349
"""Of normal values; and the median's error is 1.25 times the mean's."""


@dataclass(frozen=True, kw_only=True)
class SaveCost:
    """What one save took.

    Attributes:
        stall_seconds: of the training thread.
        interference_seconds: by which the steps beside it took longer in all; may be negative, by noise. None if too
            few steps were seen to tell.
        persist_seconds: in the background.
    """

    stall_seconds: float
    interference_seconds: float | None
    persist_seconds: float


@dataclass(frozen=True, kw_only=True)
class Chosen:
    """An interval and why.

    Attributes:
        steps: between two saves.
        wanted_steps: by the estimates as they are, without their errors and the limit to double and half.
        reason: `persist`, `budget` or `recovery point`: what decided `wanted_steps`.
        cost_seconds: that the next save is expected to take of training.
        error_seconds: standard error of `cost_seconds`; 0 from too few saves to tell.
        noisy: twice the error is more than half of `cost_seconds`, and of the budget: the cost can't be predicted.
    """

    steps: int
    wanted_steps: int
    reason: str
    cost_seconds: float
    error_seconds: float
    noisy: bool


def wanted_steps(
    *,
    cost_seconds: float,
    persist_seconds: float,
    step_seconds: float,
    overhead_budget: float,
    recovery_point_seconds: float,
) -> tuple[int, str]:
    """CheckFreq's interval in steps, and what decided it; see the module.

    Args:
        cost_seconds: stall and interference of a save.
        persist_seconds: of a save.
        step_seconds: of a step without a save beside it.
        overhead_budget: share of the training time.
        recovery_point_seconds: most training time that a crash may cost.
    """
    by_persist = max(1, math.ceil(persist_seconds / step_seconds))
    by_budget = math.ceil(max(0.0, cost_seconds) / (overhead_budget * step_seconds))
    by_recovery = math.floor((recovery_point_seconds - persist_seconds) / step_seconds)
    if by_budget <= by_persist:
        return by_persist, "persist"
    if by_recovery < by_budget:
        return max(by_persist, by_recovery), "recovery point"
    return by_budget, "budget"


@dataclass(frozen=True, kw_only=True)
class _Typical:
    """A save of one kind, by the last ones.

    Attributes:
        stall_seconds: `_capped_mean`.
        persist_seconds: likewise.
        interference_seconds: median, at least 0; 0 where it isn't known.
        error_seconds: of stall and interference, by the spread of their medians; 0 where it isn't known.
        known: there were enough saves to know the interference and the error.
    """

    stall_seconds: float
    persist_seconds: float
    interference_seconds: float
    error_seconds: float
    known: bool

    @classmethod
    def of(cls, costs: Iterable[SaveCost]) -> "_Typical":
        costs = list(costs)
        stalls = [cost.stall_seconds for cost in costs]
        told = [cost.interference_seconds for cost in costs if cost.interference_seconds is not None]
        known = len(told) >= _SAVES_WITH_SPREAD
        return cls(
            stall_seconds=_capped_mean(stalls),
            persist_seconds=_capped_mean([cost.persist_seconds for cost in costs]),
            interference_seconds=max(0.0, median(told)) if told else 0.0,
            error_seconds=math.hypot(_error(stalls), _error(told)) if known else 0.0,
            known=known,
        )


def _capped_mean(values: list[float]) -> float:
    """Mean with the largest counted as the second largest, once there are a few.

    One hiccup of the disk passes; a median would also leave out long stalls that every third save has.
    """
    ordered = sorted(values)
    if len(ordered) >= _SAVES_WITH_SPREAD:
        ordered[-1] = ordered[-2]
    return fmean(ordered)


def _error(values: list[float]) -> float:
    """Standard error of a median, by the middle half of the values, which a few odd ones don't move."""
    first, _, third = quantiles(values, n=4, method="inclusive")
    return 1.25 * (third - first) / _QUARTILES_TO_DEVIATION / math.sqrt(len(values))


class IntervalTuner:
    """The interval of a run.

    Args:
        first_steps: before anything is measured.
        overhead_budget: see `wanted_steps`.
        recovery_point_seconds: see `wanted_steps`.
    """

    def __init__(self, *, first_steps: int, overhead_budget: float, recovery_point_seconds: float) -> None:
        self.steps = first_steps
        self._overhead_budget = overhead_budget
        self._recovery_point_seconds = recovery_point_seconds
        self._deltas: deque[SaveCost] = deque(maxlen=_SAVES_REMEMBERED)
        self._baselines: deque[SaveCost] = deque(maxlen=_SAVES_REMEMBERED)
        self._saves = 0
        self._saves_since_baseline, self._saves_between_baselines = 0, 1

    def note(self, cost: SaveCost, *, step_seconds: float, baseline: bool) -> Chosen:
        """Take in a save that has ended and choose the interval to the next.

        Args:
            cost: of the save.
            step_seconds: of a step without a save beside it.
            baseline: it was one.
        """
        self._saves += 1
        if baseline and self._baselines:
            self._saves_between_baselines = self._saves_since_baseline
        self._saves_since_baseline = 1 if baseline else self._saves_since_baseline + 1
        (self._baselines if baseline else self._deltas).append(cost)
        kinds = self._kinds()
        stall_seconds = sum(share * kind.stall_seconds for share, kind in kinds)
        interference_seconds = sum(share * kind.interference_seconds for share, kind in kinds)
        error_seconds = math.hypot(*(share * kind.error_seconds for share, kind in kinds))
        told_seconds = sum(share * kind.interference_seconds for share, kind in kinds if kind.known)
        persist_seconds = kinds[-1][1].persist_seconds

        def wanted(cost_seconds: float) -> tuple[int, str]:
            return wanted_steps(
                cost_seconds=cost_seconds,
                persist_seconds=persist_seconds,
                step_seconds=step_seconds,
                overhead_budget=self._overhead_budget,
                recovery_point_seconds=self._recovery_point_seconds,
            )

        cost_seconds = stall_seconds + interference_seconds
        expected, reason = wanted(cost_seconds)
        at_least, _ = wanted(stall_seconds + max(0.0, told_seconds - _ERRORS * error_seconds))
        at_most, _ = wanted(cost_seconds + _ERRORS * error_seconds)
        if at_least > self.steps:
            self.steps = min(at_least, 2 * self.steps)
        elif at_most < self.steps and self._saves > _SAVES_TO_SHRINK and kinds[-1][1].known:
            self.steps = max(at_most, -(-self.steps // 2))
        half = max(cost_seconds, self._overhead_budget * self.steps * step_seconds) / 2
        return Chosen(
            steps=self.steps,
            wanted_steps=expected,
            reason=reason,
            cost_seconds=cost_seconds,
            error_seconds=error_seconds,
            noisy=_ERRORS * error_seconds > half,
        )

    def _kinds(self) -> list[tuple[float, _Typical]]:
        """Share of the next saves, and what one takes, of each kind so far as there were any; deltas last."""
        if not self._deltas:
            return [(1.0, _Typical.of(self._baselines))]
        if not self._baselines:
            return [(1.0, _Typical.of(self._deltas))]
        share = 1 / max(self._saves_since_baseline, self._saves_between_baselines)
        if share == 1:
            return [(1.0, _Typical.of(self._baselines))]
        return [(share, _Typical.of(self._baselines)), (1 - share, _Typical.of(self._deltas))]
