"""From `synth` through `preprocess` and `dataset export` and back, by the commands that each one names."""

import json
import shlex
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dlrm_scale.data.dataset.dataset import Dataset, Rows
from dlrm_scale.schema import CATEGORY_COLUMNS
from tests.support.command_line import run_command, run_json


def _rows(dataset: Dataset) -> list[Rows]:
    return [
        dataset.read(index, batch)
        for index, part in enumerate(dataset.manifest.parts)
        for batch in range(-(-part.rows // 8192))
    ]


def _assert_equal(one: Dataset, other: Dataset) -> None:
    assert one.table_rows.keys() == other.table_rows.keys()
    assert one.multi_hot == other.multi_hot
    pairs = list(zip(_rows(one), _rows(other), strict=True))
    assert pairs
    for a, b in pairs:
        assert np.array_equal(a.labels, b.labels)
        assert np.array_equal(a.dense, b.dense)
        assert np.array_equal(a.ids, b.ids)
        for name in one.multi_hot:
            assert np.array_equal(a.bags[name].values, b.bags[name].values)
            assert np.array_equal(a.bags[name].offsets, b.bags[name].offsets)


def _bags_of_text(folder: Path, column: str) -> list[list[str]]:
    position = 14 + CATEGORY_COLUMNS.index(column)
    lines = [line for day in sorted(folder.glob("day_*.tsv")) for line in day.read_text().splitlines()]
    return [line.split("\t")[position].split(",") for line in lines]


def _bags_of_dataset(dataset: Dataset, column: str) -> list[list[int]]:
    return [
        bag.tolist()
        for rows in _rows(dataset)
        for bag in np.split(rows.bags[column].values, rows.bags[column].offsets[1:-1])
    ]


def test_bags_of_synth_reach_the_dataset_and_come_back_from_parquet(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    raw = tmp_path / "raw"
    arguments = ("--rows", 3000, "--days", 2, "--multi-hot", "C3=5,C9=2,C20=12")
    assert run_command("synth", raw, *arguments) == 0
    command = next(
        line.removeprefix("next: dlrm-scale ") for line in capsys.readouterr().out.splitlines() if "next:" in line
    )
    words = [word if word != "DATASET" else str(tmp_path / "dataset") for word in shlex.split(command)]
    assert run_command(*words) == 0
    dataset = Dataset.open(tmp_path / "dataset")
    assert dataset.multi_hot == ("C3", "C9", "C20")
    for column in dataset.multi_hot:
        text, rows = _bags_of_text(raw, column), _bags_of_dataset(dataset, column)
        assert [len(bag) for bag in rows] == [len(bag) for bag in text]
        known = {}
        for ids, table_rows in zip(text, rows, strict=True):
            for raw_id, row in zip(ids, table_rows, strict=True):
                # An id is always the same row, and an empty field is row 0.
                assert known.setdefault(raw_id, row) == row
        assert known.get("", 0) == 0
        assert len(set(known.values())) > 2
    summary = run_json(capsys, "dataset", "show", dataset.path)
    pooling = {c["name"]: c["statistics"]["pooling"] for c in summary["columns"]}
    assert pooling["C3"] == pytest.approx(np.mean([len(bag) for bag in _bags_of_text(raw, "C3")]))
    assert pooling["C1"] == 1.0

    assert run_command("dataset", "export", dataset.path, "--to", "parquet", "--out", tmp_path / "parquet") == 0
    assert run_command("preprocess", tmp_path / "parquet", "--vocabulary", "given", "--out", tmp_path / "again") == 0
    _assert_equal(dataset, Dataset.open(tmp_path / "again"))
    # Bags of different sizes don't fit arrays.
    assert run_command("dataset", "export", dataset.path, "--to", "npy", "--out", tmp_path / "npy") == 1
    assert "column C3 has bags of different sizes" in capsys.readouterr().err


@pytest.mark.parametrize("to", ["parquet", "npy"])
def test_a_one_hot_dataset_comes_back_value_for_value(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], to: str
) -> None:
    assert run_command("synth", tmp_path / "raw", "--rows", 9000, "--days", 1, "--preset", "terabyte") == 0
    assert run_command("preprocess", tmp_path / "raw", "--out", tmp_path / "dataset") == 0
    exported: dict[str, Any] = run_json(
        capsys, "dataset", "export", tmp_path / "dataset", "--to", to, "--out", tmp_path / "out"
    )
    assert exported["rows"] == 9000
    assert len(exported["vocabularies"]) == 26
    assert run_command("preprocess", tmp_path / "out", "--vocabulary", "given", "--out", tmp_path / "again") == 0
    _assert_equal(Dataset.open(tmp_path / "dataset"), Dataset.open(tmp_path / "again"))
    note = json.loads((tmp_path / "out" / "_export.json").read_text())
    assert note["table_rows"] == Dataset.open(tmp_path / "dataset").table_rows


def test_mlperf_s_multi_hot_arrays_come_back_byte_for_byte(tmp_path: Path) -> None:
    random = np.random.Generator(np.random.Philox(3))
    given = tmp_path / "given"
    given.mkdir()
    for day, rows in ((0, 9000), (1, 500)):
        np.save(given / f"day_{day}_dense.npy", random.random((rows, 13), np.float32))
        np.save(given / f"day_{day}_labels.npy", random.integers(0, 2, (rows, 1)).astype(np.int32))
        ids = {str(k): random.integers(2, 90, (rows, 1 + k % 4)).astype(np.int32) for k in range(26)}
        np.savez(given / f"day_{day}_sparse_multi_hot.npz", **ids)
    assert run_command("preprocess", given, "--vocabulary", "given", "--out", tmp_path / "dataset") == 0
    assert run_command("dataset", "export", tmp_path / "dataset", "--to", "npy", "--out", tmp_path / "out") == 0
    for path in given.glob("*.npy"):
        assert (tmp_path / "out" / path.name).read_bytes() == path.read_bytes()
    for path in given.glob("*.npz"):
        with np.load(path) as one, np.load(tmp_path / "out" / path.name) as other:
            assert one.files == other.files
            for name in one.files:
                assert np.array_equal(one[name], other[name])
                assert one[name].dtype == other[name].dtype
