"""A new run may take another's tables alone, and tables that have grown, shrunk or are new."""

import hashlib
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch

from dlrm_scale.checkpoint import find_chain
from dlrm_scale.errors import CheckpointError, ConfigError
from dlrm_scale.layout import ShardRegion
from dlrm_scale.models.initial_rows import fill_initial_rows
from dlrm_scale.schema import TableSpec
from dlrm_scale.train.run_folder import resolve_run
from dlrm_scale.train.warm_start import WarmStart, make_warm_start
from tests.support.command_line import run_command
from tests.support.datasets import make_dataset
from tests.support.training import Observed, assemble, read_tables, run_training, same_tables

ROWS = [3, 4, 10, 2, *[40] * 22]
SETTINGS = ["sharding.kind=row_wise", "train.max_steps=4", "model.seed=5"]


@pytest.fixture(scope="module")
def first(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The run that weights are taken from, with its dataset beside it."""
    base = tmp_path_factory.mktemp("first")
    make_dataset(base / "dataset", 150, table_rows=ROWS)
    run_training(2, base / "run", base / "dataset", [*SETTINGS, "model.seed=1"])
    return base / "run"


def _initial(name: str, rows: int, dim: int = 16, seed: int = 5) -> np.ndarray:
    spec = TableSpec(name=name, rows=rows, dim=dim)
    region = ShardRegion(table=name, row_start=0, row_end=rows, column_start=0, column_end=dim, rank=0)
    weight = torch.empty(rows, dim)
    fill_initial_rows(weight, spec, region, seed)
    return weight.numpy()


def _first_values(observed: list[Observed], rows: list[int]) -> dict[str, np.ndarray]:
    """Tables and state before the first step."""
    shapes = {f"C{k + 1}.weight": np.zeros((n, 16), np.float32) for k, n in enumerate(rows)}
    shapes |= {f"C{k + 1}.momentum1": np.zeros(n, np.float32) for k, n in enumerate(rows)}
    return assemble(observed, shapes)


def test_tables_alone_are_taken_into_a_model_with_another_dense_part(first: Path, tmp_path: Path) -> None:
    changed = [*SETTINGS, "model.over_layers=[32, 8, 1]", "dense_optimizer.kind=sgd"]
    dataset = first.parent / "dataset"
    with pytest.raises(ConfigError, match=r"model\.over_layers.*\n?.*|another model") as caught:
        run_training(2, tmp_path / "run", dataset, changed, init_from=str(first))
    assert caught.value.remedy is not None
    assert "--tables-only" in caught.value.remedy
    observed = run_training(
        2, tmp_path / "run", dataset, changed, init_from=str(first), init_options={"tables_only": True}
    )
    expected = {name: value for name, value in read_tables(first).items() if not name.startswith("dense.")}
    assert same_tables(_first_values(observed, ROWS), expected)
    assert observed[0].result.start_step == 0
    assert observed[0].result.restore is not None
    assert observed[0].result.restore["step"] == 4
    # the same weights lead to the same run when it is taken up again before its first checkpoint
    died = tmp_path / "died"
    run_training(2, died, dataset, changed, init_from=str(first), init_options={"tables_only": True})
    shutil.rmtree(died / "checkpoints")
    (died / "log.jsonl").unlink()
    run_training(2, died, dataset, [], resume=True)
    assert same_tables(read_tables(died), read_tables(tmp_path / "run"))


def test_tables_alone_must_have_the_same_dim(first: Path, tmp_path: Path) -> None:
    wide = [*SETTINGS, "model.dim=8", "model.dense_layers=[8]"]
    with pytest.raises(ConfigError, match=r"model\.dim is 8, there 16"):
        run_training(
            1,
            tmp_path / "run",
            first.parent / "dataset",
            wide,
            init_from=str(first),
            init_options={"tables_only": True},
        )


@pytest.mark.parametrize("ranks", [1, 2])
def test_grown_tables_get_initial_rows_and_shrunk_ones_are_cut(first: Path, tmp_path: Path, ranks: int) -> None:
    rows = [5, 4, 10, 2, 25, *[40] * 21]  # C1 has grown by two, C5 shrunk by fifteen
    dataset = tmp_path / "dataset"
    make_dataset(dataset, 150, table_rows=rows, seed=3)
    run = tmp_path / "run"
    with pytest.raises(CheckpointError, match="table C1 is 3 x 16 in the checkpoint, 5 x 16 in the model") as caught:
        run_training(ranks, run, dataset, SETTINGS, init_from=str(first))
    assert caught.value.remedy is not None
    assert "--allow-resized-tables" in caught.value.remedy
    assert not run.exists()
    options = {"allow_resized_tables": True}
    observed = run_training(ranks, run, dataset, SETTINGS, init_from=str(first), init_options=options)
    before = read_tables(first)
    now = _first_values(observed, rows)
    for k, n in enumerate(rows):
        name = f"C{k + 1}"
        kept = min(n, ROWS[k])
        assert np.array_equal(now[f"{name}.weight"][:kept], before[f"{name}.weight"][:kept])
        assert np.array_equal(now[f"{name}.momentum1"][:kept], before[f"{name}.momentum1"][:kept])
        assert np.array_equal(now[f"{name}.weight"][kept:], _initial(name, n)[kept:])
        assert not now[f"{name}.momentum1"][kept:].any()
    # a baseline at step 3, a delta at the end; both hold what was trained
    chain = find_chain(run / "checkpoints", verify="full")
    assert chain is not None
    assert [m.kind for m in chain.manifests] == ["baseline", "delta"]
    assert [table.rows for table in chain.tip.tables] == rows
    again = run_training(ranks, run, dataset, ["train.max_steps=5"], resume=True)
    assert same_tables(
        _first_values(again, rows), {n: v for n, v in _tables_at(run, chain.tip.name, tmp_path).items() if n[0] == "C"}
    )


def _tables_at(run: Path, manifest: str, tmp_path: Path) -> dict[str, np.ndarray]:
    """Tables of an older checkpoint: a copy of the run without the newer ones."""
    copy = tmp_path / "older"
    shutil.copytree(run, copy)
    for path in (copy / "checkpoints" / "manifests").iterdir():
        if path.name > Path(manifest).name:
            path.unlink()
    return read_tables(copy)


def test_a_table_that_the_other_run_has_not_gets_its_initial_rows(first: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    shutil.copytree(first, other)
    _forget_table(other / "checkpoints", "C7")
    dataset = first.parent / "dataset"
    with pytest.raises(CheckpointError, match="table C7 is missing in the checkpoint"):
        run_training(2, tmp_path / "run", dataset, SETTINGS, init_from=str(other))
    options = {"allow_new_tables": True}
    observed = run_training(2, tmp_path / "run", dataset, SETTINGS, init_from=str(other), init_options=options)
    now, before = _first_values(observed, ROWS), read_tables(first)
    assert np.array_equal(now["C7.weight"], _initial("C7", 40))
    assert not now["C7.momentum1"].any()
    rest = {name: value for name, value in now.items() if not name.startswith("C7.")}
    assert all(np.array_equal(value, before[name]) for name, value in rest.items())


def _forget_table(root: Path, table: str) -> None:
    """Take a table out of the manifests, as if it had never been there."""
    digests: dict[str, str] = {}
    for path in sorted((root / "manifests").iterdir()):
        body = json.loads(path.read_text())["manifest"]
        body["tables"] = [t for t in body["tables"] if t["name"] != table]
        for file in body["files"]:
            file["entries"] = [entry for entry in file["entries"] if entry["table"] != table]
        if body["parent"] is not None:
            body["parent"]["sha256"] = digests[body["parent"]["name"]]
        text = json.dumps(body, sort_keys=True, separators=(",", ":"))
        digests[f"manifests/{path.name}"] = hashlib.sha256(text.encode()).hexdigest()
        path.write_text(json.dumps({"manifest": body, "sha256": digests[f"manifests/{path.name}"]}))


def test_what_differs_is_told_in_numbers(first: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    make_dataset(tmp_path / "dataset", 150, table_rows=[5, 3, *ROWS[2:]], seed=3)
    arguments = ["sample", "--set", f"run.path={tmp_path / 'run'}", "--set", f"data.path={tmp_path / 'dataset'}"]
    for setting in ("model.dim=16", "model.dense_layers=[16]", "model.over_layers=[16, 1]", "data.batch_size=32"):
        arguments += ["--set", setting]
    arguments += ["--set", "train.max_steps=1", "--init-from", first, "--allow-resized-tables", "--tables-only"]
    assert run_command("train", *arguments, "--nproc", 1) == 0
    told = capfd.readouterr()
    words = told.out + told.err
    assert "table C1 has grown from 3 to 5 rows: the new ones have initial values" in words
    assert "table C2 has shrunk from 4 to 3 rows: 1 are cut off" in words
    assert "restored the tables, with their optimizer state, of" in words
    assert "the dense part begins with initial values" in words


def test_the_flags_go_with_a_new_run_from_another_one(first: Path, tmp_path: Path) -> None:
    for name in ("tables_only", "allow_new_tables", "allow_resized_tables"):
        options = {"tables_only": False, "allow_new_tables": False, "allow_resized_tables": False, name: True}
        with pytest.raises(ConfigError, match=f"--{name.replace('_', '-')} goes with --init-from"):
            make_warm_start("", **options)
        assert make_warm_start(str(first), **options) == WarmStart(run=str(first), **{name: True})
    run_training(1, tmp_path / "run", first.parent / "dataset", SETTINGS, init_from=str(first))
    with pytest.raises(ConfigError, match="was not started with this --init-from"):
        resolve_run(
            None,
            [f"run.path={tmp_path / 'run'}"],
            resume=True,
            warm_start=WarmStart(run=str(first), tables_only=True),
        )


def _train_from(other: Path, dataset: Path, run: Path) -> int:
    arguments = ["sample", "--set", f"run.path={run}", "--set", f"data.path={dataset}", "--set", "train.max_steps=1"]
    for setting in ("model.dim=16", "model.dense_layers=[16]", "model.over_layers=[16, 1]", "data.batch_size=32"):
        arguments += ["--set", setting]
    return run_command("train", *arguments, "--init-from", other, "--nproc", 1)


def test_weights_of_an_older_checkpoint_than_the_other_runs_log_tells_of_say_so(
    first: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    dataset = first.parent / "dataset"
    run_training(1, tmp_path / "other", dataset, [*SETTINGS, "checkpoint.every_steps=2"])
    newest = max((tmp_path / "other/checkpoints/manifests").iterdir())
    newest.unlink()
    assert _train_from(tmp_path / "other", dataset, tmp_path / "run") == 0
    told = capfd.readouterr()
    assert f"{newest.name} (step 4): it is missing, and log.jsonl tells" in told.out + told.err


def test_a_run_without_checkpoints_gives_no_weights(
    first: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    shutil.copytree(first, tmp_path / "empty", ignore=shutil.ignore_patterns("checkpoints", "log.jsonl"))
    assert _train_from(tmp_path / "empty", first.parent / "dataset", tmp_path / "run") == 2
    assert f"--init-from {tmp_path / 'empty'}: that run has no checkpoint" in capfd.readouterr().err
