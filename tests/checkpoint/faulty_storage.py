"""A storage that takes notes and fails, dies or waits at a chosen operation, around any other storage.

Every operation that changes something is met twice: `Trace.note` before it, where it can be made to fail, and
`Trace.performed` after it. What was performed is kept with its bytes, in order, by all ranks: from that
`crash_states` makes what a loss of power would have left.
"""

import errno
import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from dlrm_scale.checkpoint.storage.storage import ReadableFile, Storage, WritableFile, open_storage

__all__ = ["Event", "Trace", "TracedStorage", "TracedStore", "fail_at", "kill_at"]


@dataclass(frozen=True, slots=True)
class Event:
    """One performed operation.

    Attributes:
        operation: `make_folder`, `create`, `write`, `sync`, `close`, `link`, `remove`, `sync_folder`, or `acknowledge`.
        name: of the file or folder; of a link its new name.
        source: a link's old name.
        data: what a write appended.
        step: what was acknowledged.
    """

    operation: str
    name: str = ""
    source: str = ""
    data: bytes = b""
    step: int = 0


class Trace:
    """Counts and records the operations of all ranks, and acts before chosen ones.

    Attributes:
        operations: begun ones, also those that failed.
        done: performed ones.
        act: called with number, operation and name before each; what it raises is the operation's failure.
        after: called with operation and name after each.
        room_bytes: what may still be written to files whose names contain `room_of` before the disk is full.
    """

    def __init__(self) -> None:
        self.operations: list[tuple[str, str]] = []
        self.done: list[Event] = []
        self.act: Callable[[int, str, str], None] | None = None
        self.after: Callable[[str, str], None] | None = None
        self.room_bytes: int | None = None
        self.room_of = ""
        self._lock = threading.Lock()

    def note(self, operation: str, name: str) -> None:
        with self._lock:
            index = len(self.operations)
            self.operations.append((operation, name))
        if self.act is not None:
            self.act(index, operation, name)

    @contextmanager
    def performing(self, event: Event) -> Iterator[None]:
        """Around the operation itself: the order of `done` is the order on the disk."""
        with self._lock:
            yield
            self.done.append(event)
        if self.after is not None:
            self.after(event.operation, event.name)

    def acknowledge(self, step: int) -> None:
        """Note that somebody was told that a step is saved."""
        with self._lock:
            self.done.append(Event("acknowledge", step=step))

    def take_room(self, name: str, size_bytes: int) -> int:
        """How many of `size_bytes` still fit."""
        if self.room_bytes is None or self.room_of not in name:
            return size_bytes
        with self._lock:
            taken = min(size_bytes, self.room_bytes)
            self.room_bytes -= taken
        return taken


class TracedStorage:
    """A `Storage` that tells a trace of every operation that changes something."""

    def __init__(self, location: Path | Storage, trace: Trace) -> None:
        self._inner = open_storage(location)
        self._trace = trace

    @property
    def address(self) -> str:
        return self._inner.address

    @property
    def warnings(self) -> tuple[str, ...]:
        return self._inner.warnings

    def make_folders(self, *names: str) -> None:
        self._inner.make_folders(*names)
        for name in names:
            with self._trace.performing(Event("make_folder", name)):
                pass

    @contextmanager
    def create(self, name: str, size_bytes: int = 0) -> Iterator[WritableFile]:
        self._trace.note("create", name)
        made = self._inner.create(name, size_bytes)
        with self._trace.performing(Event("create", name)):
            file = made.__enter__()
        try:
            yield _TracedFile(file, self._trace)
            self._trace.note("close", name)
        finally:
            made.__exit__(None, None, None)

    def write_durably(self, name: str, data: bytes) -> None:
        with self.create(name) as file:
            file.write(memoryview(data))
            file.sync()

    @contextmanager
    def open(self, name: str) -> Iterator[ReadableFile]:
        with self._inner.open(name) as file:
            yield file

    def read(self, name: str, limit_bytes: int) -> bytes:
        return self._inner.read(name, limit_bytes)

    def link(self, source: str, target: str) -> None:
        self._trace.note("link", target)
        with self._trace.performing(Event("link", target, source=source)):
            self._inner.link(source, target)

    def remove(self, name: str) -> None:
        self._trace.note("remove", name)
        with self._trace.performing(Event("remove", name)):
            self._inner.remove(name)

    def sync_folder(self, name: str) -> None:
        self._trace.note("sync_folder", name)
        with self._trace.performing(Event("sync_folder", name)):
            self._inner.sync_folder(name)

    def list_names(self, folder: str) -> list[str]:
        return self._inner.list_names(folder)

    def exists(self, name: str) -> bool:
        return self._inner.exists(name)

    def size_bytes(self, name: str) -> int:
        return self._inner.size_bytes(name)


class _TracedFile:
    def __init__(self, file: WritableFile, trace: Trace) -> None:
        self.name = file.name
        self._file = file
        self._trace = trace

    def write(self, data: memoryview) -> None:
        # In two parts, so that a kill in between leaves half of it.
        for part in (data[: len(data) // 2], data[len(data) // 2 :]):
            self._trace.note("write", self.name)
            fits = self._trace.take_room(self.name, len(part))
            if fits:
                with self._trace.performing(Event("write", self.name, data=bytes(part[:fits]))):
                    self._file.write(part[:fits])
            if fits < len(part):
                raise OSError(errno.ENOSPC, "No space left on device")

    def sync(self) -> None:
        self._trace.note("sync", self.name)
        with self._trace.performing(Event("sync", self.name)):
            self._file.sync()


class TracedStore:
    """A `torch.distributed` store that tells a trace of votes and outcomes, as `vote` and `outcome`."""

    def __init__(self, store: object, trace: Trace) -> None:
        self._store = store
        self._trace = trace

    def set(self, key: str, value: str) -> None:
        operation = next((kind for kind in ("vote", "outcome") if f"/{kind}/" in key), None)
        if operation is None:
            self._store.set(key, value)  # type: ignore[attr-defined]
            return
        self._trace.note(operation, value)
        self._store.set(key, value)  # type: ignore[attr-defined]
        if self._trace.after is not None:
            self._trace.after(operation, value)

    def __getattr__(self, name: str) -> object:
        return getattr(self._store, name)


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
