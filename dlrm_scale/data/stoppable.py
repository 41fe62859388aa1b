"""Runs work in threads until all of it is done or some fails; then the rest stops at its next report."""

from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, Executor, wait
from typing import TypeVar

__all__ = ["StoppedError", "run_until_error"]

Item = TypeVar("Item")
T = TypeVar("T")


class StoppedError(Exception):
    """Raised in work that needn't go on: other work failed."""


def run_until_error(
    pool: Executor, work: Callable[[Item], T], items: Sequence[Item], stop: Callable[[], None]
) -> list[T]:
    """Call `work` for each item, in the pool.

    Args:
        pool: threads.
        work: may raise `StoppedError` once `stop` was called.
        items: what to work on.
        stop: makes running work end soon; called in any case, when all has ended or one has failed.

    Returns:
        The results in the order of the items.

    Raises:
        Exception: of the first item, in order, that failed by itself.
    """
    futures = [pool.submit(work, item) for item in items]
    try:
        wait(futures, return_when=FIRST_EXCEPTION)
    finally:
        # Also on KeyboardInterrupt; harmless when all are done.
        stop()
        for future in futures:
            future.cancel()
    errors = [future.exception() for future in futures if not future.cancelled()]
    for error in errors:
        if error is not None and not isinstance(error, StoppedError):
            raise error
    return [future.result() for future in futures]
