"""Exported files hold the dataset's rows value for value, in the form that other programs read."""

import json
import os
import subprocess
import sys
import threading
import zipfile
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow.dataset as ds
import pyarrow.parquet as pq
import pytest

from dlrm_scale.data.dataset.dataset import ColumnInfo, Dataset, DatasetManifest, PartWriter, RowRange, write_manifest
from dlrm_scale.data.export import export, export_npy, export_parquet
from dlrm_scale.data.export.export import export_dataset
from dlrm_scale.data.source.raw_block import Bags
from dlrm_scale.errors import ConfigError, DatasetError
from dlrm_scale.schema import CATEGORY_COLUMNS, INTEGER_COLUMNS, LABEL_COLUMN
from tests.support.datasets import make_dataset

ROWS = (20_000, 0, 9_000)
SPLIT = {"train": [(0, 19_000), (19_500, 22_000)], "validation": [(22_000, 29_000)]}


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    return make_dataset(tmp_path_factory.mktemp("export") / "dataset", ROWS, split=SPLIT)


@pytest.fixture(scope="module")
def bags(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    path = tmp_path_factory.mktemp("export") / "bags"
    return make_dataset(path, (9_000, 3_000), split={"train": [(0, 10_000)]}, multi_hot={"C1": 4, "C21": 9})


def _fixed_bags(path: Path, rows: int = 9_000, parts: int = 2) -> Dataset:
    """Two multi-hot columns of 3 and 5 ids a row."""
    path.mkdir()
    random = np.random.Generator(np.random.Philox(1))
    sizes = {"C2": 3, "C26": 5}
    written = []
    for index in range(parts):
        given = {
            name: Bags(
                values=random.integers(0, 50, rows * size).astype(np.int32),
                offsets=np.arange(0, rows * size + 1, size, dtype=np.int32),
            )
            for name, size in sizes.items()
        }
        with PartWriter(path / f"part-{index:05d}.arrow", source=f"day_{index}", multi_hot=sizes) as writer:
            writer.write(
                random.integers(0, 2, rows).astype(np.uint8),
                random.random((13, rows), np.float32),
                random.integers(0, 50, (26, rows)).astype(np.int32),
                given,
            )
            written.append(writer.close())
    columns = tuple(
        ColumnInfo(name=name, table_rows=50, method="modulo", statistics={}, multi_hot=name in sizes)
        for name in CATEGORY_COLUMNS
    )
    split = {"train": (RowRange(start=0, end=rows * parts),), "validation": (), "test": ()}
    write_manifest(
        path, DatasetManifest(parts=tuple(written), columns=columns, transforms={}, split=split, statistics={})
    )
    return Dataset.open(path)


def _columns(dataset: Dataset, ranges: list[tuple[int, int]] | None = None) -> dict[str, list[Any]]:
    """All columns of a dataset as lists, read one record batch after another."""
    found: dict[str, list[Any]] = {name: [] for name in (LABEL_COLUMN, *INTEGER_COLUMNS, *CATEGORY_COLUMNS)}
    for index, part in enumerate(dataset.manifest.parts):
        for batch in range(-(-part.rows // 8192)):
            rows = dataset.read(index, batch)
            found[LABEL_COLUMN] += rows.labels.tolist()
            for name, values in zip(INTEGER_COLUMNS, rows.dense, strict=True):
                found[name] += values.tolist()
            for name, values in zip(CATEGORY_COLUMNS, rows.ids, strict=True):
                if name in rows.bags:
                    bag = rows.bags[name]
                    found[name] += [x.tolist() for x in np.split(bag.values, bag.offsets[1:-1])]
                else:
                    found[name] += values.tolist()
    if ranges is None:
        return found
    return {name: [x for a, z in ranges for x in values[a:z]] for name, values in found.items()}


def _types(dataset: Dataset) -> dict[str, str]:
    return {
        name: "uint8" if name == LABEL_COLUMN else "float" if name[0] == "I" else
        "list<element: int32 not null>" if name in dataset.multi_hot else "int32"
        for name in (LABEL_COLUMN, *INTEGER_COLUMNS, *CATEGORY_COLUMNS)
    }  # fmt: skip


@pytest.mark.parametrize("name", ["dataset", "bags"])
def test_parquet_holds_the_dataset_value_for_value(name: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    source: Dataset = request.getfixturevalue(name)
    result = export_dataset(source, tmp_path / "out", to="parquet")
    whole = _columns(source)
    assert not result.up_to_date
    # A folder is read as one table: neither the note nor vocabularies get in the way.
    table = pq.read_table(tmp_path / "out")
    assert table.to_pydict() == whole
    assert ds.dataset(tmp_path / "out").to_table().to_pydict() == whole
    start = 0
    for entry in result.content["files"]:
        file = pq.ParquetFile(tmp_path / "out" / entry["file"])
        assert {f.name: str(f.type) for f in file.schema_arrow} == _types(source)
        assert not any(f.nullable for f in file.schema_arrow)
        assert file.metadata.row_group(0).column(0).compression == "ZSTD"
        part = file.read().to_pydict()
        assert part == {column: values[start : start + entry["rows"]] for column, values in whole.items()}
        start += entry["rows"]
    assert start == source.rows


def test_pandas_reads_the_parquet_folder(bags: Dataset, tmp_path: Path) -> None:
    export_dataset(bags, tmp_path / "out", to="parquet")
    frame = pd.read_parquet(tmp_path / "out")
    whole = _columns(bags)
    assert list(frame.columns) == list(whole)
    assert (frame["label"].dtype, frame["I13"].dtype, frame["C2"].dtype) == (np.uint8, np.float32, np.int32)
    for name, values in whole.items():
        found = [x.tolist() for x in frame[name]] if name in bags.multi_hot else frame[name].tolist()
        assert found == values


@pytest.mark.parametrize("split", ["train", "validation"])
@pytest.mark.parametrize("name", ["dataset", "bags"])
def test_a_split_is_exported_alone(name: str, split: str, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    source: Dataset = request.getfixturevalue(name)
    ranges = [(r.start, r.end) for r in source.split_ranges(split)]
    if not ranges:
        with pytest.raises(DatasetError, match=r"has no rows in split validation \(train 10,000, validation 0"):
            export_dataset(source, tmp_path / "out", to="parquet", split=split)
        assert list(tmp_path.iterdir()) == []
        return
    result = export_dataset(source, tmp_path / "out", to="parquet", split=split)
    assert pq.read_table(tmp_path / "out").to_pydict() == _columns(source, ranges)
    assert result.content["rows"] == source.split_rows(split)
    assert result.content["split"] == split
    # Names keep the number of the part, so that two splits of one dataset can be told to belong together.
    assert [entry["file"] for entry in result.content["files"]] == {
        ("dataset", "train"): ["part-00000.parquet", "part-00002.parquet"],
        ("dataset", "validation"): ["part-00002.parquet"],
        ("bags", "train"): ["part-00000.parquet", "part-00001.parquet"],
    }[name, split]


def test_the_parquet_metadata_says_what_the_rows_mean(dataset: Dataset, tmp_path: Path) -> None:
    export_dataset(dataset, tmp_path / "out", to="parquet", split="train")
    facts = json.loads(pq.read_schema(tmp_path / "out" / "part-00002.parquet").metadata[b"dlrm_scale"])
    assert facts["fingerprint"] == dataset.fingerprint
    assert facts["table_rows"] == dataset.table_rows
    assert (facts["split"], facts["source"], facts["rows"]) == ("train", "day_2", 2000)
    assert facts["transforms"] == {"seed": 0}
    assert json.loads((tmp_path / "out" / "_export.json").read_text())["fingerprint"] == dataset.fingerprint


def test_row_groups_are_bounded_by_rows_and_by_bytes(
    dataset: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(export_parquet, "_ROW_GROUP_ROWS", 10_000)
    export_dataset(dataset, tmp_path / "rows", to="parquet")
    file = pq.ParquetFile(tmp_path / "rows" / "part-00000.parquet").metadata
    assert [file.row_group(i).num_rows for i in range(file.num_row_groups)] == [8192, 8192, 3616]
    monkeypatch.setattr(export_parquet, "_ROW_GROUP_ROWS", 131_072)
    monkeypatch.setattr(export_parquet, "_ROW_GROUP_BYTES", 2 * 8192 * (1 + 39 * 4))
    export_dataset(dataset, tmp_path / "bytes", to="parquet")
    file = pq.ParquetFile(tmp_path / "bytes" / "part-00000.parquet").metadata
    assert [file.row_group(i).num_rows for i in range(file.num_row_groups)] == [16_384, 3616]


def test_a_flipped_bit_in_an_exported_page_is_found_by_its_checksum(dataset: Dataset, tmp_path: Path) -> None:
    export_dataset(dataset, tmp_path / "out", to="parquet")
    path = tmp_path / "out" / "part-00002.parquet"
    content = bytearray(path.read_bytes())
    content[pq.ParquetFile(path).metadata.row_group(0).column(1).data_page_offset + 500] ^= 4
    path.write_bytes(content)
    with pytest.raises(OSError, match="CRC checksum verification failed"):
        pq.ParquetFile(path, page_checksum_verification=True).read()


def test_the_npy_files_have_torchrec_s_shapes_and_types(dataset: Dataset, tmp_path: Path) -> None:
    result = export_dataset(dataset, tmp_path / "out", to="npy")
    whole = _columns(dataset)
    assert [entry["file"] for entry in result.content["files"]] == [
        f"day_{day}_{kind}.npy" for day in (0, 2) for kind in ("dense", "labels", "sparse")
    ]
    for day, start, rows in ((0, 0, 20_000), (2, 20_000, 9_000)):
        dense, labels, sparse = (
            np.load(tmp_path / "out" / f"day_{day}_{k}.npy") for k in ("dense", "labels", "sparse")
        )
        assert (dense.shape, dense.dtype, dense.flags.c_contiguous) == ((rows, 13), np.float32, True)
        assert (labels.shape, labels.dtype) == ((rows, 1), np.int32)
        assert (sparse.shape, sparse.dtype) == ((rows, 26), np.int32)
        part = slice(start, start + rows)
        assert labels[:, 0].tolist() == whole[LABEL_COLUMN][part]
        for k, name in enumerate(INTEGER_COLUMNS):
            assert dense[:, k].tolist() == whole[name][part]
        for k, name in enumerate(CATEGORY_COLUMNS):
            assert sparse[:, k].tolist() == whole[name][part]


@pytest.mark.filterwarnings("ignore:The given NumPy array is not writable")
@pytest.mark.parametrize("mapped", [False, True])
def test_torchrec_reads_the_npy_files(dataset: Dataset, tmp_path: Path, mapped: bool) -> None:
    from torchrec.datasets.criteo import BinaryCriteoUtils, InMemoryBinaryCriteoIterDataPipe

    export_dataset(dataset, tmp_path / "out", to="npy")
    paths = {
        f"{kind}_paths": [str(tmp_path / "out" / f"day_{day}_{kind}.npy") for day in (0, 2)]
        for kind in ("dense", "sparse", "labels")
    }
    assert BinaryCriteoUtils.get_shape_from_npy(paths["dense_paths"][0]) == (20_000, 13)
    pipe = InMemoryBinaryCriteoIterDataPipe(
        "train", **paths, batch_size=1000, rank=0, world_size=1, mmap_mode=mapped, hashes=[50] * 26 if mapped else None
    )
    whole = _columns(dataset)
    seen = 0
    for batch in pipe:
        part = slice(seen, seen + len(batch.labels))
        assert batch.labels.tolist() == whole[LABEL_COLUMN][part]
        assert batch.dense_features[:, 3].tolist() == whole["I4"][part]
        values = batch.sparse_features.to_dict()
        assert values["cat_0"].values().tolist() == whole["C1"][part]
        assert values["cat_25"].values().tolist() == whole["C26"][part]
        seen += len(batch.labels)
    assert seen == 29_000


def test_bags_of_one_size_become_mlperf_s_npz(tmp_path: Path) -> None:
    source = _fixed_bags(tmp_path / "dataset")
    result = export_dataset(source, tmp_path / "out", to="npy")
    assert [entry["file"] for entry in result.content["files"]][2] == "day_0_sparse_multi_hot.npz"
    whole = _columns(source)
    for day in (0, 1):
        part = slice(9_000 * day, 9_000 * (day + 1))
        path = tmp_path / "out" / f"day_{day}_sparse_multi_hot.npz"
        with np.load(path) as arrays:
            assert arrays.files == [str(k) for k in range(26)]
            for k, name in enumerate(CATEGORY_COLUMNS):
                values = arrays[str(k)]
                assert (values.dtype, values.shape) == (np.int32, (9_000, {"C2": 3, "C26": 5}.get(name, 1)))
                assert values.tolist() == [x if isinstance(x, list) else [x] for x in whole[name][part]]
        assert np.load(tmp_path / "out" / f"day_{day}_labels.npy")[:, 0].tolist() == whole[LABEL_COLUMN][part]
        assert not (tmp_path / "out" / f"day_{day}_sparse.npy").exists()


def test_npz_members_can_be_mapped_as_mlperf_s_reader_does(tmp_path: Path) -> None:
    """It expects an array 20 bytes after where a plain zip header would end: the field for 64-bit sizes."""
    source = _fixed_bags(tmp_path / "dataset", rows=100, parts=1)
    export_dataset(source, tmp_path / "out", to="npy")
    path = tmp_path / "out" / "day_0_sparse_multi_hot.npz"
    np.savez(tmp_path / "numpy.npz", **dict(np.load(path).items()))
    with zipfile.ZipFile(path) as ours, zipfile.ZipFile(tmp_path / "numpy.npz") as theirs, path.open("rb") as file:
        assert ours.namelist() == theirs.namelist()
        for info in ours.infolist():
            assert info.compress_type == zipfile.ZIP_STORED
            assert info.header_offset == theirs.getinfo(info.filename).header_offset
            file.seek(info.header_offset + 30 + len(info.filename) + 20)
            assert np.lib.format.read_magic(file) == (1, 0)


@pytest.mark.parametrize("split", [None, "train"])
def test_bags_of_different_sizes_are_refused_for_npy_naming_the_column(
    bags: Dataset, tmp_path: Path, split: str | None
) -> None:
    with pytest.raises(DatasetError, match=r"part-00000.arrow: column C1 has rows with \d and \d ids(.|\n)*parquet"):
        export_dataset(bags, tmp_path / "out", to="npy", split=split)
    assert list(tmp_path.iterdir()) == []


def test_a_mean_that_is_no_whole_number_is_refused_before_reading(tmp_path: Path) -> None:
    source = _fixed_bags(tmp_path / "dataset", rows=50, parts=1)
    columns = tuple(
        replace(column, statistics={"pooling": 4.25}) if column.name == "C26" else column
        for column in source.manifest.columns
    )
    write_manifest(source.path, replace(source.manifest, columns=columns))
    with pytest.raises(DatasetError, match=r"column C26 has bags of different sizes \(4.25 ids on average\)"):
        export_dataset(Dataset.open(source.path), tmp_path / "out", to="npy")


def test_vocabularies_are_copied_and_a_missing_one_is_named(tmp_path: Path) -> None:
    source = make_dataset(tmp_path / "dataset", 100)
    (source.path / "vocabulary-C3.parquet").write_bytes(b"ids of C3")
    result = export_dataset(source, tmp_path / "out", to="npy")
    assert result.content["vocabularies"] == ["_vocabularies/vocabulary-C3.parquet"]
    assert (tmp_path / "out" / "_vocabularies" / "vocabulary-C3.parquet").read_bytes() == b"ids of C3"
    columns = tuple(replace(column, method="frequency") for column in source.manifest.columns)
    write_manifest(source.path, replace(source.manifest, columns=columns))
    with pytest.raises(DatasetError, match=r"vocabulary-C1.parquet is missing"):
        export_dataset(Dataset.open(source.path), tmp_path / "other", to="parquet")
    assert not (tmp_path / "other").exists()


@pytest.mark.parametrize("to", ["parquet", "npy"])
def test_the_same_export_again_writes_nothing(dataset: Dataset, tmp_path: Path, to: Any) -> None:
    first = export_dataset(dataset, tmp_path / "out", to=to)
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "out").rglob("*")}
    second = export_dataset(dataset, tmp_path / "out", to=to)
    assert (second.content, second.up_to_date) == (first.content, True)
    assert {path: path.stat().st_mtime_ns for path in (tmp_path / "out").rglob("*")} == before
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_another_export_is_replaced_only_when_forced_and_strangers_never(dataset: Dataset, tmp_path: Path) -> None:
    out = tmp_path / "out"
    export_dataset(dataset, out, to="npy")
    with pytest.raises(ConfigError, match=r"holds another export \(npy, split all\)(.|\n)*--force"):
        export_dataset(dataset, out, to="parquet", split="validation")
    assert (out / "day_0_dense.npy").exists()
    export_dataset(dataset, out, to="parquet", split="validation", force=True)
    assert sorted(path.name for path in out.iterdir()) == ["_export.json", "part-00002.parquet"]
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "notes.txt").write_text("mine")
    for force in (False, True):
        with pytest.raises(ConfigError, match="isn't empty and holds no export"):
            export_dataset(dataset, tmp_path / "mine", to="parquet", force=force)
    with pytest.raises(ConfigError, match="is a file, not a folder"):
        export_dataset(dataset, tmp_path / "mine" / "notes.txt", to="parquet")
    assert [path.name for path in (tmp_path / "mine").iterdir()] == ["notes.txt"]


def test_a_cut_file_of_an_earlier_export_is_noticed(dataset: Dataset, tmp_path: Path) -> None:
    export_dataset(dataset, tmp_path / "out", to="parquet")
    file = tmp_path / "out" / "part-00000.parquet"
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(ConfigError, match=r"or a damaged one(.|\n)*--force"):
        export_dataset(dataset, tmp_path / "out", to="parquet")
    export_dataset(dataset, tmp_path / "out", to="parquet", force=True)
    assert pq.read_table(tmp_path / "out").num_rows == 29_000


def test_an_empty_folder_and_a_link_to_one_are_filled(dataset: Dataset, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "empty")
    export_dataset(dataset, tmp_path / "link", to="parquet", split="validation")
    assert (tmp_path / "empty" / "part-00002.parquet").exists()
    assert (tmp_path / "link").is_symlink()


class _FullDisk:
    """A file whose disk is full after so many bytes."""

    def __init__(self, file: Any, room: int) -> None:
        self._file, self._room = file, room

    def write(self, data: Any) -> int:
        self._room -= len(memoryview(data).cast("B"))
        if self._room < 0:
            raise OSError(28, "No space left on device")
        return int(self._file.write(data))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def __enter__(self) -> "_FullDisk":
        return self

    def __exit__(self, *error: object) -> None:
        self._file.close()


@pytest.mark.parametrize("to", ["parquet", "npy", "npz"])
def test_a_full_disk_is_named_and_leaves_nothing(
    dataset: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, to: str
) -> None:
    source = _fixed_bags(tmp_path / "dataset") if to == "npz" else dataset
    opened = Path.open

    def limited(path: Path, mode: str = "r", **options: Any) -> Any:
        file = opened(path, mode, **options)
        return _FullDisk(file, 50_000) if "w" in mode and path.suffix in (".parquet", ".npy", ".npz") else file

    monkeypatch.setattr(Path, "open", limited)
    target: Any = "parquet" if to == "parquet" else "npy"
    with pytest.raises(DatasetError, match=r"out can't be written: the disk is full(.|\n)*free space or name another"):
        export_dataset(source, tmp_path / "out", to=target)
    assert [path.name for path in tmp_path.iterdir() if path.name != "dataset"] == []


def test_arrays_that_can_t_fit_are_refused_before_writing(
    dataset: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(export_npy.shutil, "disk_usage", lambda _: type("Usage", (), {"free": 1000}))
    # 29,000 rows of 13 + 1 + 26 values of 4 bytes.
    with pytest.raises(DatasetError, match=r"the arrays need 4.4 MiB, 1000 B are free"):
        export_dataset(dataset, tmp_path / "out", to="npy")
    assert list(tmp_path.iterdir()) == []


def test_an_interrupted_export_leaves_nothing(dataset: Dataset, tmp_path: Path) -> None:
    def interrupt(done: int, total: int) -> None:
        raise KeyboardInterrupt

    for to in ("parquet", "npy"):
        with pytest.raises(KeyboardInterrupt):
            export_dataset(dataset, tmp_path / "out", to=to, on_progress=interrupt)
        assert list(tmp_path.iterdir()) == []


_KILLED = """
import os, signal, sys
from pathlib import Path
from dlrm_scale.data.export import export
from dlrm_scale.data.dataset.dataset import Dataset

def kill(*arguments, **named):
    os.kill(os.getpid(), signal.SIGKILL)

place, source, out = sys.argv[1:]
progress = None
if place == "rows":
    progress = kill
elif place == "vocabularies":
    export._copy_vocabularies = kill
elif place == "note":
    export._write_synced = kill
elif place == "rename":
    export._put_in_place = kill
elif place in ("between renames", "removing the old one"):
    rename, calls = Path.rename, []
    def renamed(*arguments):
        calls.append(arguments)
        if len(calls) == 2 and place == "between renames":
            kill()
        return rename(*arguments)
    Path.rename = renamed
    if place == "removing the old one":
        export.shutil.rmtree = kill
export.export_dataset(Dataset.open(source), Path(out), to="parquet", force=True, on_progress=progress)
"""


@pytest.mark.parametrize("place", ["rows", "vocabularies", "note", "rename"])
def test_a_killed_export_leaves_no_final_name_and_the_next_one_cleans_up(
    dataset: Dataset, tmp_path: Path, place: str
) -> None:
    out = tmp_path / "out"
    killed = subprocess.run([sys.executable, "-c", _KILLED, place, str(dataset.path), str(out)], timeout=60)
    assert killed.returncode == -9
    assert [path.name for path in tmp_path.iterdir()] == [".out.exporting"]
    export_dataset(dataset, out, to="npy", split="validation")
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert sorted(path.name for path in out.iterdir()) == [
        "_export.json", *(f"day_2_{kind}.npy" for kind in ("dense", "labels", "sparse"))
    ]  # fmt: skip


@pytest.mark.parametrize("place", ["rename", "between renames", "removing the old one"])
def test_a_kill_while_an_export_is_replaced_leaves_one_of_them_whole(
    dataset: Dataset, tmp_path: Path, place: str
) -> None:
    out = tmp_path / "out"
    export_dataset(dataset, out, to="npy")
    old = {path.name: path.read_bytes() for path in out.iterdir()}
    killed = subprocess.run([sys.executable, "-c", _KILLED, place, str(dataset.path), str(out)], timeout=60)
    assert killed.returncode == -9
    left = {"rename": [".out.exporting", "out"], "between renames": [".out.exporting", ".out.replaced"]}
    assert sorted(path.name for path in tmp_path.iterdir()) == left.get(place, [".out.replaced", "out"])
    if place == "removing the old one":
        assert export_dataset(dataset, out, to="parquet").up_to_date
    else:
        # Not replaced unless it is asked for once more, although the folder was away.
        with pytest.raises(ConfigError, match=r"holds another export \(npy, split all\)"):
            export_dataset(dataset, out, to="parquet")
        assert {path.name: path.read_bytes() for path in out.iterdir()} == old
        export_dataset(dataset, out, to="parquet", force=True)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert pq.read_table(out).num_rows == 29_000


def test_half_of_an_old_export_is_not_put_back(dataset: Dataset, tmp_path: Path) -> None:
    out = tmp_path / "out"
    export_dataset(dataset, out, to="npy")
    # Killed while it was removed; then the new one was removed by hand.
    out.rename(tmp_path / ".out.replaced")
    (tmp_path / ".out.replaced" / "day_0_dense.npy").unlink()
    export_dataset(dataset, out, to="parquet")
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_an_export_that_can_t_take_its_name_gives_it_back(
    dataset: Dataset, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "out"
    export_dataset(dataset, out, to="npy")
    old = {path.name: path.read_bytes() for path in out.iterdir()}
    rename = Path.rename

    def fails(path: Path, target: Path) -> Path:
        if path.name == ".out.exporting":
            raise OSError(5, "Input/output error")
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", fails)
    with pytest.raises(DatasetError, match="Input/output error"):
        export_dataset(dataset, out, to="parquet", force=True)
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert {path.name: path.read_bytes() for path in out.iterdir()} == old


def test_two_exports_into_one_folder_are_refused(dataset: Dataset, tmp_path: Path) -> None:
    tried = []

    def second(done: int, total: int) -> None:
        with pytest.raises(DatasetError, match="another process is exporting into it"):
            export_dataset(dataset, tmp_path / "out", to="npy")
        tried.append(done)

    export_dataset(dataset, tmp_path / "out", to="parquet", on_progress=second)
    assert tried
    assert pq.read_table(tmp_path / "out").num_rows == 29_000


def test_progress_counts_every_row_once(tmp_path: Path) -> None:
    source = _fixed_bags(tmp_path / "dataset")
    for to in ("parquet", "npy"):
        seen: list[tuple[int, int]] = []
        note = seen.append
        export_dataset(source, tmp_path / to, to=to, on_progress=lambda *rows, note=note: note(rows))
        assert seen[-1] == (18_000, 18_000)
        assert [done for done, _ in seen] == sorted(done for done, _ in seen)


def test_a_dataset_that_changes_during_the_export_is_named(tmp_path: Path) -> None:
    for to in ("parquet", "npy"):
        source = _fixed_bags(tmp_path / f"from_{to}")
        part = source.path / "part-00001.arrow"

        def touch(done: int, total: int, part: Path = part) -> None:
            os.utime(part, ns=(1, 1))

        with pytest.raises(DatasetError, match=r"part-00001.arrow was changed or replaced"):
            export_dataset(source, tmp_path / "out", to=to, on_progress=touch)
        assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("to", ["parquet", "npy"])
def test_the_files_do_not_depend_on_the_jobs(tmp_path: Path, to: Any) -> None:
    source = make_dataset(tmp_path / "dataset", [3_000] * 5)
    content = export_dataset(source, tmp_path / "one", to=to).content
    assert export_dataset(source, tmp_path / "four", to=to, jobs=4).content == content
    for entry in content["files"]:
        assert (tmp_path / "one" / entry["file"]).read_bytes() == (tmp_path / "four" / entry["file"]).read_bytes()


def test_a_part_that_fails_stops_the_others(tmp_path: Path) -> None:
    source = make_dataset(tmp_path / "dataset", [20_000] * 6)
    seen = []

    def fail_once(done: int, total: int) -> None:
        seen.append(done)
        raise ValueError("this part fails")

    with pytest.raises(ValueError, match="this part fails"):
        export_dataset(source, tmp_path / "out", to="npy", jobs=2, on_progress=fail_once)
    # At most one more report for each thread, however many parts wait.
    assert len(seen) <= 2
    assert [path.name for path in tmp_path.iterdir()] == ["dataset"]
    with pytest.raises(ConfigError, match="--jobs is 0"):
        export_dataset(source, tmp_path / "out", to="npy", jobs=0)


def test_threads_of_one_process_share_no_state(dataset: Dataset, tmp_path: Path) -> None:
    threads = [
        threading.Thread(target=export_dataset, args=(dataset, tmp_path / to), kwargs={"to": to})
        for to in ("parquet", "npy")
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(path.name for path in tmp_path.iterdir()) == ["npy", "parquet"]
    assert export.EXPORT_FILE in os.listdir(tmp_path / "npy")
