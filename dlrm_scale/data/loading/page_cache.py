"""Which of a dataset's bytes the kernel keeps in memory, and how to make it forget them.

A benchmark of storage must start cold. `POSIX_FADV_DONTNEED` is advice: tmpfs and some network file systems ignore it,
and pages that another process maps stay, so what is left has to be looked at.
"""

import ctypes
import mmap
import os
from collections.abc import Sequence
from pathlib import Path

__all__ = ["cached_share", "drop_cached"]

_PAGES_LOOKED_AT = 1024


def drop_cached(paths: Sequence[Path]) -> None:
    """Advise the kernel to forget files, written or read; needs no privileges.

    Raises:
        OSError: a file can't be opened.
    """
    for path in paths:
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fdatasync(descriptor)  # dirty pages would stay
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)


def cached_share(paths: Sequence[Path]) -> float | None:
    """Estimate which share of files is in memory, from pages at equal distances.

    Args:
        paths: regular files.

    Returns:
        0 to 1; None where the kernel doesn't say: mincore(2) tells only who may write a file what of it is cached.

    Raises:
        OSError: a file can't be opened.
    """
    sizes = [path.stat().st_size for path in paths]
    pages = sum(-(-size // mmap.PAGESIZE) for size in sizes)
    if pages == 0 or not all(_may_ask(path) for path in paths):
        return None
    distance = max(1, pages // _PAGES_LOOKED_AT)
    cached = looked_at = skip = 0
    for path, size in zip(paths, sizes, strict=True):
        in_file = -(-size // mmap.PAGESIZE)
        with path.open("rb") as file:
            for page in range(skip, in_file, distance):
                looked_at += 1
                cached += _is_cached(file.fileno(), page, size)
        skip = (skip - in_file) % distance
    return cached / looked_at if looked_at else None


def _may_ask(path: Path) -> bool:
    return os.geteuid() in (0, path.stat().st_uid) or os.access(path, os.W_OK)


def _is_cached(descriptor: int, page: int, size_bytes: int) -> bool:
    # The mapping is never read, so a file that shrinks meanwhile does no harm.
    offset = page * mmap.PAGESIZE
    length = min(mmap.PAGESIZE, size_bytes - offset)
    private, access = mmap.MAP_PRIVATE, mmap.PROT_READ | mmap.PROT_WRITE
    with mmap.mmap(descriptor, length, flags=private, prot=access, offset=offset) as view:
        first = ctypes.c_char.from_buffer(view)
        state = ctypes.create_string_buffer(1)
        failed = _mincore(ctypes.c_void_p(ctypes.addressof(first)), ctypes.c_size_t(length), state)
        del first  # a mapping that is pointed to can't be closed
    if failed:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    return bool(state.raw[0] & 1)


def _mincore(address: ctypes.c_void_p, length: ctypes.c_size_t, states: "ctypes.Array[ctypes.c_char]") -> int:
    return int(ctypes.CDLL(None, use_errno=True).mincore(address, length, states))
