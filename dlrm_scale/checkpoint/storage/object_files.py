"""Objects of a store as files: written in parts and read in ranges, so that memory is bounded."""

from collections.abc import Callable
from contextlib import suppress
from typing import Any

from fsspec.spec import AbstractBufferedFile

from dlrm_scale.checkpoint.storage.store_calls import StoreCalls, StoreTimeoutError, UncertainWriteError
from dlrm_scale.units import MIB

__all__ = ["PART_BYTES", "ObjectReader", "ObjectWriter"]

PART_BYTES = 32 * MIB
"""Of a multi-part upload. S3 takes 10,000 parts, so a rank's file may have 312 GiB; about three parts are in memory."""

_REQUEST_BYTES = 16 * MIB
"""Asked for at a time."""


class ObjectWriter:
    """A new object that only grows: buffered up to a part, then uploaded part by part.

    Args:
        filesystem: of fsspec.
        path: of the object, in its words.
        name: of the object, in ours.
        calls: makes the calls.
        part_bytes: of a part.
        put: creates an object of at most one part, by our name.
    """

    def __init__(
        self,
        filesystem: Any,
        path: str,
        name: str,
        *,
        calls: StoreCalls,
        part_bytes: int,
        put: Callable[[str, bytes], None],
    ) -> None:
        self.name = name
        self._filesystem = filesystem
        self._path = path
        self._calls = calls
        self._part_bytes = part_bytes
        self._put = put
        self._pending = bytearray()
        self._upload: Any = None
        self._uploaded_bytes = 0

    def write(self, data: memoryview) -> None:
        """Append all of `data` (a flat view of bytes).

        Raises:
            FileExistsError: the name is taken.
            OSError: a part can't be uploaded.
        """
        while len(data):
            taken = data[: self._part_bytes - len(self._pending)]
            self._pending += taken
            data = data[len(taken) :]
            if len(self._pending) == self._part_bytes:
                self._send_part()

    def sync(self) -> None:
        """Do nothing: the object isn't there before its end, and durable then."""

    def finish(self) -> None:
        """Make the object of what was written.

        Raises:
            FileExistsError: the name is taken.
            OSError: it can't be made; UncertainWriteError if it may appear all the same.
        """
        if self._upload is None:
            self._put(self.name, bytes(self._pending))
            return
        upload, rest = self._upload, bytes(self._pending)

        def end() -> None:
            if rest:
                upload.write(rest)
            upload.close()

        try:
            self._calls.once(f"end the upload of {self.name}", end)
        except OSError as error:
            # Not repeated, for the libraries would upload the last part again. The answer may have been lost, though;
            # no other writer has this name and this size.
            if not self._is_whole():
                if isinstance(error, StoreTimeoutError):
                    raise UncertainWriteError(error.errno, str(error)) from error
                raise
        self._upload = None

    def abandon(self) -> None:
        """Drop what was uploaded, as far as that can be done: the next start sweeps what is left."""
        upload, self._upload = self._upload, None
        self._pending.clear()
        if upload is None:
            return
        with suppress(Exception):
            self._calls.once(f"drop the upload of {self.name}", upload.discard)
        if isinstance(upload, AbstractBufferedFile):
            # Its finalizer would end the upload, and the object would be there, incomplete.
            upload.closed = True
            return
        with suppress(Exception):
            self._calls.once(f"remove {self.name}", lambda: (upload.close(), self._filesystem.rm_file(self._path)))

    def _send_part(self) -> None:
        part = bytes(self._pending)
        handed_over = False

        def send() -> None:
            nonlocal handed_over
            if self._upload is None or (self._upload.closed and not self._uploaded_bytes):
                # fsspec closes a file whose upload couldn't begin
                handed_over = False
                self._upload = self._filesystem.open(self._path, "xb", block_size=self._part_bytes)
            if handed_over:
                self._upload.flush()
            else:
                handed_over = True
                self._upload.write(part)

        def may_repeat(error: OSError) -> bool:
            # A buffered file keeps a part that was refused, under its number; a call that goes on still uses it.
            return isinstance(self._upload, AbstractBufferedFile | None) and not isinstance(error, StoreTimeoutError)

        self._calls.until_it_works(f"upload {self.name}", send, may_repeat=may_repeat)
        self._uploaded_bytes += len(part)
        self._pending.clear()

    def _is_whole(self) -> bool:
        with suppress(OSError):
            info = self._calls.until_it_works(f"look for {self.name}", lambda: self._filesystem.info(self._path))
            return int(info["size"]) == self._uploaded_bytes + len(self._pending)
        return False


class ObjectReader:
    """An object read at given offsets."""

    def __init__(self, filesystem: Any, path: str, name: str, calls: StoreCalls, size_bytes: int) -> None:
        self.name = name
        self.size_bytes = size_bytes
        self._filesystem = filesystem
        self._path = path
        self._calls = calls

    def read_into(self, buffer: memoryview, offset_bytes: int) -> None:
        """Fill all of `buffer` (a flat view of bytes) from `offset_bytes` on.

        Raises:
            EOFError: the object ends earlier.
            OSError: the store says no, or sends too little again and again.
        """
        if offset_bytes + len(buffer) > self.size_bytes:
            raise EOFError(f"{self.name} ends before byte {offset_bytes + len(buffer)}")
        for start in range(0, len(buffer), _REQUEST_BYTES):
            part = buffer[start : start + _REQUEST_BYTES]
            part[:] = self._fetch(offset_bytes + start, len(part))

    def _fetch(self, offset_bytes: int, count: int) -> bytes:
        def fetch() -> bytes:
            data: bytes = self._filesystem.cat_file(self._path, start=offset_bytes, end=offset_bytes + count)
            if len(data) != count:
                raise ConnectionError(f"{len(data)} of {count} bytes from byte {offset_bytes} on")
            return data

        return self._calls.until_it_works(f"read {self.name}", fetch)
