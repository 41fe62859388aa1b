"""Raw Criteo rows, label, I1..I13 and C1..C26 between tabs, parsed strictly in one pass over the bytes.

A row is accepted only if it has exactly 40 tab-separated fields and

    label      0 or 1
    I1..I13    -?[0-9]{1,10} within int32, or empty (missing)
    C1..C26    8 hexadecimal digits of either case, an unsigned 32-bit id, or empty (missing)

and ends in LF or CRLF; the last row may lack it. A UTF-8 byte-order mark at byte 0 is skipped. Everything else is a
bad row with its line, column, rule and what was found; nothing is guessed. `TextLayout` asks for other fields:
comma-separated, with a header, an id column or without labels, decimal ids, several ids in a field.
"""

from collections.abc import Iterator
from pathlib import Path
from types import TracebackType
from typing import Self

import numpy as np
import numpy.typing as npt

from dlrm_scale.data.source.bad_rows import BadRow, describe_bad_row
from dlrm_scale.data.source.compressed import open_bytes
from dlrm_scale.data.source.foreign_layouts import check_header, refuse_foreign_layout
from dlrm_scale.data.source.line_blocks import BLOCK_BYTES, LineBlock, LineReader
from dlrm_scale.data.source.raw_block import FIRST_CATEGORY_BIT, Bags, RawBlock
from dlrm_scale.data.source.text_layout import CRITEO_LAYOUT, TextLayout
from dlrm_scale.data.source.tsv_kernel import HEX_VALUES, gather_bags, group_by_column, parse_rows
from dlrm_scale.schema import CATEGORY_COLUMNS, INTEGER_COLUMNS

__all__ = ["TextSource"]


class TextSource:
    """One text file, plain or compressed, as pieces of whole lines; see `RowSource`.

    Args:
        path: the file.
        layout: its fields.
        bad_rows_max: a piece is given up after so many bad rows and one more; whoever counts them stops then.
        block_bytes: bytes of a piece; a parameter for tests.
    """

    def __init__(
        self,
        path: Path,
        layout: TextLayout = CRITEO_LAYOUT,
        *,
        bad_rows_max: int = 0,
        block_bytes: int = BLOCK_BYTES,
    ) -> None:
        self.path = path
        self._layout = layout
        self._bad_rows_max = bad_rows_max
        self._source = open_bytes(path)
        self._reader = LineReader(self._source, block_bytes=block_bytes)

    def __enter__(self) -> Self:
        """Return itself."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Close the file."""
        self._source.close()

    @property
    def position_bytes(self) -> int:
        """How many stored bytes have been read."""
        return self._source.position_bytes

    def pieces(self) -> Iterator[LineBlock]:
        """Yield whole lines, about 8,500 rows at a time.

        Raises:
            DataError: the file is cut off, damaged or no text.
        """
        return iter(self._reader)

    def parse(self, piece: LineBlock) -> RawBlock:
        """Parse lines into rows; the piece's memory is used again afterwards.

        The last line of a file isn't padded if it lacks its line feed: it is the mark of a file that was cut off.

        Raises:
            DataError: the first row is bad and the file has another layout that is known.
        """
        layout, start, line = self._layout, piece.start, piece.first_line
        if layout.header and line == 1 and piece.lines:
            start, line = self._after_header(piece), 2
        first_row_line = 2 if layout.header else 1
        room = piece.lines
        labels = np.empty(room, np.uint8)
        integers = np.empty((len(INTEGER_COLUMNS), room), np.int32)
        categories = np.empty((len(CATEGORY_COLUMNS), room), np.uint32)
        missing = np.empty(room, np.uint64)
        more_room = (piece.end - start) // 2 if layout.multi_hot else 0
        more_row, more_column = np.empty(more_room, np.int32), np.empty(more_room, np.uint8)
        more_id = np.empty(more_room, np.uint32)
        rows = more = padded_rows = 0
        bad_rows: list[BadRow] = []
        position = start
        while position < piece.end:
            unterminated = position == piece.unterminated_start
            # The last line is parsed by itself where it mustn't be padded.
            stop = piece.end
            if layout.pad_short_rows and not unterminated and piece.unterminated_start >= 0:
                stop = piece.unterminated_start
            pad = layout.pad_short_rows and not unterminated
            rows, position, column, padded, more = parse_rows(
                piece.buffer,
                position,
                stop,
                rows,
                layout.separator[0],
                layout.id_column,
                layout.labeled,
                layout.decimal_ids,
                layout.multi_hot_mask,
                pad,
                HEX_VALUES,
                labels,
                integers,
                categories,
                missing,
                more_row,
                more_column,
                more_id,
                more,
            )
            padded_rows += padded
            if column == -1:
                continue
            end = piece.line_end(position)
            row = piece.buffer.data[position:end].tobytes()
            row_line = line + rows + len(bad_rows)
            if row_line == first_row_line:
                refuse_foreign_layout(self.path, piece.buffer.data[position : piece.end].tobytes(), layout)
            bad_rows.append(
                describe_bad_row(
                    self.path,
                    row_line,
                    row,
                    column,
                    layout,
                    padding=pad,
                    unterminated=position == piece.unterminated_start,
                )
            )
            position = end + 1
            if len(bad_rows) > self._bad_rows_max:
                break
        self._reader.give_back(piece)
        return RawBlock(
            first_line=line,
            labels=labels[:rows],
            integers=integers[:, :rows],
            categories=categories[:, :rows],
            missing=missing[:rows],
            bags=_bags(
                layout, categories[:, :rows], missing[:rows], more_row[:more], more_column[:more], more_id[:more]
            ),
            padded_rows=padded_rows,
            bad_rows=bad_rows,
        )

    def _after_header(self, piece: LineBlock) -> int:
        """Return where the second line starts."""
        end = piece.line_end(piece.start)
        check_header(self.path, piece.buffer.data[piece.start : end].tobytes(), self._layout)
        return end + 1


def _bags(
    layout: TextLayout,
    categories: npt.NDArray[np.uint32],
    missing: npt.NDArray[np.uint64],
    more_row: npt.NDArray[np.int32],
    more_column: npt.NDArray[np.uint8],
    more_id: npt.NDArray[np.uint32],
) -> dict[int, Bags]:
    result: dict[int, Bags] = {}
    if not layout.multi_hot:
        return result
    row, id = np.empty_like(more_row), np.empty_like(more_id)
    bounds = np.empty(len(CATEGORY_COLUMNS) + 1, np.int64)
    group_by_column(more_row, more_column, more_id, row, id, bounds)
    for name in layout.multi_hot:
        column = CATEGORY_COLUMNS.index(name)
        offsets = np.empty(len(missing) + 1, np.int32)
        further = slice(bounds[column], bounds[column + 1])
        bit = FIRST_CATEGORY_BIT + column
        first = categories[column, : len(missing)]
        result[column] = Bags(gather_bags(first, missing, bit, row[further], id[further], offsets), offsets)
    return result
