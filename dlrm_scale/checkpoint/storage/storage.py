"""The few operations that checkpoints are made of, each named after what it guarantees.

Everything durable goes through a `Storage`. Names are relative to its root, with forward slashes. Whoever writes a name
twice, or reads what isn't there, gets the same errors from every kind of storage: `FileExistsError`,
`FileNotFoundError`, `EOFError` for a file that ends early, and `OSError` for the rest.
"""

from contextlib import AbstractContextManager
from pathlib import Path
from typing import Protocol

from dlrm_scale.checkpoint.storage.local_storage import LocalStorage
from dlrm_scale.checkpoint.storage.store_calls import Retries

__all__ = ["Location", "ReadableFile", "Storage", "WritableFile", "open_storage"]


class WritableFile(Protocol):
    """A new file that only grows. Written bytes are durable after `sync` and a sync of the folder."""

    name: str

    def write(self, data: memoryview) -> None:
        """Append all of `data` (a flat view of bytes); OSError if that can't be done."""

    def sync(self) -> None:
        """Make the content durable. After an error the file can't be trusted and is never synced again."""


class ReadableFile(Protocol):
    """A file read at given offsets."""

    name: str

    def read_into(self, buffer: memoryview, offset_bytes: int) -> None:
        """Fill all of `buffer` (a flat view of bytes) from `offset_bytes` on; EOFError if the file ends earlier."""


class Storage(Protocol):
    """One root with the files of one run's checkpoints."""

    @property
    def address(self) -> str:
        """Absolute path or URL of the root: two storages of one address hold the same files."""

    @property
    def warnings(self) -> tuple[str, ...]:
        """Promises that can't be kept here, in words for the user; known after `make_folders`."""

    def make_folders(self, *names: str) -> None:
        """Make the root and folders in it, durably; those that exist are kept."""

    def create(self, name: str, size_bytes: int = 0) -> AbstractContextManager[WritableFile]:
        """Create a file that must not exist yet; it is closed at the end of the `with` block.

        Args:
            name: of the file.
            size_bytes: what it will have, as far as that is known: advice on how to write it.

        Raises:
            FileExistsError: the name is taken.
            UncertainWriteError: at the end, of remote storage: the file may be there, or still appear.
        """

    def write_durably(self, name: str, data: bytes) -> None:
        """Create a small file with `data` and sync it; the folder is left to the caller."""

    def open(self, name: str) -> AbstractContextManager[ReadableFile]:
        """Open a file for reading."""

    def read(self, name: str, limit_bytes: int) -> bytes:
        """Read a whole small file; ValueError if it is larger than `limit_bytes`."""

    def link(self, source: str, target: str) -> None:
        """Give the content of a small file a second name that must not exist yet: all or nothing, never replacing.

        Raises:
            FileExistsError: `target` exists.
            UncertainWriteError: of remote storage: `target` may be there, or still appear.
        """

    def remove(self, name: str) -> None:
        """Remove a file; one that is gone already is fine."""

    def sync_folder(self, name: str) -> None:
        """Make new, linked and removed names in a folder durable."""

    def list_names(self, folder: str) -> list[str]:
        """List the files of a folder as `folder/name`, sorted; a missing folder is empty."""

    def exists(self, name: str) -> bool:
        """Say whether a file or folder has this name."""

    def size_bytes(self, name: str) -> int:
        """Size of a file in bytes; FileNotFoundError if there is none."""


Location = str | Path | Storage
"""Where checkpoints are: a folder's path, a URL, or an open storage."""


def open_storage(location: Location, *, retries: Retries | None = None) -> Storage:
    """Open the root of a run's checkpoints; one that is open already is returned as it is. Touches nothing.

    Args:
        location: a folder, `file://` or not; the URL of a store that fsspec knows; or an open storage.
        retries: patience with a store; folders have none.

    Raises:
        ConfigError: a URL that can't be opened, with what to install.
    """
    if not isinstance(location, (str, Path)):
        return location
    protocol, separator, rest = str(location).partition("://")
    if not separator:
        return LocalStorage(Path(location))
    if protocol in ("file", "local"):
        # with links, renames and syncs, which fsspec's own file system lacks
        return LocalStorage(Path(rest))
    from dlrm_scale.checkpoint.storage.object_storage import open_object_storage

    return open_object_storage(str(location), retries)
