"""Checkpoints in a dictionary: what a crash left can be looked at, and gone on from, in milliseconds."""

import errno
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

__all__ = ["MemoryStorage"]


class MemoryStorage:
    """A `Storage` whose files are `files`, shared by all ranks of a process.

    Args:
        files: content by name, as in `data/x`; copied.
        folders: names of the folders that exist.
    """

    def __init__(
        self, files: Mapping[str, bytes] | None = None, folders: frozenset[str] | set[str] = frozenset()
    ) -> None:
        self.files: dict[str, bytearray] = {name: bytearray(data) for name, data in (files or {}).items()}
        self.folders = set(folders)

    @property
    def address(self) -> str:
        return f"memory-{id(self)}"

    @property
    def warnings(self) -> tuple[str, ...]:
        return ()

    def make_folders(self, *names: str) -> None:
        self.folders.update(names)

    @contextmanager
    def create(self, name: str, size_bytes: int = 0) -> Iterator["_MemoryFile"]:
        self._check_new(name)
        self.files[name] = bytearray()
        yield _MemoryFile(name, self.files[name])

    def write_durably(self, name: str, data: bytes) -> None:
        with self.create(name) as file:
            file.write(memoryview(data))

    @contextmanager
    def open(self, name: str) -> Iterator["_MemoryFile"]:
        yield _MemoryFile(name, self._file(name))

    def read(self, name: str, limit_bytes: int) -> bytes:
        if self.size_bytes(name) > limit_bytes:
            raise ValueError(f"{name} is larger than {limit_bytes} bytes")
        return bytes(self.files[name])

    def link(self, source: str, target: str) -> None:
        self._check_new(target)
        self.files[target] = self._file(source)

    def remove(self, name: str) -> None:
        self.files.pop(name, None)

    def sync_folder(self, name: str) -> None:
        pass

    def list_names(self, folder: str) -> list[str]:
        return sorted(name for name in list(self.files) if name.startswith(f"{folder}/"))

    def exists(self, name: str) -> bool:
        return name in self.files or name in self.folders

    def size_bytes(self, name: str) -> int:
        return len(self._file(name))

    def _file(self, name: str) -> bytearray:
        if name not in self.files:
            raise FileNotFoundError(errno.ENOENT, "No such file", name)
        return self.files[name]

    def _check_new(self, name: str) -> None:
        if "/" in name and name.split("/")[0] not in self.folders:
            raise FileNotFoundError(errno.ENOENT, "No such folder", name)
        if name in self.files:
            raise FileExistsError(errno.EEXIST, "File exists", name)


class _MemoryFile:
    def __init__(self, name: str, content: bytearray) -> None:
        self.name = name
        self._content = content

    def write(self, data: memoryview) -> None:
        self._content += data

    def sync(self) -> None:
        pass

    def read_into(self, buffer: memoryview, offset_bytes: int) -> None:
        part = self._content[offset_bytes : offset_bytes + len(buffer)]
        if len(part) < len(buffer):
            raise EOFError(f"{self.name} ends before byte {offset_bytes + len(buffer)}")
        buffer[:] = part
