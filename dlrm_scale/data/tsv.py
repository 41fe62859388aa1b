"""Raw Criteo rows, label, I1..I13 and C1..C26 between tabs, parsed strictly in one pass over the bytes.

A row is accepted only if it has exactly 40 tab-separated fields and

    label      0 or 1
    I1..I13    -?[0-9]{1,10} within int32, or empty (missing)
    C1..C26    8 hexadecimal digits of either case, an unsigned 32-bit id, or empty (missing)

and ends in LF or CRLF; the last row may lack it. A UTF-8 byte-order mark at byte 0 is skipped. Everything else is a
bad row with its line, column, rule and what was found; nothing is guessed.

Arrays are column-major: `integers[k]` and `categories[k]` are the contiguous values of one column.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from numba import njit

from dlrm_scale.data.bad_rows import BadRow, describe_bad_row
from dlrm_scale.data.compressed import ByteSource
from dlrm_scale.data.foreign_layouts import refuse_foreign_layout
from dlrm_scale.errors import DataError
from dlrm_scale.schema import CATEGORY_COLUMNS, INTEGER_COLUMNS

__all__ = ["FIRST_CATEGORY_BIT", "FIRST_INTEGER_BIT", "RawBlock", "count_lines", "read_blocks"]

FIRST_INTEGER_BIT = 1
"""Bit of I1 in `RawBlock.missing`; bit k belongs to raw column k."""
FIRST_CATEGORY_BIT = FIRST_INTEGER_BIT + len(INTEGER_COLUMNS)
"""Bit of C1 in `RawBlock.missing`."""

_BOM = b"\xef\xbb\xbf"
_LF = 10
_INTEGERS = len(INTEGER_COLUMNS)
_CATEGORIES = len(CATEGORY_COLUMNS)
_BLOCK_BYTES = 4 * 1024 * 1024
# Longest legal row: 1 + 13 x 12 + 26 x 9 + CRLF = 393 bytes. A line beyond the limit isn't a row with a typo.
_LINE_BYTES_MAX = 1024 * 1024
# The kernel reads up to 8 bytes past the last line feed before it looks at them.
_SLACK_BYTES = 64
# Not a power of two: the 40 columns that a row writes to would all fall into one set of the L1 cache.
_BLOCK_ROWS = 16_400
_INVALID = 0x80


@dataclass(slots=True)
class RawBlock:
    """Consecutive rows of one file. The arrays are reused by the next block: copy what is kept.

    Attributes:
        first_line: line number of the first row, from 1; row i stands on line `first_line + i`.
        labels: [n] uint8, 0 or 1.
        integers: [13, n] int32; 0 where missing.
        categories: [26, n] uint32; 0 where missing (and for the real id 00000000).
        missing: [n] uint64; bit k is set where raw column k is empty.
        padded_rows: how many of the rows were short and padded.
    """

    first_line: int
    labels: npt.NDArray[np.uint8]
    integers: npt.NDArray[np.int32]
    categories: npt.NDArray[np.uint32]
    missing: npt.NDArray[np.uint64]
    padded_rows: int

    @property
    def rows(self) -> int:
        """Number of rows."""
        return len(self.labels)

    def training_rows(self, training_lines: int | None) -> int:
        """How many rows, from the block's start, stand on the file's first `training_lines` lines (None: all)."""
        if training_lines is None:
            return self.rows
        return max(0, min(self.rows, training_lines - self.first_line + 1))


def _hex_values() -> npt.NDArray[np.uint8]:
    values = np.full(256, _INVALID, np.uint8)
    for value, digit in enumerate(b"0123456789abcdef"):
        values[digit] = value
        values[bytes([digit]).upper()[0]] = value
    return values


_HEX_VALUES = _hex_values()


@njit(cache=True, nogil=True)
def _row_end(buffer: Any, position: int) -> int:  # pragma: no cover - compiled
    """Return the position after LF or CRLF at `position`, or -1 if neither stands there."""
    if buffer[position] == 10:
        return position + 1
    if buffer[position] == 13 and buffer[position + 1] == 10:
        return position + 2
    return -1


@njit(cache=True, nogil=True)
def _parse(
    buffer: Any,
    start: int,
    end: int,
    pad_short_rows: bool,
    hex_values: Any,
    labels: Any,
    integers: Any,
    categories: Any,
    missing: Any,
) -> tuple[int, int, int, int]:  # pragma: no cover - compiled
    """Parse rows until the bytes, the room or the patience end.

    Args:
        buffer: uint8; `buffer[end - 1]` is a line feed and a few bytes after `end` can be read.
        start: first byte of a row.
        end: one past the last row.
        pad_short_rows: read fields that are absent at the end of a row as missing.
        hex_values: [256] uint8.
        labels: [room] uint8, written.
        integers: [13, room] int32, written.
        categories: [26, room] uint32, written.
        missing: [room] uint64, written.

    Returns:
        rows written; position of the first row that wasn't; the raw column at which that row is wrong, or -1 where the
        bytes or the room ended; padded rows.
    """
    row = 0
    padded = 0
    position = start
    room = labels.shape[0]
    while position < end and row < room:
        cursor = position
        absent = np.uint64(0)
        # after: the position after the row's end once it was met; -1 while fields follow.
        after = -1
        label = buffer[cursor]
        if label != 48 and label != 49:
            return row, position, 0, padded
        labels[row] = label - 48
        cursor += 1
        column = 1
        if buffer[cursor] == 9:
            cursor += 1
        else:
            after = _row_end(buffer, cursor)
            if after < 0:
                return row, position, 0, padded
            if not pad_short_rows:
                return row, position, 1, padded

        while after < 0 and column <= 13:
            byte = buffer[cursor]
            if byte == 9:
                integers[column - 1, row] = 0
                absent |= np.uint64(1) << np.uint64(column)
                cursor += 1
                column += 1
                continue
            negative = byte == 45
            if negative:
                cursor += 1
            value = np.int64(0)
            digits = 0
            digit = np.int64(buffer[cursor]) - 48
            while 0 <= digit <= 9:
                value = value * 10 + digit
                digits += 1
                if digits > 10:
                    return row, position, column, padded
                cursor += 1
                digit = np.int64(buffer[cursor]) - 48
            if negative:
                value = -value
            if digits == 0:
                # An empty field at the end of a short row, or no integer at all.
                if negative or _row_end(buffer, cursor) < 0:
                    return row, position, column, padded
                absent |= np.uint64(1) << np.uint64(column)
            if value < -2147483648 or value > 2147483647:
                return row, position, column, padded
            integers[column - 1, row] = value
            column += 1
            if buffer[cursor] == 9:
                cursor += 1
            else:
                after = _row_end(buffer, cursor)
                if after < 0:
                    return row, position, column - 1, padded
                if not pad_short_rows:
                    return row, position, column, padded

        while after < 0 and column <= 39:
            byte = buffer[cursor]
            if byte == 9 and column < 39:
                categories[column - 14, row] = 0
                absent |= np.uint64(1) << np.uint64(column)
                cursor += 1
                column += 1
                continue
            value32 = np.uint32(0)
            invalid = np.uint8(0)
            for i in range(8):
                nibble = hex_values[buffer[cursor + i]]
                invalid |= nibble
                value32 = (value32 << np.uint32(4)) | np.uint32(nibble)
            if invalid & 0x80:
                # An empty field at the end of a row, or no id at all.
                if _row_end(buffer, cursor) < 0:
                    return row, position, column, padded
                value32 = np.uint32(0)
                absent |= np.uint64(1) << np.uint64(column)
            else:
                cursor += 8
            categories[column - 14, row] = value32
            column += 1
            if column <= 39 and buffer[cursor] == 9:
                cursor += 1
            else:
                after = _row_end(buffer, cursor)
                if after < 0:
                    return row, position, column - 1, padded
                if column <= 39 and not pad_short_rows:
                    return row, position, column, padded

        if column <= 39:
            padded += 1
            while column <= 39:
                absent |= np.uint64(1) << np.uint64(column)
                if column <= 13:
                    integers[column - 1, row] = 0
                else:
                    categories[column - 14, row] = 0
                column += 1
        missing[row] = absent
        row += 1
        position = after
    return row, position, -1, padded


class _LineBuffer:
    """A sliding window over a source that always holds whole lines.

    Attributes:
        array: uint8 with slack behind it.
        start: first byte not yet parsed.
        end: one past the last line feed.
        last_line_start: start of a last line that has no line feed (one was added), -1 until it is met.
    """

    def __init__(self, source: ByteSource) -> None:
        self._source = source
        self.array = np.zeros(_BLOCK_BYTES + _LINE_BYTES_MAX + _SLACK_BYTES, np.uint8)
        self._view = self.array.data
        self.start = 0
        self.end = 0
        self._filled = 0
        self.last_line_start = -1
        self._first = True

    def fill(self) -> bool:
        """Move what is left to the front and read on; False at the end of the file."""
        rest = self._filled - self.end
        self.array[:rest] = self.array[self.end : self._filled]
        count = self._source.read_into(self._view[rest : rest + _BLOCK_BYTES])
        self.start, self._filled = 0, rest + count
        if self._first:
            self._first = False
            if self._view[:3].tobytes() == _BOM and count >= 3:
                self.start = 3
        if count == 0:
            if self._filled == self.start:
                self.end = self._filled
                return False
            self.array[self._filled] = _LF
            self._filled += 1
            self.end = self._filled
            self.last_line_start = self.start
            return True
        newline = bytes(self._view[max(0, self._filled - _LINE_BYTES_MAX) : self._filled]).rfind(b"\n")
        if newline < 0:
            if self._filled - self.start >= _LINE_BYTES_MAX:
                raise DataError(
                    f"{self._source.path}: a line of more than {_LINE_BYTES_MAX:,} bytes; this is no text of rows",
                    remedy="give plain, gzip or zstd files of Criteo rows",
                )
            self.end = self.start
            return True
        self.end = max(0, self._filled - _LINE_BYTES_MAX) + newline + 1
        return True

    def line_at(self, position: int) -> bytes:
        """Return the line that starts there, without its line feed."""
        end = position
        while not (found := np.flatnonzero(self.array[end : end + 4096] == _LF)).size:
            end += 4096
        return self._view[position : end + int(found[0])].tobytes()


def read_blocks(
    source: ByteSource, *, on_bad_row: Callable[[BadRow], None], pad_short_rows: bool = False
) -> Iterator[RawBlock]:
    """Parse a file into blocks of at most 16,400 rows.

    Args:
        source: an open file; read to its end.
        on_bad_row: called for each row that is left out; it raises to stop.
        pad_short_rows: read fields that are absent at the end of a row as missing (and count such rows). The last line
            of a file isn't padded if it lacks its line feed: it is the mark of a file that was cut off.

    Yields:
        Blocks in file order; a block never spans a bad row.

    Raises:
        DataError: the file is cut off, damaged, no text, or of a layout that is recognised and not read.
    """
    labels = np.zeros(_BLOCK_ROWS, np.uint8)
    integers = np.zeros((_INTEGERS, _BLOCK_ROWS), np.int32)
    categories = np.zeros((_CATEGORIES, _BLOCK_ROWS), np.uint32)
    missing = np.zeros(_BLOCK_ROWS, np.uint64)
    buffer = _LineBuffer(source)
    line = 1
    while buffer.fill():
        position = buffer.start
        while position < buffer.end:
            unterminated = position == buffer.last_line_start
            pad = pad_short_rows and not unterminated
            rows, position, column, padded = _parse(
                buffer.array, position, buffer.end, pad, _HEX_VALUES, labels, integers, categories, missing
            )
            if rows:
                yield RawBlock(line, labels[:rows], integers[:, :rows], categories[:, :rows], missing[:rows], padded)
                line += rows
            if column >= 0:
                row = buffer.line_at(position)
                if line == 1:
                    refuse_foreign_layout(source.path, buffer.array[position : buffer.end].tobytes())
                on_bad_row(describe_bad_row(source.path, line, row, column, padding=pad, unterminated=unterminated))
                position += len(row) + 1
                line += 1


def count_lines(source: ByteSource, *, on_read: Callable[[], None] | None = None) -> int:
    """Count the lines of a file; a last line without a line feed counts.

    Args:
        source: an open file; read to its end.
        on_read: called after each block.

    Raises:
        DataError: the file is cut off or damaged.
    """
    buffer = bytearray(_BLOCK_BYTES)
    view = memoryview(buffer)
    lines, last = 0, _LF
    while count := source.read_into(view):
        lines += int(np.count_nonzero(np.frombuffer(buffer, np.uint8, count) == _LF))
        last = buffer[count - 1]
        if on_read is not None:
            on_read()
    return lines + (last != _LF)
