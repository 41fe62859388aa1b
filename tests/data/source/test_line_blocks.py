"""Blocks of whole lines hold every line once, whatever their length."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dlrm_scale.data.source import line_blocks
from dlrm_scale.data.source.compressed import open_bytes
from dlrm_scale.data.source.line_blocks import LineReader, count_lines


def _blocks(path: Path, *, block_bytes: int = 1 << 16) -> list[tuple[int, int, bytes, int]]:
    """First line, lines, text, and where the unterminated line starts in it."""
    found = []
    with open_bytes(path) as source:
        reader = LineReader(source, block_bytes=block_bytes)
        for block in reader:
            text = block.buffer[block.start : block.end].tobytes()
            assert text.count(b"\n") == block.lines
            assert len(block.buffer) >= block.end + 8
            unterminated = block.unterminated_start
            found.append((block.first_line, block.lines, text, unterminated - block.start if unterminated >= 0 else -1))
            # Spoils what a later block would share.
            block.buffer[: block.end] = 7
            reader.give_back(block)
    return found


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("lines") / "x.tsv"


@settings(max_examples=150, deadline=None)
@given(
    lines=st.lists(st.text("ab\t\r", max_size=30).map(str.encode), max_size=60),
    ends=st.booleans(),
    bom=st.booleans(),
    block_bytes=st.integers(1, 300),
    most=st.integers(1, 8),
)
def test_blocks_hold_every_line_once(
    path: Path, lines: list[bytes], ends: bool, bom: bool, block_bytes: int, most: int
) -> None:
    text = b"".join(line + b"\n" for line in lines)
    if not ends and lines and lines[-1]:
        text = text[:-1]
    path.write_bytes(b"\xef\xbb\xbf" * bom + text)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(line_blocks, "_BLOCK_LINES_MAX", most)
        blocks = _blocks(path, block_bytes=max(3, block_bytes))
    whole = b"".join(line + b"\n" for line in lines)
    assert b"".join(block[2] for block in blocks) == whole
    assert all(1 <= block[1] <= most for block in blocks)
    assert [block[0] for block in blocks] == [1 + sum(block[1] for block in blocks[:i]) for i in range(len(blocks))]
    unterminated = [block[2][block[3] :] for block in blocks if block[3] >= 0]
    assert unterminated == ([lines[-1] + b"\n"] if lines and text != b"".join(x + b"\n" for x in lines) else [])


def test_short_lines_are_scanned_and_copied_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "x.tsv"
    data = b"0\n" * 3_000_000
    path.write_bytes(data)
    line_feeds, scanned = line_blocks._line_feeds, []

    def counted(buffer: Any) -> int:
        scanned.append(len(buffer))
        return int(line_feeds(buffer))

    monkeypatch.setattr(line_blocks, "_line_feeds", counted)
    blocks = _blocks(path, block_bytes=line_blocks.BLOCK_BYTES)
    assert sum(scanned) == len(data)
    assert max(block[1] for block in blocks) == 16_384
    assert sum(block[1] for block in blocks) == 3_000_000
    assert np.all(np.frombuffer(b"".join(block[2] for block in blocks), "<u2") == np.frombuffer(b"0\n", "<u2"))


@pytest.mark.parametrize(("text", "lines"), [(b"", 0), (b"\n", 1), (b"a", 1), (b"a\n", 1), (b"a\nb", 2), (b"\n\n", 2)])
def test_lines_are_counted_as_they_are_cut(tmp_path: Path, text: bytes, lines: int) -> None:
    path = tmp_path / "x.tsv"
    path.write_bytes(text)
    with open_bytes(path) as source:
        assert count_lines(source) == lines
    assert sum(block[1] for block in _blocks(path)) == lines
