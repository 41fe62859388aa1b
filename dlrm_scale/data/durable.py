"""Making files and their names outlive a power cut: first the content, then the name, then the note that says so."""

import os
from pathlib import Path

__all__ = ["fsync_file", "fsync_folder"]


def fsync_file(file: Path) -> None:
    """Make the content of a finished file durable, whoever wrote it."""
    _fsync(file, os.O_RDONLY)


def fsync_folder(folder: Path) -> None:
    """Make renames and removals inside `folder` durable."""
    _fsync(folder, os.O_RDONLY | os.O_DIRECTORY)


def _fsync(path: Path, flags: int) -> None:
    descriptor = os.open(path, flags)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
