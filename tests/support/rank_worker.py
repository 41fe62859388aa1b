"""The worker side of `rank_runner`: runs one case after another as one rank.

parent                      worker
  | -- request ------------>  |   function, arguments, environment
  | <------------- outcome -- |   result, or the exception with the time it was raised
  | -- finish ------------->  |   all ranks have answered (or this one failed): tear down
  | <--------------- ready -- |   group destroyed, environment restored
"""

import faulthandler
import gc
import os
import pickle
import signal
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from multiprocessing.connection import Connection

import torch
import torch.distributed as dist

__all__ = ["Outcome", "Request", "serve"]


@dataclass(kw_only=True)
class Request:
    """One case for one rank; crosses the pipe in pieces so that an import error is the case's error."""

    function: Callable[..., object]
    args: tuple[object, ...]
    kwargs: dict[str, object]


@dataclass(kw_only=True)
class Outcome:
    """What a rank answered."""

    result: object = None
    error: BaseException | None = None
    traceback_text: str = ""
    raised_at: float = field(default_factory=time.monotonic)


def serve(connection: Connection, stacks_path: str) -> None:
    """Answer requests until the parent closes the pipe; SIGUSR1 writes all stacks to `stacks_path`."""
    torch.set_num_threads(1)
    gc.freeze()  # the imported libraries are never garbage; without it every tear-down walks them
    stacks = open(stacks_path, "w")
    faulthandler.register(signal.SIGUSR1, file=stacks, all_threads=True)
    while True:
        try:
            environment, path, request = pickle.loads(connection.recv_bytes())
        except EOFError:
            return
        before = dict(os.environ)
        handlers = {s: signal.getsignal(s) for s in (signal.SIGINT, signal.SIGTERM)}
        os.environ.update(environment)
        sys.path[:] = path
        outcome = _run(request)
        try:
            connection.send_bytes(_dumps(outcome))
            del outcome
            connection.recv_bytes()
            _tear_down()
            os.environ.clear()
            os.environ.update(before)
            for number, handler in handlers.items():
                signal.signal(number, handler)
            connection.send_bytes(b"ready")
        except (EOFError, BrokenPipeError):
            return


def _run(request_bytes: bytes) -> Outcome:
    torch.manual_seed(0)
    torch.set_num_threads(1)
    try:
        request = pickle.loads(request_bytes)
        return Outcome(result=request.function(*request.args, **request.kwargs))
    except BaseException as error:
        raised_at = time.monotonic()
        text = traceback.format_exc()
        error.__traceback__ = None
        return Outcome(error=_picklable(error), traceback_text=text, raised_at=raised_at)


def _dumps(outcome: Outcome) -> bytes:
    try:
        return pickle.dumps(outcome)
    except Exception as error:
        text = f"the result of a rank can't be pickled: {error!r}"
        return pickle.dumps(Outcome(error=TypeError(text), traceback_text=text))


def _picklable(error: BaseException) -> BaseException:
    error.__cause__ = error.__context__ = None
    try:
        pickle.loads(pickle.dumps(error))
    except Exception:
        return RuntimeError(f"{type(error).__name__}: {error}")
    return error


def _tear_down() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()
    # torchrec keeps the intra- and cross-host groups of the first case for ever; the next case has other ranks.
    comm = sys.modules.get("torchrec.distributed.comm")
    for name in ("_INTRA_PG", "_CROSS_PG", "_INTRA_PG_2D", "_CROSS_PG_2D"):
        if comm is not None and hasattr(comm, name):
            setattr(comm, name, None)
    gc.collect()
