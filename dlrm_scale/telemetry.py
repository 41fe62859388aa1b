"""Where the main thread's time goes, by exclusive named intervals."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

__all__ = ["StepClock"]


class StepClock:
    """Adds up seconds by name; an interval inside another is taken off the outer one.

    Args:
        now: the clock, in seconds; a parameter so that tests need not wait.
    """

    def __init__(self, now: Callable[[], float] = time.perf_counter) -> None:
        self._now = now
        self._stack: list[float] = []
        self.seconds: dict[str, float] = {}
        self.started = now()

    @contextmanager
    def interval(self, name: str) -> Iterator[None]:
        """Charge the time inside the `with` block to `name`, less what nested intervals are charged."""
        start = self._now()
        self._stack.append(0.0)
        try:
            yield
        finally:
            elapsed = self._now() - start
            nested = self._stack.pop()
            self.seconds[name] = self.seconds.get(name, 0.0) + elapsed - nested
            if self._stack:
                self._stack[-1] += elapsed

    def elapsed(self) -> float:
        """Seconds since the clock was made or reset."""
        return self._now() - self.started

    def reset(self) -> None:
        """Start again from zero."""
        self.seconds = {}
        self.started = self._now()
