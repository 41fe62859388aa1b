"""The parser's inner loop: one pass over the bytes of whole lines, strict, without the GIL."""

from typing import Any

import numpy as np
import numpy.typing as npt
from numba import njit

__all__ = ["HEX_VALUES", "gather_bags", "group_by_column", "parse_rows"]

_INVALID = 0x80


def _hex_values() -> npt.NDArray[np.uint8]:
    values = np.full(256, _INVALID, np.uint8)
    for value, digit in enumerate(b"0123456789abcdef"):
        values[digit] = value
        values[bytes([digit]).upper()[0]] = value
    return values


HEX_VALUES = _hex_values()
"""[256] uint8: the value of each hexadecimal digit of either case, 0x80 for any other byte."""


@njit(cache=True, nogil=True)
def _row_end(buffer: Any, position: int) -> int:  # pragma: no cover - compiled
    """Return the position after LF or CRLF at `position`, or -1 if neither stands there."""
    if buffer[position] == 10:
        return position + 1
    if buffer[position] == 13 and buffer[position + 1] == 10:
        return position + 2
    return -1


@njit(cache=True, nogil=True)
def _category(buffer: Any, cursor: int, decimal: bool, hex_values: Any) -> tuple[Any, int]:  # pragma: no cover
    """Read an id at `cursor`; return it and the position after it, or -1 for the position if none stands there."""
    if decimal:
        value, digits = np.int64(0), 0
        digit = np.int64(buffer[cursor]) - 48
        while 0 <= digit <= 9 and digits < 11:
            value = value * 10 + digit
            digits += 1
            cursor += 1
            digit = np.int64(buffer[cursor]) - 48
        if digits == 0 or digits > 10 or value > 4294967295:
            return 0, -1
        return value, cursor
    value32 = np.uint32(0)
    invalid = np.uint8(0)
    for i in range(8):
        nibble = hex_values[buffer[cursor + i]]
        invalid |= nibble
        value32 = (value32 << np.uint32(4)) | np.uint32(nibble)
    if invalid & 0x80:
        return 0, -1
    return np.int64(value32), cursor + 8


@njit(cache=True, nogil=True)
def parse_rows(
    buffer: Any,
    start: int,
    end: int,
    row: int,
    separator: int,
    id_column: bool,
    labeled: bool,
    decimal: bool,
    multi_hot: int,
    pad_short_rows: bool,
    hex_values: Any,
    labels: Any,
    integers: Any,
    categories: Any,
    missing: Any,
    more_row: Any,
    more_column: Any,
    more_id: Any,
    more: int,
) -> tuple[int, int, int, int, int]:  # pragma: no cover - compiled
    """Parse rows until the bytes end or a row is wrong.

    Args:
        buffer: uint8; `buffer[end - 1]` is a line feed and a few bytes after `end` can be read.
        start: first byte of a row.
        end: one past the last row.
        row: index of the first row to write; there is room for every line.
        separator: the byte between fields.
        id_column: skip a field before the others.
        labeled: the label is there; otherwise it becomes 0.
        decimal: ids are decimal.
        multi_hot: bit k is set where category column k may hold several ids.
        pad_short_rows: read fields that are absent at the end of a row as missing.
        hex_values: `HEX_VALUES`.
        labels: [room] uint8, written.
        integers: [13, room] int32, written.
        categories: [26, room] uint32, written; the first id of a field with several.
        missing: [room] uint64, written.
        more_row: [room for ids] int32, written: the row of each further id, ascending.
        more_column: [room for ids] uint8, written: its category column.
        more_id: [room for ids] uint32, written.
        more: index of the first further id to write.

    Returns:
        the row after the last one written; position of the first row that wasn't; the raw column at which that row is
        wrong (-1: the bytes ended); padded rows; the index after the last further id.
    """
    padded = 0
    position = start
    while position < end:
        cursor = position
        absent = np.uint64(0)
        more_before = more
        # after: the position after the row's end once it was met; -1 while fields follow.
        after = -1
        if id_column:
            first = cursor
            byte = buffer[cursor]
            while byte != separator and byte != 10 and byte != 13 and byte != 0 and byte != 34:
                cursor += 1
                byte = buffer[cursor]
            if byte != separator or cursor == first:
                return row, position, -2, padded, more
            cursor += 1
        column = 1
        if labeled:
            label = buffer[cursor]
            if label != 48 and label != 49:
                return row, position, 0, padded, more
            labels[row] = label - 48
            cursor += 1
            if buffer[cursor] == separator:
                cursor += 1
            else:
                after = _row_end(buffer, cursor)
                if after < 0:
                    return row, position, 0, padded, more
                if not pad_short_rows:
                    return row, position, 1, padded, more
        else:
            labels[row] = 0
            if _row_end(buffer, cursor) >= 0:
                return row, position, 1, padded, more

        while after < 0 and column <= 13:
            byte = buffer[cursor]
            if byte == separator:
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
                    return row, position, column, padded, more
                cursor += 1
                digit = np.int64(buffer[cursor]) - 48
            if negative:
                value = -value
            if digits == 0:
                # An empty field at the end of a short row, or no integer at all.
                if negative or _row_end(buffer, cursor) < 0:
                    return row, position, column, padded, more
                absent |= np.uint64(1) << np.uint64(column)
            if value < -2147483648 or value > 2147483647:
                return row, position, column, padded, more
            integers[column - 1, row] = value
            column += 1
            if buffer[cursor] == separator:
                cursor += 1
            else:
                after = _row_end(buffer, cursor)
                if after < 0:
                    return row, position, column - 1, padded, more
                if not pad_short_rows:
                    return row, position, column, padded, more

        while after < 0 and column <= 39:
            byte = buffer[cursor]
            if byte == separator and column < 39:
                categories[column - 14, row] = 0
                absent |= np.uint64(1) << np.uint64(column)
                cursor += 1
                column += 1
                continue
            value32 = np.uint32(0)
            if decimal:
                value64, behind = _category(buffer, cursor, decimal, hex_values)
                value32 = np.uint32(value64)
                valid = behind >= 0
            else:
                # The common case stands here, unrolled: through a function it takes twice the time.
                behind = cursor + 8
                invalid = np.uint8(0)
                for i in range(8):
                    nibble = hex_values[buffer[cursor + i]]
                    invalid |= nibble
                    value32 = (value32 << np.uint32(4)) | np.uint32(nibble)
                valid = invalid & 0x80 == 0
            if not valid:
                # An empty field at the end of a row, or no id at all.
                if _row_end(buffer, cursor) < 0:
                    return row, position, column, padded, more_before
                value32 = np.uint32(0)
                absent |= np.uint64(1) << np.uint64(column)
            else:
                cursor = behind
                while multi_hot and buffer[cursor] == 44 and (multi_hot >> (column - 14)) & 1:
                    further, behind = _category(buffer, cursor + 1, decimal, hex_values)
                    if behind < 0:
                        return row, position, column, padded, more_before
                    more_row[more] = row
                    more_column[more] = column - 14
                    more_id[more] = further
                    more += 1
                    cursor = behind
            categories[column - 14, row] = value32
            column += 1
            if column <= 39 and buffer[cursor] == separator:
                cursor += 1
            else:
                after = _row_end(buffer, cursor)
                if after < 0:
                    return row, position, column - 1, padded, more_before
                if column <= 39 and not pad_short_rows:
                    return row, position, column, padded, more_before

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
    return row, position, -1, padded, more


@njit(cache=True, nogil=True)
def group_by_column(
    more_row: Any, more_column: Any, more_id: Any, row: Any, id: Any, bounds: Any
) -> None:  # pragma: no cover - compiled
    """Order further ids by column, within a column as they came.

    Args:
        more_row: [m] int32 rows, ascending.
        more_column: [m] uint8 columns.
        more_id: [m] uint32.
        row: [m] int32, written.
        id: [m] uint32, written.
        bounds: [27] int64, written: those of column k stand at `[bounds[k], bounds[k + 1])`.
    """
    bounds[:] = 0
    for i in range(more_column.shape[0]):
        bounds[more_column[i] + 1] += 1
    for k in range(bounds.shape[0] - 1):
        bounds[k + 1] += bounds[k]
    place = bounds.copy()
    for i in range(more_column.shape[0]):
        k = place[more_column[i]]
        place[more_column[i]] += 1
        row[k] = more_row[i]
        id[k] = more_id[i]


@njit(cache=True, nogil=True)
def gather_bags(
    categories: Any, missing: Any, bit: int, more_row: Any, more_id: Any, offsets: Any
) -> Any:  # pragma: no cover - compiled
    """Join the first and the further ids of one multi-hot column.

    Args:
        categories: [n] uint32, the first ids.
        missing: [n] uint64; a row whose `bit` is set has none.
        bit: of this column.
        more_row: [m] int32 rows of its further ids, ascending.
        more_id: [m] uint32.
        offsets: [n + 1] int32, written.

    Returns:
        [total] uint32.
    """
    rows = categories.shape[0]
    selected = np.uint64(1) << np.uint64(bit)
    values = np.empty(rows + more_row.shape[0], np.uint32)
    offsets[0] = 0
    place = further = 0
    for i in range(rows):
        if not missing[i] & selected:
            values[place] = categories[i]
            place += 1
            while further < more_row.shape[0] and more_row[further] == i:
                values[place] = more_id[further]
                place += 1
                further += 1
        offsets[i + 1] = place
    return values[:place]
