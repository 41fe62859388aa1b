"""How much memory this host gives the process: what is installed, less what a container's limit takes away.

A cgroup's limit holds for everything below it, so the tightest one from the process's group up to the root counts.
Inside a container the root that is mounted is often the container's own group.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

__all__ = ["HostMemory", "host_memory"]


@dataclass(frozen=True, kw_only=True)
class HostMemory:
    """Main memory as this process may use it.

    Attributes:
        total_bytes: installed, or the tightest limit where that is less.
        free_bytes: of it, free or quickly reclaimed.
        limited: a cgroup's limit is less than what is installed.
    """

    total_bytes: int
    free_bytes: int
    limited: bool


def host_memory(root: Path = Path("/")) -> HostMemory:
    """Read `/proc/meminfo` and the limits of cgroups, version 1 and 2.

    Args:
        root: where `proc` and `sys` are; a parameter for tests.
    """
    fields = dict(line.split(":", 1) for line in (root / "proc/meminfo").read_text().splitlines())
    installed, free = (1024 * int(fields[name].split()[0]) for name in ("MemTotal", "MemAvailable"))
    total = installed
    for limit, used in _limits(root):
        if limit < installed:  # version 1 writes "no limit" as nearly 2^63
            total = min(total, limit)
            free = min(free, max(0, limit - used))
    return HostMemory(total_bytes=total, free_bytes=free, limited=total < installed)


def _limits(root: Path) -> Iterator[tuple[int, int]]:
    """Yield limit and use in bytes of each of this process's groups that has a limit."""
    groups = root / "proc/self/cgroup"
    for line in groups.read_text().splitlines() if groups.exists() else ():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            base, limit, used, inactive = "", "memory.max", "memory.current", "inactive_file"
        elif "memory" in controllers.split(","):
            base, limit, used = "memory", "memory.limit_in_bytes", "memory.usage_in_bytes"
            inactive = "total_inactive_file"
        else:
            continue
        group = PurePosixPath(path.lstrip("/"))
        for folder in (root / "sys/fs/cgroup" / base / step for step in (group, *group.parents)):
            limit_bytes = _number(folder / limit)
            if limit_bytes is not None:
                # file pages that nobody has used lately are counted as used, but are given up first
                reclaimable = _statistics(folder / "memory.stat").get(inactive, 0)
                yield limit_bytes, max(0, (_number(folder / used) or 0) - reclaimable)


def _number(file: Path) -> int | None:
    """Return the number in a file; None where there is no file, or it says `max`."""
    text = file.read_text().strip() if file.is_file() else ""
    return int(text) if text.isdigit() else None


def _statistics(file: Path) -> dict[str, int]:
    lines = file.read_text().splitlines() if file.is_file() else []
    return {name: int(value) for name, value in (line.split() for line in lines)}
