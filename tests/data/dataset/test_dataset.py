"""Datasets on disk."""

import json
import os
from dataclasses import replace
from pathlib import Path

import numpy as np
import pyarrow as pa
import pytest

from dlrm_scale.data.dataset.dataset import (
    MANIFEST_FILE,
    ROWS_PER_RECORD_BATCH,
    Dataset,
    PartWriter,
    RowRange,
    write_manifest,
)
from dlrm_scale.data.source.raw_block import Bags
from dlrm_scale.errors import DatasetError
from dlrm_scale.schema import RAW_COLUMNS
from tests.support.datasets import bags_of, make_dataset, row_numbers


def _rows(n: int, seed: int = 0) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    random = np.random.default_rng(seed)
    return (
        random.integers(0, 2, n, np.uint8),
        random.standard_normal((13, n), np.float32),
        random.integers(0, 50, (26, n), np.int32),
    )


def test_rows_are_read_as_they_were_written(tmp_path: Path) -> None:
    labels, dense, ids = _rows(20_000)
    dataset = make_dataset(tmp_path, 20_000)
    with PartWriter(tmp_path / "part-00000.arrow", source="day_0") as writer:
        writer.write(labels, dense, ids)
        part = writer.close()
    write_manifest(tmp_path, replace(dataset.manifest, parts=(part,)))
    dataset = Dataset.open(tmp_path)
    read = [dataset.read(0, b) for b in range(3)]
    assert [len(r[0]) for r in read] == [8192, 8192, 3616]
    assert np.array_equal(np.concatenate([r[0] for r in read]), labels)
    assert np.array_equal(np.concatenate([r[1] for r in read], axis=1), dense)
    assert np.array_equal(np.concatenate([r[2] for r in read], axis=1), ids)


def test_files_open_in_pyarrow_with_named_columns(tmp_path: Path) -> None:
    make_dataset(tmp_path, [100, 30])
    table = pa.ipc.open_file(tmp_path / "part-00001.arrow").read_all()
    assert table.column_names == list(RAW_COLUMNS)
    assert {str(field.type) for field in table.schema} == {"uint8", "float", "int32"}
    assert row_numbers(table.select(["I1"]).to_pandas().to_numpy()).tolist() == list(range(100, 130))


@pytest.mark.parametrize("block_rows", [1_000, 8192, 20_000])
def test_a_parts_bytes_do_not_depend_on_the_blocks_that_were_written(tmp_path: Path, block_rows: int) -> None:
    labels, dense, ids = _rows(20_000)
    parts = []
    for name, size in (("whole.arrow", 20_000), ("blocks.arrow", block_rows)):
        with PartWriter(tmp_path / name) as writer:
            for a in range(0, 20_000, size):
                z = a + size
                writer.write(labels[a:z], dense[:, a:z], ids[:, a:z])
            parts.append(writer.close())
    assert parts[0].xxh3_128 == parts[1].xxh3_128
    assert (tmp_path / "whole.arrow").read_bytes() == (tmp_path / "blocks.arrow").read_bytes()
    assert parts[0].size_bytes == (tmp_path / "whole.arrow").stat().st_size


def test_a_part_without_close_leaves_nothing(tmp_path: Path) -> None:
    with PartWriter(tmp_path / "part-00000.arrow") as writer:
        writer.write(*_rows(10_000))
        assert len(list(tmp_path.iterdir())) == 1
    assert list(tmp_path.iterdir()) == []


def test_a_part_appears_under_its_name_only_when_closed(tmp_path: Path) -> None:
    path = tmp_path / "part-00000.arrow"
    with PartWriter(path) as writer:
        writer.write(*_rows(10_000))
        assert not path.exists()
        writer.close()
    assert [p.name for p in tmp_path.iterdir()] == [path.name]


def test_a_full_disk_is_an_error_that_names_the_part(tmp_path: Path) -> None:
    if not os.path.exists("/dev/full"):
        pytest.skip("no /dev/full")
    (tmp_path / "part-00000.arrow.tmp").symlink_to("/dev/full")
    with pytest.raises(DatasetError, match=r"part-00000\.arrow can't be written.*No space"):
        _write_part(tmp_path / "part-00000.arrow")
    assert list(tmp_path.iterdir()) == []


def _write_part(path: Path) -> None:
    with PartWriter(path) as writer:
        writer.write(*_rows(10_000))
        writer.close()


def test_a_dataset_knows_its_rows_tables_and_splits(tmp_path: Path) -> None:
    dataset = make_dataset(
        tmp_path, [100, 0, 37], [10 + c for c in range(26)], split={"train": [(0, 50), (60, 100)], "test": [(100, 137)]}
    )
    assert dataset.rows == 137
    assert (dataset.split_rows("train"), dataset.split_rows("validation"), dataset.split_rows("test")) == (90, 0, 37)
    assert dataset.table_rows["C1"] == 10
    assert dataset.table_rows["C26"] == 35
    with pytest.raises(DatasetError, match="no split 'eval'"):
        dataset.split_rows("eval")


def test_a_folder_without_manifest_is_not_a_dataset(tmp_path: Path) -> None:
    with pytest.raises(DatasetError, match="no such folder"):
        Dataset.open(tmp_path / "absent")
    make_dataset(tmp_path, 10)
    (tmp_path / MANIFEST_FILE).unlink()
    with pytest.raises(DatasetError, match=r"not a finished dataset.*\n.*preprocess"):
        Dataset.open(tmp_path)


def test_a_newer_schema_is_refused(tmp_path: Path) -> None:
    make_dataset(tmp_path, 10)
    file = tmp_path / MANIFEST_FILE
    file.write_text(file.read_text().replace('"schema_version": 2', '"schema_version": 3'))
    with pytest.raises(DatasetError, match=r"schema version 3.*\n.*newer dlrm-scale"):
        Dataset.open(tmp_path)


def test_an_older_schema_is_refused_and_says_how_to_replace_it(tmp_path: Path) -> None:
    make_dataset(tmp_path, 10)
    file = tmp_path / MANIFEST_FILE
    file.write_text(file.read_text().replace('"schema_version": 2', '"schema_version": 1'))
    with pytest.raises(DatasetError, match=r"schema version 1.*reads version 2\n.*preprocess --force"):
        Dataset.open(tmp_path)


@pytest.mark.parametrize(
    "text", ["", "[]", "{}", '{"schema_version": 2}', '{"schema_version": 2, "parts": 3, "columns": [], "split": {}}']
)
def test_a_damaged_manifest_is_an_error_that_names_it(tmp_path: Path, text: str) -> None:
    make_dataset(tmp_path, 10)
    (tmp_path / MANIFEST_FILE).write_text(text)
    with pytest.raises(DatasetError, match=MANIFEST_FILE):
        Dataset.open(tmp_path)


def test_an_edited_manifest_is_refused(tmp_path: Path) -> None:
    make_dataset(tmp_path, 10, table_rows=50)
    file = tmp_path / MANIFEST_FILE
    content = json.loads(file.read_text())
    content["columns"][2]["table_rows"] = 60
    file.write_text(json.dumps(content))
    with pytest.raises(DatasetError, match="fingerprint"):
        Dataset.open(tmp_path)


def test_the_fingerprint_covers_rows_tables_transforms_and_split(tmp_path: Path) -> None:
    manifest = make_dataset(tmp_path, 10).manifest
    changed = [
        replace(manifest, parts=(replace(manifest.parts[0], xxh3_128="0" * 32),)),
        replace(manifest, columns=(replace(manifest.columns[0], table_rows=51), *manifest.columns[1:])),
        replace(manifest, columns=(replace(manifest.columns[0], multi_hot=True), *manifest.columns[1:])),
        replace(manifest, transforms={"dense": "other"}),
        replace(manifest, split={**manifest.split, "train": (RowRange(start=0, end=9),)}),
        replace(manifest, statistics={"rows": 10}),
    ]
    fingerprints = {write_manifest(tmp_path, m).fingerprint for m in [manifest, *changed]}
    assert len(fingerprints) == 7
    assert write_manifest(tmp_path, manifest).fingerprint == manifest.fingerprint


def test_rows_in_two_splits_are_refused(tmp_path: Path) -> None:
    manifest = make_dataset(tmp_path, 10).manifest
    split = {**manifest.split, "validation": (RowRange(start=8, end=10),)}
    with pytest.raises(DatasetError, match="rows 8 to 10 are in train and in validation"):
        write_manifest(tmp_path, replace(manifest, split=split))


def test_a_split_beyond_the_rows_is_refused(tmp_path: Path) -> None:
    manifest = make_dataset(tmp_path, 10).manifest
    split = {**manifest.split, "train": (RowRange(start=0, end=11),)}
    with pytest.raises(DatasetError, match="split train has rows 0 to 11, the dataset has 10"):
        write_manifest(tmp_path, replace(manifest, split=split))


def test_a_missing_part_is_named(tmp_path: Path) -> None:
    make_dataset(tmp_path, [10, 10])
    (tmp_path / "part-00001.arrow").unlink()
    with pytest.raises(DatasetError, match=r"part-00001\.arrow can't be opened"):
        Dataset.open(tmp_path)


def test_a_truncated_part_is_named_when_the_dataset_is_opened(tmp_path: Path) -> None:
    make_dataset(tmp_path, [10, 10])
    part = tmp_path / "part-00001.arrow"
    os.truncate(part, part.stat().st_size - 1)
    with pytest.raises(DatasetError, match=r"part-00001\.arrow has .* bytes, dataset\.json says"):
        Dataset.open(tmp_path)


def test_a_part_truncated_while_in_use_is_an_error_not_a_crash(tmp_path: Path) -> None:
    dataset = make_dataset(tmp_path, 3 * ROWS_PER_RECORD_BATCH)
    dataset.read(0, 0)
    os.truncate(tmp_path / "part-00000.arrow", 10_000)
    with pytest.raises(DatasetError, match=r"part-00000\.arrow was changed or replaced"):
        dataset.read(0, 2)


def test_a_part_replaced_while_in_use_is_an_error(tmp_path: Path) -> None:
    dataset = make_dataset(tmp_path / "a", 100)
    make_dataset(tmp_path / "b", 100, seed=1)
    os.replace(tmp_path / "b/part-00000.arrow", tmp_path / "a/part-00000.arrow")
    with pytest.raises(DatasetError, match=r"part-00000\.arrow was changed or replaced"):
        dataset.read(0, 0)


def test_a_part_of_the_right_size_without_arrow_data_is_named(tmp_path: Path) -> None:
    make_dataset(tmp_path, 100)
    part = tmp_path / "part-00000.arrow"
    part.write_bytes(bytes(part.stat().st_size))
    with pytest.raises(DatasetError, match=r"part-00000\.arrow"):
        Dataset.open(tmp_path).read(0, 0)


def test_verify_names_the_part_with_a_flipped_bit(tmp_path: Path) -> None:
    make_dataset(tmp_path, [1000, 1000]).verify()
    part = tmp_path / "part-00001.arrow"
    content = bytearray(part.read_bytes())
    content[len(content) // 2] ^= 1
    part.write_bytes(content)
    with pytest.raises(DatasetError, match=r"wrong checksum: [^,]*part-00001\.arrow"):
        Dataset.open(tmp_path).verify()


@pytest.mark.parametrize("wrong_id", [50, -1])
def test_ids_beyond_their_table_are_refused_with_column_and_row(tmp_path: Path, wrong_id: int) -> None:
    dataset = make_dataset(tmp_path, 100, table_rows=50)
    labels, dense, ids = _rows(100)
    ids[6, 42] = wrong_id
    with PartWriter(tmp_path / "part-00000.arrow") as writer:
        writer.write(labels, dense, ids)
        part = writer.close()
    write_manifest(tmp_path, replace(dataset.manifest, parts=(part,)))
    with pytest.raises(DatasetError, match=f"row 42: column C7 has id {wrong_id}, its table has 50 rows"):
        Dataset.open(tmp_path).read(0, 0)


def _bags(n: int, longest: int = 4, seed: int = 0) -> Bags:
    random = np.random.default_rng(seed)
    offsets = np.concatenate([[0], np.cumsum(random.integers(0, longest + 1, n))]).astype(np.int32)
    return Bags(values=random.integers(0, 50, offsets[-1], np.int32), offsets=offsets)


def _multi_hot_dataset(path: Path, n: int, bags: dict[str, Bags]) -> Dataset:
    """Rows of `_rows` with bags in some columns."""
    manifest = make_dataset(path, 10).manifest
    with PartWriter(path / "part-00000.arrow", multi_hot=bags) as writer:
        writer.write(*_rows(n), bags)
        part = writer.close()
    columns = tuple(replace(column, multi_hot=column.name in bags) for column in manifest.columns)
    split = {**manifest.split, "train": (RowRange(start=0, end=n),)}
    write_manifest(path, replace(manifest, parts=(part,), columns=columns, split=split))
    return Dataset.open(path)


def test_bags_are_read_as_they_were_written(tmp_path: Path) -> None:
    bags = {"C3": _bags(20_000), "C26": _bags(20_000, longest=1, seed=1), "C1": _bags(20_000, longest=0)}
    dataset = _multi_hot_dataset(tmp_path, 20_000, bags)
    assert dataset.multi_hot == ("C1", "C3", "C26")
    read = [dataset.read(0, b) for b in range(3)]
    for name, expected in bags.items():
        assert [bag for r in read for bag in bags_of(r.bags[name])] == bags_of(expected)
        assert all(r.bags[name].values.dtype == r.bags[name].offsets.dtype == np.int32 for r in read)
    labels, dense, ids = _rows(20_000)
    ids[[0, 2, 25]] = 0
    assert np.array_equal(np.concatenate([r.labels for r in read]), labels)
    assert np.array_equal(np.concatenate([r.dense for r in read], axis=1), dense)
    assert np.array_equal(np.concatenate([r.ids for r in read], axis=1), ids)
    types = {field.name: str(field.type) for field in pa.ipc.open_file(tmp_path / "part-00000.arrow").schema}
    assert types["C2"] == "int32"
    assert types["C3"].startswith("list<item: int32")


@pytest.mark.parametrize("block_rows", [1_000, 8192, 20_000])
def test_a_multi_hot_parts_bytes_do_not_depend_on_the_blocks(tmp_path: Path, block_rows: int) -> None:
    labels, dense, ids = _rows(20_000)
    bags = _bags(20_000)
    parts = []
    for name, size in (("whole.arrow", 20_000), ("blocks.arrow", block_rows)):
        with PartWriter(tmp_path / name, multi_hot=["C5"]) as writer:
            for a in range(0, 20_000, size):
                offsets = bags.offsets[a : a + size + 1]
                values = bags.values[offsets[0] : offsets[-1]].copy()
                block = Bags(values=values, offsets=offsets - offsets[0])
                z = a + size
                writer.write(labels[a:z], dense[:, a:z], ids[:, a:z], {"C5": block})
                values[:] = -1  # The caller's arrays may be used again.
            parts.append(writer.close())
    assert parts[0].xxh3_128 == parts[1].xxh3_128


@pytest.mark.parametrize("wrong_id", [50, -1])
def test_ids_of_bags_beyond_their_table_are_refused_with_column_and_row(tmp_path: Path, wrong_id: int) -> None:
    bags = _bags(9_000)
    row = next(row for row in range(8_200, 9_000) if np.diff(bags.offsets)[row] > 1)
    bags.values[bags.offsets[row + 1] - 1] = wrong_id
    dataset = _multi_hot_dataset(tmp_path, 9_000, {"C7": bags})
    dataset.read(0, 0)
    with pytest.raises(DatasetError, match=f"batch 1, row {row - 8192}: column C7 has id {wrong_id}, its table has 50"):
        dataset.read(0, 1)


def test_lists_where_the_manifest_says_one_id_are_refused(tmp_path: Path) -> None:
    dataset = _multi_hot_dataset(tmp_path, 100, {"C7": _bags(100)})
    columns = tuple(replace(column, multi_hot=column.name == "C8") for column in dataset.manifest.columns)
    write_manifest(tmp_path, replace(dataset.manifest, columns=columns))
    with pytest.raises(DatasetError, match=r"must hold .*list<int32> for C8.*found .*C7 list"):
        Dataset.open(tmp_path).read(0, 0)


def test_damaged_offsets_of_bags_are_refused_before_anything_follows_them(tmp_path: Path) -> None:
    bags = _bags(100)
    _multi_hot_dataset(tmp_path, 100, {"C7": bags})
    part = tmp_path / "part-00000.arrow"
    content = part.read_bytes()
    position = content.index(bags.offsets.tobytes())
    for at, value in ((40, -5), (40, 1 << 30), (0, 3), (100, 1 << 20)):
        offsets = bags.offsets.copy()
        offsets[at] = value
        part.write_bytes(content[:position] + offsets.tobytes() + content[position + offsets.nbytes :])
        with pytest.raises(DatasetError, match=r"part-00000\.arrow, record batch 0"):
            Dataset.open(tmp_path).read(0, 0)
