"""Keeps what comes in through standard input as a file: it is read twice, and a pipe can't be."""

import os
import sys
from pathlib import Path

from dlrm_scale.data.source.inputs import InputFile
from dlrm_scale.errors import DataError
from dlrm_scale.units import MIB

__all__ = ["spool_stdin"]


def spool_stdin(folder: Path) -> InputFile:
    """Copy standard input, as it comes (compressed or not), into a file of the staging folder.

    Raises:
        DataError: it is a terminal or can't be read.
        OSError: the disk is full.
    """
    if sys.stdin is None or sys.stdin.closed or sys.stdin.isatty():
        state = "closed" if sys.stdin is None or sys.stdin.closed else "a terminal"
        raise DataError(
            f"the input is - (standard input), which is {state}", remedy="pipe rows in: zcat day_0.gz | … -"
        )
    path = folder / "stdin"
    with path.open("wb") as out:
        while block := _read():
            out.write(block)
    status = path.stat()
    return InputFile(path=path, day=None, size_bytes=status.st_size, modified_ns=status.st_mtime_ns)


def _read() -> bytes:
    try:
        return os.read(sys.stdin.fileno(), MIB)
    except OSError as error:
        raise DataError(f"standard input can't be read: {error.strerror}") from error
