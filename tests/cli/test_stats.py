"""The command `dlrm-scale stats`."""

import json
from pathlib import Path

import pytest

from dlrm_scale.planning.tables.load import load_tables
from tests.support.command_line import run_command, run_json
from tests.support.datasets import make_dataset


def test_a_built_in_set_is_shown_with_its_sums(capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command("stats", "mlperf_dcnv2", "--batch-size", 65536) == 0
    shown = capsys.readouterr().out
    assert "40,000,000 128 19.1 GiB 100.00 100" in " ".join(shown.split())
    assert "26 tables 204,184,588 97.4 GiB 214.00" in " ".join(shown.split())


def test_a_measured_set_is_written_and_read_back(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    make_dataset(tmp_path / "data", 3000, 500)
    out = tmp_path / "tables.toml"
    flags = ("--dim", 8, "--optimizer", "sgd", "--batch-size", 1024, "--samples", 2048)
    printed = run_json(capsys, "stats", tmp_path / "data", *flags, "-o", out)
    read = load_tables(out)
    assert read.optimizer == "sgd"
    assert [t["rows"] for t in printed["tables"]] == [500] * 26 == [t.rows for t in read.tables]
    assert 1024 in dict(read.tables[0].unique_rows)
    assert "measured on 2,048 of 3,000" in read.source
    assert run_command("stats", out) == 0


def test_a_generated_set_has_its_tables(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "a.json"
    assert run_command("stats", "--generate", "production", "--tables", 70, "--seed", 4, "--dim", 32, "-o", out) == 0
    shown = capsys.readouterr().out
    assert "50 more" in shown
    content = json.loads(out.read_text())
    assert len(content["tables"]) == 70
    assert {t["dim"] for t in content["tables"]} == {32}


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ((), "give SOURCE or --generate"),
        (("mlperf_dcnv2", "--generate", "synthetic"), "give SOURCE or --generate"),
        (("mlperf_dcnv2", "--seed", 1), "--seed changes nothing without --generate"),
        (("--generate", "synthetic", "--samples", 10), "--samples changes nothing without SOURCE"),
        (("--generate", "synthetic", "--set", "data.seed=1"), "--set changes nothing without SOURCE"),
        (("--generate", "synthetic", "--dim", 10), "--dim 10: must be a multiple of 4 (the nearest allowed: 8 or 12)"),
        (("mlperf_dcnv2", "-o", "a.csv"), "a tables file ends in .toml or .json"),
        (("mlperf_dcnv2", "-o", "nowhere/a.toml"), "doesn't exist"),
        (("mlperf", "--dim", 8), "did you mean 'mlperf_dcnv2'"),
    ],
)
def test_a_wrong_command_is_told_with_exit_code_2(
    arguments: tuple[object, ...],
    said: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert run_command("stats", *arguments) == 2
    assert said in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_an_existing_file_is_kept_without_force(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "a.toml"
    out.write_text("kept")
    assert run_command("stats", "criteo_kaggle", "-o", out) == 2
    assert "--force" in capsys.readouterr().err
    assert out.read_text() == "kept"
    assert run_command("stats", "criteo_kaggle", "-o", out, "--force") == 0
    assert load_tables(out).name == "criteo_kaggle"


def test_real_rows_are_measured(shared_data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    raw = shared_data / "kaggle" / "kaggle_union.tsv"
    run_json(capsys, "preprocess", raw, "--out", tmp_path / "a", "--validation", "none")
    printed = run_json(capsys, "stats", tmp_path / "a", "--dim", 16, "--batch-size", 6379)
    tables = {t["name"]: t for t in printed["tables"]}
    distinct = {
        name: len({line.split("\t")[13 + int(name[1:])] for line in raw.read_text().splitlines()}) for name in tables
    }
    # C9 has three values, none of them missing or rare; the many rare ones of C3 share a row.
    assert dict(tables["C9"]["unique_rows"])[6379] == distinct["C9"] == 3
    assert dict(tables["C3"]["unique_rows"])[6379] < distinct["C3"]
