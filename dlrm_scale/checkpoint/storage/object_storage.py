"""Checkpoints in an object store, through fsspec: S3, Google Cloud Storage, and whatever else it knows.

    create      small: one PUT that must not replace anything; large: a multi-part upload, one part in memory
    link        GET, then such a PUT: nothing is renamed
    sync        nothing: an object is there, whole and durable, once its `with` block has ended, or not at all
    read        ranges, each checked for its length

The answer to a PUT can get lost after the object has been made, and the library's own second try then finds "its" name
taken. So a name that is taken is read back: with exactly the bytes that were to be written, it is ours. That needs
bytes that no other writer would write; manifests and starts name their writer, its attempt and the time.

Credentials and endpoints come from the environment and fsspec's configuration files, never from the URL.
"""

import uuid
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any

import fsspec

from dlrm_scale.checkpoint.storage.object_files import PART_BYTES, ObjectReader, ObjectWriter
from dlrm_scale.checkpoint.storage.store_calls import Retries, StoreCalls, UncertainWriteError, is_transient
from dlrm_scale.errors import ConfigError, StorageError
from dlrm_scale.units import MIB

__all__ = ["ObjectStorage", "open_object_storage"]

_EXCLUSIVE_PROTOCOLS = frozenset({"s3", "s3a", "gs", "gcs", "memory"})
"""Whose fsspec implementations create exclusively: If-None-Match of S3, ifGenerationMatch of GCS."""

_BUCKET_PROTOCOLS = frozenset({"s3", "s3a", "gs", "gcs", "abfs", "abfss", "az", "oss", "oci"})
"""Which have no folders; making one could make a bucket of a misspelt name."""

_NO_STORES = frozenset({"data", "ftp", "git", "github", "http", "https", "jupyter", "reference", "sftp", "ssh"})
"""Which fsspec opens, and which can't be written to, or not so that a file appears whole or not at all."""

_LINK_LIMIT_BYTES = 512 * MIB
"""Of a file that is given a second name; they are manifests."""


_REMEDY = "name a folder, or a bucket as s3://… or gs://…"


class ObjectStorage:
    """The objects under one prefix of a store.

    Args:
        filesystem: an fsspec file system that keeps no listings.
        root: prefix in its own words, with the bucket and without the protocol.
        address: the URL.
        retries: patience.
        part_bytes: of a multi-part upload; 5 MiB at least on S3.
    """

    def __init__(
        self, filesystem: Any, root: str, *, address: str, retries: Retries | None = None, part_bytes: int = PART_BYTES
    ) -> None:
        self.address = address
        self._filesystem = filesystem
        self._root = root.rstrip("/")
        self._calls = StoreCalls(retries if retries is not None else Retries())
        self._part_bytes = part_bytes
        self._protocols = _protocols(filesystem)
        self._creates_exclusively = bool(_EXCLUSIVE_PROTOCOLS.intersection(self._protocols))
        self._probed = False

    @property
    def warnings(self) -> tuple[str, ...]:
        """Promises that the store doesn't keep, for the user; known after `make_folders`."""
        found = []
        if not self._creates_exclusively:
            found.append(
                f"{self.address}: the store doesn't create files exclusively; two trainers that start on this URL at "
                "the same moment could overwrite each other's checkpoints"
            )
        if "memory" in self._protocols:
            found.append(f"{self.address}: these checkpoints end with the process")
        return tuple(found)

    def make_folders(self, *names: str) -> None:
        """Make folders where the store has any; the first time, find out whether it refuses to replace an object."""
        if not _BUCKET_PROTOCOLS.intersection(self._protocols):
            for name in names:
                makedirs = partial(self._filesystem.makedirs, self._path(name), exist_ok=True)
                self._calls.until_it_works(f"make {name}", makedirs)
        if self._creates_exclusively and not self._probed:
            self._creates_exclusively = self._refuses_to_replace()
            self._probed = True

    @contextmanager
    def create(self, name: str, size_bytes: int = 0) -> Iterator[ObjectWriter]:
        """Write an object that must not exist yet; it appears whole at the end of the `with` block, if at all.

        Its size doesn't matter here.

        Raises:
            FileExistsError: the name is taken; noticed at the end at the latest.
            UncertainWriteError: the store didn't answer, and the object may still appear.
        """
        file = ObjectWriter(
            self._filesystem,
            self._path(name),
            name,
            calls=self._calls,
            part_bytes=self._part_bytes,
            put=self.put,
        )
        try:
            yield file
            file.finish()
        except BaseException:
            file.abandon()
            raise

    def write_durably(self, name: str, data: bytes) -> None:
        """Create a small object with `data`."""
        self.put(name, data)

    def put(self, name: str, data: bytes) -> None:
        """Create an object in one request.

        Raises:
            FileExistsError: the name is taken, by other bytes.
            UncertainWriteError: none of the attempts was answered with a yes, nor all with a no: the object may appear.
        """
        path = self._path(name)
        unanswered: list[OSError] = []

        def attempt() -> None:
            self._filesystem.pipe_file(path, data, mode="create")

        def note(error: OSError) -> bool:
            unanswered.append(error)
            return True

        try:
            self._calls.until_it_works(f"create {name}", attempt, may_repeat=note)
        except FileExistsError:
            if not self._holds(name, data):
                raise
        except OSError as error:
            try:
                is_there = self._holds(name, data)
            except OSError:
                raise UncertainWriteError(error.errno, f"{error}; and whether it is there can't be read") from error
            if is_there:
                return
            if any(isinstance(e, (TimeoutError, ConnectionError)) and is_transient(e) for e in [*unanswered, error]):
                # Whatever got no answer, given up by us or cut off on the way, may still be carried out.
                raise UncertainWriteError(error.errno, str(error)) from error
            raise

    @contextmanager
    def open(self, name: str) -> Iterator[ObjectReader]:
        """Open an object for reading."""
        yield ObjectReader(self._filesystem, self._path(name), name, self._calls, self.size_bytes(name))

    def read(self, name: str, limit_bytes: int) -> bytes:
        """Read a whole small object; ValueError if it is larger than `limit_bytes`."""
        with self.open(name) as file:
            if file.size_bytes > limit_bytes:
                raise ValueError(f"{name} has {file.size_bytes} bytes, more than {limit_bytes}")
            buffer = bytearray(file.size_bytes)
            file.read_into(memoryview(buffer), 0)
        return bytes(buffer)

    def link(self, source: str, target: str) -> None:
        """Create `target` with the bytes of `source`, which stays; as `put`, it replaces nothing.

        Raises:
            FileExistsError: `target` exists with other bytes.
            UncertainWriteError: it may have been made, or still be.
        """
        self.put(target, self.read(source, _LINK_LIMIT_BYTES))

    def remove(self, name: str) -> None:
        """Remove an object; one that is gone already is fine."""
        with suppress(FileNotFoundError):
            self._calls.until_it_works(f"remove {name}", lambda: self._filesystem.rm_file(self._path(name)))

    def sync_folder(self, name: str) -> None:
        """Do nothing: an object that is there is durable."""

    def list_names(self, folder: str) -> list[str]:
        """List the objects of a folder as `folder/name`, sorted, as they are now; a missing folder is empty."""
        path = self._path(folder)

        def listing() -> Sequence[dict[str, Any]]:
            self._filesystem.invalidate_cache(path)
            found: Sequence[dict[str, Any]] = self._filesystem.ls(path, detail=True)
            return found

        try:
            entries = self._calls.until_it_works(f"list {folder}", listing)
        except FileNotFoundError:
            return []
        names = [str(entry["name"]).rsplit("/", 1)[-1] for entry in entries if entry["type"] == "file"]
        return sorted(f"{folder}/{name}" for name in names if name)

    def exists(self, name: str) -> bool:
        """Say whether an object or folder has this name."""
        try:
            self._info(name)
        except FileNotFoundError:
            return False
        return True

    def size_bytes(self, name: str) -> int:
        """Size of an object; FileNotFoundError if there is none."""
        return int(self._info(name)["size"])

    def _path(self, name: str) -> str:
        return f"{self._root}/{name}" if name != "." else self._root

    def _info(self, name: str) -> dict[str, Any]:
        path = self._path(name)

        def info() -> dict[str, Any]:
            self._filesystem.invalidate_cache(path)
            found: dict[str, Any] = self._filesystem.info(path)
            return found

        return self._calls.until_it_works(f"look for {name}", info)

    def _holds(self, name: str, data: bytes) -> bool:
        """Whether an object has exactly these bytes."""
        try:
            return self.size_bytes(name) == len(data) and self.read(name, len(data)) == data
        except (FileNotFoundError, EOFError, ValueError):
            return False

    def _refuses_to_replace(self) -> bool:
        """Create one object twice. S3-compatible stores of other makers may not know the condition and replace it."""
        probe = f"probe-{uuid.uuid4().hex}"
        self.put(probe, b"first")
        try:
            self.put(probe, b"second")
        except FileExistsError:
            return True
        finally:
            self.remove(probe)
        return False


def open_object_storage(url: str, retries: Retries | None = None) -> ObjectStorage:
    """Open a URL; no request is made.

    Raises:
        ConfigError: the protocol isn't known or no store, its library isn't installed, or the URL has a password.
        StorageError: its host doesn't answer, of a protocol that asks it already.
    """
    protocol = url.split("://", 1)[0]
    if protocol in _NO_STORES:
        raise ConfigError(f"{url}: checkpoints can't be kept under {protocol}://", remedy=_REMEDY)
    if "::" in url:
        raise ConfigError(f"{protocol}://: chained URLs aren't supported: a cache would hide other ranks' files")
    if "@" in url.split("://", 1)[1].split("/", 1)[0]:
        raise ConfigError(
            f"a {protocol}:// URL holds a user or password",
            remedy="give credentials through the environment or fsspec's configuration, as its manual says",
        )
    try:
        # One file system for each storage: another's cached listings would hide new files.
        filesystem, root = fsspec.core.url_to_fs(url, use_listings_cache=False, skip_instance_cache=True)
    except ImportError as error:
        extra = {"s3": "s3", "s3a": "s3", "gs": "gcs", "gcs": "gcs"}.get(protocol)
        remedy = f".venv/bin/pip install 'dlrm-scale[{extra}]'" if extra else "install the package that it names"
        raise ConfigError(f"{protocol}:// can't be opened: {error}", remedy=remedy) from error
    except ValueError as error:
        raise ConfigError(f"{url} can't be opened: {error}", remedy=_REMEDY) from error
    except OSError as error:
        raise StorageError(f"{url} can't be opened: {error}", remedy="check the host, and try again") from error
    return ObjectStorage(filesystem, root, address=url.rstrip("/"), retries=retries)


def _protocols(filesystem: Any) -> tuple[str, ...]:
    protocol = filesystem.protocol
    return (protocol,) if isinstance(protocol, str) else tuple(protocol)
