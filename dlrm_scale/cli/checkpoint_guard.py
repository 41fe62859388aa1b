"""What all checkpoint commands share: a clean end at a signal, and an outage that isn't called damage."""

import errno
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import wraps
from types import FrameType
from typing import ParamSpec

import typer

from dlrm_scale.cli.output_errors import is_of_output

__all__ = ["guarded"]

P = ParamSpec("P")

_SIGNALS = (signal.SIGTERM, signal.SIGHUP)
_NO_ROOM = (errno.ENOSPC, errno.EDQUOT)


def guarded(command: Callable[P, None]) -> Callable[P, None]:
    """Make a command give back what it holds at a signal, and tell a storage's errors as such.

    SIGINT, SIGTERM and SIGHUP end it with exit code 130 after its leases and uncommitted files are gone. An `OSError`
    becomes a `StorageError`: exit code 1, as nothing is known to be damaged.
    """

    @wraps(command)
    def run(*args: P.args, **kwargs: P.kwargs) -> None:
        with _interruptible(), _storage_errors(str(kwargs["run"])):
            command(*args, **kwargs)

    return run


@contextmanager
def _interruptible() -> Iterator[None]:
    def stop(signum: int, frame: FrameType | None) -> None:
        raise KeyboardInterrupt

    in_main = threading.current_thread() is threading.main_thread()
    # one that is ignored, as SIGHUP under nohup, stays ignored
    taken = [signum for signum in _SIGNALS if in_main and signal.getsignal(signum) is not signal.SIG_IGN]
    before = {signum: signal.signal(signum, stop) for signum in taken}
    try:
        yield
    except KeyboardInterrupt:
        raise typer.Exit(130) from None
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)


@contextmanager
def _storage_errors(run: str) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        if is_of_output(error):
            raise
        from dlrm_scale.checkpoint.files.format import OUTAGE_REMEDY
        from dlrm_scale.errors import StorageError

        reason = ", ".join([error.strerror or str(error), *getattr(error, "__notes__", ())])
        remedy = OUTAGE_REMEDY
        if error.errno in _NO_ROOM:
            remedy = f"make room on its disk: `dlrm-scale checkpoint gc {run}` removes old checkpoints"
        elif error.errno == errno.EROFS:
            remedy = "name a run that may be written to"
        raise StorageError(f"{error.filename or run}: {reason}", remedy=remedy) from error
