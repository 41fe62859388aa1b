"""Puts the files of a folder into the page cache of the system, or out of it, so that loads begin alike."""

import os
from pathlib import Path

from dlrm_scale.units import MIB

__all__ = ["drop_from_cache", "read_into_cache"]


def read_into_cache(folder: Path) -> None:
    """Read all files once."""
    buffer = bytearray(16 * MIB)
    for path in _files(folder):
        with path.open("rb", buffering=0) as file:
            while file.readinto(buffer):
                pass


def drop_from_cache(folder: Path) -> None:
    """Make all files durable and have the system forget them, as a restart of the machine would; Linux only."""
    for path in _files(folder):
        descriptor = os.open(path, os.O_RDONLY)
        try:
            os.fsync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        finally:
            os.close(descriptor)


def _files(folder: Path) -> list[Path]:
    return [path for path in sorted(folder.rglob("*")) if path.is_file()]
