"""Which raw files are read and in which order: by day number, so that day_2 comes before day_10."""

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from dlrm_scale.errors import DataError

__all__ = ["InputFile", "Inputs", "find_inputs"]

_SUFFIXES = r"(?:\.(?:tsv|txt))?(?:\.(?:gz|zst|zstd))?"
_NUMBERED = re.compile(rf"(?P<stem>.*?)(?P<number>\d+){_SUFFIXES}", re.IGNORECASE)
# In a folder only these are taken; whatever else lies there (day_0.bak, README) is named in a note.
_DAY_FILE = re.compile(rf"day_?(?P<number>\d+){_SUFFIXES}", re.IGNORECASE)


@dataclass(frozen=True, kw_only=True, slots=True)
class InputFile:
    """One raw file as it was when the command started.

    Attributes:
        path: the file.
        day: its number, or None where the names have none.
        size_bytes: its size.
        modified_ns: its modification time in nanoseconds.
    """

    path: Path
    day: int | None
    size_bytes: int
    modified_ns: int

    def check_unchanged(self) -> None:
        """Compare with the file on disk.

        Raises:
            DataError: it was changed or replaced since.
        """
        if _identity(self.path) != (self.size_bytes, self.modified_ns):
            raise DataError(
                f"{self.path} was changed while it was read", remedy="run preprocess again when the file is complete"
            )


@dataclass(frozen=True, kw_only=True, slots=True)
class Inputs:
    """The files in the order of their rows.

    Attributes:
        files: at least one.
        notes: sentences for the user: gaps, strangers, an order that couldn't be told.
    """

    files: tuple[InputFile, ...]
    notes: tuple[str, ...]


def find_inputs(paths: Sequence[Path]) -> Inputs:
    """Find and order the files.

    Files are sorted by the number in their names if all have one after the same stem, otherwise they keep the order
    in which they were given. Of a folder the files named `day_N` with any of .tsv, .txt, .gz, .zst are taken.

    Raises:
        DataError: a path is absent, a folder holds no day files, or a file or day occurs twice.
    """
    notes: list[str] = []
    found: list[Path] = []
    for path in paths:
        found.extend(_day_files(path, notes) if path.is_dir() else [path])
    if not found:
        raise DataError("no input files", remedy="name the raw files or a folder of day_N files")
    for path in found:
        if path.exists() and not path.is_file():
            raise DataError(f"{path} is no regular file, and files are read more than once", remedy="save it as a file")
        if not path.is_file():
            raise DataError(f"{path}: no such file", remedy="check the path")
    _refuse_twice([(str(path.resolve()), path) for path in found], "the same file")
    matches = [_NUMBERED.fullmatch(path.name) for path in found]
    numbers: list[int | None] = [int(match["number"]) if match else None for match in matches]
    if len({match["stem"].lower() if match else None for match in matches}) == 1 and matches[0] is not None:
        _refuse_twice(list(zip(numbers, found, strict=True)), "the same day")
        days = sorted((number, path) for number, path in zip(numbers, found, strict=True) if number is not None)
        for (day, _), (following, _) in pairwise(days):
            if following != day + 1:
                absent = f"day {day + 1} is" if following == day + 2 else f"days {day + 1} to {following - 1} are"
                notes.append(f"{absent} absent between day {day} and day {following}")
        files = tuple(_input_file(path, day) for day, path in days)
    else:
        if len(found) > 1:
            notes.append("the file names hold no common day number: rows keep the order in which the files were given")
        files = tuple(_input_file(path, None) for path in found)
    for file in files:
        if file.size_bytes == 0:
            notes.append(f"{file.path} is empty: 0 rows")
    return Inputs(files=files, notes=tuple(notes))


def _day_files(folder: Path, notes: list[str]) -> list[Path]:
    names = sorted(path for path in folder.iterdir() if not path.name.startswith("."))
    days = [path for path in names if path.is_file() and _DAY_FILE.fullmatch(path.name)]
    strangers = [path.name for path in names if path not in days]
    if not days:
        raise DataError(
            f"{folder} holds no files named day_0, day_1, … (with or without .tsv, .txt, .gz, .zst)",
            remedy="name the files themselves",
        )
    if strangers:
        shown = ", ".join(strangers[:5]) + (", …" if len(strangers) > 5 else "")
        notes.append(f"{folder}: {len(strangers)} other entries were left out ({shown})")
    return days


def _refuse_twice(keyed: Sequence[tuple[object, Path]], what: str) -> None:
    seen: dict[object, Path] = {}
    for key, path in keyed:
        if key in seen:
            raise DataError(f"{seen[key]} and {path} are {what}", remedy="name each once")
        seen[key] = path


def _input_file(path: Path, day: int | None) -> InputFile:
    size_bytes, modified_ns = _identity(path)
    return InputFile(path=path, day=day, size_bytes=size_bytes, modified_ns=modified_ns)


def _identity(path: Path) -> tuple[int, int]:
    try:
        status = os.stat(path)
    except OSError as error:
        raise DataError(f"{path}: {error.strerror}") from error
    return status.st_size, status.st_mtime_ns
