"""When to save, after CheckFreq (Mohan et al., FAST'21): what saving costs is measured, and the interval follows.

    interval = max( persist time / step time,                            one save is written at a time
                    (stall + interference) / (budget * step time) )      saving takes at most its share

in steps, at most what the wanted recovery point allows: a crash just before a commit costs the interval and the time
that the save was being written. stall is how long the training thread stands; interference how much longer the steps
take while a save is written in the background than without one. Measured anew at each save; the interval grows or
shrinks to the double or the half at most, so that one odd measurement can't do much.

Differs from CheckFreq: costs are a mean over the saves since the last baseline, as baselines cost many times a delta;
and there is no profiling phase, the first interval is given.
"""

import math
from dataclasses import dataclass

__all__ = ["Chosen", "IntervalTuner", "SaveCost", "wanted_steps"]


@dataclass(frozen=True, kw_only=True)
class SaveCost:
    """What one save took.

    Attributes:
        stall_seconds: of the training thread.
        interference_seconds: by which the steps beside it took longer in all; may be negative, by noise.
        persist_seconds: in the background.
    """

    stall_seconds: float
    interference_seconds: float
    persist_seconds: float

    @property
    def seconds(self) -> float:
        """What training lost."""
        return self.stall_seconds + self.interference_seconds


@dataclass(frozen=True, kw_only=True)
class Chosen:
    """An interval and why.

    Attributes:
        steps: between two saves.
        wanted_steps: without the limit to double and half.
        reason: `persist`, `budget` or `recovery point`: what decided `wanted_steps`.
        cost_seconds: that the next save is expected to take of training.
    """

    steps: int
    wanted_steps: int
    reason: str
    cost_seconds: float


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
        self._costs: list[SaveCost] = []

    def note(self, cost: SaveCost, *, step_seconds: float, baseline: bool) -> Chosen:
        """Take in a save that has ended and choose the interval to the next.

        Args:
            cost: of the save.
            step_seconds: of a step without a save beside it.
            baseline: it was one; the costs before are forgotten.
        """
        self._costs = [cost] if baseline else [*self._costs, cost]
        mean_seconds = max(0.0, sum(c.seconds for c in self._costs) / len(self._costs))
        wanted, reason = wanted_steps(
            cost_seconds=mean_seconds,
            persist_seconds=cost.persist_seconds,
            step_seconds=step_seconds,
            overhead_budget=self._overhead_budget,
            recovery_point_seconds=self._recovery_point_seconds,
        )
        self.steps = min(max(wanted, -(-self.steps // 2)), 2 * self.steps)
        return Chosen(steps=self.steps, wanted_steps=wanted, reason=reason, cost_seconds=mean_seconds)
