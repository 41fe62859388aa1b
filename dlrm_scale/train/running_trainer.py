"""Refuses a second trainer of a run while the first one is alive on this host.

A start fences off the trainer before it, which is right for one that hangs or is cut off on another host, and takes a
healthy one down. Two signs together tell that the newest start's trainer is alive here:

    its process    the start's record names it, with when it began: a pid is given out again
    its lock       on `log.jsonl`, which ends with the trainer, also where its process lives on

Where a file system has no locks, the process alone tells. Of another host nothing can be known, and the fence decides.
"""

import fcntl
import os
import time
from pathlib import Path
from typing import TextIO

from dlrm_scale.checkpoint import Storage
from dlrm_scale.checkpoint.chain.holders import is_running
from dlrm_scale.checkpoint.chain.starts import newest_start, read_start
from dlrm_scale.errors import ConfigError

__all__ = ["hold_log", "refuse_running_trainer"]

_GRACE_SECONDS = 3.0
"""A trainer that has just been killed, or whose launcher has, is given this long to end: ranks look every 0.5 s."""


def hold_log(log: TextIO) -> None:
    """Lock an open log until it is closed, where the file system can and nobody else has it."""
    for _ in range(20):
        try:
            fcntl.flock(log, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            time.sleep(0.01)  # somebody looks whether it is locked, or a trainer on another host is fenced off
        except OSError:
            return
        else:
            return


def refuse_running_trainer(storage: Storage, log: Path) -> None:
    """See that the newest start's trainer isn't alive here; waits a little for one that is about to end.

    Args:
        storage: the run's checkpoints.
        log: the run's `log.jsonl`.

    Raises:
        ConfigError: it is.
        OSError: the storage doesn't answer.
    """
    number = newest_start(storage)
    record = read_start(storage, number) if number else None
    until = time.monotonic() + _GRACE_SECONDS
    while record is not None and record.get("pid") != os.getpid() and is_running(record) and _may_be_held(log):
        if time.monotonic() < until:
            time.sleep(0.1)
            continue
        began = record.get("created_unix_seconds")
        since = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(began)) if isinstance(began, int | float) else "?"
        raise ConfigError(
            f"{log.parent} is being trained already: process {record['pid']} on this host, start {number}, since "
            f"{since}; a second trainer would end the first",
            remedy=f"wait until it has ended, or stop it with `kill {record['pid']}`, upon which it saves a checkpoint "
            "and ends; --resume auto then goes on from there",
        )


def _may_be_held(log: Path) -> bool:
    """Whether a trainer has the log locked, or that can't be known."""
    try:
        with log.open("r+") as file:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False  # a trainer makes it before it claims the folder
    except OSError:
        return True
    return False
