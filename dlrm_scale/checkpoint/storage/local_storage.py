"""Checkpoints in a folder of a POSIX file system that all ranks share; see `Storage` for what an operation promises."""

import errno
import os
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from dlrm_scale.checkpoint.storage.store_calls import UncertainWriteError
from dlrm_scale.units import MIB

__all__ = [
    "MOST_CACHED_BYTES",
    "MOST_UNSYNCED_BYTES",
    "PIECE_BYTES",
    "LocalReadableFile",
    "LocalStorage",
    "LocalWritableFile",
]

PIECE_BYTES = 32 * MIB
"""Written bytes that are synced at a time, while writing goes on."""

MOST_UNSYNCED_BYTES = 128 * MIB
"""What a file has un-synced at most: a sync of all of a big file could take longer than the others wait."""

MOST_CACHED_BYTES = 256 * MIB
"""A larger file isn't left in the page cache: a baseline would drive the training data out of it."""

_UNANSWERED = frozenset({errno.EIO, errno.ESTALE, errno.ETIMEDOUT})


class LocalWritableFile:
    """A new file that only grows. Written bytes are durable after `sync` and a sync of the folder.

    A big file is synced in a thread of its own while it is written, so that the disk works from the beginning, little
    is left for `sync`, and no sync takes long: whoever waits for the file sees it move on. Measured for 1.4 GB of
    hashed blocks, beside syncs of 256 MiB by the writer itself: two thirds of the time at the same CPU.

    What is synced of a file that isn't to be cached leaves the page cache at once, and its pages are used again for
    what comes: 2.2 GB took 1.1 s (0.8 of it in the kernel) instead of 4.4 (4.0) on a virtual machine, where fresh
    pages are dear. O_DIRECT took 1.0 s (0.1), and needs aligned memory and a way out where it is refused.

    Args:
        descriptor: of the open file, which is this object's from now on.
        name: of the file.
        piece_bytes: un-synced bytes that are worth a sync in the background; a smaller file has no thread.
        most_unsynced_bytes: `write` waits for the disk rather than have more; at least two pieces.
        cached: leave the content in the page cache.
    """

    def __init__(
        self, descriptor: int, name: str, *, piece_bytes: int, most_unsynced_bytes: int, cached: bool = True
    ) -> None:
        # Less than a piece isn't synced, and a whole piece must fit beside it.
        assert most_unsynced_bytes >= 2 * piece_bytes
        self.name = name
        self._descriptor = descriptor
        self._piece_bytes = piece_bytes
        self._most_unsynced_bytes = most_unsynced_bytes
        self._cached = cached
        self._moved = threading.Condition()  # guards what follows
        self._written_bytes = 0
        self._synced_bytes = 0
        self._ending = False
        self._error: Exception | None = None
        self._error_is_known = False
        self._thread: threading.Thread | None = None

    def write(self, data: memoryview) -> None:
        """Append all of `data` (a flat view of bytes); short writes are continued.

        Raises:
            OSError: no space, quota, I/O error, of this write or of an earlier one's sync.
        """
        while len(data):
            piece = data[: self._piece_bytes]
            self._await_room(len(piece))
            count = os.write(self._descriptor, piece)
            data = data[count:]
            self._note_written(count)

    def sync(self) -> None:
        """Make the content durable. After an error the file can't be trusted and is never synced again.

        Linux tells an error of writing back to one sync alone, and the next one succeeds without the bytes (Rebello et
        al., "Can Applications Recover from fsync Failures?", 2020). So no two syncs run at a time.
        """
        self._end_thread()
        self._raise_error()
        try:
            os.fsync(self._descriptor)
        except OSError as error:
            self._error, self._error_is_known = error, True
            raise
        self._drop_from_cache(0, self._written_bytes)
        self._synced_bytes = self._written_bytes

    def close(self) -> None:
        """Close the file; may raise a late I/O error, and that of a sync in the background that nobody was told of."""
        self._end_thread()
        descriptor, self._descriptor = self._descriptor, -1
        if descriptor >= 0:
            os.close(descriptor)
        if not self._error_is_known:
            self._raise_error()

    def _await_room(self, size_bytes: int) -> None:
        with self._moved:
            self._moved.wait_for(
                lambda: (
                    self._error is not None
                    or self._written_bytes + size_bytes - self._synced_bytes <= self._most_unsynced_bytes
                )
            )
        self._raise_error()

    def _note_written(self, count: int) -> None:
        with self._moved:
            self._written_bytes += count
            if self._written_bytes - self._synced_bytes < self._piece_bytes:
                return
            if self._thread is None:
                self._ending = False
                # A daemon, as whoever writes may be: a disk that hangs doesn't keep the program from ending.
                thread = threading.Thread(target=self._sync_pieces, name=f"sync {self.name}", daemon=True)
                thread.start()
                self._thread = thread
            self._moved.notify_all()

    def _sync_pieces(self) -> None:
        while True:
            with self._moved:
                self._moved.wait_for(
                    lambda: self._ending or self._written_bytes - self._synced_bytes >= self._piece_bytes
                )
                if self._ending:
                    return
                reached_bytes = self._written_bytes
            error: Exception | None = None
            try:
                os.fdatasync(self._descriptor)
                self._drop_from_cache(self._synced_bytes, reached_bytes)
            except Exception as raised:
                error = raised
            with self._moved:
                if error is None:
                    self._synced_bytes = reached_bytes
                self._error = error
                self._moved.notify_all()
            if error is not None:
                return

    def _drop_from_cache(self, start_bytes: int, end_bytes: int) -> None:
        """Advise the system that synced bytes won't be read soon; macOS knows no such advice."""
        if not self._cached and hasattr(os, "posix_fadvise"):
            os.posix_fadvise(self._descriptor, start_bytes, end_bytes - start_bytes, os.POSIX_FADV_DONTNEED)

    def _end_thread(self) -> None:
        """Wait for the sync under way, if there is one; the next piece that is full starts another thread."""
        with self._moved:
            self._ending = True
            self._moved.notify_all()
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def _raise_error(self) -> None:
        if self._error is None:
            return
        self._error_is_known = True
        if isinstance(self._error, OSError):
            text = f"{self._error.strerror or self._error} (when earlier bytes were synced)"
            raise OSError(self._error.errno, text) from self._error
        raise self._error


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
    def create(self, name: str, size_bytes: int = 0) -> Iterator[LocalWritableFile]:
        """Create a file that must not exist yet and close it at the end of the `with` block.

        One of more than `MOST_CACHED_BYTES` isn't left in the page cache.

        Raises:
            FileExistsError: the name is taken.
            OSError: from the block or the end of it; the file is named in it.
        """
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
        file = LocalWritableFile(
            os.open(self._path(name), flags, 0o644),
            name,
            piece_bytes=PIECE_BYTES,
            most_unsynced_bytes=MOST_UNSYNCED_BYTES,
            cached=size_bytes <= MOST_CACHED_BYTES,
        )
        try:
            try:
                yield file
            except BaseException:
                with suppress(OSError):  # what ended the block is what the caller has to know
                    file.close()
                raise
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
            UncertainWriteError: a server didn't answer, or a disk failed: the name may be there, or appear.
            OSError: the file system has no hard links.
        """
        try:
            os.link(self._path(source), self._path(target))
        except FileExistsError:
            # On NFS the answer may have got lost, and the second try finds what the first one made.
            if not os.path.samefile(self._path(source), self._path(target)):
                raise
        except OSError as error:
            if error.errno not in _UNANSWERED:
                raise
            raise UncertainWriteError(error.errno, error.strerror, str(self._path(target))) from error

    def remove(self, name: str) -> None:
        """Remove a file; one that is gone already is fine."""
        self._path(name).unlink(missing_ok=True)

    def sync_folder(self, name: str) -> None:
        """Make new, linked and removed names in a folder durable."""
        self._sync_path(self._path(name))

    def list_names(self, folder: str) -> list[str]:
        """List the files of a folder as `folder/name`, sorted; a missing folder is empty.

        Raises:
            OSError: it can't be read.
        """
        try:
            entries = os.listdir(self._path(folder))
        except (FileNotFoundError, NotADirectoryError):
            return []
        return sorted(f"{folder}/{entry}" for entry in entries)

    def exists(self, name: str) -> bool:
        """Say whether a name is taken.

        Raises:
            OSError: the folder can't be asked.
        """
        try:
            os.lstat(self._path(name))  # `os.path.lexists` says no where it may not look
        except (FileNotFoundError, NotADirectoryError):
            return False
        return True

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
