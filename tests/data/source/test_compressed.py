"""Decompressed bytes of gzip and zstd files, whole and cut."""

import gzip
import struct
from collections.abc import Callable
from pathlib import Path

import pytest
import zstandard

from dlrm_scale.data.source.compressed import name_contradicts_content, open_bytes
from dlrm_scale.errors import DataError

PARTS = [b"first\n" * 50, b"", b"second\n" * 40, b"third, longer than the others\n" * 60]
CUT = r"file ends in the middle of a compressed stream, after [\d,]+ of [\d,]+ stored bytes"


def _read(path: Path, *, at_once: int = 1000) -> bytes:
    with open_bytes(path) as source:
        buffer, data = bytearray(at_once), b""
        while count := source.read_into(memoryview(buffer)):
            data += buffer[:count]
        return data


def _stored(tmp_path: Path, data: bytes) -> Path:
    path = tmp_path / "rows"
    path.write_bytes(data)
    return path


def _skippable(kind: int, content: bytes) -> bytes:
    return struct.pack("<II", 0x184D2A50 + kind, len(content)) + content


def _zstd(data: bytes) -> bytes:
    return zstandard.ZstdCompressor(write_checksum=True).compress(data)


def _streamed(data: bytes) -> bytes:
    compressor = zstandard.ZstdCompressor().compressobj()
    return compressor.compress(data) + compressor.flush()


def _like_pzstd(part: bytes) -> bytes:
    frame = _zstd(part)
    return _skippable(0, struct.pack("<I", len(frame))) + frame


@pytest.mark.parametrize("kind", range(16))
def test_a_zstd_file_that_starts_with_a_skippable_frame_is_read(tmp_path: Path, kind: int) -> None:
    path = _stored(tmp_path, _skippable(kind, b"size") + _zstd(PARTS[0]) + _skippable(15 - kind, b"") + _zstd(PARTS[2]))
    with open_bytes(path) as source:
        assert source.compression == "zstd"
        assert "the name says not compressed, the content is zstd" in str(name_contradicts_content(source))
    assert _read(path) == PARTS[0] + PARTS[2]


def test_skippable_frames_alone_hold_nothing_and_one_of_a_wrong_length_is_refused(tmp_path: Path) -> None:
    assert _read(_stored(tmp_path, _skippable(3, bytes(100_000)))) == b""
    with pytest.raises(DataError, match=CUT):
        _read(_stored(tmp_path, struct.pack("<II", 0x184D2A50, 101) + bytes(100)))


def test_a_magic_next_to_the_skippable_ones_is_no_zstd(tmp_path: Path) -> None:
    for magic in (0x184D2A4F, 0x184D2A60):
        data = struct.pack("<II", magic, 0)
        assert _read(_stored(tmp_path, data)) == data


@pytest.mark.parametrize(
    ("compress", "name"),
    [(gzip.compress, "gzip"), (_zstd, "zstd"), (_like_pzstd, "zstd")],
    ids=["gzip", "zstd", "pzstd"],
)
def test_a_file_cut_anywhere_but_between_members_is_refused(
    tmp_path: Path, compress: Callable[[bytes], bytes], name: str
) -> None:
    members = [compress(part) for part in PARTS]
    data = b"".join(members)
    whole: dict[int, bytes] = {}
    for i in range(len(members) + 1):
        start = sum(map(len, members[:i]))
        whole[start] = b"".join(PARTS[:i])
        if compress is _like_pzstd and i < len(members):
            whole[start + 12] = whole[start]
    for size in range(len(data) + 1):
        path = _stored(tmp_path, data[:size])
        if size in whole:
            assert _read(path) == whole[size]
        else:
            with pytest.raises(DataError, match=f"rows: {name} {CUT}"):
                _read(path)


def test_a_zstd_frame_with_another_size_than_it_states_is_refused(tmp_path: Path) -> None:
    frame = bytearray(zstandard.ZstdCompressor(write_checksum=False).compress(b"x" * 100))
    # Frame header: magic, descriptor (single segment, one byte of size), size.
    assert frame[5] == 100
    for stated in (99, 101):
        frame[5] = stated
        with pytest.raises(DataError, match="zstd file is damaged"):
            _read(_stored(tmp_path, bytes(frame)))


@pytest.mark.parametrize("window_log", [27, 28, 31])
def test_zstd_frames_of_any_window_are_read(tmp_path: Path, window_log: int) -> None:
    parameters = zstandard.ZstdCompressionParameters(window_log=window_log, enable_ldm=False)
    compressor = zstandard.ZstdCompressor(compression_params=parameters).compressobj()
    data = PARTS[2] * 100
    # A compressor that isn't told the size states the whole window.
    path = _stored(tmp_path, compressor.compress(data) + compressor.flush())
    assert zstandard.get_frame_parameters(path.read_bytes()).window_size == 1 << window_log
    assert _read(path, at_once=10_000) == data


def test_a_zstd_window_beyond_all_memory_is_named(tmp_path: Path) -> None:
    frame = bytearray(_streamed(b"x" * 100))
    # The byte after the descriptor: exponent 10 + 5 bits.
    frame[5] = 31 << 3
    with pytest.raises(DataError, match="zstd file is damaged, or has a window of more than 2 GiB"):
        _read(_stored(tmp_path, bytes(frame)))


@pytest.mark.parametrize(("compress", "name"), [(gzip.compress, "gzip"), (_zstd, "zstd")])
def test_a_flipped_bit_never_passes(tmp_path: Path, compress: Callable[[bytes], bytes], name: str) -> None:
    good = compress(PARTS[0])
    # A gzip header's first ten bytes hold a time and the like, which have no checksum.
    for position in range(10 if name == "gzip" else 4, len(good)):
        flipped = bytearray(good)
        flipped[position] ^= 1
        path = _stored(tmp_path, bytes(flipped))
        with pytest.raises(DataError, match=f"rows: {name} file") as caught:
            _read(path)
        assert caught.value.remedy, position
