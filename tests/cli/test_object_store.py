"""A run's checkpoints in a store: every command finds them through the run, or by their URL."""

from pathlib import Path

import pyarrow.parquet as pq
import pytest
from fsspec.implementations.memory import MemoryFileSystem

from tests.checkpoint.faulty_bucket import empty_memory, hide_store_packages
from tests.support.command_line import run_command, run_json
from tests.support.datasets import make_dataset
from tests.support.training import SMALL_MODEL


def test_a_run_in_memory_is_resumed_evaluated_listed_and_verified(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    empty_memory()
    dataset, run = tmp_path / "dataset", tmp_path / "run"
    make_dataset(dataset, (150, 50), split={"train": [(0, 150)], "validation": [(150, 200)]})
    settings = [f"data.path={dataset}", *SMALL_MODEL, "checkpoint.path=memory://bucket/run", "train.max_steps=3"]
    words = [word for setting in settings for word in ("--set", setting)]
    assert run_command("train", "sample", "--nproc", 1, "--set", f"run.path={run}", *words) == 0
    assert "memory://bucket/run: these checkpoints end with the process" in capsys.readouterr().err.replace("\n", " ")
    more = ["--set", f"run.path={run}", "--set", "train.max_steps=0"]
    assert run_command("train", "--resume", "auto", "--nproc", 1, *more) == 0
    for place in (run, "memory://bucket/run"):
        listed = run_json(capsys, "checkpoint", "ls", place)
        assert [row["step"] for row in listed][-2:] == [3, 5]
        assert run_json(capsys, "checkpoint", "verify", place)["ok"]
        assert run_json(capsys, "checkpoint", "show", place, 3)["kind"] == "baseline"
    assert run_json(capsys, "evaluate", run)["step"] == 5
    assert run_json(capsys, "evaluate", run, "--step", "best")["checkpoint"] == "best"
    assert run_command("predict", run, dataset, "--out", tmp_path / "scores.parquet", "--nproc", 1) == 0
    assert pq.read_metadata(tmp_path / "scores.parquet").num_rows == 200
    assert not (run / "checkpoints").exists()
    # the other run's weights come from the store too
    other = ["--set", f"run.path={tmp_path / 'other'}", *words, "--set", "checkpoint.path=", "--init-from", run]
    assert run_command("train", "sample", "--nproc", 1, *other) == 0
    empty_memory()
    capsys.readouterr()
    assert run_command("train", "--resume", "auto", *more) == 4
    assert "tells of committed checkpoints, and memory://bucket/run has none" in capsys.readouterr().err
    assert not MemoryFileSystem.store


def test_a_store_without_its_package_is_refused_before_a_run_has_a_folder(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    hide_store_packages(monkeypatch)
    make_dataset(tmp_path / "dataset", (150, 50), split={"train": [(0, 150)], "validation": [(150, 200)]})
    words = [
        "run.path=" + str(tmp_path / "run"),
        f"data.path={tmp_path / 'dataset'}",
        "checkpoint.path=s3://bucket/run",
    ]
    assert run_command("train", "sample", "--nproc", 1, *(w for word in words for w in ("--set", word))) == 2
    assert "remedy: .venv/bin/pip install 'dlrm-scale[s3]'" in capsys.readouterr().err
    assert not (tmp_path / "run").exists()
