"""The file in which an input file's counts are kept: runs of entries, and at the end a table of contents.

entries       8 bytes each, little-endian, run after run as they were spilled
contents      JSON: format version and, for each run, column, first entry, number of entries, occurrences
length        of the contents in bytes, 8 bytes little-endian
end mark      8 bytes
"""

import json
import os
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import xxhash

from dlrm_scale.data.durable import fsync_folder
from dlrm_scale.data.recently_opened import RecentlyOpened
from dlrm_scale.data.vocabulary.count_runs import CountChunk, packed_entries
from dlrm_scale.errors import DatasetError

__all__ = ["CountFile", "CountFileWriter", "RunInFile", "RunOnDisk"]

_FORMAT_VERSION = 1
_END_MARK = b"dlrm-cnt"
_ENTRY = np.dtype("<u8")
_REMEDY = "remove it and count the ids again"


@dataclass(frozen=True, kw_only=True, slots=True)
class RunOnDisk:
    """Where a run stands.

    Attributes:
        column: 0 to 25.
        first: number of its first entry in the file.
        entries: how many.
        occurrences: sum of their counts.
        xxh3_64: checksum of its bytes, hexadecimal.
    """

    column: int
    first: int
    entries: int
    occurrences: int
    xxh3_64: str


class CountFileWriter:
    """Appends runs; the file gets its name when it is complete.

    Args:
        path: the final name.

    Raises:
        DatasetError: the file can't be made.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._temporary = path.with_name(f"{path.name}.tmp")
        self._runs: list[RunOnDisk] = []
        self._entries = 0
        self._error: DatasetError | None = None
        try:
            self._file = self._temporary.open("wb", buffering=0)
        except OSError as error:
            raise self._failed(error) from error

    def append(self, column: int, chunks: Iterable[CountChunk]) -> None:
        """Append a run.

        Args:
            column: 0 to 25.
            chunks: its ids and counts in hash order; the sum of all counts is below 2^32.

        Raises:
            DatasetError: the file can't be written.
        """
        first, occurrences, checksum = self._entries, 0, xxhash.xxh3_64()
        for ids, counts in chunks:
            occurrences += int(counts.sum())
            entries = packed_entries(ids, counts).data
            checksum.update(entries)
            self._write(entries)
            self._entries += len(ids)
        assert occurrences < 2**32
        if self._entries > first:
            self._runs.append(
                RunOnDisk(
                    column=column,
                    first=first,
                    entries=self._entries - first,
                    occurrences=occurrences,
                    xxh3_64=checksum.hexdigest(),
                )
            )

    def close(self) -> None:
        """Complete the file, make it durable and give it its name.

        Raises:
            DatasetError: the file can't be written; nothing is left of it.
        """
        contents = json.dumps({"format_version": _FORMAT_VERSION, "runs": [asdict(run) for run in self._runs]}).encode()
        self._write(memoryview(contents + len(contents).to_bytes(8, "little") + _END_MARK))
        try:
            os.fsync(self._file.fileno())
            self._file.close()
            os.replace(self._temporary, self.path)
            fsync_folder(self.path.parent)
        except OSError as error:
            self.abort()
            raise self._failed(error) from error

    def abort(self) -> None:
        """Remove what was written; does nothing after `close()`."""
        self._file.close()
        self._temporary.unlink(missing_ok=True)

    def _write(self, content: memoryview) -> None:
        if self._error is not None:
            # Another thread's; the file is closed.
            raise self._error
        left = content.cast("B")
        try:
            while len(left):
                left = left[self._file.write(left) :]
        except OSError as error:
            self.abort()
            raise self._failed(error) from error

    def _failed(self, error: OSError) -> DatasetError:
        self._error = DatasetError(
            f"{self._temporary} can't be written: {error}", remedy="free space or choose another folder"
        )
        return self._error


class CountFile:
    """A complete file to read; a context manager that closes it.

    Args:
        path: what `CountFileWriter` was given.
        opened: keeps its descriptor, for callers that read more files than may be open at a time; who gives it closes
            it.

    Raises:
        DatasetError: the file is absent, cut off or of another format.
    """

    def __init__(self, path: Path, opened: RecentlyOpened[int] | None = None) -> None:
        self.path = path
        self._own = RecentlyOpened(os.close) if opened is None else None
        self._opened = opened if self._own is None else self._own
        try:
            self._descriptor()
        except OSError as error:
            raise DatasetError(f"{path} can't be read: {error}", remedy=_REMEDY) from error
        try:
            self.runs = self._contents()
        except (OSError, ValueError, KeyError, TypeError) as error:
            self.close()
            raise DatasetError(f"{path} is damaged: {error!r}", remedy=_REMEDY) from error

    def of_column(self, column: int) -> list["RunInFile"]:
        """Return the runs of a column, 0 to 25; each holds until the file is closed."""
        return [RunInFile(self, run) for run in self.runs if run.column == column]

    def read(self, first: int, out: npt.NDArray[np.uint64]) -> None:
        """Fill `out` with the entries from `first` on.

        Raises:
            DatasetError: the file can't be read or is shorter than it was.
        """
        left = out.data.cast("B")
        position = first * _ENTRY.itemsize
        try:
            while len(left):
                done = os.preadv(self._descriptor(), [left], position)
                if done == 0:
                    raise OSError("it ends early")
                left, position = left[done:], position + done
        except OSError as error:
            raise DatasetError(f"{self.path} can't be read: {error}", remedy=_REMEDY) from error

    def close(self) -> None:
        """Close the file, unless the caller keeps it open."""
        if self._own is not None:
            self._own.close()

    def __enter__(self) -> "CountFile":
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def _descriptor(self) -> int:
        assert self._opened is not None
        return self._opened.get(self.path, lambda: os.open(self.path, os.O_RDONLY | os.O_CLOEXEC))

    def _contents(self) -> tuple[RunOnDisk, ...]:
        descriptor = self._descriptor()
        size = os.fstat(descriptor).st_size
        tail = os.pread(descriptor, 16, max(0, size - 16))
        if len(tail) < 16 or tail[8:] != _END_MARK:
            raise ValueError("the end is absent")
        length = int.from_bytes(tail[:8], "little")
        contents = json.loads(os.pread(descriptor, length, size - 16 - length))
        if contents["format_version"] != _FORMAT_VERSION:
            raise ValueError(f"format version {contents['format_version']}, this dlrm-scale reads {_FORMAT_VERSION}")
        runs = tuple(RunOnDisk(**run) for run in contents["runs"])
        if size != _ENTRY.itemsize * sum(run.entries for run in runs) + length + 16:
            raise ValueError(f"{size:,} bytes don't fit its contents")
        return runs


class RunInFile:
    """A run that is read from its start to its end, once; see `count_runs.Run`."""

    def __init__(self, file: CountFile, about: RunOnDisk) -> None:
        self._file = file
        self._about = about
        self._checksum = xxhash.xxh3_64()

    @property
    def entries(self) -> int:
        """How many."""
        return self._about.entries

    def read(self, start: int, out: npt.NDArray[np.uint64]) -> None:
        """Fill `out` with the entries from `start` on, where the last call ended."""
        self._file.read(self._about.first + start, out)
        self._checksum.update(out.data)

    def check(self) -> None:
        """Compare what was read with the checksum.

        Raises:
            DatasetError: it isn't what was written.
        """
        if self._checksum.hexdigest() != self._about.xxh3_64:
            raise DatasetError(
                f"{self._file.path} is damaged: its counts aren't those that were written", remedy=_REMEDY
            )
