"""Whether the process that wrote a lease has ended, so that nobody waits for the lease to run out.

It is only said of a process of this host, and only where nothing else explains that it isn't seen:

    boot id           another one is another host, or this one before it was started anew
    namespaces        of pids, without which another container's process isn't seen, and of time, which its start is by
    start             of the process: a pid is given out again, and then with a later start

A process that has ended has no threads left, and its reads are over. Its writes are over too on a disk of this host: a
system call ends before its thread does. A server's answer isn't waited for by a process that is killed, so what it has
been sent may still be carried out: by an object store, and by a network file system.
"""

import os
import platform
from collections.abc import Mapping
from pathlib import Path

from dlrm_scale.checkpoint.storage.local_storage import LocalStorage
from dlrm_scale.checkpoint.storage.storage import Storage

__all__ = ["has_ended", "is_running", "process_record", "writes_end_with_process"]

_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")
_MOUNTS = Path("/proc/self/mountinfo")
_DISKS = frozenset({"ext2", "ext3", "ext4", "f2fs", "overlay", "tmpfs", "xfs", "zfs"})
"""File systems that this host's kernel carries out itself; what isn't listed may be a server's."""


def process_record() -> dict[str, object]:
    """This process as a lease names it; without what this system doesn't tell."""
    record: dict[str, object] = {"host": platform.node(), "pid": os.getpid()}
    try:
        return record | _where() | {"start_ticks": _start_ticks(os.getpid())}
    except (OSError, ValueError, IndexError):
        return record


def has_ended(record: Mapping[str, object]) -> bool:
    """Whether the process of a record is known to be gone; False where it can't be known.

    Args:
        record: as `process_record` made it; one without a start is of a process that can't be looked for.
    """
    pid, start = record.get("pid"), record.get("start_ticks")
    if not isinstance(pid, int) or pid <= 0 or not isinstance(start, int):
        return False
    try:
        if {"host": platform.node(), **_where()} != {key: record.get(key) for key in ("host", "boot_id", "namespaces")}:
            return False
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    except PermissionError:
        pass  # it is there, and another user's
    except OSError:
        return False
    try:
        # What /proc hides of another user's processes is there all the same.
        return _start_ticks(pid) != start or _is_zombie(pid)
    except (OSError, ValueError, IndexError):
        return False


def is_running(record: Mapping[str, object]) -> bool:
    """Whether the process of a record is known to be alive; False where it can't be known.

    Args:
        record: as in `has_ended`.
    """
    pid, start = record.get("pid"), record.get("start_ticks")
    if not isinstance(pid, int) or pid <= 0 or not isinstance(start, int):
        return False
    try:
        if {"host": platform.node(), **_where()} != {key: record.get(key) for key in ("host", "boot_id", "namespaces")}:
            return False
        return _start_ticks(pid) == start and not _is_zombie(pid)
    except (OSError, ValueError, IndexError):
        return False


def writes_end_with_process(storage: Storage) -> bool:
    """Whether nothing that a process has written can still appear once it has ended."""
    if not isinstance(storage, LocalStorage):
        return False
    try:
        device = os.stat(storage.address).st_dev
        lines = _MOUNTS.read_text(errors="replace").splitlines()
    except OSError:
        return False
    number = f"{os.major(device)}:{os.minor(device)}"
    kinds = {line.partition(" - ")[2].split(" ")[0] for line in lines if line.split(" ")[2:3] == [number]}
    return bool(kinds) and kinds <= _DISKS


def _where() -> dict[str, object]:
    namespaces = [os.readlink(f"/proc/self/ns/{kind}") for kind in ("pid", "time") if _has_namespace(kind)]
    return {"boot_id": _BOOT_ID.read_text().strip(), "namespaces": namespaces}


def _has_namespace(kind: str) -> bool:
    return os.path.lexists(f"/proc/self/ns/{kind}")  # kernels before 5.6 have none of time


def _stat(pid: int) -> list[str]:
    """Fields of a process from its state on; its name before them may hold any character."""
    return Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()


def _start_ticks(pid: int) -> int:
    return int(_stat(pid)[19])


def _is_zombie(pid: int) -> bool:
    """Whether it waits for its parent to ask for its exit code, and no thread of it is left."""
    return _stat(pid)[0] in ("Z", "X") and len(os.listdir(f"/proc/{pid}/task")) <= 1
