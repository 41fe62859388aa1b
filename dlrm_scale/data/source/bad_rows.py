"""Rows that break the format: what is said about them, how many are allowed, where they are kept."""

import re
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from dlrm_scale.data.source.text_layout import CRITEO_LAYOUT, TextLayout
from dlrm_scale.errors import DataError
from dlrm_scale.schema import CATEGORY_COLUMNS, INTEGER_COLUMNS, LABEL_COLUMN, RAW_COLUMNS

__all__ = ["ID_COLUMN", "REJECTED_HEADER", "BadRow", "BadRowLimit", "describe_bad_row", "rejected_line"]

REJECTED_HEADER = "file\tline\tcolumn\texpected\tfound\trow\n"
"""First line of `rejected.tsv`; the row is the last field, its bytes escaped as in a Python literal."""

_FOUND_BYTES_MAX = 40
_KEPT_ROW_BYTES_MAX = 2048
_EXAMPLES = 5
_PUT_ASIDE = "correct the row, or let --max-bad-rows N put up to N rows into rejected.tsv"
ID_COLUMN = -2
"""Column of `describe_bad_row` for the row's id."""
_INTEGER = re.compile(rb"-?[0-9]+")


@dataclass(frozen=True, kw_only=True, slots=True)
class BadRow:
    """One rejected row.

    Attributes:
        path: the file.
        line: its line number, from 1.
        column: name of the first wrong column, or "row" where the row as a whole is wrong.
        expected: the rule.
        found: what stands there.
        row: the row's first bytes.
        short: fields are absent at its end.
        unit: what the number counts: lines of text, or rows of other formats.
    """

    path: Path
    line: int
    column: str
    expected: str
    found: str
    row: bytes
    short: bool = False
    unit: Literal["line", "row"] = "line"

    def __str__(self) -> str:
        """One sentence: file, line, column, expected and found."""
        where = f"{self.path}, {self.unit} {self.line:,}, column {self.column}"
        return f"{where}: expected {self.expected}, found {self.found}"


def _quoted(text: bytes) -> str:
    if not text:
        return "an empty field"
    shown = ascii(text[:_FOUND_BYTES_MAX].decode("utf-8", "replace"))
    return shown + (f"… ({len(text):,} bytes)" if len(text) > _FOUND_BYTES_MAX else "")


def describe_bad_row(
    path: Path,
    line: int,
    row: bytes,
    column: int,
    layout: TextLayout = CRITEO_LAYOUT,
    *,
    padding: bool,
    unterminated: bool = False,
) -> BadRow:
    """Say what is wrong with a row that the parser refused.

    A wrong number of fields comes first: it shifts the fields, so that what stands in a column misleads.

    Args:
        path: the file.
        line: its line number, from 1.
        row: the row without its line feed.
        column: index in `RAW_COLUMNS` of the field where the parser stopped; -2 for the row's id.
        layout: what the fields are.
        padding: whether short rows are padded.
        unterminated: the row is a last line without a line feed.
    """
    ended_by_crlf = row.endswith(b"\r")
    fields = (row[:-1] if ended_by_crlf else row).split(layout.separator)
    kept = row[:_KEPT_ROW_BYTES_MAX]
    cut = "; the line has no line feed, so the file may be cut off here" if unterminated else ""
    index = 0 if column == ID_COLUMN else layout.field_index(column)
    if len(fields) == 1 and not fields[0]:
        expected = f"{layout.fields} fields"
        return BadRow(path=path, line=line, column="row", expected=expected, found="a blank line", row=kept)
    if len(fields) > layout.fields or (len(fields) < layout.fields and not (padding and index < len(fields))):
        return BadRow(
            path=path,
            line=line,
            column="row",
            expected=f"{layout.fields} {layout.separator_name} fields",
            found=f"{len(fields)} (starting {_quoted(row)}){cut}",
            row=kept,
            # What is there is right: then the end may have been stripped.
            short=0 < len(fields) <= index,
        )
    name = "id" if column == ID_COLUMN else RAW_COLUMNS[column]
    field = fields[index] if index < len(fields) else b""
    if column == ID_COLUMN:
        expected = "an id of the row without quotes"
    elif name == LABEL_COLUMN:
        expected = "0 or 1"
    elif name in INTEGER_COLUMNS:
        expected = "an integer or nothing"
        if _INTEGER.fullmatch(field):
            expected = "an integer that fits 32 bits (-2147483648 to 2147483647) or nothing"
    else:
        assert name in CATEGORY_COLUMNS
        expected = "a decimal id from 0 to 4294967295" if layout.decimal_ids else "8 hexadecimal digits"
        if name in layout.multi_hot:
            expected += ", several joined by commas,"
        expected += " or nothing"
    return BadRow(path=path, line=line, column=name, expected=expected, found=_quoted(field) + cut, row=kept)


def rejected_line(bad: BadRow) -> str:
    """Return the row's line for `rejected.tsv`."""
    row = bad.row.decode("latin-1").encode("unicode_escape").decode("ascii")
    # A name may hold anything, even bytes that are no UTF-8.
    name = bad.path.name.encode("utf-8", "backslashreplace").decode().replace("\t", "\\t").replace("\n", "\\n")
    return f"{name}\t{bad.line}\t{bad.column}\t{bad.expected}\t{bad.found}\t{row}\n"


class BadRowLimit:
    """Counts bad rows over all files and threads; the one beyond the limit is an error.

    Args:
        allowed: how many bad rows are tolerated.
    """

    def __init__(self, allowed: int) -> None:
        self.allowed = allowed
        self.count = 0
        self._examples: list[BadRow] = []
        self._lock = threading.Lock()

    def add(self, bad: BadRow) -> None:
        """Count one more.

        Raises:
            DataError: it is one too many; the message names it and, with a limit, the first ones.
        """
        with self._lock:
            self.count += 1
            if len(self._examples) < _EXAMPLES:
                self._examples.append(bad)
            if self.count <= self.allowed:
                return
            examples = list(self._examples)
        if self.allowed == 0:
            raise DataError(f"bad row: {bad}", remedy=_remedy(bad))
        raise self._too_many([str(example) for example in examples], _remedy(examples[0]))

    def add_earlier(self, path: Path, bad_rows: int) -> None:
        """Count those of a file that an earlier process has finished; their reasons aren't at hand.

        Args:
            path: the file.
            bad_rows: how many it has.

        Raises:
            DataError: with them there are too many.
        """
        if bad_rows == 0:
            return
        with self._lock:
            self.count += bad_rows
            if self.count <= self.allowed:
                return
            examples = list(self._examples)
        found = f"{path}: {bad_rows:,} bad rows, found before this was interrupted"
        raise self._too_many([*map(str, examples), found], _PUT_ASIDE)

    def _too_many(self, examples: Sequence[str], remedy: str) -> DataError:
        shown = "\n".join(f"  {example}" for example in examples)
        return DataError(
            f"more than {self.allowed:,} bad rows (--max-bad-rows); the first ones:\n{shown}", remedy=remedy
        )


def _remedy(bad: BadRow) -> str:
    if bad.short:
        return (
            "correct the row; or, if an editor stripped the tabs at the ends of rows, --pad-short-rows reads the "
            "fields that are gone as missing; or let --max-bad-rows N put up to N rows into rejected.tsv"
        )
    return _PUT_ASIDE
