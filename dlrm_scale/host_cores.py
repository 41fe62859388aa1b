"""How many cores this host gives the process: what affinity allows, less what a container's quota takes away.

A quota bounds CPU time, not cores: with more busy threads than it pays for, all of them stand still for the rest of
each period. `os.sched_getaffinity` doesn't know of it.
"""

import os
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

__all__ = ["usable_cores"]


def usable_cores(root: Path = Path("/")) -> int:
    """Count the cores that this process may keep busy, at least 1; part of a core isn't counted.

    The tightest quota from the process's cgroup up to the root counts, version 1 and 2.

    Args:
        root: where `proc` and `sys` are; a parameter for tests.
    """
    return max(1, int(min([len(os.sched_getaffinity(0)), *_quotas(root)])))


def _quotas(root: Path) -> Iterator[float]:
    """Yield the cores that each of this process's groups with a quota pays for."""
    groups = root / "proc/self/cgroup"
    for line in groups.read_text().splitlines() if groups.exists() else ():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            base = ""
        elif "cpu" in controllers.split(","):
            base = controllers  # mounted under the joined name, "cpu,cpuacct", or under "cpu"
        else:
            continue
        group = PurePosixPath(path.lstrip("/"))
        for folder in (root / "sys/fs/cgroup" / base / step for step in (group, *group.parents)):
            quota, period = _quota(folder)
            if quota is not None and period:
                yield quota / period


def _quota(folder: Path) -> tuple[int | None, int]:
    """Return CPU time and period in microseconds; None where there is no quota (`max`, or -1 in version 1)."""
    if (folder / "cpu.max").is_file():
        words = (folder / "cpu.max").read_text().split()
    elif (folder / "cpu.cfs_quota_us").is_file():
        words = [(folder / name).read_text().strip() for name in ("cpu.cfs_quota_us", "cpu.cfs_period_us")]
    else:
        return None, 0
    return (int(words[0]) if words[0].isdigit() else None), int(words[1])
