"""Local ranks through torch's elastic launcher, or joining torchrun's.

Signals: ranks start with SIGINT and SIGTERM blocked, as they inherit it from the launcher's main thread, and open
them once their own handler is in place. The launcher passes signals on. A rank then finishes its step, commits and
returns, and the launcher sees an ordinary end.
"""

import logging
import multiprocessing
import os
import signal
import sys
import tempfile
import threading
import time
import uuid
from collections.abc import Callable
from contextlib import suppress
from multiprocessing import resource_tracker
from pathlib import Path
from types import FrameType
from typing import TypeVar

from dlrm_scale.errors import ConfigError, DlrmScaleError, TrainingError
from dlrm_scale.plain_warnings import tell_warnings_plainly
from dlrm_scale.train.failure import describe_failure, first_cause, mark_done, mark_started, record_failure
from dlrm_scale.train.stop import REPEAT_SECONDS, StopRequest

__all__ = ["default_local_ranks", "launch", "under_torchrun"]

Argument = TypeVar("Argument")
Result = TypeVar("Result")
RankFunction = Callable[[Argument, StopRequest], Result]

_SIGNALS = {signal.SIGINT, signal.SIGTERM}


def under_torchrun() -> bool:
    """Whether another launcher has already started the ranks."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def default_local_ranks(device: str) -> int:
    """One rank a GPU, or one on CPU."""
    import torch

    gpus = torch.cuda.device_count() if device != "cpu" else 0
    return max(1, gpus)


def launch(
    function: "RankFunction[Argument, Result]", argument: Argument, local_ranks: int, shutdown_seconds: int
) -> Result:
    """Run `function(argument, stop)` on every rank and return rank 0's result.

    Args:
        function: a module-level function; it joins the process group itself.
        argument: picklable, the same for all ranks.
        local_ranks: ranks to start here; ignored under torchrun.
        shutdown_seconds: how long ranks may take after a signal.

    Raises:
        DlrmScaleError: the first cause, naming the rank.
    """
    if under_torchrun():
        return _joined(function, argument)
    if local_ranks < 1:
        raise ConfigError(f"--nproc {local_ranks}: there must be at least one rank")
    if local_ranks == 1:
        stop = StopRequest()
        stop.install()
        result = function(argument, stop)
        _ignore_late_signals(stop)
        return result
    return _elastic(function, argument, local_ranks, shutdown_seconds)


def _joined(function: "RankFunction[Argument, Result]", argument: Argument) -> Result:
    stop = StopRequest()
    stop.install()
    try:
        result = function(argument, stop)
    except Exception as error:
        failure = describe_failure(int(os.environ["RANK"]), error)
        shown = failure.error()
        if failure.lost_peer:
            shown = TrainingError(f"rank {failure.rank}: lost another rank; its own error is the cause")
        sys.stderr.write(f"error: {shown}\n")
        sys.stdout.flush()
        sys.stderr.flush()
        # a plain exit could wait for threads of a broken process group
        os._exit(failure.exit_code)
    _ignore_late_signals(stop)
    return result


def _ignore_late_signals(stop: StopRequest) -> None:
    """A run that has stopped well isn't killed by the rest of an impatient series."""
    if stop.requested:
        for signum in _SIGNALS:
            signal.signal(signum, signal.SIG_IGN)


def _elastic(
    function: "RankFunction[Argument, Result]", argument: Argument, local_ranks: int, shutdown_seconds: int
) -> Result:
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    # the launcher's own tracebacks would bury the rank's message, which is printed instead
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    # "Terminating process N via signal SIGTERM" for each rank that outlives the one that failed
    logging.getLogger("torch.multiprocessing.spawn").setLevel(logging.ERROR)
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    with tempfile.TemporaryDirectory(prefix="dlrm-scale-") as folder:
        launcher = elastic_launch(
            LaunchConfig(
                min_nodes=1,
                max_nodes=1,
                nproc_per_node=local_ranks,
                run_id=uuid.uuid4().hex,
                rdzv_backend="c10d",
                rdzv_endpoint="localhost:0",
                max_restarts=0,
                monitor_interval=0.1,
                start_method="spawn",
                shutdown_timeout=shutdown_seconds,
                # not SIGINT and SIGTERM: torch would kill the ranks 30 s after them and raise here
                signals_to_handle="SIGHUP,SIGQUIT",
            ),
            _rank_main,
        )
        # it opens both signals in this thread when it starts, so it must start before they are blocked
        resource_tracker.ensure_running()
        with _SignalForwarding(shutdown_seconds) as forwarding:
            try:
                results = launcher(function, argument, folder, os.getpid())
            except ChildFailedError as error:
                if forwarding.abandoned:
                    abandoned = TrainingError("stopped at once: work since the last checkpoint is lost")
                    abandoned.exit_code = 130
                    raise abandoned from None
                failure = first_cause(Path(folder))
                if failure is None:
                    rank, cause = error.get_first_failure()
                    raise TrainingError(f"rank {rank} ended before it ran (exit code {cause.exitcode})") from None
                raise failure.error() from None
    first: Result = results[0]
    return first


def _rank_main(
    function: "RankFunction[Argument, Result]", argument: Argument, folder: str, launcher: int
) -> Result | None:
    rank = int(os.environ["RANK"])
    tell_warnings_plainly()
    stop = StopRequest()
    stop.install()
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
    threading.Thread(target=_end_with_launcher, args=(launcher,), daemon=True).start()
    mark_started(Path(folder), rank)
    try:
        result = function(argument, stop)
    except Exception as error:
        record_failure(Path(folder), rank, error)
        sys.stderr.flush()
        # a plain exit could wait for threads of a broken process group
        os._exit(error.exit_code if isinstance(error, DlrmScaleError) else 1)
    mark_done(Path(folder), rank)
    return result if rank == 0 else None


def _end_with_launcher(launcher: int) -> None:
    """End a rank whose launcher is gone: the store that ranks meet and vote through was in it."""
    while os.getppid() == launcher:
        time.sleep(0.5)
    os._exit(1)


class _SignalForwarding:
    """Passes SIGINT and SIGTERM on to the ranks, and kills ranks that don't stop in time.

    The main thread blocks both signals, so that the ranks it spawns begin with them blocked. A thread of this class
    leaves them open: the system delivers them there, and Python runs the handler in the main thread.
    """

    def __init__(self, shutdown_seconds: int) -> None:
        self._shutdown_seconds = shutdown_seconds
        self._first: float | None = None
        self.abandoned = False
        """Whether the ranks were made to end without finishing their step."""
        self._signum: int | None = None
        self._told: set[int] = set()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def __enter__(self) -> "_SignalForwarding":
        self._handlers = {signum: signal.signal(signum, self._handle) for signum in _SIGNALS}
        self._thread.start()
        self._mask = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
        return self

    def __exit__(self, *_: object) -> None:
        self._over.set()
        self._thread.join()
        signal.pthread_sigmask(signal.SIG_SETMASK, self._mask)
        for signum, handler in self._handlers.items():
            signal.signal(signum, handler if self._first is None else signal.SIG_IGN)

    def _handle(self, signum: int, frame: FrameType | None) -> None:
        if self._first is None:
            self._first = time.monotonic()
        elif time.monotonic() - self._first <= REPEAT_SECONDS:
            return
        else:
            self.abandoned = True
        self._told.clear()
        self._signum = signum
        self._tell()

    def _tell(self) -> None:
        """Pass the signal on to ranks that haven't had it; later ones may still be on their way."""
        for child in multiprocessing.active_children():
            if self._signum is not None and child.pid is not None and child.pid not in self._told:
                self._told.add(child.pid)
                _send(child.pid, self._signum)

    def _watch(self) -> None:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
        while not self._over.wait(0.2):
            if self._first is not None and time.monotonic() - self._first > self._shutdown_seconds:
                sys.stderr.write(f"ranks did not stop within {self._shutdown_seconds} s: killing them\n")
                self.abandoned = True
                for child in multiprocessing.active_children():
                    if child.pid is not None:
                        _send(child.pid, signal.SIGKILL)
                return
            self._tell()


def _send(pid: int, signum: int) -> None:
    with suppress(ProcessLookupError):
        os.kill(pid, signum)
