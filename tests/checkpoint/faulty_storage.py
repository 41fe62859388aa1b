"""Storage that fails, dies or takes notes at a chosen operation."""

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from dlrm_scale.checkpoint.local_storage import LocalStorage, LocalWritableFile

OPERATIONS = ("create", "write", "sync", "link", "remove", "sync_folder")


class Trace:
    """Counts and records the operations of all ranks, and acts before chosen ones."""

    def __init__(self) -> None:
        self.operations: list[tuple[str, str]] = []
        self.act: Callable[[int, str, str], None] | None = None
        self._lock = threading.Lock()

    def note(self, operation: str, name: str) -> None:
        with self._lock:
            index = len(self.operations)
            self.operations.append((operation, name))
        if self.act is not None:
            self.act(index, operation, name)


class TracedStorage(LocalStorage):
    """A `LocalStorage` that tells a trace of every operation that changes something, before doing it."""

    def __init__(self, root: Path, trace: Trace) -> None:
        super().__init__(root)
        self._trace = trace

    @contextmanager
    def create(self, name: str) -> Iterator[LocalWritableFile]:
        self._trace.note("create", name)
        with super().create(name) as file:
            yield _TracedFile(file, self._trace)

    def link(self, source: str, target: str) -> None:
        self._trace.note("link", target)
        super().link(source, target)

    def remove(self, name: str) -> None:
        self._trace.note("remove", name)
        super().remove(name)

    def sync_folder(self, name: str) -> None:
        self._trace.note("sync_folder", name)
        super().sync_folder(name)


class _TracedFile(LocalWritableFile):
    def __init__(self, file: LocalWritableFile, trace: Trace) -> None:
        super().__init__(os.dup(file._descriptor), file.name)
        self._trace = trace
        self._closed = file

    def write(self, data: memoryview) -> None:
        # In two parts, so that a kill in between leaves half of it.
        self._trace.note("write", self.name)
        super().write(data[: len(data) // 2])
        self._trace.note("write", self.name)
        super().write(data[len(data) // 2 :])

    def sync(self) -> None:
        self._trace.note("sync", self.name)
        super().sync()

    def __del__(self) -> None:
        self.close()


def fail_at(index: int, error: OSError) -> Callable[[int, str, str], None]:
    """An action that raises `error` before operation `index`."""

    def act(now: int, operation: str, name: str) -> None:
        if now == index:
            raise error

    return act


def kill_at(index: int) -> Callable[[int, str, str], None]:
    """An action that ends the process with SIGKILL before operation `index`."""

    def act(now: int, operation: str, name: str) -> None:
        if now == index:
            os.kill(os.getpid(), signal.SIGKILL)

    return act
