"""Long calls into compiled libraries that Ctrl-C ends at once.

Python runs the handler of a signal in the main thread, between two of its own instructions: not before a library's call
returns. So the call runs in a thread of its own, while the main thread waits and may be interrupted.
"""

import os
import sys
import threading
from collections.abc import Callable
from typing import TypeVar

__all__ = ["end_beside_abandoned_calls", "interruptible"]

T = TypeVar("T")

_LOOK_SECONDS = 0.2
"""Between two looks for a signal that the wait itself missed."""
_abandoned: list[threading.Thread] = []
"""Threads whose results nobody waits for any more."""


def interruptible(call: Callable[[], T], stop: Callable[[], None] = lambda: None) -> T:
    """Run a call that releases Python's lock while it works.

    Args:
        call: its result or error is the caller's.
        stop: asks the library to end early; called before an interrupt goes on. A library that can't is left alone: its
            thread ends with the process, see `end_beside_abandoned_calls`.

    Raises:
        KeyboardInterrupt: or whatever a handler of a signal raises in the main thread.
    """
    if threading.current_thread() is not threading.main_thread():
        return call()
    results: list[T] = []
    errors: list[BaseException] = []
    ended = threading.Event()

    def work() -> None:
        try:
            results.append(call())
        except BaseException as error:  # handed to the main thread, which raises it
            errors.append(error)
        finally:
            ended.set()

    thread = threading.Thread(target=work, name="solver", daemon=True)
    thread.start()
    try:
        while not ended.wait(_LOOK_SECONDS):
            pass
    except BaseException:
        _abandoned.append(thread)
        stop()
        raise
    if errors:
        raise errors[0]
    return results[0]


def end_beside_abandoned_calls(exit_code: int) -> None:
    """End the process at once if a call that was interrupted still runs; otherwise do nothing.

    Libraries tear down their threads as a process exits. HiGHS aborts it then, with SIGABRT and words of its own, where
    one of them still works.
    """
    if any(thread.is_alive() for thread in _abandoned):
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(exit_code)
