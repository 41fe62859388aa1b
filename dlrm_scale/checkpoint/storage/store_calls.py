"""Calls to a remote store: each has a time limit, and what may work the next time is tried again.

Stores throttle, drop connections and answer "internal error" as a matter of course; their libraries repeat such calls
themselves, but not all of them, and not if an answer never comes. A call that is given up goes on in its daemon thread:
its effect may still appear later, so whoever writes has to find out.
"""

import errno
import random
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TypeVar

from dlrm_scale.errors import CheckpointError

__all__ = ["Retries", "StoreCalls", "StoreTimeoutError", "UncertainWriteError", "is_outage", "is_transient"]

_TRANSIENT_ERRNOS = frozenset(
    {
        errno.EAGAIN,
        errno.EBUSY,  # what s3fs makes of SlowDown, ServiceUnavailable and 409
        errno.ECONNABORTED,
        errno.ECONNREFUSED,
        errno.ECONNRESET,
        errno.EHOSTUNREACH,
        errno.EINTR,
        errno.EIO,  # and of what it has no number for
        errno.ENETUNREACH,
        errno.EPIPE,
        errno.EREMOTEIO,  # and of InternalError
        errno.ETIMEDOUT,
    }
)
_NET_PACKAGES = frozenset({"aiobotocore", "aiohttp", "botocore", "gcsfs", "requests", "urllib3"})
_TRANSIENT_STATUS = frozenset({408, 425, 429, 500, 502, 503, 504})

_OUTAGE_ERRNOS = (_TRANSIENT_ERRNOS - {errno.EINTR, errno.EIO, errno.EREMOTEIO}) | {
    errno.EACCES,
    errno.EHOSTDOWN,
    errno.EMFILE,  # this process has too many files open
    errno.ENETDOWN,
    errno.ENETRESET,
    errno.ENFILE,
    errno.ENODEV,
    errno.ENOMEM,
    errno.ENOTCONN,  # of a network file system that was unmounted
    errno.ENXIO,
    errno.EPERM,
    errno.ESTALE,
}
"""EIO is what a broken disk says, too; a store has none, and `StoreCalls` makes a `ConnectionError` of it."""

T = TypeVar("T")


class StoreTimeoutError(TimeoutError):
    """A call gave no answer in time; it may still take effect."""


class UncertainWriteError(OSError):
    """It isn't known whether a file was made, nor whether it still will be."""


@dataclass(frozen=True, kw_only=True)
class Retries:
    """How patient a storage is.

    Attributes:
        attempts: of one operation, at least 1.
        first_pause_seconds: before the second attempt; doubled before each further one.
        longest_pause_seconds: where doubling ends.
        call_timeout_seconds: of one call.
        give_up_seconds: of an operation with all its attempts. Ranks take one that is silent for
            `checkpoint.vote_timeout_seconds` for dead, so it has to be shorter.
        now: a clock in seconds.
        pause: waits for some seconds.
        draw: a random number in [0, 1): ranks that were throttled together don't come back together.
    """

    attempts: int = 8
    first_pause_seconds: float = 0.5
    longest_pause_seconds: float = 16.0
    call_timeout_seconds: float = 60.0
    give_up_seconds: float = 96.0
    now: Callable[[], float] = field(default=time.monotonic)
    pause: Callable[[float], None] = field(default=time.sleep)
    draw: Callable[[], float] = field(default=random.random)

    def pause_seconds(self, attempt: int) -> float:
        """Wait after attempt `attempt` (the first is 1): exponential, between half of it and all of it by chance."""
        longest = min(self.first_pause_seconds * 2.0 ** (attempt - 1), self.longest_pause_seconds)
        return longest * (0.5 + 0.5 * self.draw())


class StoreCalls:
    """Makes calls with the patience of `retries`; every failure leaves it as an OSError that names the operation."""

    def __init__(self, retries: Retries) -> None:
        self._retries = retries

    def once(self, what: str, call: Callable[[], T]) -> T:
        """Make one call.

        Args:
            what: the operation in words, for messages.
            call: runs in a thread of its own.

        Raises:
            StoreTimeoutError: no answer in time.
            OSError: whatever the store says.
        """
        return self._once(what, call, self._retries.call_timeout_seconds)

    def until_it_works(
        self, what: str, call: Callable[[], T], *, may_repeat: Callable[[OSError], bool] = lambda error: True
    ) -> T:
        """Repeat a call while its failures are transient.

        Args:
            what: the operation in words, for messages.
            call: safe to repeat after a transient failure, also beside itself.
            may_repeat: says no to a transient failure after which the call isn't safe to repeat.

        Raises:
            OSError: the first failure that isn't transient, or the last one.
        """
        retries = self._retries
        ends = retries.now() + retries.give_up_seconds
        attempt = 0
        while True:
            attempt += 1
            try:
                return self._once(what, call, min(retries.call_timeout_seconds, ends - retries.now()))
            except OSError as error:
                pause = retries.pause_seconds(attempt)
                over = attempt >= retries.attempts or retries.now() + pause >= ends
                if over or not is_transient(error) or not may_repeat(error):
                    if attempt > 1:
                        error.add_note(f"after {attempt} attempts")
                    raise
            retries.pause(pause)

    def _once(self, what: str, call: Callable[[], T], timeout_seconds: float) -> T:
        results: list[T] = []
        failures: list[BaseException] = []

        def run() -> None:
            try:
                results.append(call())
            except BaseException as error:
                failures.append(error)

        thread = threading.Thread(target=run, name=f"store: {what}", daemon=True)
        thread.start()
        thread.join(max(timeout_seconds, 0.001))
        if failures:
            failure = _as_os_error(failures[0], what)
            raise failure from (None if failure is failures[0] else failures[0])
        if results:
            return results[0]
        raise StoreTimeoutError(errno.ETIMEDOUT, f"{what}: no answer within {timeout_seconds:g} s")


def is_outage(error: BaseException) -> bool:
    """Say whether the storage couldn't be asked, in the end: whatever was to be read may be as sound as ever."""
    return isinstance(error, (TimeoutError, ConnectionError)) or (
        isinstance(error, OSError) and error.errno in _OUTAGE_ERRNOS
    )


def is_transient(error: BaseException) -> bool:
    """Say whether the same call may work the next time."""
    cause = error.__cause__
    status = getattr(cause, "code", None) or getattr(cause, "status", None)
    if str(status).isdecimal():
        return int(str(status)) in _TRANSIENT_STATUS
    if isinstance(error, (TimeoutError, ConnectionError)):
        return True
    return isinstance(error, OSError) and error.errno in _TRANSIENT_ERRNOS


def _as_os_error(error: BaseException, what: str) -> BaseException:
    """The same kind of OSError with the operation in its text; EOFError and our own errors stay as they are."""
    if isinstance(error, (EOFError, CheckpointError)) or not isinstance(error, Exception):
        return error
    text = f"{what}: {str(error) or type(error).__name__}"
    for kind in (FileExistsError, FileNotFoundError, PermissionError, IsADirectoryError, TimeoutError):
        if isinstance(error, kind):
            return kind(error.errno or _ERRNOS[kind], text)
    if isinstance(error, OSError):
        number = error.errno or errno.EIO
        is_trouble = isinstance(error, ConnectionError) or number in _STORE_TROUBLE
        return ConnectionError(number, text) if is_trouble else OSError(number, text)
    # aiohttp's and the libraries' own exceptions: a connection that broke, unless a status says otherwise.
    return ConnectionError(errno.EIO, text) if _is_of_the_net(error) else OSError(errno.EINVAL, text)


_STORE_TROUBLE = frozenset({errno.EIO, errno.EREMOTEIO})


_ERRNOS: dict[type[OSError], int] = {
    FileExistsError: errno.EEXIST,
    FileNotFoundError: errno.ENOENT,
    PermissionError: errno.EACCES,
    IsADirectoryError: errno.EISDIR,
    TimeoutError: errno.ETIMEDOUT,
}


def _is_of_the_net(error: Exception) -> bool:
    return type(error).__module__.split(".")[0] in _NET_PACKAGES
