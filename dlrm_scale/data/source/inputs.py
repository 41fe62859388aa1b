"""Which input files are read and in which order: by day number, so that day_2 comes before day_10.

Files are text (plain, gzip or zstd), trios of .npy files, or Parquet; one command reads one of these formats, and the
name tells which it is.
"""

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Literal

from dlrm_scale.data.source.npy_trios import group_trios, trio_stem
from dlrm_scale.errors import DataError

__all__ = ["InputFile", "InputFormat", "Inputs", "day_number", "find_inputs"]

InputFormat = Literal["text", "npy", "parquet"]

_SUFFIXES = r"(?:\.(?:tsv|txt|csv))?(?:\.(?:gz|zst|zstd))?"
_NUMBERED = re.compile(rf"(?P<stem>.*?)(?P<number>\d+)(?:{_SUFFIXES}|(?:\.[a-z0-9]+)?\.(?:parquet|pq))", re.IGNORECASE)
# In a folder only these are taken; whatever else lies there (day_0.bak, README) is named in a note.
_DAY = re.compile(r"day_?\d+", re.IGNORECASE)
_DAY_FILE = re.compile(rf"{_DAY.pattern}{_SUFFIXES}", re.IGNORECASE)
_ENDINGS: dict[str, InputFormat] = {".npy": "npy", ".npz": "npy", ".parquet": "parquet", ".pq": "parquet"}
_FORMAT_NAMES: dict[InputFormat, str] = {"text": "text", "npy": ".npy", "parquet": "Parquet"}


@dataclass(frozen=True, kw_only=True, slots=True)
class InputFile:
    """One input as it was when the command started.

    Attributes:
        path: the file; of a trio of .npy files the dense one.
        day: its number, or None where the names have none.
        size_bytes: its size; of several files their sum.
        modified_ns: its modification time in nanoseconds; of several files the sum, which changes with any of them.
        format: how its rows are stored.
        members: the files that it is made of: (path,), or dense, sparse and labels.
        identities: size and modification time of each member.
    """

    path: Path
    day: int | None
    size_bytes: int
    modified_ns: int
    format: InputFormat = "text"
    members: tuple[Path, ...] = ()
    identities: tuple[tuple[int, int], ...] = ()

    def __post_init__(self) -> None:
        """Let a file that is given without members be its own only one."""
        if not self.members:
            object.__setattr__(self, "members", (self.path,))
            object.__setattr__(self, "identities", ((self.size_bytes, self.modified_ns),))

    def check_unchanged(self) -> None:
        """Compare with the files on disk.

        Raises:
            DataError: one was changed or replaced since; names it.
        """
        for path, identity in zip(self.members, self.identities, strict=True):
            if _identity(path) != identity:
                raise DataError(
                    f"{path} was changed while it was read", remedy="run preprocess again when the file is complete"
                )


@dataclass(frozen=True, kw_only=True, slots=True)
class Inputs:
    """The files in the order of their rows, all of one format.

    Attributes:
        files: at least one.
        notes: sentences for the user: gaps, strangers, an order that couldn't be told.
    """

    files: tuple[InputFile, ...]
    notes: tuple[str, ...]

    @property
    def format(self) -> InputFormat:
        """How the rows of all files are stored."""
        return self.files[0].format


@dataclass(frozen=True, slots=True)
class _Found:
    """An input before its place in the order is known; `name` holds its number."""

    name: str
    path: Path
    members: tuple[Path, ...]


def day_number(name: str) -> int | None:
    """Return the last number in a file's name, None if there is none."""
    match = _NUMBERED.fullmatch(name)
    return int(match["number"]) if match else None


def find_inputs(paths: Sequence[Path]) -> Inputs:
    """Find and order the files.

    Files are sorted by the number in their names if all have one after the same stem, otherwise they keep the order
    in which they were given (in a folder of Parquet files: that of their names). Of a folder are taken the files named
    `day_N` with any of .tsv, .txt, .csv, .gz, .zst; or the trios of .npy files with such names; or all Parquet files.

    Args:
        paths: files and folders. Standard input, `-`, never gets here: it is the command's to store it as a file.

    Raises:
        DataError: a path is absent, a folder holds no input, formats are mixed, a trio of .npy files lacks one, or a
            file or day occurs twice.
    """
    notes: list[str] = []
    listed: list[Path] = []
    for path in paths:
        listed.extend(_files_of_folder(path, notes) if path.is_dir() else [path])
    if not listed:
        raise DataError("no input files", remedy="name the raw files or a folder of day_N files")
    for path in listed:
        if path.exists() and not path.is_file():
            raise DataError(f"{path} is no regular file, and files are read more than once", remedy="save it as a file")
        if not path.is_file():
            raise DataError(f"{path}: no such file", remedy="check the path")
    _refuse_twice([(str(path.resolve()), path) for path in listed], "the same file")
    format_ = _only_format(listed)
    found = _inputs_of(format_, listed)
    matches = [_NUMBERED.fullmatch(one.name) for one in found]
    numbers: list[int | None] = [int(match["number"]) if match else None for match in matches]
    numbered = len({match["stem"].lower() if match else None for match in matches}) == 1 and matches[0] is not None
    # In train-00000-of-00024.parquet the last number is no day; such names are in order already.
    if numbered and not (format_ == "parquet" and len(set(numbers)) < len(numbers)):
        _refuse_twice([(number, one.path) for number, one in zip(numbers, found, strict=True)], "the same day")
        days = sorted(
            ((number, one) for number, one in zip(numbers, found, strict=True) if number is not None),
            key=lambda day: day[0],
        )
        for (day, _), (following, _) in pairwise(days):
            if following != day + 1:
                absent = f"day {day + 1} is" if following == day + 2 else f"days {day + 1} to {following - 1} are"
                notes.append(f"{absent} absent between day {day} and day {following}")
        files = tuple(_input_file(one, format_, day) for day, one in days)
    else:
        if len(found) > 1:
            order = "of their names" if format_ == "parquet" and len(paths) == 1 else "in which the files were given"
            notes.append(f"the file names hold no common day number: rows keep the order {order}")
        files = tuple(_input_file(one, format_, None) for one in found)
    for file in files:
        if file.size_bytes == 0 and format_ == "text":
            notes.append(f"{file.path} is empty: 0 rows")
    return Inputs(files=files, notes=tuple(notes))


def _inputs_of(format_: InputFormat, paths: Sequence[Path]) -> list[_Found]:
    if format_ != "npy":
        return [_Found(path.name, path, (path,)) for path in paths]
    return [_Found(trio.stem, trio.dense, (trio.dense, trio.sparse, trio.labels)) for trio in group_trios(paths)]


def _format_of(path: Path) -> InputFormat:
    return _ENDINGS.get(path.suffix.lower(), "text")


def _only_format(paths: Sequence[Path]) -> InputFormat:
    first: dict[InputFormat, Path] = {}
    for path in paths:
        first.setdefault(_format_of(path), path)
    if len(first) > 1:
        shown = " and ".join(f"{path} is {_FORMAT_NAMES[format_]}" for format_, path in first.items())
        raise DataError(f"{shown}; one command reads one format", remedy="name files of one format")
    return next(iter(first))


def _files_of_folder(folder: Path, notes: list[str]) -> list[Path]:
    names = sorted((path for path in folder.iterdir() if not path.name.startswith(".")), key=_natural_order)
    if (folder / "dataset.json").exists():
        # Its vocabularies are Parquet files, but no rows.
        raise DataError(
            f"{folder} is a dataset that was preprocessed already", remedy="name the raw files it was made of"
        )
    taken = [path for path in names if _is_input(path) and path.is_file()]
    if not taken:
        raise DataError(
            f"{folder} holds no files named day_0, day_1, … (with or without .tsv, .txt, .csv, .gz, .zst), no "
            "day_0_dense.npy, day_0_sparse.npy, day_0_labels.npy, … and no .parquet files",
            remedy="name the files themselves",
        )
    # What `synth` says about its files belongs there.
    strangers = [path.name for path in names if path not in taken and path.name != "synthetic.json"]
    if strangers:
        shown = ", ".join(sorted(strangers)[:5]) + (", …" if len(strangers) > 5 else "")
        notes.append(f"{folder}: {len(strangers)} other entries were left out ({shown})")
    return taken


def _is_input(path: Path) -> bool:
    format_ = _format_of(path)
    if format_ == "npy":
        stem = trio_stem(path)
        return stem is not None and _DAY.fullmatch(stem) is not None
    return format_ == "parquet" or _DAY_FILE.fullmatch(path.name) is not None


def _natural_order(path: Path) -> tuple[list[str | int], str]:
    # Text and numbers alternate, so that both sides of a comparison have the same type.
    parts = re.split(r"(\d+)", path.name)
    return [int(part) if i % 2 else part for i, part in enumerate(parts)], path.name


def _refuse_twice(keyed: Sequence[tuple[object, Path]], what: str) -> None:
    seen: dict[object, Path] = {}
    for key, path in keyed:
        if key in seen:
            raise DataError(f"{seen[key]} and {path} are {what}", remedy="name each once")
        seen[key] = path


def _input_file(found: _Found, format_: InputFormat, day: int | None) -> InputFile:
    identities = tuple(_identity(path) for path in found.members)
    return InputFile(
        path=found.path,
        day=day,
        size_bytes=sum(size_bytes for size_bytes, _ in identities),
        modified_ns=sum(modified_ns for _, modified_ns in identities),
        format=format_,
        members=found.members,
        identities=identities,
    )


def _identity(path: Path) -> tuple[int, int]:
    try:
        status = os.stat(path)
    except OSError as error:
        raise DataError(f"{path}: {error.strerror}") from error
    return status.st_size, status.st_mtime_ns
