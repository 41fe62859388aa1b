"""Rows of Parquet files of several makers, types and faults."""

import random
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dlrm_scale.data.source import parquet_source
from dlrm_scale.data.source.inputs import InputFile, find_inputs
from dlrm_scale.data.source.parquet_source import ParquetSource
from dlrm_scale.data.source.raw_block import RawBlock
from dlrm_scale.data.source.row_layout import RowLayout
from dlrm_scale.errors import ConfigError, DataError
from dlrm_scale.schema import CATEGORY_COLUMNS, INTEGER_COLUMNS, RAW_COLUMNS
from tests.support.raw_rows import slow_parse

Columns = dict[str, pa.Array]


def _columns(rows: int, *, seed: int = 0) -> Columns:
    """Integers with missing ones, and ids as uint32."""
    source = random.Random(seed)

    def values(draw: Any) -> list[Any]:
        return [None if source.random() < 0.2 else draw() for _ in range(rows)]

    columns = {"label": pa.array([source.randrange(2) for _ in range(rows)], pa.int8())}
    for name in INTEGER_COLUMNS:
        columns[name] = pa.array(values(lambda: source.randrange(-3, 2_000_000)), pa.int32())
    for name in CATEGORY_COLUMNS:
        columns[name] = pa.array(values(lambda: source.getrandbits(32)), pa.uint32())
    return columns


def _store(tmp_path: Path, columns: Mapping[str, pa.Array], name: str = "rows.parquet", **options: Any) -> InputFile:
    path = tmp_path / name
    pq.write_table(pa.table(dict(columns)), path, **options)
    return find_inputs([path]).files[0]


def _blocks(file: InputFile, **options: Any) -> list[RawBlock]:
    with ParquetSource(file, **options) as source:
        return [source.parse(piece) for piece in source.pieces()]


def _block(file: InputFile, **options: Any) -> RawBlock:
    (block,) = _blocks(file, **options)
    return block


def _bad(tmp_path: Path, stored: Columns, **options: Any) -> list[str]:
    return [str(bad) for block in _blocks(_store(tmp_path, stored), **options) for bad in block.bad_rows]


def _rows(blocks: list[RawBlock]) -> list[list[Any]]:
    """Rows as lists of Python values: label, integers or features, ids; None where missing, a list for a bag."""
    rows = []
    for block in blocks:
        numbers = block.integers if block.features is None else block.features
        for i in range(block.rows):
            row: list[Any] = [int(block.labels[i]), *numbers[:, i].tolist()]
            for column in range(26):
                bags = block.bags.get(column)
                row.append(
                    int(block.categories[column, i])
                    if bags is None
                    else bags.values[bags.offsets[i] : bags.offsets[i + 1]].tolist()
                )
            for bit, value in enumerate(row):
                if int(block.missing[i]) >> bit & 1:
                    assert value in (0, [])
                    row[bit] = None
            rows.append(row)
    return rows


def _expected(columns: Columns) -> list[list[Any]]:
    return [list(row) for row in zip(*(columns[name].to_pylist() for name in RAW_COLUMNS), strict=True)]


@pytest.mark.parametrize("rows", [0, 1, 8192, 20_000])
def test_integers_and_ids_give_their_values_over_batches_and_row_groups(tmp_path: Path, rows: int) -> None:
    columns = _columns(rows)
    file = _store(tmp_path, columns, row_group_size=5000)
    blocks = _blocks(file)
    assert _rows(blocks) == _expected(columns)
    starts = [block.first_line for block in blocks]
    assert starts == [1 + sum(block.rows for block in blocks[:i]) for i in range(len(blocks))]
    for block in blocks:
        types = (block.labels.dtype, block.integers.dtype, block.categories.dtype, block.missing.dtype)
        assert [str(kind) for kind in types] == ["uint8", "int32", "uint32", "uint64"]
        assert block.integers.flags.c_contiguous
        assert block.features is None
    with ParquetSource(file) as source:
        assert source.layout == RowLayout(path=file.path, rows=rows, multi_hot=(), gives_features=False)
        for _ in source.pieces():
            pass
        assert source.position_bytes == (file.size_bytes if rows else 0)


_ID_TYPES = [
    pa.uint32(),
    pa.int64(),
    pa.uint64(),
    pa.string(),
    pa.large_string(),
    pa.string_view(),
    pa.binary(),
    pa.binary(8),
    pa.dictionary(pa.int32(), pa.string()),
    pa.dictionary(pa.int8(), pa.int64()),
    pa.list_(pa.uint32()),
    pa.large_list(pa.int64()),
    pa.list_(pa.string()),
    pa.list_(pa.int64(), 3),
    pa.list_(pa.dictionary(pa.int32(), pa.string())),
]
_RAW_ID = st.integers(0, 2**32 - 1)


def _as_stored(id: int, kind: pa.DataType, upper: bool) -> Any:
    if pa.types.is_dictionary(kind):
        kind = kind.value_type
    if pa.types.is_integer(kind):
        return id
    text = f"{id:08X}" if upper else f"{id:08x}"
    return (
        text
        if pa.types.is_string(kind) or pa.types.is_large_string(kind) or kind == pa.string_view()
        else text.encode()
    )


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_every_type_of_ids_gives_the_same_ids(tmp_path: Path, data: st.DataObject) -> None:
    rows = data.draw(st.integers(1, 12))
    columns = _columns(rows)
    expected = _expected(columns)
    multi_hot = []
    for column in data.draw(st.sets(st.sampled_from(CATEGORY_COLUMNS), min_size=1, max_size=4)):
        kind, upper = data.draw(st.sampled_from(_ID_TYPES)), data.draw(st.booleans())
        listed = hasattr(kind, "value_type") and not pa.types.is_dictionary(kind)
        if listed:
            sizes = (3, 3) if pa.types.is_fixed_size_list(kind) else (0, 5)
            field = st.none() | st.lists(_RAW_ID, min_size=sizes[0], max_size=sizes[1])
            multi_hot.append(column)
        else:
            field = st.none() | _RAW_ID
        fields = data.draw(st.lists(field, min_size=rows, max_size=rows))
        inner = kind.value_type if listed else kind
        stored = [
            None if x is None else [_as_stored(i, inner, upper) for i in x] if listed else _as_stored(x, inner, upper)
            for x in fields
        ]
        columns[column] = pa.array(stored, kind)
        index = RAW_COLUMNS.index(column)
        for row, x in zip(expected, fields, strict=True):
            row[index] = None if x == [] else x
    file = _store(tmp_path, columns)
    with ParquetSource(file) as source:
        assert sorted(source.multi_hot) == sorted(multi_hot)
        assert list(source.multi_hot) == sorted(multi_hot, key=CATEGORY_COLUMNS.index)
    assert _rows(_blocks(file)) == expected


def test_an_empty_string_and_a_column_of_nulls_are_missing(tmp_path: Path) -> None:
    columns = _columns(3)
    columns["C1"] = pa.array(["", "00000000", None])
    columns["C2"] = columns["I4"] = pa.nulls(3)
    rows = _rows(_blocks(_store(tmp_path, columns)))
    assert [row[14] for row in rows] == [None, 0, None]
    assert [row[15] for row in rows] == [row[4] for row in rows] == [None] * 3


def test_an_int32_id_is_its_32_bits(tmp_path: Path) -> None:
    columns = _columns(3)
    columns["C1"] = pa.array([-1, -(2**31), 7], pa.int32())
    assert _block(_store(tmp_path, columns)).categories[0].tolist() == [2**32 - 1, 2**31, 7]


@pytest.mark.parametrize("kind", [pa.int8(), pa.bool_(), pa.float64(), pa.uint64()])
def test_labels_may_have_any_number_type(tmp_path: Path, kind: pa.DataType) -> None:
    columns = _columns(3)
    columns["label"] = pa.array([1, 0, 1]).cast(kind)
    assert _block(_store(tmp_path, columns)).labels.tolist() == [1, 0, 1]


@pytest.mark.parametrize("kind", [pa.int16(), pa.int64(), pa.uint8(), pa.uint32(), pa.uint64()])
def test_integers_may_have_any_integer_type(tmp_path: Path, kind: pa.DataType) -> None:
    columns = _columns(3)
    columns["I5"] = pa.array([5, None, 120], kind)
    assert [row[5] for row in _rows(_blocks(_store(tmp_path, columns)))] == [5, None, 120]


@pytest.mark.parametrize("kind", ["float16", "float32", "float64"])
def test_floating_point_columns_are_ready_made_features(tmp_path: Path, kind: str) -> None:
    columns = _columns(9000)
    dense = np.random.default_rng(0).normal(size=(13, 9000)).astype(kind)
    columns.update({name: pa.array(dense[k]) for k, name in enumerate(INTEGER_COLUMNS)})
    file = _store(tmp_path, columns)
    with ParquetSource(file) as source:
        assert source.gives_features
    blocks = _blocks(file)
    features = np.concatenate([block.features for block in blocks], axis=1)  # type: ignore[misc]
    assert features.dtype == np.float32
    assert np.array_equal(features, dense.astype(np.float32))
    assert all(block.integers.shape == (13, 0) for block in blocks)
    assert not any((block.missing & 0x3FFF).any() for block in blocks)


def test_columns_are_mapped_and_others_ignored(tmp_path: Path) -> None:
    columns = _columns(5)
    theirs = {"label": "click", "C3": "site.id", "I1": "C3x"}
    stored = {theirs.get(name, name): array for name, array in reversed(columns.items())}
    stored["unused"] = pa.array([{"a": 1}] * 5)
    file = _store(tmp_path, stored)
    assert _rows(_blocks(file, columns=theirs)) == _expected(columns)


def test_a_mapping_that_makes_no_sense_is_refused(tmp_path: Path) -> None:
    file = _store(tmp_path, _columns(1))
    with pytest.raises(ConfigError, match=r"--column C27=x: no column of ours is named C27") as caught:
        ParquetSource(file, columns={"C27": "x"})
    assert "label, I1 to I13 or C1 to C26" in str(caught.value.remedy)
    with pytest.raises(ConfigError, match=r"column C2 is to be both C1 and C2"):
        ParquetSource(file, columns={"C1": "C2"})


def test_absent_columns_are_named_with_those_that_are_there(tmp_path: Path) -> None:
    columns: dict[str, pa.Array] = _columns(1)
    columns["clicked"] = columns.pop("label")
    del columns["C7"]
    with pytest.raises(DataError) as caught:
        ParquetSource(_store(tmp_path, columns))
    assert caught.value.message.startswith(
        f"{tmp_path}/rows.parquet: no column label, C7; its columns are I1, I2, I3, I4, I5, I6, I7, I8, I9, I10,"
    )
    assert caught.value.message.endswith("C26, clicked")
    assert caught.value.remedy == "say which column it is: --column label=NAME"
    with pytest.raises(DataError, match=r"no column hit \(as label\), C7"):
        ParquetSource(find_inputs([tmp_path]).files[0], columns={"label": "hit"})


def test_two_columns_of_one_name_are_refused(tmp_path: Path) -> None:
    columns = _columns(1)
    table = pa.table([*columns.values(), columns["C1"]], names=[*columns, "C1"])
    pq.write_table(table, tmp_path / "rows.parquet")
    with pytest.raises(DataError, match="two columns are named C1"):
        ParquetSource(find_inputs([tmp_path]).files[0])


@pytest.mark.parametrize(
    ("name", "array", "told"),
    [
        ("label", pa.array(["1"]), r"column label: expected a label of an integer, boolean or .*, found string"),
        ("I2", pa.array(["7"]), r"column I2: expected integers, or ready-made features .*, found string"),
        ("I2", pa.array([True]), r"column I2: expected integers, .*, found bool"),
        ("C2", pa.array([1.0]), r"column C2: expected ids \(integers or strings .*\) or lists of them, found double"),
        ("C2", pa.array([[1.0]]), r"column C2: .*, found list<element: double>"),
        ("C2", pa.array([[[1]]]), r"column C2: .*, found list<element: list<element: int64>>"),
        ("C2", pa.array([{"a": 1}]), r"column C2: .*, found struct"),
        ("I2", pa.array([1.5]), r"I2 are floating point, I1 is int32; either all of I1..I13 are integers"),
    ],
)
def test_a_column_of_another_type_is_refused(tmp_path: Path, name: str, array: pa.Array, told: str) -> None:
    file = _store(tmp_path, {**_columns(1), name: array})
    with pytest.raises(DataError, match=rf"rows\.parquet.* {told}") as caught:
        ParquetSource(file)
    assert caught.value.remedy


def test_the_mixture_that_pandas_makes_is_refused_with_the_remedy(tmp_path: Path) -> None:
    import pandas as pd

    columns = _columns(50)
    frame = pd.DataFrame({name: array.to_pandas() for name, array in columns.items()})
    frame["I2"] = range(50)
    frame.to_parquet(tmp_path / "rows.parquet")
    with pytest.raises(DataError, match=r"I1, I3, I4, .* are floating point, I2 is int64") as caught:
        ParquetSource(find_inputs([tmp_path]).files[0])
    assert "Int64" in str(caught.value.remedy)


def test_real_rows_through_polars_are_those_of_the_slow_parser(tmp_path: Path, shared_data: Path) -> None:
    polars = pytest.importorskip("polars")
    source = shared_data / "terabyte/day_0_head_10000.tsv"
    types = [polars.Int8, *[polars.Int64] * 13, *[polars.String] * 26]
    frame = polars.read_csv(source, separator="\t", has_header=False, schema=dict(zip(RAW_COLUMNS, types, strict=True)))
    frame.write_parquet(tmp_path / "rows.parquet")
    rows = _rows(_blocks(find_inputs([tmp_path]).files[0]))
    good, bad = slow_parse(source.read_bytes())
    assert not bad
    assert rows == [[row.label, *row.integers, *row.categories] for _, row in good]


def test_every_bad_value_is_a_bad_row_with_file_row_column_expected_and_found(tmp_path: Path) -> None:
    columns = _columns(9000)
    good = _expected(columns)

    def put(name: str, row: int, value: Any, kind: pa.DataType | None = None) -> None:
        values = columns[name].to_pylist()
        values[row] = value
        columns[name] = pa.array(values, kind or columns[name].type)

    columns["C3"] = pa.array([None if x is None else f"{x:08x}" for x in columns["C3"].to_pylist()])
    columns["C4"] = pa.array([None if x is None else [x, x] for x in columns["C4"].to_pylist()], pa.list_(pa.int64()))
    columns["C5"] = pa.array([["0000000a"]] * 9000)
    for row in good:
        row[17] = None if row[17] is None else [row[17]] * 2
        row[18] = [10]
    put("label", 0, 2)
    put("label", 1, None)
    put("I3", 2, 2**31, pa.int64())
    put("I3", 3, -(2**31) - 1)
    put("I3", 4, -(2**31))
    good[4][3] = -(2**31)
    put("C1", 5, -1, pa.int64())
    put("C1", 6, 2**32)
    put("C3", 7, "-1f")
    put("C3", 8, "0000000g")
    put("C3", 9, "000000001")
    put("C4", 10, [1, None, 3])
    put("C4", 11, [2**33, 1])
    put("C5", 8999, ["0000000a", "a", "0000000b"])
    blocks = _blocks(_store(tmp_path, columns))
    bad = [bad for block in blocks for bad in block.bad_rows]
    where = f"{tmp_path}/rows.parquet, row"
    integer = "an integer that fits 32 bits (-2147483648 to 2147483647) or null"
    listed = "in every place of the list"
    assert [str(row) for row in bad] == [
        f"{where} 1, column label: expected 0 or 1, found 2",
        f"{where} 2, column label: expected 0 or 1, found null",
        f"{where} 3, column I3: expected {integer}, found 2147483648",
        f"{where} 4, column I3: expected {integer}, found -2147483649",
        f"{where} 6, column C1: expected an id from 0 to 4294967295 or null, found -1",
        f"{where} 7, column C1: expected an id from 0 to 4294967295 or null, found 4294967296",
        f"{where} 8, column C3: expected 8 hexadecimal digits or null, found -1f",
        f"{where} 9, column C3: expected 8 hexadecimal digits or null, found 0000000g",
        f"{where} 10, column C3: expected 8 hexadecimal digits or null, found 000000001",
        f"{where} 11, column C4: expected an id from 0 to 4294967295 {listed}, found 1,null,3",
        f"{where} 12, column C4: expected an id from 0 to 4294967295 {listed}, found 8589934592,1",
        f"{where} 9,000, column C5: expected 8 hexadecimal digits {listed}, found 0000000a,a,0000000b",
    ]
    kept = [i for i in range(9000) if i + 1 not in {row.line for row in bad}]
    assert _rows(blocks) == [good[i] for i in kept]
    assert len(bad[0].row.decode().split("\t")) == 40
    # Of the first ten rows the fifth alone is good.
    assert blocks[0].training_rows(10) == 1


def test_a_feature_that_is_absent_or_infinite_is_a_bad_row(tmp_path: Path) -> None:
    columns = _columns(6)
    columns.update({name: pa.array([0.5] * 6) for name in INTEGER_COLUMNS})
    columns["I7"] = pa.array([0.5, None, float("nan"), float("-inf"), 1e39, -0.5])
    bad = _bad(tmp_path, columns)
    assert [text.split("column ")[1] for text in bad] == [
        f"I7: expected a finite number, found {found}" for found in ("null", "nan", "-inf", "1e+39")
    ]


def test_a_bad_value_of_a_mapped_column_names_both(tmp_path: Path) -> None:
    columns = _columns(2)
    columns["click"] = pa.array([0, 7])
    del columns["label"]
    (bad,) = _bad(tmp_path, columns, columns={"label": "click"})
    assert bad.endswith("row 2, column click (as label): expected 0 or 1, found 7")


def _given(rows: int) -> Columns:
    columns = _columns(rows)
    columns.update({name: pa.array(range(rows), pa.int64()) for name in CATEGORY_COLUMNS})
    columns["C2"] = pa.array([[1, 2]] * rows)
    return columns


def test_given_ids_must_be_rows_of_tables(tmp_path: Path) -> None:
    assert _block(_store(tmp_path, _given(3)), ids="given").categories[0].tolist() == [0, 1, 2]
    for name, value, row in (("C1", -1, 2), ("C1", 2**31 - 1, 2), ("C2", 2**31, 1)):
        columns = _given(3)
        columns["C1"] = pa.array([None, value if name == "C1" else 1, 2], pa.int64())
        columns["C2"] = pa.array([[1, value if name == "C2" else 1], [1], []], pa.list_(pa.int64()))
        with pytest.raises(DataError, match=rf"rows\.parquet, row {row}, column {name}: expected the row of a table"):
            _blocks(_store(tmp_path, columns), ids="given")


def test_given_ids_have_no_missing_ones_but_may_have_empty_bags(tmp_path: Path) -> None:
    columns = _given(3)
    columns["C1"] = pa.array([1, None, 3])
    columns["C2"] = pa.array([[], [1], None], pa.list_(pa.int64()))
    block = _block(_store(tmp_path, columns), ids="given")
    (bad,) = block.bad_rows
    assert str(bad).endswith("row 2, column C1: expected the row of a table, 0 to 2147483646, found null")
    assert block.bags[1].offsets.tolist() == [0, 0, 0]
    columns["C1"] = pa.array(["0000000a"] * 3)
    with pytest.raises(DataError, match=r"column C1: expected rows of a table \(--vocabulary given\), found string"):
        ParquetSource(_store(tmp_path, columns), ids="given")


def test_no_parquet_and_a_cut_or_changed_file_are_refused(tmp_path: Path) -> None:
    file = _store(tmp_path, _columns(3000), write_page_checksum=True, use_dictionary=False, compression="none")
    whole = file.path.read_bytes()
    for content in (b"", b"label\tI1", whole[: len(whole) // 2], whole[:-1], whole[:-1] + b"2"):
        file.path.write_bytes(content)
        with pytest.raises(DataError, match=r"rows\.parquet: no readable Parquet file \(.+\)"):
            ParquetSource(find_inputs([file.path]).files[0])
    flipped = bytearray(whole)
    flipped[len(whole) // 2] ^= 1
    file.path.write_bytes(flipped)
    with pytest.raises(DataError, match=r"rows\.parquet: cut off or damaged after row 0 \(.+\)"):
        _blocks(find_inputs([file.path]).files[0])


def test_long_lists_are_read_in_smaller_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parquet_source, "_PIECE_IDS_MAX", 20_000)
    columns = _columns(100)
    columns["C4"] = pa.array([list(range(1000))] * 100)
    blocks = _blocks(_store(tmp_path, columns))
    assert max(block.rows for block in blocks) == 20_000 // 1039
    assert sum(block.rows for block in blocks) == 100
    assert all(block.bags[3].values.tolist() == list(range(1000)) * block.rows for block in blocks)


def test_memory_does_not_grow_with_a_row_group(tmp_path: Path) -> None:
    rows, random = 400_000, np.random.default_rng(0)
    columns: Columns = {"label": pa.array(np.zeros(rows, np.int8))}
    for name in (*INTEGER_COLUMNS, *CATEGORY_COLUMNS):
        columns[name] = pa.array(random.integers(0, 2**31, rows, np.int32))
    file = _store(tmp_path, columns, row_group_size=rows, compression="none", use_dictionary=False)
    del columns
    assert file.size_bytes > 60_000_000
    before, most = pa.total_allocated_bytes(), 0
    with ParquetSource(file) as source:
        for piece in source.pieces():
            most = max(most, pa.total_allocated_bytes() - before)
            source.parse(piece)
    # 39 columns: a buffer of 256 KiB and a page each, and one batch.
    assert most < 32_000_000
