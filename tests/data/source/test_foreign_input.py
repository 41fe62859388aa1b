"""Datasets made of .npy trios, multi-hot .npz and Parquet files, end to end, against the arrays they were made of."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from dlrm_scale.data.dataset.dataset import Dataset
from dlrm_scale.data.export.export import export_dataset
from dlrm_scale.data.preprocess.options import PreprocessOptions
from dlrm_scale.data.preprocess.preprocess import preprocess
from dlrm_scale.errors import ConfigError, DataError
from dlrm_scale.schema import CATEGORY_COLUMNS, INTEGER_COLUMNS, RAW_COLUMNS
from tests.support.datasets import make_dataset
from tests.support.raw_rows import Row, make_row, make_rows, slow_parse, write_rows

POOLINGS = {0: 3, 4: 6, 20: 40}


def _run(paths: Path | Sequence[Path], out: Path, **options: Any) -> Dataset:
    preprocess([paths] if isinstance(paths, Path) else paths, out, PreprocessOptions(**options))
    return Dataset.open(out)


def _read(dataset: Dataset) -> tuple[np.ndarray, np.ndarray, np.ndarray, dict[str, list[list[int]]]]:
    blocks = [
        dataset.read(part, batch)
        for part, about in enumerate(dataset.manifest.parts)
        for batch in range(-(-about.rows // 8192))
    ]
    bags: dict[str, list[list[int]]] = {name: [] for name in dataset.multi_hot}
    for block in blocks:
        for name, bag in block.bags.items():
            bags[name].extend(list(map(int, part)) for part in np.split(bag.values, bag.offsets[1:-1]))
    return (
        np.concatenate([block.labels for block in blocks]),
        np.concatenate([block.dense for block in blocks], axis=1),
        np.concatenate([block.ids for block in blocks], axis=1),
        bags,
    )


def _trio(folder: Path, day: int, rows: int, *, several: bool = False) -> dict[str, Any]:
    """Write three files; return their arrays, the ids as 26 arrays [rows, pooling]."""
    folder.mkdir(exist_ok=True)
    random = np.random.default_rng(day)
    dense = random.normal(size=(rows, 13)).astype(np.float32)
    labels = random.integers(0, 2, (rows, 1)).astype(np.int32)
    ids = [
        random.integers(0, 100 + k, (rows, POOLINGS.get(k, 1) if several else 1)).astype(np.int32) for k in range(26)
    ]
    np.save(folder / f"day_{day}_dense.npy", dense)
    np.save(folder / f"day_{day}_labels.npy", labels)
    if several:
        np.savez(folder / f"day_{day}_sparse_multi_hot.npz", **{str(k): column for k, column in enumerate(ids)})
    else:
        np.save(folder / f"day_{day}_sparse.npy", np.hstack(ids))
    return {"dense": dense, "labels": labels, "ids": ids}


@pytest.mark.parametrize("several", [False, True], ids=["one-hot", "multi-hot"])
def test_trios_become_a_dataset_of_their_arrays(tmp_path: Path, several: bool) -> None:
    days = [_trio(tmp_path / "in", day, rows, several=several) for day, rows in ((2, 9000), (10, 100), (11, 50))]
    dataset = _run(tmp_path / "in", tmp_path / "out", jobs=2)
    labels, dense, ids, bags = _read(dataset)
    assert np.array_equal(labels, np.concatenate([day["labels"][:, 0] for day in days]))
    assert np.array_equal(dense, np.concatenate([day["dense"] for day in days]).T)
    for k, name in enumerate(CATEGORY_COLUMNS):
        given = np.concatenate([day["ids"][k] for day in days])
        if given.shape[1] == 1:
            assert np.array_equal(ids[k], given[:, 0])
        else:
            assert bags[name] == given.tolist()
        # The ids are rows of the tables, which have room for the largest.
        assert dataset.table_rows[name] > given.max()
    assert dataset.multi_hot == (("C1", "C5", "C21") if several else ())
    assert [part.rows for part in dataset.manifest.parts] == [9000, 100, 50]
    assert [dataset.split_rows(split) for split in ("train", "validation", "test")] == [9100, 50, 0]
    assert {column.method for column in dataset.manifest.columns} == {"given"}
    dataset.verify()


def _parquet(path: Path, rows: Sequence[Row], *, hexadecimal: bool = False) -> Path:
    columns: dict[str, Any] = {"label": pa.array([row.label for row in rows], pa.int8())}
    for k, name in enumerate(INTEGER_COLUMNS):
        columns[name] = pa.array([row.integers[k] for row in rows], pa.int32())
    for k, name in enumerate(CATEGORY_COLUMNS):
        ids = [row.categories[k] for row in rows]
        if hexadecimal:
            columns[name] = pa.array([None if id is None else f"{id:08x}" for id in ids]).dictionary_encode()
        else:
            columns[name] = pa.array(ids, pa.uint32())
    pq.write_table(pa.table(columns), path, row_group_size=1000)
    return path


def _slow_rows(lines: list[bytes]) -> list[Row]:
    return [row for _, row in slow_parse(b"\n".join(lines))[0]]


def _same(a: Dataset, b: Dataset) -> None:
    for one, other in zip(_read(a)[:3], _read(b)[:3], strict=True):
        assert np.array_equal(one, other)
    assert a.table_rows == b.table_rows
    assert a.manifest.split == b.manifest.split


@pytest.mark.parametrize("hexadecimal", [False, True])
@pytest.mark.parametrize(
    "options",
    [{}, {"vocabulary": "hash", "max_rows_per_table": 30}, {"vocabulary": "modulo", "max_rows_per_table": 30}],
)
def test_parquet_becomes_the_same_dataset_as_the_text_it_holds(
    tmp_path: Path, hexadecimal: bool, options: dict[str, Any]
) -> None:
    lines = make_rows(2500)
    text = _run(write_rows(tmp_path / "rows.txt", lines), tmp_path / "text", **options)
    parquet = _run(
        _parquet(tmp_path / "rows.parquet", _slow_rows(lines), hexadecimal=hexadecimal), tmp_path / "parquet", **options
    )
    _same(text, parquet)


def test_real_rows_as_parquet_become_the_same_dataset(tmp_path: Path, shared_data: Path) -> None:
    source = shared_data / "kaggle/kaggle_union.tsv"
    lines = source.read_bytes().splitlines()
    parquet = _parquet(tmp_path / "rows.parquet", _slow_rows(lines))
    _same(_run(source, tmp_path / "text"), _run(parquet, tmp_path / "parquet"))


def test_raw_ids_of_a_trio_get_the_rows_that_those_of_text_get(tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    pool = random.integers(0, 2**32, (26, 40), np.uint32)
    ids = np.stack([random.choice(column, 500) for column in pool], axis=1)
    lines = [make_row(1, [1] * 13, row) for row in ids.tolist()]
    text = _run(write_rows(tmp_path / "rows.txt", lines), tmp_path / "text")
    folder = tmp_path / "in"
    folder.mkdir()
    np.save(folder / "day_0_dense.npy", np.zeros((500, 13), np.float32))
    np.save(folder / "day_0_labels.npy", np.ones(500, np.int32))
    # As torchrec's older scripts stored them: ids from 2^31 on are negative.
    np.save(folder / "day_0_sparse.npy", ids.view(np.int32))
    with pytest.raises(DataError, match=r"day_0_sparse\.npy, row [\d,]+, column C\d+: expected the row of a table"):
        _run(folder, tmp_path / "given")
    trio = _run(folder, tmp_path / "trio", vocabulary="frequency")
    assert np.array_equal(_read(trio)[2], _read(text)[2])
    assert trio.table_rows == text.table_rows


def test_lists_in_parquet_become_bags(tmp_path: Path) -> None:
    rows = _slow_rows(make_rows(300))
    path = _parquet(tmp_path / "rows.parquet", rows)
    lists = [[5, 6, 5], [7], [], None, [5, 9]] * 60
    table = pq.read_table(path)
    table = table.set_column(table.schema.names.index("C2"), "C2", pa.array(lists, pa.list_(pa.uint32())))
    pq.write_table(table, path)
    dataset = _run(path, tmp_path / "out", validation="none", threshold=100)
    bags = _read(dataset)[3]["C2"]
    # Of 5, 6, 7 and 9 only 5 is seen 100 times. A field without ids is the row of missing ones.
    assert bags == [[2, 1, 2], [1], [0], [0], [2, 1]] * 60
    assert dataset.multi_hot == ("C2",)
    assert dataset.table_rows["C2"] == 3


@pytest.mark.parametrize("to", ["parquet", "npy"])
def test_an_exported_dataset_is_read_back(tmp_path: Path, to: Any) -> None:
    dataset = make_dataset(tmp_path / "in", [9000, 20], 50, multi_hot={"C2": 4} if to == "parquet" else None)
    export_dataset(dataset, tmp_path / "exported", to=to)
    again = _run(tmp_path / "exported", tmp_path / "out", vocabulary="given", max_rows_per_table=50)
    for one, other in zip(_read(dataset)[:3], _read(again)[:3], strict=True):
        assert np.array_equal(one, other)
    # Bags may be empty where ids are given.
    assert _read(dataset)[3] == _read(again)[3]
    assert again.table_rows == dataset.table_rows


def test_columns_of_parquet_are_mapped(tmp_path: Path) -> None:
    path = _parquet(tmp_path / "rows.parquet", _slow_rows(make_rows(200)))
    plain = _run(path, tmp_path / "plain")
    names = {"label": "click", "I1": "age", "C26": "C0"}
    table = pq.read_table(path)
    pq.write_table(table.rename_columns([names.get(name, name) for name in RAW_COLUMNS]), tmp_path / "theirs.parquet")
    with pytest.raises(DataError, match="no column label, I1, C26"):
        _run(tmp_path / "theirs.parquet", tmp_path / "out")
    _same(plain, _run(tmp_path / "theirs.parquet", tmp_path / "out", columns=names))


def test_bad_rows_of_parquet_and_trios_are_put_aside(tmp_path: Path) -> None:
    path = _parquet(tmp_path / "rows.parquet", _slow_rows(make_rows(100)))
    table = pq.read_table(path)
    labels = table["label"].to_pylist()
    labels[70] = 3
    pq.write_table(table.set_column(0, "label", pa.array(labels)), path)
    with pytest.raises(DataError, match=r"rows\.parquet, .* 71, column label: expected 0 or 1, found 3"):
        _run(path, tmp_path / "out")
    assert sum(part.rows for part in _run(path, tmp_path / "out", max_bad_rows=1).manifest.parts) == 99
    rejected = (tmp_path / "out/rejected.tsv").read_text().splitlines()
    assert [line.split("\t")[:5] for line in rejected[1:]] == [["rows.parquet", "71", "label", "0 or 1", "3"]]
    arrays = _trio(tmp_path / "in", 0, 50)
    arrays["dense"][7, 3] = np.nan
    np.save(tmp_path / "in/day_0_dense.npy", arrays["dense"])
    with pytest.raises(DataError, match=r"day_0_dense\.npy, .* 8, column I4: expected a finite number, found nan"):
        _run(tmp_path / "in", tmp_path / "trio")
    dataset = _run(tmp_path / "in", tmp_path / "trio", max_bad_rows=1)
    assert np.array_equal(_read(dataset)[1], np.delete(arrays["dense"], 7, 0).T)


def test_files_that_do_not_agree_are_refused_before_anything_is_written(tmp_path: Path) -> None:
    for day in range(3):
        _trio(tmp_path / "in", day, 10, several=day == 1)
    with pytest.raises(DataError, match=r"day_1_dense\.npy has several ids a row in C1, C5, C21, unlike .*day_0"):
        _run(tmp_path / "in", tmp_path / "out")
    assert not (tmp_path / "out/dataset.json").exists()


def test_options_of_another_format_are_refused(tmp_path: Path) -> None:
    _trio(tmp_path / "in", 0, 10)
    with pytest.raises(ConfigError, match="--column"):
        _run(tmp_path / "in", tmp_path / "out", columns={"label": "click"})


def test_a_cut_file_leaves_no_dataset(tmp_path: Path) -> None:
    _trio(tmp_path / "in", 0, 10)
    _trio(tmp_path / "in", 1, 10)
    path = tmp_path / "in/day_1_sparse.npy"
    path.write_bytes(path.read_bytes()[:-4])
    with pytest.raises(DataError, match=r"day_1_sparse\.npy: is cut off"):
        _run(tmp_path / "in", tmp_path / "out")
    assert not (tmp_path / "out/dataset.json").exists()
