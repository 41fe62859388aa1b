"""Raw Criteo rows for tests: a slow parser to compare with, and rows made on the spot."""

import random
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from dlrm_scale.data.source.text_layout import CRITEO_LAYOUT, TextLayout

__all__ = ["Row", "make_row", "make_rows", "slow_parse", "write_rows"]

_INTEGER = re.compile(rb"-?[0-9]{1,10}")
_HEX = re.compile(rb"[0-9a-fA-F]{8}")
_DECIMAL = re.compile(rb"[0-9]{1,10}")
_ROW_ID = re.compile(rb'[^\r\x00"]+')


@dataclass(frozen=True)
class Row:
    """One row as a person would read it; None is missing, a tuple a field that may hold several ids."""

    label: int
    integers: tuple[int | None, ...]
    categories: tuple[int | tuple[int, ...] | None, ...]


def _id(text: bytes, decimal: bool) -> int | None:
    if not (_DECIMAL if decimal else _HEX).fullmatch(text):
        return None
    value = int(text, 10 if decimal else 16)
    return value if value < 2**32 else None


def _row(line: bytes, pad: bool, layout: TextLayout) -> Row | None:
    fields = line.split(b"," if layout.delimiter == "comma" else b"\t")
    if layout.id_column:
        if len(fields) < 2 or not _ROW_ID.fullmatch(fields[0]):
            return None
        fields = fields[1:]
    if not layout.labeled:
        if line == b"" or fields == [b""]:
            return None
        fields = [b"0", *fields]
    if pad and len(fields) < 40:
        fields += [b""] * (40 - len(fields))
    if len(fields) != 40 or fields[0] not in (b"0", b"1"):
        return None
    integers: list[int | None] = []
    for field in fields[1:14]:
        if field and not (_INTEGER.fullmatch(field) and -(2**31) <= int(field) < 2**31):
            return None
        integers.append(int(field) if field else None)
    categories: list[int | tuple[int, ...] | None] = []
    for column, field in enumerate(fields[14:], 1):
        if f"C{column}" in layout.multi_hot:
            ids = [_id(text, layout.decimal_ids) for text in field.split(b",")] if field else []
            if None in ids:
                return None
            categories.append(tuple(ids))
            continue
        if field and _id(field, layout.decimal_ids) is None:
            return None
        categories.append(_id(field, layout.decimal_ids) if field else None)
    return Row(int(fields[0]), tuple(integers), tuple(categories))


def slow_parse(
    data: bytes, *, pad: bool = False, layout: TextLayout = CRITEO_LAYOUT
) -> tuple[list[tuple[int, Row]], list[int]]:
    """Return good rows with their line numbers, and the line numbers of bad rows."""
    lines = data.removeprefix(b"\xef\xbb\xbf").split(b"\n")
    good, bad = [], []
    for number, line in enumerate(lines, 1):
        last = number == len(lines)
        if last and not line:
            break
        if layout.header and number == 1:
            continue
        row = _row(line.removesuffix(b"\r"), pad and not last, layout)
        if row is None:
            bad.append(number)
        else:
            good.append((number, row))
    return good, bad


def make_row(
    label: object = 0, integers: Sequence[object] = (), categories: Sequence[object] = (), *, fill: object = ""
) -> bytes:
    """Return a row without its line feed; fields that aren't given are `fill`; ints among categories become hex."""
    shown = [f"{c:08x}" if isinstance(c, int) else str(c) for c in categories]
    left = [*(str(x) for x in integers), *[str(fill)] * (13 - len(integers))]
    return "\t".join([str(label), *left, *shown, *[str(fill)] * (26 - len(categories))]).encode()


def make_rows(rows: int, *, seed: int = 0, ids: int = 50) -> list[bytes]:
    """Return random rows with missing fields, negative integers and ids over all 32 bits, about `ids` a column."""
    source = random.Random(seed)
    pools = [[source.getrandbits(32) for _ in range(ids)] for _ in range(26)]
    result = []
    for _ in range(rows):
        integers = [source.choice(["", -2, -1, 0, 1, source.randrange(2_000_000)]) for _ in range(13)]
        categories = [source.choice([*pool[:5], source.choice(pool), ""]) for pool in pools]
        result.append(make_row(source.randrange(2), integers, categories))
    return result


def write_rows(path: Path, rows: Sequence[bytes]) -> Path:
    """Write rows with line feeds."""
    path.write_bytes(b"".join(row + b"\n" for row in rows))
    return path
