"""The folder in which a dataset is built, so that nothing half-made has a final name and a rerun goes on.

DIR/.building/request.json        what is being built; another request throws the folder away
DIR/.building/part-00000.arrow    finished files of this request, each with its part-00000.arrow.json
DIR/.building/counts-00000.bin    id counts of an input file, likewise
DIR/.building/lock                held while a process works here; a second one is refused
DIR/preprocess.json               of a finished dataset: the request that made it
"""

import contextlib
import fcntl
import hashlib
import json
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from dlrm_scale.data.dataset.dataset import MANIFEST_FILE
from dlrm_scale.data.durable import fsync_folder
from dlrm_scale.errors import DatasetError

__all__ = [
    "REJECTED_FILE",
    "REQUEST_FILE",
    "Staging",
    "finished_request",
    "remove_leftovers",
    "request_key",
    "write_json",
]

REQUEST_FILE = "preprocess.json"
"""Beside the manifest: inputs and options, for `up to date`. Not part of the fingerprint, which is about content."""
REJECTED_FILE = "rejected.tsv"
_FOLDER = ".building"
_OURS = ("part-*.arrow", "vocabulary-C*.parquet", "rejected-*.tsv", REQUEST_FILE, REJECTED_FILE)


def request_key(request: Mapping[str, Any]) -> str:
    """Hash of a JSON-ready description of what is asked for."""
    text = json.dumps(request, sort_keys=True, separators=(",", ":"))
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def write_json(file: Path, content: Mapping[str, Any]) -> None:
    """Write a small file atomically and durably."""
    temporary = file.with_name(f"{file.name}.tmp")
    with temporary.open("w", encoding="utf-8") as out:
        json.dump(content, out, indent=1)
        out.flush()
        os.fsync(out.fileno())
    os.replace(temporary, file)
    fsync_folder(file.parent)


def finished_request(folder: Path) -> dict[str, Any] | None:
    """Return the request that made the finished dataset in `folder`, None if there is none or it isn't known.

    Where days were added it names the dataset's fingerprint: one that isn't there yet belongs to a process that died.
    """
    manifest = _read_json(folder / MANIFEST_FILE)
    request = _read_json(folder / REQUEST_FILE)
    while manifest is not None and request is not None:
        if request.get("fingerprint", manifest.get("fingerprint")) == manifest.get("fingerprint"):
            return request
        request = request.get("before")
    return None


def _read_json(file: Path) -> dict[str, Any] | None:
    try:
        content = json.loads(file.read_bytes())
    except (OSError, ValueError):
        return None
    return content if isinstance(content, dict) else None


def remove_leftovers(folder: Path, request: Mapping[str, Any]) -> None:
    """Remove the staging folder that a process left which died between the manifest and its own clean-up.

    Another process's, or that of other input, stays.

    Args:
        folder: of a finished dataset.
        request: what it was made from.
    """
    staging = Staging(folder, request)
    if not staging.path.is_dir():
        return
    known = _read_json(staging.path / "request.json")
    if known is not None and known.get("inputs") != request["inputs"]:
        return
    with contextlib.suppress(DatasetError), staging.locked():
        staging.remove()


class Staging:
    """Building a dataset for one request; a context manager that holds the lock.

    Args:
        folder: the dataset's folder; made if absent.
        request: JSON-ready; what was finished under an equal request is kept.

    Raises:
        DatasetError: another process is building here, or the folder holds something else than a dataset.
    """

    def __init__(self, folder: Path, request: Mapping[str, Any]) -> None:
        self.folder = folder
        self.path = folder / _FOLDER
        self._request = {**request, "key": request_key(request)}
        self._lock = -1
        self._worthless = False
        self._made_folder = False

    def __enter__(self) -> Self:
        if self.folder.exists() and not self.folder.is_dir():
            raise DatasetError(f"{self.folder} is a file", remedy="name a folder for --out")
        if self.folder.exists() and not self.path.exists() and not (self.folder / MANIFEST_FILE).exists():
            strangers = sorted(entry.name for entry in self.folder.iterdir())
            if strangers:
                raise DatasetError(
                    f"{self.folder} is not empty and holds no dataset ({', '.join(strangers[:3])}, …)",
                    remedy="name a new or empty folder for --out",
                )
        self._made_folder = not self.folder.exists()
        self.path.mkdir(parents=True, exist_ok=True)
        self._lock = self._locked()
        try:
            known = _read_json(self.path / "request.json")
            if known is None or known.get("key") != self._request["key"]:
                self._clear(known)
                write_json(self.path / "request.json", self._request)
        except BaseException:
            os.close(self._lock)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        # What an early error leaves is worth nothing to a rerun; finished files are.
        if error is not None and (self._worthless or not any(self.path.glob("*-*.json"))):
            shutil.rmtree(self.path, ignore_errors=True)
            if self._made_folder:
                with contextlib.suppress(OSError):
                    self.folder.rmdir()
        os.close(self._lock)

    def finished(self, name: str) -> dict[str, Any] | None:
        """Return what `finish` noted under this name in this or an earlier process, or None."""
        return _read_json(self.path / f"{name}.json")

    def finish(self, name: str, content: Mapping[str, Any]) -> None:
        """Note that a step of the work is done; the files that it made must be durable already."""
        write_json(self.path / f"{name}.json", content)

    def holds(self, file: str) -> bool:
        """Whether a data file of this request is finished, here or already under its final name."""
        return self.where(file).exists()

    def where(self, file: str) -> Path:
        """Path of a data file: here, unless a process moved it to its final name and died before the manifest."""
        staged = self.path / file
        return staged if staged.exists() or self.is_replacing() else self.folder / file

    def is_replacing(self) -> bool:
        """Whether a finished dataset is still in place."""
        return (self.folder / MANIFEST_FILE).exists()

    def leave_nothing(self) -> None:
        """Remove what is here when an error ends the work: a rerun would end in the same way."""
        self._worthless = True

    def add_to_dataset(self, files: Sequence[str]) -> None:
        """Move new data files beside those of a dataset, whose manifest goes on describing the old ones."""
        for file in files:
            if (self.path / file).exists():
                os.replace(self.path / file, self.folder / file)
        fsync_folder(self.folder)

    def publish(self, files: Sequence[str]) -> None:
        """Give the data files, durable already, their final names; the manifest is written afterwards.

        A dataset that is replaced loses its manifest first, so that at no time a manifest stands beside files that it
        doesn't describe.
        """
        if self.is_replacing():
            (self.folder / MANIFEST_FILE).unlink()
            fsync_folder(self.folder)
        for pattern in _OURS:
            for old in self.folder.glob(pattern):
                # What is no longer in staging was moved by a process that died before the manifest.
                if old.name not in files or (self.path / old.name).exists():
                    old.unlink()
        for file in files:
            if (self.path / file).exists():
                os.replace(self.path / file, self.folder / file)
        write_json(self.folder / REQUEST_FILE, self._request)

    def remove(self) -> None:
        """Remove the staging folder, lock included; the dataset is complete."""
        # First what says that the rest is of use: a process may die in the middle.
        (self.path / "request.json").unlink(missing_ok=True)
        fsync_folder(self.path)
        shutil.rmtree(self.path)

    def _clear(self, known: Mapping[str, Any] | None) -> None:
        # Counts depend on the input alone: another threshold can use them again.
        counted = known is not None and known.get("counts_key", "") == self._request.get("counts_key")
        for entry in self.path.iterdir():
            if entry.name != "lock" and not (counted and entry.name.startswith("counts-")):
                entry.unlink()
        # Files that were published for a request that never got its manifest.
        if not self.is_replacing():
            for pattern in _OURS:
                for old in self.folder.glob(pattern):
                    old.unlink()

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Hold the lock without looking at what is here.

        Raises:
            DatasetError: another process has it.
        """
        descriptor = self._locked()
        try:
            yield
        finally:
            os.close(descriptor)

    def _locked(self) -> int:
        file = self.path / "lock"
        descriptor = os.open(file, os.O_RDWR | os.O_CREAT, 0o644)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # A process that finished in between removed the file: then this lock guards nothing.
            current = file.exists() and os.stat(file).st_ino == os.fstat(descriptor).st_ino
        except BlockingIOError:
            current = False
        if not current:
            os.close(descriptor)
            raise DatasetError(
                f"another process is writing a dataset into {self.folder}", remedy="wait for it or name another --out"
            )
        return descriptor
