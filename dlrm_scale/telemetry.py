"""Where the main thread's time goes, by named intervals."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

__all__ = ["StepClock"]


class StepClock:
    """Adds up seconds by name. Intervals don't nest: the time of an inner one would count twice.

    Args:
        now: the clock, in seconds; a parameter so that tests need not wait.

    Attributes:
        seconds: charged so far, by name.
    """

    def __init__(self, now: Callable[[], float] = time.perf_counter) -> None:
        self._now = now
        self._started = now()
        self.seconds: dict[str, float] = {}

    @contextmanager
    def interval(self, name: str) -> Iterator[None]:
        """Charge the time inside the `with` block to `name`, also when it ends in an error."""
        start = self._now()
        try:
            yield
        finally:
            self.seconds[name] = self.seconds.get(name, 0.0) + self._now() - start

    def elapsed(self) -> float:
        """Seconds since the clock was made."""
        return self._now() - self._started
