"""Runs a function as ranks 0..n-1 in processes that stay alive between cases.

Importing torchrec takes 3-7 s, so workers are kept, and they are forked from a fork server that has imported it
once: the first case pays one import whatever the number of ranks, and a worker that was killed is replaced in
milliseconds. A plain fork of the pytest process would copy its threads' locks; the fork server has one thread.
"""

import atexit
import multiprocessing
import os
import pickle
import re
import signal
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import TypeVar

import torch.distributed as dist

from tests.support.rank_worker import Outcome, Request, serve

__all__ = ["RankDied", "RankTimeout", "run_ranks"]

_ROOT = str(Path(__file__).resolve().parents[2])
_PRELOAD = ["torch", "torchrec.models.dlrm", "dlrm_scale.models.initial_rows", "dlrm_scale.sharding.pipeline"]
_GRACE_SECONDS = 3.0
"""After the first failure: how long the other ranks have to answer before they are killed."""

_NEIGHBOUR_LEFT = re.compile(
    r"closed by peer|reset by peer|broken pipe|connection refused|connection was likely closed|socket timeout"
    r"|timed out waiting|application timeout|recvvalue failed|failed to recv|wait timeout",
    re.IGNORECASE,
)
"""What a rank reports when another one has failed before it."""


class RankDied(RuntimeError):
    """A rank's process ended in the middle of a case."""


class RankTimeout(RuntimeError):
    """A rank gave no answer in time; the message has the stacks of all its threads."""


T = TypeVar("T")


@dataclass
class _Worker:
    process: BaseProcess
    connection: Connection
    stacks_path: str


def run_ranks(
    ranks: int,
    function: Callable[..., T],
    *args: object,
    ranks_per_host: int | None = None,
    environment: Mapping[str, str] | None = None,
    timeout_seconds: float = 120.0,
    fresh: bool = False,
    **kwargs: object,
) -> list[T]:
    """Run `function(*args, **kwargs)` on ranks 0..ranks-1 and return the results in rank order.

    A rank finds RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE and MASTER_* in its environment, as under torchrun: the
    store is hosted here, so that no two cases race for a port. The default process group isn't initialised; one
    that the function leaves is destroyed. Each case begins with `torch.manual_seed(0)` and one torch thread.

    Args:
        ranks: number of processes.
        function: a function at module level; function, arguments and result are pickled.
        args: its arguments, the same on every rank.
        ranks_per_host: how many ranks pretend to share a host; default all.
        environment: more variables for the ranks (they don't see the test process's later changes).
        timeout_seconds: limit for the whole case.
        fresh: in processes that have run nothing else and end with the case, as a measurement of memory needs them.
        kwargs: its keyword arguments.

    Raises:
        BaseException: what a rank raised first, with the rank and its traceback as a note.
        RankDied: a process ended, and no rank raised anything of its own.
        RankTimeout: a rank gave no answer.
    """
    request = Request(function=function, args=args, kwargs=kwargs)
    pool = _Pool() if fresh else _POOL
    try:
        return pool.run(ranks, request, ranks_per_host or ranks, dict(environment or {}), timeout_seconds)
    finally:
        if fresh:
            pool.close()


class _Pool:
    def __init__(self) -> None:
        self._workers: list[_Worker] = []
        self._context = multiprocessing.get_context("forkserver")
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._started = 0

    def run(
        self, ranks: int, request: Request, ranks_per_host: int, environment: dict[str, str], timeout_seconds: float
    ) -> list[object]:
        payload = pickle.dumps(request)
        self._grow(ranks)
        workers = self._workers[:ranks]
        store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        for rank, worker in enumerate(workers):
            variables = _variables(rank, ranks, ranks_per_host, store.port) | environment
            worker.connection.send_bytes(pickle.dumps((variables, [_ROOT, *sys.path], payload)))
        outcomes: dict[int, Outcome] = {}
        try:
            outcomes = _collect(workers, timeout_seconds)
        finally:
            self._settle(workers, outcomes)
            del store
        _raise_first_cause(outcomes, workers, timeout_seconds)
        return [outcomes[rank].result for rank in range(ranks)]

    def _grow(self, ranks: int) -> None:
        self._workers = [w for w in self._workers if w.process.is_alive()]
        while len(self._workers) < ranks:
            self._workers.append(self._start())

    def _start(self) -> _Worker:
        if self._folder is None:
            self._folder = tempfile.TemporaryDirectory(prefix="rank_runner_")
            self._context.set_forkserver_preload(_PRELOAD)
        self._started += 1
        stacks_path = os.path.join(self._folder.name, f"stacks-{self._started}")
        ours, theirs = self._context.Pipe()
        with _start_conditions():
            process = self._context.Process(target=serve, args=(theirs, stacks_path), daemon=True)
            process.start()
        theirs.close()
        return _Worker(process, ours, stacks_path)

    def _settle(self, workers: list[_Worker], outcomes: dict[int, Outcome]) -> None:
        """Let the ranks that answered tear down; kill those that hang."""
        for rank, outcome in outcomes.items():
            if outcome.error is None:
                _send(workers[rank], b"finish")
        for rank, worker in enumerate(workers):
            if not (rank in outcomes and _ready(worker)):
                _kill(worker)
        self._workers = [w for w in self._workers if w.process.is_alive()]

    def close(self) -> None:
        for worker in self._workers:
            _kill(worker)
        self._workers = []
        if self._folder is not None:
            self._folder.cleanup()
            self._folder = None


@contextmanager
def _start_conditions() -> Iterator[None]:
    """Import paths for the child, and one thread for the fork server's libraries (a fork must not copy threads)."""
    names = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
    before = {name: os.environ.get(name) for name in names}
    os.environ.update(dict.fromkeys(names, "1"))
    sys.path.insert(0, _ROOT)
    try:
        yield
    finally:
        sys.path.remove(_ROOT)
        for name, value in before.items():
            os.environ.pop(name, None)
            if value is not None:
                os.environ[name] = value


def _variables(rank: int, ranks: int, ranks_per_host: int, port: int) -> dict[str, str]:
    variables = {
        "RANK": rank,
        "WORLD_SIZE": ranks,
        "LOCAL_RANK": rank % ranks_per_host,
        "LOCAL_WORLD_SIZE": ranks_per_host,
        "GROUP_RANK": rank // ranks_per_host,
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": port,
        "TORCHELASTIC_USE_AGENT_STORE": True,
    }
    if sys.platform == "linux":
        variables["GLOO_SOCKET_IFNAME"] = "lo"
    return {name: str(value) for name, value in variables.items()}


def _collect(workers: list[_Worker], timeout_seconds: float) -> dict[int, Outcome]:
    """Wait for every rank's outcome; after a failure only for the grace period. Silent ranks are left out."""
    deadline = time.monotonic() + timeout_seconds
    outcomes: dict[int, Outcome] = {}
    waiting = {worker.connection: rank for rank, worker in enumerate(workers)}
    while waiting and (left := deadline - time.monotonic()) > 0:
        for connection in wait(list(waiting), timeout=left):
            rank = waiting.pop(connection)
            try:
                outcomes[rank] = pickle.loads(connection.recv_bytes())
            except (EOFError, ConnectionError):
                workers[rank].process.join(10)
                outcomes[rank] = Outcome(error=RankDied(_how_it_ended(rank, workers[rank].process.exitcode)))
            if outcomes[rank].error is not None:
                deadline = min(deadline, time.monotonic() + _GRACE_SECONDS)
                _send(workers[rank], b"finish")  # its group goes away, so that waiting neighbours fail at once
    return outcomes


def _how_it_ended(rank: int, exit_code: int | None) -> str:
    if exit_code is not None and exit_code < 0:
        return f"rank {rank} was killed by {signal.Signals(-exit_code).name}"
    return f"rank {rank} exited with code {exit_code}"


def _raise_first_cause(outcomes: dict[int, Outcome], workers: list[_Worker], timeout_seconds: float) -> None:
    failed = {rank: o for rank, o in outcomes.items() if o.error is not None}
    if not failed and len(outcomes) == len(workers):
        return
    if not failed:
        silent = [rank for rank in range(len(workers)) if rank not in outcomes]
        stacks = "\n".join(f"rank {r}:\n{Path(workers[r].stacks_path).read_text()}" for r in silent)
        raise RankTimeout(f"no answer from rank {', '.join(map(str, silent))} in {timeout_seconds} s\n{stacks}")
    rank, first = min(failed.items(), key=lambda item: (_severity(item[1].error), item[1].raised_at))
    error = first.error
    assert error is not None
    error.add_note(f"raised by rank {rank} of {len(workers)}:\n{first.traceback_text}")
    for other, outcome in failed.items():
        if other != rank:
            error.add_note(f"after it, rank {other}: {outcome.error!r}"[:500])
    raise error


def _severity(error: BaseException | None) -> int:
    """0: a rank's own error; 1: its death; 2: what a neighbour's end causes."""
    if isinstance(error, RankDied):
        return 1
    return 2 if _NEIGHBOUR_LEFT.search(str(error)) and isinstance(error, RuntimeError) else 0


def _send(worker: _Worker, message: bytes) -> None:
    try:
        worker.connection.send_bytes(message)
    except (BrokenPipeError, ConnectionError, OSError):
        pass


def _ready(worker: _Worker) -> bool:
    try:
        return worker.connection.poll(_GRACE_SECONDS) and worker.connection.recv_bytes() == b"ready"
    except (EOFError, ConnectionError):
        return False


def _kill(worker: _Worker) -> None:
    if worker.process.is_alive():
        os.kill(worker.process.pid or 0, signal.SIGUSR1)  # its stacks go into a file for the error message
        worker.process.join(0.3)
        worker.process.kill()
    worker.process.join(10)
    worker.connection.close()


_POOL = _Pool()
atexit.register(_POOL.close)
