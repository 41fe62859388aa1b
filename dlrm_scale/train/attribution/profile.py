"""Traces of chosen steps by torch's profiler: one file a rank and run of consecutive steps.

A trace names the intervals of `telemetry` on the main thread and the parts of the backward pass, around every operator.
It opens in chrome://tracing and ui.perfetto.dev. Profiled steps are slower than others.
"""

from pathlib import Path

import torch
from torch.autograd.profiler import record_function
from torch.profiler import ProfilerActivity, profile

from dlrm_scale.sharding.step_phases import BackwardRanges
from dlrm_scale.telemetry import StepClock

__all__ = ["StepProfiler"]


class StepProfiler:
    """Profiles steps of a run on this rank; starting and writing are charged to the interval `profile`.

    Args:
        steps: which ones, 1 for a run's first.
        folder: where the traces go; made when the first is written.
        rank: for their names.
        clock: its switches become ranges of the trace.
        backward: splits the backward pass of profiled steps.

    Attributes:
        written: paths of the traces so far.
    """

    def __init__(
        self, steps: tuple[int, ...], folder: Path, rank: int, clock: StepClock, backward: BackwardRanges
    ) -> None:
        self.written: list[Path] = []
        self._notes: list[str] = []
        self._steps = frozenset(steps)
        self._to_come = set(steps)
        self._folder = folder
        self._rank = rank
        self._clock = clock
        self._backward = backward
        self._profile: profile | None = None
        self._ranges = _Ranges()
        self._first = self._last = 0

    def before(self, step: int) -> None:
        """Start, if `step` is the first of consecutive steps to profile."""
        if step not in self._steps or self._profile is not None:
            return
        with self._clock.interval("profile"):
            activities = [ProfilerActivity.CPU] + [ProfilerActivity.CUDA] * torch.cuda.is_available()
            self._profile = profile(activities=activities)
            self._profile.start()
        self._first = self._last = step
        self._backward.enabled = True
        self._clock.listeners.append(self._ranges.switch)

    def after(self, step: int) -> bool:
        """Stop and write, if `step` was the last of consecutive steps; says whether it was."""
        if self._profile is None:
            return False
        self._last = step
        self._to_come.discard(step)
        if step + 1 in self._steps:
            return False
        self.close()
        return True

    def close(self) -> None:
        """Stop and write what was profiled so far; nothing if nothing was."""
        if self._profile is not None:
            self._write()

    def end(self) -> None:
        """Close at the end of training, and note the steps that never came."""
        self.close()
        if self._to_come:
            named = ", ".join(str(step) for step in sorted(self._to_come))
            self._notes.append(f"warning: train.profile_steps: no trace of {named}, which this start did not train")
            self._to_come.clear()

    def _write(self) -> None:
        assert self._profile is not None
        stopped, self._profile = self._profile, None
        self._clock.listeners.remove(self._ranges.switch)
        self._ranges.switch(None)
        self._backward.enabled = False
        with self._clock.interval("profile"):
            stopped.stop()
            path = self._folder / f"steps-{self._first}-{self._last}-rank-{self._rank}.json.gz"
            try:
                self._folder.mkdir(parents=True, exist_ok=True)
                stopped.export_chrome_trace(str(path))
                self.written.append(path)
                steps = f"step {self._first}" if self._first == self._last else f"steps {self._first} to {self._last}"
                self._notes.append(f"traces of {steps}, of every rank: {self._folder}")
            except OSError as error:
                self._notes.append(f"warning: the trace {path} isn't written: {error}; training goes on without it")

    def take_notes(self) -> list[str]:
        """Return lines for the user that weren't returned before."""
        notes, self._notes = self._notes, []
        return notes


class _Ranges:
    """One range of the trace at a time."""

    def __init__(self) -> None:
        self._range: record_function | None = None

    def switch(self, name: str | None) -> None:
        """End the range and begin the next, if there is one."""
        if self._range is not None:
            self._range.__exit__(None, None, None)
        self._range = None if name is None else record_function(name)
        if self._range is not None:
            self._range.__enter__()  # type: ignore[no-untyped-call]
