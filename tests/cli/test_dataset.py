"""The commands `dlrm-scale dataset show | verify | export`."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
import pytest

from dlrm_scale.data.dataset.dataset import Dataset, write_manifest
from tests.support.command_line import run_command, run_json
from tests.support.datasets import make_dataset

SPLIT = {"train": [(0, 900)], "validation": [(900, 1000)]}


@pytest.fixture
def dataset(tmp_path: Path) -> Dataset:
    return make_dataset(tmp_path / "dataset", 1000, split=SPLIT)


def _with_statistics(dataset: Dataset, **columns: dict[str, Any]) -> None:
    write_manifest(
        dataset.path,
        replace(
            dataset.manifest,
            columns=tuple(replace(c, statistics=columns.get(c.name, {})) for c in dataset.manifest.columns),
        ),
    )


def test_export_writes_parquet_and_says_what_it_wrote(
    dataset: Dataset, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "out"
    assert run_command("dataset", "export", dataset.path, "--to", "parquet", "--out", out) == 0
    captured = capsys.readouterr()
    assert captured.out.startswith(f"{out}: 1,000 rows (all splits) in 1 file, ")
    assert "rows/s" in captured.out
    assert captured.err == ""
    assert pq.read_table(out).num_rows == 1000
    assert run_command("dataset", "export", dataset.path, "--to", "parquet", "--out", out) == 0
    assert capsys.readouterr().out.startswith(f"{out}: up to date, 1,000 rows")


def test_export_prints_json(dataset: Dataset, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    summary = run_json(capsys, "dataset", "export", dataset.path, "--to", "npy", "--out", out, "--split", "validation")
    assert (summary["out"], summary["up_to_date"], summary["rows"]) == (str(out), False, 100)
    assert [entry["file"] for entry in summary["files"]] == [
        f"day_0_{kind}.npy" for kind in ("dense", "labels", "sparse")
    ]
    stored = json.loads((out / "_export.json").read_text())
    assert {name: summary[name] for name in stored} == stored
    assert np.load(out / "day_0_sparse.npy").shape == (100, 26)


@pytest.mark.parametrize(
    ("arguments", "code", "message"),
    [
        (("--to", "npy", "--split", "test"), 1, "has no rows in split test (train 900, validation 100, test 0)"),
        (("--to", "csv"), 2, "csv"),
        (("--to", "npy", "--split", "held_out"), 2, "held_out"),
    ],
)
def test_export_names_what_it_can_t_do(
    dataset: Dataset, tmp_path: Path, capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], code: int,
    message: str,
) -> None:  # fmt: skip
    assert run_command("dataset", "export", dataset.path, "--out", tmp_path / "out", *arguments) == code
    assert message in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_export_refuses_a_used_folder_with_2_and_replaces_an_export_with_force(
    dataset: Dataset, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ("dataset", "export", dataset.path, "--to", "parquet", "--out")
    assert run_command(*arguments, tmp_path) == 2
    assert "isn't empty and holds no export" in capsys.readouterr().err
    assert run_command(*arguments, tmp_path / "out", "--split", "train") == 0
    assert run_command(*arguments, tmp_path / "out") == 2
    assert run_command(*arguments, tmp_path / "out", "--force") == 0
    assert pq.read_table(tmp_path / "out").num_rows == 1000


def test_a_folder_that_is_no_dataset_is_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command("dataset", "export", tmp_path, "--to", "npy", "--out", tmp_path / "out") == 1
    assert "is not a finished dataset" in capsys.readouterr().err


def test_show_has_a_column_for_bags_and_collisions_only_where_there_are_any(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "200")
    plain = make_dataset(tmp_path / "plain", 100)
    _with_statistics(plain, C1={"pooling": 1.0, "colliding_ids": None, "collision_rate": 0.0})
    assert run_command("dataset", "show", plain.path) == 0
    shown = capsys.readouterr().out
    assert "ids a" not in shown
    assert "colliding" not in shown
    bags = make_dataset(tmp_path / "bags", 100, multi_hot={"C3": 9, "C4": 2})
    _with_statistics(
        bags,
        C3={"pooling": 4.46, "colliding_ids": 1234, "collision_rate": 0.0625},
        C5={"colliding_ids": 7, "collision_rate": 0.5},
        C6={"colliding_ids": None, "collision_rate": 0.0},
    )
    assert run_command("dataset", "show", bags.path) == 0
    cells = {line.split()[0]: line.split() for line in capsys.readouterr().out.splitlines() if line.startswith("C")}
    # Name, 7 facts, ids a row, colliding ids and their share.
    assert cells["C3"] == ["C3", "50", *["–"] * 6, "4.5", "1,234", "6.2"]  # noqa: RUF001
    assert cells["C4"] == ["C4", "50", *["–"] * 9]  # noqa: RUF001
    assert cells["C5"] == ["C5", "50", *["–"] * 6, "1", "7", "50.0"]  # noqa: RUF001
    assert cells["C6"] == ["C6", "50", *["–"] * 6, "1", "–", "0.0"]  # noqa: RUF001


def test_the_columns_of_large_tables_fit_into_80_characters(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    dataset = make_dataset(tmp_path / "dataset", 100, multi_hot={"C20": 9})
    facts = {
        "missing_rate": 0.468, "unique_ids": 292_775_614, "kept_ids": 39_999_998, "coverage": 1.0,
        "held_out_out_of_vocabulary_rate": 0.1234, "hot_row_curve": {"0.01": 1.0}, "pooling": 100.0,
    }  # fmt: skip
    columns = tuple(
        replace(c, table_rows=40_000_000, statistics=facts) if c.name == "C20" else c for c in dataset.manifest.columns
    )
    write_manifest(dataset.path, replace(dataset.manifest, columns=columns))
    assert run_command("dataset", "show", dataset.path) == 0
    lines = [line.rstrip() for line in capsys.readouterr().out.splitlines()]
    shown = next(line for line in lines if line.startswith("C20"))
    assert shown.split() == [
        "C20",
        "40,000,000",
        "46.8",
        "292,775,614",
        "39,999,998",
        "100.0",
        "12.3",
        "100.0",
        "100.0",
    ]
    assert len(shown) <= 80
    assert not any("…" in line for line in lines)
