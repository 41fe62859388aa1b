"""Bytes of an input file, decompressed, with every kind of cut-off file refused.

What a file is, is told by its first bytes and never by its name. Gzip goes through isal (about twice the speed of the
standard library's zlib), zstd through zstandard. A zstd reader ends silently where a frame is cut, so frames are
driven one by one here and their ends are checked. Skippable frames, as pzstd and the seekable format write them, hold
no rows and are passed over. A frame of `zstd --long=N` takes up to 2^N bytes of memory while it is read.

One cut can't be seen: neither gzip nor zstd says how many members or frames a file has, so a file that ends exactly
between two of them is a whole file of fewer rows. Compare the size with the source's when a download broke off.
"""

import os
from pathlib import Path
from types import TracebackType
from typing import Protocol, Self, cast

import zstandard
from isal import igzip_lib

from dlrm_scale.errors import DataError

__all__ = ["ByteSource", "name_contradicts_content", "open_bytes"]

_GZIP_MAGIC = b"\x1f\x8b"
# RFC 8878: frames (3.1.1), and skippable frames (3.1.2) with 0x184D2A50 to 0x184D2A5F, stored in little-endian order.
_ZSTD_MAGICS = (b"\x28\xb5\x2f\xfd", *(bytes([0x50 + i]) + b"\x2a\x4d\x18" for i in range(16)))
# 256 KiB of compressed input keeps the calls few; zstd gets less, as its output per call can't be limited.
_GZIP_CHUNK_BYTES = 256 * 1024
_ZSTD_CHUNK_BYTES = 32 * 1024
# `zstd --long=31`, the widest; unless it is told, zstd refuses more than 128 MiB. Memory is taken as rows fill it.
_ZSTD_WINDOW_BYTES_MAX = 1 << 31

# isal's stubs call it an instance.
_ISAL_ERROR = cast(type[Exception], igzip_lib.IsalError)

_CUT = "ends in the middle of a compressed stream"
_TRUNCATED = "fetch the file again; the rows before the cut can't be told from a whole file"


class _Decompressor(Protocol):
    """One gzip member or one zstd frame."""

    @property
    def eof(self) -> bool: ...

    @property
    def unused_data(self) -> bytes: ...

    def decompress(self, data: bytes, /) -> bytes: ...


class _GzipMember:
    """An isal decompressor whose output per call is bounded."""

    def __init__(self) -> None:
        self._inner = igzip_lib.IgzipDecompressor(flag=igzip_lib.DECOMP_GZIP)

    @property
    def eof(self) -> bool:
        return bool(self._inner.eof)

    @property
    def needs_input(self) -> bool:
        return bool(self._inner.needs_input)

    @property
    def unused_data(self) -> bytes:
        return bytes(self._inner.unused_data)

    def decompress(self, data: bytes) -> bytes:
        # A megabyte a call: a file of zeros can grow a thousandfold.
        return bytes(self._inner.decompress(data, 1024 * 1024))


def _compression(start: bytes) -> str:
    """Tell the compression by the first four bytes; of a shorter file, what it is the start of, so that it's cut."""
    if not start:
        return "none"
    if start.startswith(_GZIP_MAGIC) or _GZIP_MAGIC.startswith(start):
        return "gzip"
    return "zstd" if any(magic.startswith(start) for magic in _ZSTD_MAGICS) else "none"


class ByteSource:
    """A file read from its start to its end, decompressed.

    Attributes:
        path: the file.
        compression: "none", "gzip" or "zstd".
        size_bytes: size of the file as stored.
        position_bytes: how much of the stored file has been read, for progress.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._file = open(path, "rb", buffering=0)
        except OSError as error:
            raise DataError(f"{path}: {error.strerror}") from error
        self.size_bytes = os.fstat(self._file.fileno()).st_size
        self.position_bytes = 0
        magic = self._read_exactly(4)
        self._file.seek(0)
        self.compression = _compression(magic)
        self._decompressor: _GzipMember | _Decompressor | None = None
        self._unread = b""
        self._ready = memoryview(b"")
        self._produced_bytes = 0

    def __enter__(self) -> Self:
        """Return itself."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close the file."""
        self.close()

    def close(self) -> None:
        """Close the file; harmless when repeated."""
        self._file.close()

    def read_into(self, target: memoryview) -> int:
        """Fill `target` from its start with the next decompressed bytes.

        Args:
            target: a writable buffer of bytes.

        Returns:
            How many bytes were written; fewer than asked for only at the end of the file, 0 after it.

        Raises:
            DataError: the file is cut off or damaged, with the offset.
        """
        try:
            return self._fill(target)
        except OSError as error:
            raise DataError(f"{self.path}: {error.strerror}, after {self.position_bytes:,} bytes") from error

    def _fill(self, target: memoryview) -> int:
        filled = 0
        while filled < len(target):
            if self.compression == "none":
                count = self._file.readinto(target[filled:]) or 0
                self.position_bytes += count
            else:
                count = min(len(self._ready), len(target) - filled)
                if count == 0:
                    self._ready = memoryview(self._decompress_more())
                    count = min(len(self._ready), len(target) - filled)
                target[filled : filled + count] = self._ready[:count]
                self._ready = self._ready[count:]
            if count == 0:
                break
            filled += count
        return filled

    def _read_exactly(self, count: int) -> bytes:
        data = b""
        while len(data) < count and (more := self._file.read(count - len(data))):
            data += more
        return data

    def _read_stored(self) -> bytes:
        data = self._file.read(_GZIP_CHUNK_BYTES if self.compression == "gzip" else _ZSTD_CHUNK_BYTES)
        self.position_bytes += len(data)
        return data

    def _decompress_more(self) -> bytes:
        """Return the next piece, never empty before the end of the file."""
        while True:
            held = isinstance(self._decompressor, _GzipMember) and not self._decompressor.needs_input
            if not self._unread and not held:
                self._unread = self._read_stored()
                if not self._unread:
                    if self._decompressor is not None:
                        raise self._damaged(_CUT)
                    return b""
            if self._decompressor is None:
                self._decompressor = self._next_stream()
            data, self._unread = self._unread, b""
            try:
                piece = self._decompressor.decompress(data)
            except (_ISAL_ERROR, zstandard.ZstdError, EOFError, ValueError) as error:
                if "too much memory" in str(error):
                    raise self._damaged("is damaged, or has a window of more than 2 GiB") from error
                raise self._damaged(f"is damaged ({error})") from error
            if self._decompressor.eof:
                self._unread = self._decompressor.unused_data
                self._decompressor = None
            if piece:
                self._produced_bytes += len(piece)
                return piece

    def _next_stream(self) -> "_GzipMember | _Decompressor":
        if self.compression == "gzip":
            # Zero padding after a member is refused as well: a download that was given its full size beforehand and
            # broke off between two members looks the same.
            while len(self._unread) < 2 and (more := self._read_stored()):
                self._unread += more
            if self._unread == _GZIP_MAGIC[:1]:
                raise self._damaged(_CUT)
            if self._unread[:2] != _GZIP_MAGIC:
                raise self._damaged(f"has bytes after the end of a gzip member that start none ({self._unread[:4]!r})")
            return _GzipMember()
        return zstandard.ZstdDecompressor(max_window_size=_ZSTD_WINDOW_BYTES_MAX).decompressobj()

    def _damaged(self, what: str) -> DataError:
        return DataError(
            f"{self.path}: {self.compression} file {what}, after {self.position_bytes - len(self._unread):,} of "
            f"{self.size_bytes:,} stored bytes and {self._produced_bytes:,} decompressed ones",
            remedy=_TRUNCATED,
        )


def open_bytes(path: Path) -> ByteSource:
    """Open a plain, gzip or zstd file for one pass.

    Raises:
        DataError: the file can't be opened.
    """
    return ByteSource(path)


def name_contradicts_content(source: ByteSource) -> str | None:
    """Say so when the name promises another compression than the content has.

    Returns:
        A sentence for the user, or None.
    """
    promised = {".gz": "gzip", ".zst": "zstd", ".zstd": "zstd"}.get(source.path.suffix.lower(), "none")
    if promised == source.compression or source.size_bytes == 0:
        return None
    names = {"none": "not compressed", "gzip": "gzip", "zstd": "zstd"}
    return f"{source.path}: the name says {names[promised]}, the content is {names[source.compression]}; read as that"
