"""Local ranks through torch's elastic launcher, or joining torchrun's.

Signals: the launcher blocks SIGINT and SIGTERM, so the ranks start with them blocked and open them only once their
own handler is in place; a thread waits for them and passes them on. A rank then finishes its step, commits and
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
from pathlib import Path
from typing import TypeVar

from dlrm_scale.errors import ConfigError, DlrmScaleError, TrainingError
from dlrm_scale.train.failure import first_cause, mark_done, mark_started, record_failure
from dlrm_scale.train.stop import StopRequest

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
        return function(argument, stop)
    return _elastic(function, argument, local_ranks, shutdown_seconds)


def _joined(function: "RankFunction[Argument, Result]", argument: Argument) -> Result:
    stop = StopRequest()
    stop.install()
    try:
        return function(argument, stop)
    except Exception as error:
        with tempfile.TemporaryDirectory() as folder:
            failure = record_failure(Path(folder), int(os.environ["RANK"]), error)
        if failure.lost_peer:
            raise TrainingError(f"rank {failure.rank}: lost another rank; its own error is the cause") from None
        raise failure.error() from None


def _elastic(
    function: "RankFunction[Argument, Result]", argument: Argument, local_ranks: int, shutdown_seconds: int
) -> Result:
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    # the launcher's own tracebacks would bury the rank's message, which is printed instead
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
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
            ),
            _rank_main,
        )
        previous = signal.pthread_sigmask(signal.SIG_BLOCK, _SIGNALS)
        over = threading.Event()
        forwarder = threading.Thread(target=_forward_signals, args=(over, shutdown_seconds), daemon=True)
        forwarder.start()
        try:
            results = launcher(function, argument, folder)
        except ChildFailedError as error:
            failure = first_cause(Path(folder))
            if failure is None:
                rank, cause = error.get_first_failure()
                raise TrainingError(f"rank {rank} ended before it ran (exit code {cause.exitcode})") from None
            raise failure.error() from None
        finally:
            over.set()
            forwarder.join()
            signal.pthread_sigmask(signal.SIG_SETMASK, previous)
    first: Result = results[0]
    return first


def _rank_main(function: "RankFunction[Argument, Result]", argument: Argument, folder: str) -> Result | None:
    rank = int(os.environ["RANK"])
    stop = StopRequest()
    stop.install()
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _SIGNALS)
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


def _forward_signals(over: threading.Event, shutdown_seconds: int) -> None:
    first: float | None = None
    while not over.is_set():
        received = signal.sigtimedwait(_SIGNALS, 0.2)
        if received is not None:
            first = first or time.monotonic()
            _signal_children(received.si_signo)
        if first is not None and time.monotonic() - first > shutdown_seconds:
            sys.stderr.write(f"ranks did not stop within {shutdown_seconds} s: killing them\n")
            _signal_children(signal.SIGKILL)
            first = None


def _signal_children(signum: int) -> None:
    for child in multiprocessing.active_children():
        if child.pid is not None:
            try:
                os.kill(child.pid, signum)
            except ProcessLookupError:
                continue
