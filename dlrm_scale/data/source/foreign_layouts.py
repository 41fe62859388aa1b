"""Layouts that are met where Criteo rows are expected: named with the flags that read them, never guessed."""

import re
from pathlib import Path

from dlrm_scale.data.source.text_layout import TextLayout
from dlrm_scale.errors import DataError
from dlrm_scale.schema import LABEL_COLUMN, RAW_COLUMNS

__all__ = ["check_header", "refuse_foreign_layout"]

_SAMPLED_LINES = 10
_FIELDS = len(RAW_COLUMNS)
_INTEGER_OR_EMPTY = re.compile(rb"(-?[0-9]{1,10})?")
_ID_OR_EMPTY = re.compile(rb"([0-9a-fA-F]{8})?")
_DECIMAL_OR_EMPTY = re.compile(rb"-?[0-9]*")
_LISTS_OR_EMPTY = re.compile(rb"([0-9a-fA-F]{8}(,[0-9a-fA-F]{8})*)?")
_COLUMN_NAME = re.compile(
    r"(?P<ours>[IC])(?P<number>[0-9]{1,2})|(?P<torchrec>int|cat)_(?P<index>[0-9]{1,2})", re.IGNORECASE
)
_WORD = re.compile(rb"\"?[A-Za-z_][A-Za-z0-9_]*\"?")


def _all(pattern: re.Pattern[bytes], fields: list[bytes]) -> bool:
    return all(pattern.fullmatch(field) for field in fields)


_ARCHIVES = {
    b"BZh": "bzip2",
    b"\xfd7zXZ\x00": "xz",
    b"PK\x03\x04": "zip",
    b"7z\xbc\xaf\x27\x1c": "7z",
    b"\x1f\x8b": "gzip inside a compressed file",
    b"\x04\x22\x4d\x18": "lz4",
    b"PAR1": "Parquet",
    b"\x93NUMPY": "a .npy array",
}


def refuse_foreign_layout(path: Path, head: bytes, layout: TextLayout) -> None:
    """Raise if the start of a file whose first row is bad has a layout that is known and wasn't asked for.

    Args:
        path: the file.
        head: its first bytes from the first row on, whole lines.
        layout: what was asked for.

    Raises:
        DataError: the content is no text but something known, or a layout that flags read. Returns when it's only a
            bad row.
    """
    for magic, name in _ARCHIVES.items():
        if head.startswith(magic):
            raise DataError(
                f"{path}: the content is {name}, not text", remedy="unpack it; plain text, gzip and zstd are read"
            )
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
        _raise(path, found, flags, layout)
        return
    width = len(rows[0])
    if any(len(row) != width for row in rows):
        _raise(path, found, flags, layout)
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
            flags.append("--unlabeled (and --vocabulary-from the dataset of the model that is to score them)")
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
    _raise(path, found, flags, layout)


def _raise(path: Path, found: list[str], flags: list[str], layout: TextLayout) -> None:
    if flags:
        raise DataError(
            f"{path}, line 1: {' and '.join(found)}; rows are read as {layout.fields} {layout.separator_name} fields, "
            f"ids in {'decimal' if layout.decimal_ids else 'hexadecimal'}",
            remedy=f"if that is what the file holds, run again with {' '.join(flags)}",
        )


def check_header(path: Path, line: bytes, layout: TextLayout) -> None:
    """Check that the first line names the columns in the order in which they are read.

    Names like ours (`label`, `I1`, `C26`, or torchrec's `int_0`, `cat_25`) must stand in their places; other names say
    nothing about the order.

    Raises:
        DataError: it is no header, a row must not be lost as one; or the columns have another order or number.
    """
    fields = line.rstrip(b"\r").split(layout.separator)
    if not _is_header(fields):
        shown = ascii(line[:40].decode("utf-8", "replace"))
        raise DataError(
            f"{path}, line 1: expected a header that names each column (--header), found {shown}",
            remedy="leave --header out if the file starts with a row, or check --delimiter",
        )
    if len(fields) != layout.fields:
        raise DataError(
            f"{path}, line 1: the header names {len(fields)} columns, rows are read as {layout.fields}",
            remedy="see --id-column and --unlabeled",
        )
    for column in range(layout.first_column, _FIELDS):
        place = layout.field_index(column)
        named = _column_of(fields[place])
        if named not in (None, RAW_COLUMNS[column]):
            raise DataError(
                f"{path}, line 1: the header names {fields[place].decode()} as column {place + 1}, where "
                f"{RAW_COLUMNS[column]} is read; columns are read by position",
                remedy="bring the columns into the order label, I1 to I13, C1 to C26",
            )


def _column_of(name: bytes) -> str | None:
    """Return which of our columns a name means, None if it can't be told."""
    text = name.strip(b'"').decode("utf-8", "replace")
    if text.lower() == LABEL_COLUMN:
        return LABEL_COLUMN
    match = _COLUMN_NAME.fullmatch(text)
    if match is None:
        return None
    if match["ours"]:
        return f"{match['ours'].upper()}{int(match['number'])}"
    return f"{'I' if match['torchrec'].lower() == 'int' else 'C'}{int(match['index']) + 1}"


def _is_header(fields: list[bytes]) -> bool:
    names = [field for field in fields if field]
    # Hexadecimal ids can look like words, column names are no 8 hexadecimal digits.
    words = [name for name in names if _WORD.fullmatch(name) and not _ID_OR_EMPTY.fullmatch(name)]
    return len(fields) >= _FIELDS - 1 and len(names) == len(fields) and len(words) == len(names)
