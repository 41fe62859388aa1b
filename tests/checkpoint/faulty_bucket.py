"""A bucket whose answers fail, get lost or never come, as those of real object stores do."""

import io
import sys
import threading
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fsspec
import pytest
from fsspec.implementations.local import LocalFileSystem
from fsspec.implementations.memory import MemoryFileSystem
from fsspec.registry import _registry
from fsspec.spec import AbstractBufferedFile, AbstractFileSystem

from dlrm_scale.checkpoint.storage.object_storage import ObjectStorage
from dlrm_scale.checkpoint.storage.store_calls import Retries

Act = Callable[[str, str], None]
"""Called with the kind of request and the name; what it raises is the answer."""


class Clock:
    """Seconds that pass only while somebody pauses."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self.pauses: list[float] = []

    def pause(self, seconds: float) -> None:
        self.pauses.append(seconds)
        self.seconds += seconds

    def retries(self, **options: Any) -> Retries:
        return Retries(now=lambda: self.seconds, pause=self.pause, draw=lambda: 1.0, **options)


class Bucket(AbstractFileSystem):  # type: ignore[misc]
    """Objects in a dict: whole or absent, no folders, no rename, multi-part uploads, If-None-Match.

    `before` acts on a request before it has an effect, `after` when its answer is on the way back. Requests are
    `put`, `begin`, `part`, `end`, `get`, `head`, `list`, `delete`.
    """

    protocol = ("s3",)
    cachable = False

    def __init__(self) -> None:
        super().__init__()
        self.objects: dict[str, bytes] = {}
        self.requests: list[tuple[str, str]] = []
        self.uploads = 0
        self.before: Act = lambda kind, name: None
        self.after: Act = lambda kind, name: None
        self.knows_conditions = True
        self.short_by = 0
        self.largest_part = 0
        self.lock = threading.Lock()

    def do(self, kind: str, path: str, effect: Callable[[], Any]) -> Any:
        name = path.split("/", 2)[-1]
        self.requests.append((kind, name))
        self.before(kind, name)
        with self.lock:
            result = effect()
        self.after(kind, name)
        return result

    def put(self, path: str, value: bytes, exclusive: bool) -> None:
        if exclusive and self.knows_conditions and path in self.objects:
            raise FileExistsError(path)
        self.objects[path] = value

    def pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **kwargs: Any) -> None:
        self.do("put", path, lambda: self.put(path, bytes(value), mode == "create"))

    def _open(self, path: str, mode: str = "rb", block_size: int | None = None, **kwargs: Any) -> Any:
        return _Upload(self, path, mode, block_size=block_size)

    def cat_file(self, path: str, start: int | None = None, end: int | None = None, **kwargs: Any) -> bytes:
        data: bytes = self.do("get", path, lambda: self._object(path)[start:end])
        short, self.short_by = self.short_by, 0
        return data[: len(data) - short]

    def info(self, path: str, **kwargs: Any) -> dict[str, Any]:
        def head() -> dict[str, Any]:
            if path in self.objects:
                return {"name": path, "type": "file", "size": len(self.objects[path])}
            if any(name.startswith(f"{path}/") for name in self.objects):
                return {"name": path, "type": "directory", "size": 0}
            raise FileNotFoundError(path)

        found: dict[str, Any] = self.do("head", path, head)
        return found

    def ls(self, path: str, detail: bool = True, **kwargs: Any) -> list[dict[str, Any]]:
        def listing() -> list[dict[str, Any]]:
            inside = [name for name in self.objects if name.startswith(f"{path}/")]
            if not inside:
                raise FileNotFoundError(path)
            return [{"name": name, "type": "file", "size": len(self.objects[name])} for name in inside]

        found: list[dict[str, Any]] = self.do("list", path, listing)
        return found

    def rm_file(self, path: str) -> None:
        self.do("delete", path, lambda: self.objects.pop(path, None))

    def mv(self, *args: Any, **kwargs: Any) -> None:
        raise AssertionError("a bucket renames nothing")

    def _object(self, path: str) -> bytes:
        if path not in self.objects:
            raise FileNotFoundError(path)
        return self.objects[path]


class _Upload(AbstractBufferedFile):  # type: ignore[misc]
    """A multi-part upload as s3fs has it: parts by number, and the object appears at the end."""

    def _initiate_upload(self) -> None:
        self.fs.do("begin", self.path, lambda: None)
        self.parts: dict[int, bytes] = {}
        self.answered_parts = 0
        self.fs.uploads += 1

    def _upload_chunk(self, final: bool = False) -> bool:
        self.buffer.seek(0)
        part = self.buffer.read()
        if part:
            self.fs.largest_part = max(self.fs.largest_part, len(part))
            # One whose answer is lost comes again under its number, and replaces itself.
            self.fs.do("part", self.path, lambda: self.parts.update({self.answered_parts: part}))
            self.answered_parts += 1
        if final:
            self.fs.do("end", self.path, self._end)
        self.offset += self.buffer.tell()
        self.buffer = io.BytesIO()
        return False

    def _end(self) -> None:
        self.fs.put(self.path, b"".join(self.parts.values()), "x" in self.mode)
        self.fs.uploads -= 1

    def discard(self) -> None:
        self.fs.uploads -= 1


class FolderBucket(LocalFileSystem):  # type: ignore[misc]
    """A local folder that behaves as a bucket: no links, no renames, no syncs, but an exclusive create.

    After `register`, URLs as `folder-bucket:///tmp/x` open it.
    """

    protocol = ("folder-bucket",)
    cachable = False

    def __init__(self, **options: Any) -> None:
        super().__init__(auto_mkdir=True, **options)

    @classmethod
    def register(cls) -> None:
        fsspec.register_implementation("folder-bucket", cls, clobber=True)

    @classmethod
    def _strip_protocol(cls, path: str) -> str:
        return str(super()._strip_protocol(str(path).removeprefix("folder-bucket://")))

    def pipe_file(self, path: str, value: bytes, mode: str = "overwrite", **kwargs: Any) -> None:
        with self.open(path, "xb" if mode == "create" else "wb") as file:
            file.write(value)

    def mv(self, *args: Any, **kwargs: Any) -> None:
        raise AssertionError("a bucket renames nothing")

    link = symlink = mv_file = mv


def bucket_storage(bucket: Bucket, clock: Clock | None = None, **options: Any) -> ObjectStorage:
    """A storage on `s3://b/run` in a bucket, with a clock that nobody waits for."""
    return ObjectStorage(bucket, "b/run", address="s3://b/run", retries=(clock or Clock()).retries(), **options)


def folder_storage(folder: Path) -> ObjectStorage:
    """A storage on a local folder without links, renames and syncs."""
    return ObjectStorage(FolderBucket(), str(folder), address=f"folder-bucket://{folder}", retries=Clock().retries())


def fail_first(count: int, kind: str, error: Callable[[], BaseException], name: str = "") -> Act:
    """An act that fails the first `count` requests of a kind, of names that hold `name`."""
    seen: dict[str, int] = defaultdict(int)

    def act(now: str, target: str) -> None:
        if now == kind and name in target:
            seen[kind] += 1
            if seen[kind] <= count:
                raise error()

    return act


def hide_store_packages(patch: pytest.MonkeyPatch) -> None:
    """As if neither s3fs nor gcsfs were installed."""
    for package, protocol in (("s3fs", "s3"), ("gcsfs", "gs")):
        patch.setitem(sys.modules, package, None)
        patch.delitem(_registry, protocol, raising=False)


def empty_memory() -> None:
    """Forget all that `memory://` holds."""
    MemoryFileSystem.store.clear()
    MemoryFileSystem.pseudo_dirs[:] = [""]
