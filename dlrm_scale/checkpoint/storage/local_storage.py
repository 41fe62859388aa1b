"""Checkpoints in a folder of a POSIX file system that all ranks share; see `Storage` for what an operation promises."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

__all__ = ["LocalReadableFile", "LocalStorage", "LocalWritableFile"]


class LocalWritableFile:
    """A new file that only grows. Written bytes are durable after `sync` and a sync of the folder."""

    def __init__(self, descriptor: int, name: str) -> None:
        self._descriptor = descriptor
        self.name = name

    def write(self, data: memoryview) -> None:
        """Append all of `data` (a flat view of bytes); short writes are continued.

        Raises:
            OSError: no space, quota, I/O error.
        """
        while len(data):
            data = data[os.write(self._descriptor, data) :]

    def sync(self) -> None:
        """Make the content durable. After an error the file can't be trusted and is never synced again."""
        os.fsync(self._descriptor)

    def close(self) -> None:
        """Close the file; may raise a late I/O error."""
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)


class LocalReadableFile:
    """A file read at given offsets."""

    def __init__(self, descriptor: int, name: str) -> None:
        self._descriptor = descriptor
        self.name = name

    def read_into(self, buffer: memoryview, offset_bytes: int) -> None:
        """Fill all of `buffer` (a flat view of bytes) from `offset_bytes` on.

        Raises:
            EOFError: the file ends earlier.
            OSError: I/O error.
        """
        while len(buffer):
            count = os.preadv(self._descriptor, [buffer], offset_bytes)
            if count == 0:
                raise EOFError(f"{self.name} ends before byte {offset_bytes + len(buffer)}")
            buffer = buffer[count:]
            offset_bytes += count

    def close(self) -> None:
        """Close the file."""
        os.close(self._descriptor)


class LocalStorage:
    """Files under one folder of a POSIX file system that all ranks share.

    Args:
        root: the folder; made by `make_folders`.
    """

    def __init__(self, root: Path) -> None:
        self.root = Path(root)

    @property
    def address(self) -> str:
        """The folder's absolute path."""
        return str(self.root.resolve())

    @property
    def warnings(self) -> tuple[str, ...]:
        """None: all promises are kept."""
        return ()

    def _path(self, name: str) -> Path:
        return self.root / name

    def make_folders(self, *names: str) -> None:
        """Make the root and folders in it, durably; those that exist are kept."""
        missing = [p for p in (self.root, *self.root.parents) if not p.exists()]
        for name in names:
            self._path(name).mkdir(parents=True, exist_ok=True)
        for path in {self.root, *(p.parent for p in missing)}:
            self._sync_path(path)

    @contextmanager
    def create(self, name: str) -> Iterator[LocalWritableFile]:
        """Create a file that must not exist yet and close it at the end of the `with` block.

        Raises:
            FileExistsError: the name is taken.
            OSError: from the block or the end of it; the file is named in it.
        """
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        file = LocalWritableFile(os.open(self._path(name), flags, 0o644), name)
        try:
            try:
                yield file
            finally:
                file.close()
        except OSError as error:
            if error.filename is None:  # a descriptor's error knows no name, and users must know which disk is full
                error.filename = str(self._path(name))
            raise

    def write_durably(self, name: str, data: bytes) -> None:
        """Create a small file with `data` and sync it; the folder is left to the caller."""
        with self.create(name) as file:
            file.write(memoryview(data))
            file.sync()

    @contextmanager
    def open(self, name: str) -> Iterator[LocalReadableFile]:
        """Open a file for reading; a symbolic link is refused."""
        file = LocalReadableFile(os.open(self._path(name), os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC), name)
        try:
            yield file
        finally:
            file.close()

    def read(self, name: str, limit_bytes: int) -> bytes:
        """Read a whole small file.

        Raises:
            OSError: it can't be read.
            ValueError: it is larger than `limit_bytes`.
        """
        size = self.size_bytes(name)
        if size > limit_bytes:
            raise ValueError(f"{name} has {size} bytes, more than {limit_bytes}")
        buffer = bytearray(size)
        with self.open(name) as file:
            file.read_into(memoryview(buffer), 0)
        return bytes(buffer)

    def link(self, source: str, target: str) -> None:
        """Give a file a second name that must not exist yet: all or nothing, never replacing.

        Raises:
            FileExistsError: `target` exists.
            OSError: the file system has no hard links.
        """
        os.link(self._path(source), self._path(target))

    def remove(self, name: str) -> None:
        """Remove a file; one that is gone already is fine."""
        self._path(name).unlink(missing_ok=True)

    def sync_folder(self, name: str) -> None:
        """Make new, linked and removed names in a folder durable."""
        self._sync_path(self._path(name))

    def list_names(self, folder: str) -> list[str]:
        """List the files of a folder as `folder/name`, sorted; a missing folder is empty."""
        path = self._path(folder)
        if not path.is_dir():
            return []
        return sorted(f"{folder}/{entry}" for entry in os.listdir(path))

    def exists(self, name: str) -> bool:
        """Say whether a name is taken."""
        return os.path.lexists(self._path(name))

    def size_bytes(self, name: str) -> int:
        """Size of a file in bytes.

        Raises:
            FileNotFoundError: there is none.
        """
        return self._path(name).stat(follow_symlinks=False).st_size

    @staticmethod
    def _sync_path(path: Path) -> None:
        descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
