"""Layouts that are met where Criteo rows are expected: named with the flags that read them, never guessed."""

import re
from pathlib import Path

from dlrm_scale.data.text_layout import TextLayout
from dlrm_scale.errors import DataError
from dlrm_scale.schema import RAW_COLUMNS

__all__ = ["refuse_a_row_as_header", "refuse_foreign_layout"]

_SAMPLED_LINES = 10
_FIELDS = len(RAW_COLUMNS)
_INTEGER_OR_EMPTY = re.compile(rb"(-?[0-9]{1,10})?")
_ID_OR_EMPTY = re.compile(rb"([0-9a-fA-F]{8})?")
_DECIMAL_OR_EMPTY = re.compile(rb"-?[0-9]*")
_LISTS_OR_EMPTY = re.compile(rb"([0-9a-fA-F]{8}(,[0-9a-fA-F]{8})*)?")
_WORD = re.compile(rb"\"?[A-Za-z_][A-Za-z0-9_]*\"?")


def _all(pattern: re.Pattern[bytes], fields: list[bytes]) -> bool:
    return all(pattern.fullmatch(field) for field in fields)


def refuse_foreign_layout(path: Path, head: bytes, layout: TextLayout) -> None:
    """Raise if the start of a file whose first row is bad has a layout that is known and wasn't asked for.

    Args:
        path: the file.
        head: its first bytes from the first row on, whole lines.
        layout: what was asked for.

    Raises:
        DataError: names the layout and the flags that read it. Returns when it's only a bad row.
    """
    lines = [line.rstrip(b"\r") for line in head.split(b"\n", _SAMPLED_LINES)[:_SAMPLED_LINES] if line.strip()]
    if not lines:
        return
    found: list[str] = []
    flags: list[str] = []
    separator, other = layout.separator, b"," if layout.delimiter == "tab" else b"\t"
    rows = [line.split(separator) for line in lines]
    if all(len(row) == 1 for row in rows) and all(len(line.split(other)) >= _FIELDS - 1 for line in lines):
        rows = [line.split(other) for line in lines]
        found.append("comma-separated fields" if other == b"," else "tab-separated fields")
        flags.append(f"--delimiter {'comma' if other == b',' else 'tab'}")
    header = _is_header(rows[0])
    if header:
        found.append(f"a header row ({rows[0][0].decode(errors='replace')!r}, …)")
        if not layout.header:
            flags.append("--header")
        rows = rows[1:]
    if rows and _is_header(rows[0]):
        rows = []
    if not rows:
        _raise(path, found, flags)
        return
    width = len(rows[0])
    if any(len(row) != width for row in rows):
        _raise(path, found, flags)
        return
    # The columns that are there tell themselves apart from the right: 26 ids, 13 integers, a label, an id.
    categories = [field for row in rows for field in row[-26:]]
    integers = [field for row in rows for field in row[-39:-26]]
    decimal = _all(_DECIMAL_OR_EMPTY, categories) and not _all(_ID_OR_EMPTY, categories)
    plausible = (
        abs(width - _FIELDS) <= 1
        and _all(_INTEGER_OR_EMPTY, integers)
        and (decimal or _all(_LISTS_OR_EMPTY, categories))
    )
    if plausible and width == _FIELDS - 1:
        found.append("rows without a label (39 fields: I1..I13, C1..C26)")
        if layout.labeled:
            flags.append("--unlabeled")
    elif plausible and width == _FIELDS and not layout.labeled and all(row[0] in (b"0", b"1") for row in rows):
        found.append("rows with a label")
        flags.append("no --unlabeled")
    elif plausible and width == _FIELDS + 1 and all(row[1] in (b"0", b"1") for row in rows):
        found.append("an id column before the label (41 fields)")
        if not layout.id_column:
            flags.append("--id-column")
    if plausible and decimal and not layout.decimal_ids:
        found.append("decimal category ids")
        flags.append("--decimal-ids")
    lists = {f"C{i % 26 + 1}" for i, field in enumerate(categories) if b"," in field}
    if (
        plausible
        and lists - set(layout.multi_hot)
        and layout.delimiter == "tab"
        and "comma-separated fields" not in found
    ):
        names = sorted(lists | set(layout.multi_hot), key=lambda name: int(name[1:]))
        found.append(f"several ids in a field ({', '.join(sorted(lists, key=lambda name: int(name[1:])))})")
        flags.append(f"--multi-hot {','.join(names)}")
    _raise(path, found, flags)


def _raise(path: Path, found: list[str], flags: list[str]) -> None:
    if flags:
        raise DataError(
            f"{path}, line 1: {' and '.join(found)}; without a flag rows are read as "
            f"{_FIELDS} tab-separated fields (label, I1..I13, C1..C26), ids in hexadecimal",
            remedy=f"if that is what the file holds, run again with {' '.join(flags)}",
        )


def refuse_a_row_as_header(path: Path, line: bytes, layout: TextLayout) -> None:
    """Raise unless the first line names columns: a row must not be lost as a header.

    Raises:
        DataError: it is no header.
    """
    fields = line.rstrip(b"\r").split(layout.separator)
    if not _is_header(fields):
        shown = ascii(line[:40].decode("utf-8", "replace"))
        raise DataError(
            f"{path}, line 1: expected a header that names each column (--header), found {shown}",
            remedy="leave --header out if the file starts with a row, or check --delimiter",
        )


def _is_header(fields: list[bytes]) -> bool:
    names = [field for field in fields if field]
    # Hexadecimal ids can look like words, column names are no 8 hexadecimal digits.
    words = [name for name in names if _WORD.fullmatch(name) and not _ID_OR_EMPTY.fullmatch(name)]
    return len(fields) >= _FIELDS - 1 and len(names) == len(fields) and len(words) == len(names)
