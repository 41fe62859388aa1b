"""SIGINT and SIGTERM as a wish to stop, not as an exception in the middle of a step."""

import os
import signal
import sys
import time
from collections.abc import Callable
from types import FrameType

from dlrm_scale.checkpoint.chain.leases import give_back_leases

__all__ = ["REPEAT_SECONDS", "StopRequest"]

REPEAT_SECONDS = 2.0
"""A Ctrl-C reaches a rank from the terminal and again from the launcher: repeats within this time count once."""


def _exit_at_once(code: int) -> None:
    """Without clean-up but for the lease of a restore, which would hold up removals for minutes."""
    try:
        give_back_leases()
    finally:  # also where no thread can be started any more
        os._exit(code)


class StopRequest:
    """Set by the first signal; a second one, later than two seconds, ends the process at once.

    Args:
        now: the clock, in seconds.
        abandon: called with the exit code on the second signal; ends the process if None.
    """

    def __init__(
        self,
        now: Callable[[], float] = time.monotonic,
        abandon: Callable[[int], object] | None = None,
    ) -> None:
        self._now = now
        self._abandon = abandon if abandon is not None else _exit_at_once
        self._first: float | None = None
        self.signal_name = ""

    @property
    def requested(self) -> bool:
        """Whether to stop after this step."""
        return self._first is not None

    def install(self) -> None:
        """Take over SIGINT and SIGTERM of this process (main thread only)."""
        signal.signal(signal.SIGINT, self.handle)
        signal.signal(signal.SIGTERM, self.handle)

    def handle(self, signum: int, frame: FrameType | None = None) -> None:
        """The signal handler."""
        name = signal.Signals(signum).name
        if self._first is None:
            self._first = self._now()
            self.signal_name = name
        elif self._now() - self._first > REPEAT_SECONDS:
            sys.stderr.write(f"second {name}: stopping at once, work since the last checkpoint is lost\n")
            self._abandon(128 + signum)
