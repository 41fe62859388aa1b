"""`checkpoint export` finds a run's checkpoints, takes the step that is asked for and tells what it wrote."""

import warnings
from pathlib import Path

import pyarrow.parquet as pq
import pytest
import torch
from safetensors.torch import load_file

from dlrm_scale.checkpoint.storage.local_storage import LocalStorage
from tests.checkpoint.faulty_bucket import FolderBucket
from tests.checkpoint.simulated_run import TABLES, Run, make_layout, make_truth
from tests.support.command_line import run_command, run_json


def _run(root: Path | str) -> list[torch.Tensor]:
    """Two checkpoints; table C1 at each."""
    run = Run(root, make_layout("row_wise", 2), make_truth(TABLES, ["row"]))  # type: ignore[arg-type]
    tables = []
    for step in (1, 2):
        run.change("C1", [step], 1.0)
        assert run.save(step).committed
        tables.append(run.truth.weight["C1"].clone())
    return tables


def test_the_newest_or_a_given_step_is_exported(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    first, second = _run(tmp_path / "run" / "checkpoints")
    out = tmp_path / "newest.safetensors"
    told = run_json(capsys, "checkpoint", "export", tmp_path / "run", "--to", "safetensors", "--out", out)
    assert (told["step"], told["rows"], told["tables"]) == (2, sum(table.rows for table in TABLES), len(TABLES))
    assert told["bytes"] == out.stat().st_size
    assert torch.equal(load_file(out)["C1.weight"], second)
    out = tmp_path / "first"
    words = ["checkpoint", "export", tmp_path / "run", "--to", "parquet", "--out", out, "--step", 1]
    assert run_command(*words) == 0
    assert f"{out}: step 1, 141 rows of 4 tables, " in capsys.readouterr().out
    assert torch.equal(torch.tensor(pq.read_table(out / "C1.parquet")["weight"].to_pylist()), first)
    assert run_command(*words) == 2
    assert "exists already" in capsys.readouterr().err
    assert run_command(*words[:-3], tmp_path / "other", "--step", 9) == 2
    assert "remedy: name one of these: 1, 2" in capsys.readouterr().err
    assert not (tmp_path / "other").exists()
    assert not list((tmp_path / "run" / "checkpoints").glob("leases/*"))


def test_a_run_in_a_store_is_exported_by_its_url(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    FolderBucket.register()
    url = f"folder-bucket://{tmp_path}/bucket"
    _, second = _run(url)
    out = tmp_path / "out"
    told = run_json(capsys, "checkpoint", "export", url, "--to", "safetensors", "--out", out)
    assert told["step"] == 2
    assert torch.equal(load_file(out)["C1.weight"], second)


def test_a_folder_that_may_only_be_read_is_exported_with_a_plain_note(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    _run(str(tmp_path / "run" / "checkpoints"))

    def refuse(self: LocalStorage, *names: str) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(LocalStorage, "make_folders", refuse)
    words = ["checkpoint", "export", tmp_path / "run", "--to", "safetensors", "--out", tmp_path / "out"]
    with warnings.catch_warnings():
        warnings.simplefilter("always")
        assert run_command(*words) == 0
    told = capsys.readouterr().err
    root = tmp_path / "run" / "checkpoints"
    assert f"note: the checkpoints in {root} aren't kept from removal while they are read: Permission denied\n" in told
    assert "Warning" not in told
    assert ".py" not in told
