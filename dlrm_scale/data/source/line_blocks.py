"""Cuts the bytes of a text file into blocks of whole lines, numbered, for parsers that work side by side."""

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from numba import njit

from dlrm_scale.data.source.compressed import ByteSource
from dlrm_scale.errors import DataError

__all__ = ["BLOCK_BYTES", "LineBlock", "LineReader", "count_lines"]

_BOM = b"\xef\xbb\xbf"
_LF = 10
# About 8,500 rows of 245 bytes: their values fit a core's L2 cache, and the work per block outweighs the hand-over.
BLOCK_BYTES = 2 * 1024 * 1024
"""Bytes of a block, without what is left of a line from the one before."""
# Longest legal one-hot row: 1 + 13 x 12 + 26 x 9 + CRLF = 393 bytes. A line beyond the limit isn't a row with a typo.
_LINE_BYTES_MAX = 1024 * 1024
# A parser reads up to 8 bytes past the last line feed before it looks at them.
_SLACK_BYTES = 64
# Rows of a few bytes would make arrays hundredfold larger than the text.
_BLOCK_LINES_MAX = 16_384


@dataclass(slots=True)
class LineBlock:
    """Whole lines of one file.

    Attributes:
        buffer: uint8; `buffer[end - 1]` is a line feed, some bytes after `end` can be read.
        start: first byte of the first line.
        end: one past the last line feed.
        first_line: number of the first line, from 1.
        lines: how many.
        unterminated_start: start of a last line that had no line feed (one was added), or -1.
    """

    buffer: npt.NDArray[np.uint8]
    start: int
    end: int
    first_line: int
    lines: int
    unterminated_start: int = -1

    def line_end(self, position: int) -> int:
        """Return the position of the line feed that ends the line that starts at `position`."""
        end = position
        while not (found := np.flatnonzero(self.buffer[end : end + 4096] == _LF)).size:
            end += 4096
        return end + int(found[0])


class LineReader:
    """Reads a source to its end in blocks; buffers that are given back are filled again.

    Args:
        source: an open file.
        block_bytes: bytes read at a time; a parameter for tests.
    """

    def __init__(self, source: ByteSource, *, block_bytes: int = BLOCK_BYTES) -> None:
        self._source = source
        self._block_bytes = block_bytes
        self._free: deque[npt.NDArray[np.uint8]] = deque()

    def give_back(self, block: LineBlock) -> None:
        """Say that nobody reads the block any more; any thread."""
        self._free.append(block.buffer)

    def __iter__(self) -> Iterator[LineBlock]:
        """Yield the blocks in order, each of at most 16,384 lines.

        Raises:
            DataError: the file is cut off, damaged or no text.
        """
        rest = np.empty(0, np.uint8)
        line, first, at_end = 1, True, False
        while not at_end:
            buffer = self._buffer()
            filled = len(rest)
            buffer[:filled] = rest
            count = self._source.read_into(buffer.data[filled : filled + self._block_bytes])
            at_end = count < self._block_bytes
            filled += count
            start = 0
            if first:
                start, first = 3 if buffer[:3].tobytes() == _BOM and filled >= 3 else 0, False
            lines = int(_line_feeds(buffer[start:filled]))
            while lines >= _BLOCK_LINES_MAX:
                end = int(_after_line_feeds(buffer, start, _BLOCK_LINES_MAX))
                short = self._buffer()
                short[: end - start] = buffer[start:end]
                yield LineBlock(short, 0, end - start, line, _BLOCK_LINES_MAX)
                start, line, lines = end, line + _BLOCK_LINES_MAX, lines - _BLOCK_LINES_MAX
            unterminated = -1
            end = _after_last_line_feed(buffer, filled) if lines else start
            if at_end and end < filled:
                if buffer[filled - 1] == 0:
                    raise DataError(
                        f"{self._source.path} ends in zero bytes after line {line + lines - 1:,}: its size was set "
                        "before all of it was written",
                        remedy="get the file again",
                    )
                unterminated = end
                buffer[filled] = _LF
                filled += 1
                end, lines = filled, lines + 1
            rest = buffer[end:filled].copy()
            if len(rest) >= _LINE_BYTES_MAX:
                raise DataError(
                    f"{self._source.path}, line {line + lines:,}: a line of more than {_LINE_BYTES_MAX:,} bytes; "
                    "this is no text of rows",
                    remedy="give plain, gzip or zstd files of Criteo rows",
                )
            if lines:
                yield LineBlock(buffer, start, end, line, lines, unterminated)
                line += lines
            else:
                self._free.append(buffer)

    def _buffer(self) -> npt.NDArray[np.uint8]:
        try:
            return self._free.popleft()
        except IndexError:
            return np.empty(_LINE_BYTES_MAX + self._block_bytes + _SLACK_BYTES, np.uint8)


@njit(cache=True, nogil=True)
def _line_feeds(buffer: Any) -> int:  # pragma: no cover - compiled
    # 23 ns a row; counting the nonzero of `buffer == _LF` takes two to three times that.
    count = 0
    for i in range(buffer.shape[0]):
        count += buffer[i] == 10
    return count


@njit(cache=True, nogil=True)
def _after_line_feeds(buffer: Any, start: int, count: int) -> int:  # pragma: no cover - compiled
    i = start
    while count > 0:
        count -= buffer[i] == 10
        i += 1
    return i


def _after_last_line_feed(buffer: npt.NDArray[np.uint8], filled: int) -> int:
    # Line feeds are never far from the end: one byte in 245 is one.
    begin = filled
    while begin > 0:
        begin = max(0, begin - 4096)
        found = np.flatnonzero(buffer[begin:filled] == _LF)
        if found.size:
            return begin + int(found[-1]) + 1
    raise AssertionError("no line feed")


def count_lines(source: ByteSource, *, on_read: Callable[[], None] | None = None) -> int:
    """Count the lines of a file; a last line without a line feed counts.

    Args:
        source: an open file; read to its end.
        on_read: called after each block.

    Raises:
        DataError: the file is cut off or damaged.
    """
    buffer = bytearray(BLOCK_BYTES)
    view = memoryview(buffer)
    lines, last = 0, _LF
    while count := source.read_into(view):
        lines += int(_line_feeds(np.frombuffer(buffer, np.uint8, count)))
        last = buffer[count - 1]
        if on_read is not None:
            on_read()
    return lines + (last != _LF)
