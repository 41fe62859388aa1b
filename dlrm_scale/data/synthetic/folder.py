"""Which files of a folder `synth` made, so that it removes or replaces no others.

While day files are written, `.synthetic-unfinished` lists those that have their names already, each with its size and
time of modification: a file is listed just before it takes its name, and a file of the same name that is another one
isn't ours.
"""

import fcntl
import json
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from dlrm_scale.data.durable import fsync_folder
from dlrm_scale.errors import ConfigError, DataError

__all__ = ["SyntheticFolder", "alone_in", "check_folder", "new_file"]

_UNFINISHED = ".synthetic-unfinished"


class SyntheticFolder:
    """The folder of one generation, and what an interrupted one left there.

    Args:
        path: the folder; may be absent.

    Attributes:
        path: the folder.
        interrupted: an earlier generation began here and did not end.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.interrupted = (path / _UNFINISHED).exists()
        self._days: list[str] = []
        self._written: list[dict[str, Any]] = []

    def begin(self, days: Sequence[str], *, earlier: Sequence[str]) -> None:
        """Note that a generation begins, and which files are of an earlier one.

        Args:
            days: names of the day files to write.
            earlier: names of day files that an earlier generation finished.
        """
        found = _read_unfinished(self.path)
        # A file is known by its name before it has it: temporary ones are ours wherever they are left.
        self._days = sorted({*days, *(found["days"] if found else ())})
        self._written = list(found["written"]) if found else []
        self._written += [_identity(self.path / name) for name in earlier if (self.path / name).is_file()]
        self._note()

    def remove_earlier(self) -> None:
        """Remove what earlier generations made, which may have had more days than this one."""
        for name in self._days:
            _temporary(self.path / name).unlink(missing_ok=True)
        for entry in self._written:
            if _is_written(self.path, entry):
                (self.path / entry["file"]).unlink()
        self._written = []
        self._note()

    @contextmanager
    def new_day(self, name: str) -> Iterator[BinaryIO]:
        """Open a day file that takes its name, synced and listed, only when the block ends well."""
        with _new_file(self.path / name, on_complete=self._list) as file:
            yield file

    def end(self) -> None:
        """Note that all is written."""
        (self.path / _UNFINISHED).unlink()

    def _list(self, path: Path, name: str) -> None:
        self._written.append({**_identity(path), "file": name})
        self._note()

    def _note(self) -> None:
        with new_file(self.path / _UNFINISHED) as file:
            file.write(json.dumps({"days": self._days, "written": self._written}).encode())


def check_folder(folder: Path, names: Sequence[str], *, made: Sequence[str], ours: bool, force: bool) -> None:
    """Refuse a folder where files of other making are in the way.

    Args:
        folder: may be absent.
        names: day files to write.
        made: day files that an earlier generation finished.
        ours: the folder was made by `synth`, or an interrupted one began in it.
        force: don't mind files of other making.

    Raises:
        ConfigError: the folder is a file, or holds something else.
    """
    if folder.exists() and not folder.is_dir():
        raise ConfigError(f"{folder} is a file, not a folder", remedy="give another folder")
    if force or not folder.is_dir():
        return
    leftover = _temporary(folder / _UNFINISHED).name
    if not ours and any(entry.name != leftover for entry in folder.iterdir()):
        raise ConfigError(
            f"{folder} isn't empty and wasn't made by synth",
            remedy="give an empty or new folder, or --force to write beside what is there",
        )
    found = _read_unfinished(folder)
    known = {*made, *(entry["file"] for entry in (found["written"] if found else ()) if _is_written(folder, entry))}
    foreign = [name for name in names if name not in known and (folder / name).exists()]
    if foreign:
        raise ConfigError(
            f"{folder / foreign[0]} wasn't made by synth, and a file of this name is to be written",
            remedy="give another folder, or --force to replace it",
        )


@contextmanager
def alone_in(folder: Path) -> Iterator[None]:
    """Hold the folder's lock; the system lets go of it when the process ends, however that happens.

    Raises:
        DataError: another process holds it.
    """
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(descriptor)
        raise DataError(
            f"{folder}: another process is generating rows here", remedy="wait for it, or choose another folder"
        ) from None
    try:
        yield
    finally:
        os.close(descriptor)


@contextmanager
def new_file(path: Path) -> Iterator[BinaryIO]:
    """Open a temporary file that takes its name, synced, only when the block ends well."""
    with _new_file(path, on_complete=lambda temporary, name: None) as file:
        yield file


@contextmanager
def _new_file(path: Path, on_complete: Callable[[Path, str], None]) -> Iterator[BinaryIO]:
    temporary = _temporary(path)
    try:
        with temporary.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        on_complete(temporary, path.name)
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    fsync_folder(path.parent)


def _temporary(path: Path) -> Path:
    return path.with_name(f".{path.name}.tmp")


def _identity(path: Path) -> dict[str, Any]:
    # Renaming keeps them, and so do copies that keep times; a file that somebody else writes has another time.
    status = path.stat()
    return {"file": path.name, "size_bytes": status.st_size, "modified_ns": status.st_mtime_ns}


def _is_written(folder: Path, entry: dict[str, Any]) -> bool:
    path = folder / entry["file"]
    return path.is_file() and _identity(path) == entry


def _read_unfinished(folder: Path) -> dict[str, Any] | None:
    try:
        found = json.loads((folder / _UNFINISHED).read_bytes())
        days = [Path(name).name for name in found["days"]]
        return {"days": days, "written": [{**entry, "file": Path(entry["file"]).name} for entry in found["written"]]}
    except (OSError, ValueError, KeyError, TypeError):
        return None
