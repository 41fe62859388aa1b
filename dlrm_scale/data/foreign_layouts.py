"""Layouts that are often met where Criteo rows are expected: recognised and named, never read by guess."""

import re
from pathlib import Path

from dlrm_scale.errors import DataError
from dlrm_scale.schema import RAW_COLUMNS

__all__ = ["refuse_foreign_layout"]

_SAMPLED_LINES = 10
_FIELDS = len(RAW_COLUMNS)
_INTEGER_OR_EMPTY = re.compile(rb"(-?[0-9]{1,10})?")
_ID_OR_EMPTY = re.compile(rb"([0-9a-fA-F]{8})?")
_DECIMAL_OR_EMPTY = re.compile(rb"-?[0-9]*")
_WORD = re.compile(rb"\"?[A-Za-z_][A-Za-z0-9_]*\"?")


def _all(pattern: re.Pattern[bytes], fields: list[bytes]) -> bool:
    return all(pattern.fullmatch(field) for field in fields)


def refuse_foreign_layout(path: Path, head: bytes) -> None:
    """Raise if the start of a file whose first row is bad has a layout that is known.

    Args:
        path: the file.
        head: its first bytes, whole lines.

    Raises:
        DataError: names the layout and how to convert it. Returns when it's only a bad row.
    """
    lines = [line.rstrip(b"\r") for line in head.split(b"\n", _SAMPLED_LINES)[:_SAMPLED_LINES] if line.strip()]
    if not lines:
        return
    where = f"{path}, line 1"
    tabs, commas = [line.split(b"\t") for line in lines], [line.split(b",") for line in lines]
    if all(len(fields) == 1 for fields in tabs) and all(len(fields) >= _FIELDS - 1 for fields in commas):
        header = " with a header row" if _is_header(commas[0]) else ""
        ids = " and an id column" if len(commas[0]) == _FIELDS + 1 else ""
        raise DataError(
            f"{where}: comma-separated{header}{ids} ({len(commas[0])} fields); only tab-separated rows of "
            f"{_FIELDS} fields (label, I1..I13, C1..C26) without a header are read, and no option changes that yet",
            remedy="convert the file, for instance with: "
            + ("tail -n +2 FILE | " if header else "cat FILE | ")
            + ("cut -d, -f2- | " if ids else "")
            + "tr ',' '\\t'",
        )
    if _is_header(tabs[0]):
        raise DataError(
            f"{where}: a header row ({tabs[0][0].decode(errors='replace')!r}, …); rows are read by position, and no "
            "option skips a header yet",
            remedy="remove it: tail -n +2 FILE",
        )
    if all(len(fields) == _FIELDS - 1 for fields in tabs) and all(
        _all(_INTEGER_OR_EMPTY, fields[:13]) and _all(_ID_OR_EMPTY, fields[13:]) for fields in tabs
    ):
        raise DataError(
            f"{where}: rows of {_FIELDS - 1} fields without a label (I1..I13, C1..C26); training and evaluation need "
            "labels, and no option reads unlabeled rows yet",
            remedy="give the labeled files (Kaggle's train.txt, not test.txt)",
        )
    if all(len(fields) == _FIELDS for fields in tabs):
        categories = [field for fields in tabs for field in fields[14:]]
        if _all(_DECIMAL_OR_EMPTY, categories) and not _all(_ID_OR_EMPTY, categories):
            raise DataError(
                f"{where}: the category ids are decimal numbers; ids are 8 hexadecimal digits, and no option reads "
                "decimal ids yet",
                remedy="write each id as 8 hexadecimal digits ('%08x')",
            )


def _is_header(fields: list[bytes]) -> bool:
    names = [field for field in fields if field]
    # Hexadecimal ids can look like words, column names are no 8 hexadecimal digits.
    words = [name for name in names if _WORD.fullmatch(name) and not _ID_OR_EMPTY.fullmatch(name)]
    return len(fields) >= _FIELDS - 1 and len(names) == len(fields) and len(words) == len(names)
