"""The parser of raw rows, against a slow one in Python."""

import gzip
import itertools
import random
import tempfile
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import zstandard
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from dlrm_scale.data.source.bad_rows import BadRow
from dlrm_scale.data.source.compressed import name_contradicts_content, open_bytes
from dlrm_scale.data.source.line_blocks import BLOCK_BYTES, count_lines
from dlrm_scale.data.source.text_layout import CRITEO_LAYOUT, TextLayout
from dlrm_scale.data.source.tsv import TextSource
from dlrm_scale.errors import DataError
from tests.support.raw_rows import Row, make_row, make_rows, slow_parse, write_rows

Parsed = tuple[list[tuple[int, Row]], list[BadRow], int]


def _parse(
    path: Path, *, pad: bool = False, layout: TextLayout = CRITEO_LAYOUT, block_bytes: int = BLOCK_BYTES
) -> Parsed:
    good: list[tuple[int, Row]] = []
    bad: list[BadRow] = []
    padded = 0
    layout = replace(layout, pad_short_rows=pad)
    with TextSource(path, layout, bad_rows_max=2**31, block_bytes=block_bytes) as source:
        for block in map(source.parse, source.pieces()):
            assert (block.labels.dtype, block.integers.dtype) == (np.uint8, np.int32)
            assert (block.categories.dtype, block.missing.dtype) == (np.uint32, np.uint64)
            bad_lines = {row.line for row in block.bad_rows}
            lines = (line for line in itertools.count(block.first_line) if line not in bad_lines)
            for i, line in zip(range(block.rows), lines, strict=False):
                absent = [bool(int(block.missing[i]) >> bit & 1) for bit in range(40)]
                values: list[object] = [*block.integers[:, i].tolist(), *block.categories[:, i].tolist()]
                assert not absent[0]
                assert all(value == 0 for value, gone in zip(values, absent[1:], strict=True) if gone)
                shown = [None if gone else value for value, gone in zip(values, absent[1:], strict=True)]
                for column, bags in block.bags.items():
                    ids = tuple(bags.values[bags.offsets[i] : bags.offsets[i + 1]].tolist())
                    assert (ids == ()) == (shown[13 + column] is None)
                    shown[13 + column] = ids
                good.append((line, Row(int(block.labels[i]), tuple(shown[:13]), tuple(shown[13:]))))
            padded += block.padded_rows
            bad += block.bad_rows
    return good, bad, padded


def _parse_bytes(
    tmp_path: Path,
    data: bytes,
    *,
    pad: bool = False,
    layout: TextLayout = CRITEO_LAYOUT,
    block_bytes: int = BLOCK_BYTES,
) -> Parsed:
    path = tmp_path / "rows.tsv"
    path.write_bytes(data)
    return _parse(path, pad=pad, layout=layout, block_bytes=block_bytes)


GOOD = make_row(1, range(13), range(2**32 - 26, 2**32))


@settings(max_examples=300, deadline=None)
@given(
    seed=st.integers(0, 2**32),
    rows=st.integers(1, 12),
    mutations=st.lists(
        st.tuples(
            st.integers(0, 11),
            st.integers(0, 400),
            st.integers(0, 12),
            st.one_of(
                st.sampled_from(
                    [b"", b"\t", b"\n", b"\r", b"\r\n", b"-", b"0", b"9", b"f", b"\x00", b'"', b".5", b"1_0"]
                ),
                st.binary(max_size=3),
            ),
        ),
        max_size=4,
    ),
    ending=st.sampled_from([b"\n", b"\r\n"]),
    final=st.booleans(),
    bom=st.booleans(),
    pad=st.booleans(),
    block_bytes=st.sampled_from([37, 500, 4096]),
)
def test_valid_and_broken_bytes_parse_as_the_slow_parser_says(
    seed: int,
    rows: int,
    mutations: list[tuple[int, int, int, bytes]],
    ending: bytes,
    final: bool,
    bom: bool,
    pad: bool,
    block_bytes: int,
) -> None:
    lines = make_rows(rows, seed=seed, ids=8)
    for row, start, length, text in mutations:
        if row < rows:
            start = min(start, len(lines[row]))
            lines[row] = lines[row][:start] + text + lines[row][start + length :]
    # A good first row keeps the file from being taken for another layout.
    data = (b"\xef\xbb\xbf" if bom else b"") + ending.join([GOOD, *lines]) + (ending if final else b"")
    # Zero bytes at the end are an error of the file, not a bad row.
    assume(not data.endswith(b"\x00"))
    with tempfile.TemporaryDirectory() as folder:
        good, bad, _ = _parse_bytes(Path(folder), data, pad=pad, block_bytes=block_bytes)
    expected_good, expected_bad = slow_parse(data, pad=pad)
    assert [row.line for row in bad] == expected_bad
    assert good == expected_good


def _field(column: str, text: str) -> bytes:
    fields = GOOD.split(b"\t")
    fields[tsv_column(column)] = text.encode()
    return b"\t".join(fields)


def tsv_column(name: str) -> int:
    from dlrm_scale.schema import RAW_COLUMNS

    return RAW_COLUMNS.index(name)


HEX = "8 hexadecimal digits or nothing"
INTEGER = "an integer or nothing"
INT32 = "an integer that fits 32 bits (-2147483648 to 2147483647) or nothing"
FIELDS = "40 tab-separated fields"


@pytest.mark.parametrize(
    ("row", "column", "expected", "found"),
    [
        (GOOD.rsplit(b"\t", 1)[0], "row", FIELDS, "39"),
        (GOOD + b"\t", "row", FIELDS, "41"),
        (GOOD + b"\t00000001", "row", FIELDS, "41"),
        (GOOD.replace(b"\t5\t", b"\t"), "row", FIELDS, "39"),
        (b"1", "row", FIELDS, "1"),
        (b"", "row", "40 fields", "a blank line"),
        (b"\r", "row", "40 fields", "a blank line"),
        (b"\t" * 39, "label", "0 or 1", "an empty field"),
        (_field("label", "-1"), "label", "0 or 1", "'-1'"),
        (_field("label", "2"), "label", "0 or 1", "'2'"),
        (_field("label", "01"), "label", "0 or 1", "'01'"),
        (_field("label", ""), "label", "0 or 1", "an empty field"),
        (_field("I3", "1.5"), "I3", INTEGER, "'1.5'"),
        (_field("I3", "1e3"), "I3", INTEGER, "'1e3'"),
        (_field("I3", "1_0"), "I3", INTEGER, "'1_0'"),
        (_field("I3", "+1"), "I3", INTEGER, "'+1'"),
        (_field("I3", "-"), "I3", INTEGER, "'-'"),
        (_field("I3", "--1"), "I3", INTEGER, "'--1'"),
        (_field("I3", " 1"), "I3", INTEGER, "' 1'"),
        (_field("I13", "2147483648"), "I13", INT32, "'2147483648'"),
        (_field("I13", "-2147483649"), "I13", INT32, "'-2147483649'"),
        (_field("I13", "12345678901"), "I13", INT32, "'12345678901'"),
        (_field("C1", "zz"), "C1", HEX, "'zz'"),
        (_field("C1", "0123456g"), "C1", HEX, "'0123456g'"),
        (_field("C1", "-1f"), "C1", HEX, "'-1f'"),
        (_field("C1", "1_000000"), "C1", HEX, "'1_000000'"),
        (_field("C1", "123456789"), "C1", HEX, "'123456789'"),
        (_field("C1", "1234567"), "C1", HEX, "'1234567'"),
        (_field("C1", '"1234567'), "C1", HEX, "'\"1234567'"),
        (_field("C1", "0x345678"), "C1", HEX, "'0x345678'"),
        (_field("C26", "c04"), "C26", HEX, "'c04'"),
        (_field("C26", "123456789"), "C26", HEX, "'123456789'"),
        (_field("C5", "\x00\x00\x00\x00\x00\x00\x00\x00"), "C5", HEX, "'\\x00\\x00\\x00\\x00\\x00\\x00\\x00\\x00'"),
        (_field("C5", "ab\rdef01"), "C5", HEX, "'ab\\rdef01'"),
    ],
)
def test_a_bad_row_is_named_with_line_column_expected_and_found(
    tmp_path: Path, row: bytes, column: str, expected: str, found: str
) -> None:
    good, bad, _ = _parse_bytes(tmp_path, GOOD + b"\n" + row + b"\n" + GOOD + b"\n")
    assert [line for line, _ in good] == [1, 3]
    assert [(b.line, b.column, b.expected) for b in bad] == [(2, column, expected)]
    assert bad[0].found.split(" (starting")[0] == found
    assert str(bad[0]).startswith(f"{tmp_path / 'rows.tsv'}, line 2, column {column}: expected {expected}, found ")


def test_the_extreme_legal_values_are_accepted(tmp_path: Path) -> None:
    row = make_row(1, [-(2**31), 2**31 - 1, -0, "007", ""], ["FFFFFFFF", "ffffffff", 0x80000000, 0x7FFFFFFF, 0, ""])
    good, bad, _ = _parse_bytes(tmp_path, row + b"\n")
    assert not bad
    assert good[0][1].integers[:5] == (-(2**31), 2**31 - 1, 0, 7, None)
    assert good[0][1].categories[:6] == (2**32 - 1, 2**32 - 1, 2**31, 2**31 - 1, 0, None)


def test_crlf_a_byte_order_mark_and_no_final_line_feed_change_nothing(tmp_path: Path) -> None:
    rows = make_rows(7)
    plain, _, _ = _parse_bytes(tmp_path, b"\n".join(rows) + b"\n")
    for data in (
        b"\r\n".join(rows) + b"\r\n",
        b"\n".join(rows),
        b"\r\n".join(rows),
        b"\xef\xbb\xbf" + b"\n".join(rows) + b"\n",
    ):
        assert _parse_bytes(tmp_path, data) == (plain, [], 0)
    _, bad, _ = _parse_bytes(tmp_path, rows[0] + b"\n\xef\xbb\xbf" + rows[1] + b"\n")
    assert [row.column for row in bad] == ["label"]


def test_a_padded_short_row_has_missing_fields_and_is_counted(tmp_path: Path) -> None:
    data = b"1\t5\n" + GOOD.rsplit(b"\t", 3)[0] + b"\r\n" + b"0\n"
    good, bad, padded = _parse_bytes(tmp_path, GOOD + b"\n" + data, pad=True)
    assert not bad
    assert padded == 3
    assert good[1][1] == Row(1, (5, *[None] * 12), (None,) * 26)
    assert good[2][1].categories[-4:] == (2**32 - 4, None, None, None)
    assert good[3][1] == Row(0, (None,) * 13, (None,) * 26)


def test_a_short_last_line_without_a_line_feed_is_never_padded(tmp_path: Path) -> None:
    _, bad, padded = _parse_bytes(tmp_path, GOOD + b"\n" + GOOD[:100], pad=True)
    assert padded == 0
    assert bad[0].line == 2
    assert "the file may be cut off here" in bad[0].found


def test_blocks_and_refills_keep_every_row_and_line_number(tmp_path: Path) -> None:
    rows = make_rows(400) * 100
    path = write_rows(tmp_path / "rows.tsv", rows)
    lines, labels = [], []
    with TextSource(path) as source:
        for block in map(source.parse, source.pieces()):
            assert not block.bad_rows
            lines.append((block.first_line, block.rows))
            labels.append(block.labels)
    assert len(lines) > 3
    assert [first for first, _ in lines] == list(np.cumsum([1, *[n for _, n in lines]])[:-1])
    assert np.concatenate(labels).tolist() == [row[0] - 48 for row in rows]
    with open_bytes(path) as source:
        assert count_lines(source) == 40_000


def test_lines_are_counted_with_and_without_a_final_line_feed(tmp_path: Path) -> None:
    for data, lines in ((b"", 0), (b"a", 1), (b"a\n", 1), (b"a\n\nb", 3)):
        (tmp_path / "x").write_bytes(data)
        with open_bytes(tmp_path / "x") as source:
            assert count_lines(source) == lines


def test_bytes_without_lines_are_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"rows\.tsv, line 2: a line of more than 1,048,576 bytes"):
        _parse_bytes(tmp_path, GOOD + b"\n" + bytes(3_000_000))


@pytest.mark.parametrize("compress", [gzip.compress, zstandard.compress])
def test_compressed_rows_equal_plain_ones_in_one_or_many_members(tmp_path: Path, compress) -> None:
    rows = make_rows(300)
    halves = [b"\n".join(rows[:123]), b"\n" + b"\n".join(rows[123:]) + b"\n"]
    plain = _parse_bytes(tmp_path, b"".join(halves))
    assert len(plain[0]) == 300
    assert _parse_bytes(tmp_path, compress(b"".join(halves))) == plain
    assert _parse_bytes(tmp_path, b"".join(compress(half) for half in halves)) == plain


@pytest.mark.parametrize(("compress", "name"), [(gzip.compress, "gzip"), (zstandard.compress, "zstd")])
@pytest.mark.parametrize("kept", [0.6, 0.999, -1])
def test_a_truncated_compressed_file_is_refused(tmp_path: Path, compress, name: str, kept: float) -> None:
    data = compress(b"\n".join(make_rows(3000)) + b"\n")
    cut = data[:-1] if kept < 0 else data[: int(len(data) * kept)]
    with pytest.raises(DataError, match=rf"{name} file ends in the middle of a compressed stream, after [\d,]+ of"):
        _parse_bytes(tmp_path, cut)


@pytest.mark.parametrize("compress", [gzip.compress, zstandard.compress])
@pytest.mark.parametrize("tail", [bytes(512), b"garbage!"])
def test_bytes_after_the_last_member_are_refused(tmp_path: Path, compress, tail: bytes) -> None:
    with pytest.raises(DataError, match=r"is damaged|start none"):
        _parse_bytes(tmp_path, compress(GOOD + b"\n") + tail)


def test_a_flipped_byte_in_a_gzip_is_refused(tmp_path: Path) -> None:
    data = bytearray(gzip.compress(b"\n".join(make_rows(500)) + b"\n"))
    data[-6] ^= 1
    with pytest.raises(DataError, match="is damaged"):
        _parse_bytes(tmp_path, bytes(data))


def test_the_content_decides_and_a_contradicting_name_is_noted(tmp_path: Path) -> None:
    for name, data, note in (
        ("day_0.gz", GOOD + b"\n", "the name says gzip, the content is not compressed"),
        ("day_0", gzip.compress(GOOD + b"\n"), "the name says not compressed, the content is gzip"),
        ("day_0.zst", gzip.compress(GOOD + b"\n"), "the name says zstd, the content is gzip"),
        ("day_1.gz", gzip.compress(GOOD + b"\n"), None),
        ("day_2.zst", zstandard.compress(GOOD + b"\n"), None),
        ("day_3.gz", b"", None),
    ):
        (tmp_path / name).write_bytes(data)
        with open_bytes(tmp_path / name) as source:
            found = name_contradicts_content(source)
        assert (found is None) if note is None else (note in str(found)), name
        assert len(_parse(tmp_path / name)[0]) == (1 if data else 0)


def _csv(rows: list[bytes]) -> list[bytes]:
    return [row.replace(b"\t", b",") for row in rows]


HEADER = b"\t".join([b"label", *(f"I{i}".encode() for i in range(1, 14)), *(f"C{i}".encode() for i in range(1, 27))])


LISTS = [make_row(1, [3], [f"{i:08x},{i + 1:08x}" if i in (2, 19) else i for i in range(26)]) for _ in range(3)]
UNLABELED = [row[2:] for row in make_rows(3)]
DECIMAL = [make_row(0, [1], [str(i * 1000) for i in range(26)]) for _ in range(3)]


@pytest.mark.parametrize(
    ("lines", "named", "flags", "layout"),
    [
        (_csv(make_rows(3)), "comma-separated fields", "--delimiter comma", TextLayout(delimiter="comma")),
        (
            _csv([HEADER, *make_rows(3)]),
            "comma-separated fields and a header row",
            "--delimiter comma --header",
            TextLayout(delimiter="comma", header=True),
        ),
        ([HEADER, *make_rows(3)], "a header row", "--header", TextLayout(header=True)),
        (UNLABELED, "rows without a label", "--unlabeled", TextLayout(labeled=False)),
        ([HEADER[6:], *UNLABELED], "a header row", "--header --unlabeled", TextLayout(header=True, labeled=False)),
        (DECIMAL, "decimal category ids", "--decimal-ids", TextLayout(decimal_ids=True)),
        ([b"r1\t" + row for row in make_rows(3)], "an id column", "--id-column", TextLayout(id_column=True)),
        (LISTS, r"several ids in a field \(C3, C20\)", "--multi-hot C3,C20", TextLayout(multi_hot=("C3", "C20"))),
    ],
)
def test_another_layout_is_named_with_the_flags_that_read_it(
    tmp_path: Path, lines: list[bytes], named: str, flags: str, layout: TextLayout
) -> None:
    data = b"\n".join(lines) + b"\n"
    with pytest.raises(DataError, match=named) as caught:
        _parse_bytes(tmp_path, data)
    assert "line 1" in caught.value.message
    assert f"run again with {flags}" in str(caught.value.remedy)
    good, bad, _ = _parse_bytes(tmp_path, data, layout=layout)
    assert (good, bad) == (slow_parse(data, layout=layout)[0], [])
    assert len(good) == 3


def test_a_row_is_never_lost_as_a_header(tmp_path: Path) -> None:
    data = b"\n".join(make_rows(3)) + b"\n"
    with pytest.raises(DataError, match=r"line 1: expected a header that names each column \(--header\), found"):
        _parse_bytes(tmp_path, data, layout=TextLayout(header=True))


@pytest.mark.parametrize(
    ("swap", "message"),
    [
        ((1, 2), "the header names I2 as column 2, where I1 is read"),
        ((0, 39), "the header names C26 as column 1, where label is read"),
    ],
)
def test_a_header_in_another_order_is_refused(tmp_path: Path, swap: tuple[int, int], message: str) -> None:
    names = HEADER.split(b"\t")
    a, b = swap
    names[a], names[b] = names[b], names[a]
    layout = TextLayout(header=True)
    with pytest.raises(DataError, match=message):
        _parse_bytes(tmp_path, b"\n".join([b"\t".join(names), *make_rows(3)]) + b"\n", layout=layout)
    torchrec = [b"label", *(b"int_%d" % i for i in range(13)), *(b"cat_%d" % i for i in range(26))]
    data = b"\n".join([b"\t".join(torchrec), *make_rows(3)]) + b"\n"
    assert len(_parse_bytes(tmp_path, data, layout=layout)[0]) == 3


@pytest.mark.parametrize(
    ("content", "name"),
    [(b"BZh91AY&SY" + bytes(99), "bzip2"), (b"\xfd7zXZ\x00" + bytes(99), "xz"), (b"PK\x03\x04" + bytes(99), "zip")],
)
def test_other_compressions_are_named(tmp_path: Path, content: bytes, name: str) -> None:
    with pytest.raises(DataError, match=f"the content is {name}, not text"):
        _parse_bytes(tmp_path, content + b"\n")
    twice = gzip.compress(gzip.compress(b"\n".join(make_rows(200))) + b"\n")
    with pytest.raises(DataError, match="gzip inside a compressed file"):
        _parse_bytes(tmp_path, twice)


def test_only_rows_whose_fields_are_right_are_called_short(tmp_path: Path) -> None:
    _, bad, _ = _parse_bytes(tmp_path, b"\n".join([GOOD, GOOD[:100].rsplit(b"\t", 1)[0], b"junk", b""]) + b"\n")
    assert [row.short for row in bad] == [True, False, False]


def test_labels_in_input_that_is_said_to_have_none_are_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="rows with a label") as caught:
        _parse_bytes(tmp_path, b"\n".join(make_rows(3)) + b"\n", layout=TextLayout(labeled=False))
    assert str(caught.value.remedy).endswith("run again with no --unlabeled")


layouts = st.builds(
    TextLayout,
    delimiter=st.just("tab"),
    header=st.booleans(),
    id_column=st.booleans(),
    labeled=st.booleans(),
    decimal_ids=st.booleans(),
    multi_hot=st.sampled_from([(), ("C1",), ("C3", "C26")]),
) | st.builds(
    TextLayout,
    delimiter=st.just("comma"),
    header=st.booleans(),
    id_column=st.booleans(),
    labeled=st.booleans(),
    decimal_ids=st.booleans(),
)


@settings(max_examples=300, deadline=None)
@given(layout=layouts, data=st.data())
def test_every_layout_parses_as_the_slow_parser_says(layout: TextLayout, data: st.DataObject) -> None:
    ids = (
        st.sampled_from(["0", "7", "4294967295", "4294967296", "12345678901", "-1"])
        if layout.decimal_ids
        else (st.sampled_from(["00000000", "ffffffff", "ABCDEF01", "1234567", "123456789"]))
    )
    usual = "7" if layout.decimal_ids else "abcdef01"
    lines = []
    for number in range(data.draw(st.integers(1, 6))):
        categories = [usual] * 26
        for _ in range(data.draw(st.integers(0, 3))):
            parts = data.draw(st.lists(ids, max_size=3))
            categories[data.draw(st.sampled_from([0, 2, 25]))] = ",".join(parts)
        fields = ["1"] * layout.labeled + ["5"] * 12 + [data.draw(st.sampled_from(["", "-3", "x"]))] + categories
        if layout.id_column:
            fields.insert(0, data.draw(st.sampled_from(["row-1", "9", "", "a b"])))
        line = ("\t" if layout.delimiter == "tab" else ",").join(fields).encode()
        cut = data.draw(st.sampled_from([0, 0, 0, 1, 5, 60]))
        lines.append(line[: len(line) - cut] if number else line)
    if layout.header:
        names = ["id"] * layout.id_column + ["label"] * layout.labeled + HEADER.decode().split("\t")[1:]
        lines.insert(0, layout.separator.join(name.encode() for name in names))
    text = b"\n".join(lines) + data.draw(st.sampled_from([b"\n", b""]))
    pad = data.draw(st.booleans())
    with tempfile.TemporaryDirectory() as folder:
        try:
            good, bad, _ = _parse_bytes(Path(folder), text, pad=pad, layout=layout, block_bytes=700)
        except DataError as error:
            # A first row that is bad may look like another layout.
            first_bad = slow_parse(text, pad=pad, layout=layout)[1][:1]
            if "line 1" not in error.message or first_bad != [2 if layout.header else 1]:
                raise
            return
    expected_good, expected_bad = slow_parse(text, pad=pad, layout=layout)
    assert [row.line for row in bad] == expected_bad
    assert good == expected_good


def test_a_bad_row_leaves_none_of_its_ids_to_the_next_row(tmp_path: Path) -> None:
    layout = TextLayout(multi_hot=("C1", "C26"))
    ids = "00000001,00000002,00000003"
    rows = [make_row(0, [], [7] * 26), make_row(0, [], [ids, *[7] * 24, "7"]), make_row(0, [], [ids, "x", *[7] * 24])]
    rows += [make_row(0, [], [*[7] * 25, ids + ",x"]), make_row(0, [], [*[7] * 25, ids]) + b"\t", rows[0]]
    good, bad, _ = _parse_bytes(tmp_path, b"\n".join(rows) + b"\n", layout=layout)
    assert [row.line for row in bad] == [2, 3, 4, 5]
    assert good[1][1].categories == ((7,), *[7] * 24, (7,))


def test_a_bad_first_row_is_just_a_bad_row(tmp_path: Path) -> None:
    rows = make_rows(5)
    for first in (b"", _field("label", "x"), GOOD.rsplit(b"\t", 2)[0]):
        good, bad, _ = _parse_bytes(tmp_path, b"\n".join([first, *rows]) + b"\n")
        assert [row.line for row in bad] == [1]
        assert len(good) == 5


@pytest.mark.parametrize("name", ["kaggle/kaggle_union.tsv", "kaggle/intact_100.tsv", "terabyte/day_0_head_10000.tsv"])
def test_real_rows_parse_as_the_slow_parser_says(shared_data: Path, name: str) -> None:
    good, bad, _ = _parse(shared_data / name)
    assert (good, [row.line for row in bad]) == slow_parse((shared_data / name).read_bytes())
    assert not bad


def test_real_gzip_days_are_all_days(shared_data: Path) -> None:
    days = [row for i in range(5) for _, row in _parse(shared_data / f"kaggle/gz_days/day_{i}.gz")[0]]
    assert days == [row for _, row in _parse(shared_data / "kaggle/gz_days/alldays.txt")[0]]


def test_real_stripped_rows_are_refused_or_padded_to_the_intact_ones(shared_data: Path) -> None:
    _, bad, _ = _parse(shared_data / "kaggle/stripped_tabs_100.tsv")
    assert len(bad) == 51
    assert bad[0].found.startswith("38 ")
    good, bad, padded = _parse(shared_data / "kaggle/stripped_tabs_100.tsv", pad=True)
    assert (len(bad), padded) == (0, 51)
    assert good == _parse(shared_data / "kaggle/intact_100.tsv")[0]


@pytest.mark.parametrize(
    ("name", "flags", "layout", "rows"),
    [
        (
            "kaggle/with_header_crlf.csv",
            "--delimiter comma --header --id-column",
            TextLayout(delimiter="comma", header=True, id_column=True),
            1999,
        ),
        ("kaggle/kaggle_test_nolabel_1999.tsv", "--unlabeled", TextLayout(labeled=False), 1999),
    ],
)
def test_other_real_layouts_are_named_and_read_with_their_flags(
    shared_data: Path, name: str, flags: str, layout: TextLayout, rows: int
) -> None:
    with pytest.raises(DataError) as caught:
        _parse(shared_data / name)
    assert f"run again with {flags}" in str(caught.value.remedy)
    good, bad, _ = _parse(shared_data / name, layout=layout)
    assert (good, [row.line for row in bad]) == slow_parse((shared_data / name).read_bytes(), layout=layout)
    assert len(good) == rows


def test_random_bytes_never_crash_the_parser(tmp_path: Path) -> None:
    source = random.Random(1)
    for size in (1, 5, 100, 5000):
        for _ in range(20):
            data = GOOD + b"\n" + source.randbytes(size)
            good, bad, _ = _parse_bytes(tmp_path, data)
            assert (good, [row.line for row in bad]) == slow_parse(data)
