"""Telling an error of what is printed to from one of files: a full disk behind `>`, a closed pipe."""

import os
import signal
import sys
import traceback

import typer

__all__ = ["end_of_output_error", "is_of_output"]

_PRINTERS = frozenset({typer.echo.__module__, "rich.console"})


def is_of_output(error: OSError) -> bool:
    """Whether printing raised it."""
    return any(frame.f_globals.get("__name__") in _PRINTERS for frame, _ in traceback.walk_tb(error.__traceback__))


def end_of_output_error(error: OSError) -> int:
    """Say what is wrong, and give the exit code; a closed pipe, as of `… | head`, is what somebody wanted."""
    # The interpreter flushes it at the end, and would complain again.
    sys.stdout = open(os.devnull, "w")
    if isinstance(error, BrokenPipeError):
        return 128 + signal.SIGPIPE
    print(  # noqa: T201
        f"error: the output can't be written: {error.strerror}\n  remedy: print to another place", file=sys.stderr
    )
    return 1
