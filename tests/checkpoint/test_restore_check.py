"""verify --level restore and show A B: what a restore would find, and what changed, without a trainer."""

import json
import shutil
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from dlrm_scale.checkpoint import find_chain, open_chain, verify
from dlrm_scale.checkpoint.chain.changes import Changes, find_changes
from dlrm_scale.checkpoint.restoring.restore_check import check_restore
from dlrm_scale.checkpoint.verify import chain_of_step, read_checkpoint
from dlrm_scale.cli.checkpoint import app
from dlrm_scale.errors import CheckpointError
from tests.checkpoint.faulty_bucket import Bucket, bucket_storage
from tests.checkpoint.simulated_run import TABLES, Run, make_layout, make_truth

ROWS = sum(table.rows for table in TABLES)


@pytest.fixture(scope="module")
def history(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Baseline, two deltas, a baseline, a delta."""
    root = tmp_path_factory.mktemp("history") / "checkpoints"
    run = Run(root, make_layout("row_wise", 2), make_truth(TABLES, ["row"]), baseline_ratio=1e9)
    changes: list[dict[str, list[int]]] = [{}, {"C1": [0, 1], "C3": [7]}, {"C1": [1, 50, 96]}, {}, {"C2": [0, 1, 2]}]
    for step, changed in enumerate(changes):
        for table, ids in changed.items():
            run.change(table, ids, 0.5)
        if step == 3:
            for engine in run.engines:
                engine._chain = engine._chain.model_copy(update={"needs_baseline": True})
        assert run.save(step).committed
    return root


@pytest.fixture
def copy(history: Path, tmp_path: Path) -> Path:
    shutil.copytree(history, tmp_path / "run" / "checkpoints")
    return tmp_path / "run" / "checkpoints"


def _flip(path: Path, at: int) -> None:
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def test_a_sound_checkpoint_is_covered_finite_and_read_once(history: Path) -> None:
    for step in range(5):
        chain = chain_of_step(history, step)
        ticks = iter((10.0, 12.5))
        read: list[int] = []
        found = check_restore(chain, progress=read.append, now=partial(next, ticks))
        assert (found.step, found.tables, found.rows, found.seconds) == (step, 4, ROWS, 2.5)
        stored = [t for m in chain.manifests for f in m.files for e in f.entries for t in e.tensors.values()]
        stored += [t for f in chain.tip.files for t in f.tensors.values()]
        assert found.bytes_read == sum(read) == sum(t.size_bytes for t in stored)
        assert found.faults == ()


def test_damage_is_named_by_file_and_the_check_goes_on(copy: Path) -> None:
    chain = chain_of_step(copy, 2)
    first, last = (
        next(file for file in manifest.files if file.rank == 1) for manifest in (chain.manifests[0], chain.tip)
    )
    for file in (first, last):
        entry = next(entry for entry in file.entries if entry.table == "C1")
        _flip(copy / file.name, entry.tensors["weight"].offset_bytes)
    dense = next(file for file in chain.tip.files if file.role == "dense")
    (copy / dense.name).unlink()
    faults = dict(check_restore(chain).faults)
    # the delta's block of C1 isn't reached, as the baseline's comes first
    assert faults.keys() == {first.name, dense.name}
    assert "tensor C1[" in faults[first.name]
    assert "damaged" in faults[first.name]


def test_values_that_are_not_finite_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    truth = make_truth(TABLES, ["row"])
    truth.weight["C3"][7, 2] = float("nan")
    truth.state["C1"]["momentum1"][96] = float("inf")
    monkeypatch.setattr("dlrm_scale.checkpoint.saving.snapshot.finite_blocks", lambda blocks, place: iter(blocks))
    Run(tmp_path / "ck", make_layout("column_wise", 2), truth).save(1)
    chain = find_chain(tmp_path / "ck")
    assert chain is not None
    assert check_restore(chain).faults == (
        (chain.name, "C1: momentum1[0:8] of row 96, column 0, is inf"),
        (chain.name, "C3: weight of row 7, column 2, is nan"),
    )
    assert verify(tmp_path / "ck", "full") == []


def test_the_command_restores_a_step_and_tells_what_it_read(copy: Path) -> None:
    runner = CliRunner()
    words = ["verify", str(copy.parent), "--level", "restore"]
    told = runner.invoke(app, words)
    assert told.exit_code == 0
    assert f"step 4 put together: {ROWS} rows of 4 tables from 2 manifests, " in told.output
    result = json.loads(runner.invoke(app, [*words, "--step", "1", "--json"]).stdout)
    assert (result["ok"], result["restore"]["step"], result["restore"]["faults"]) == (True, 1, [])
    missing = runner.invoke(app, [*words, "--step", "9"])
    assert isinstance(missing.exception, CheckpointError)
    assert missing.exception.remedy == "name one of these: 0, 1, 2, 3, 4"
    file = next(f for f in read_checkpoint(copy, 4).files if f.rank == 0 and f.role == "rank")
    _flip(copy / file.name, next(e for e in file.entries if e.rows).tensors["weight"].offset_bytes)
    damaged = runner.invoke(app, [*words, "--json"])
    assert damaged.exit_code == 4
    assert json.loads(damaged.stdout)["restore"]["faults"][0][0] == file.name
    assert not list(copy.glob("leases/*"))


def test_files_that_are_removed_during_a_check_are_no_damage(copy: Path) -> None:
    bucket = Bucket()
    for path in copy.rglob("*"):
        if path.is_file():
            bucket.objects[f"b/run/{path.relative_to(copy)}"] = path.read_bytes()
    storage = bucket_storage(bucket)

    def retention(kind: str, name: str) -> None:
        if kind == "head" and name.startswith("data/"):
            bucket.before = lambda kind, name: None
            for gone in [name for name in bucket.objects if name.split("/")[-1] < "00000004"]:
                if not gone.endswith("FORMAT"):
                    del bucket.objects[gone]

    bucket.before = retention
    assert verify(storage, "full") == []
    bucket.objects.pop("b/run/data/00000005-s1a5-dense.safetensors")
    assert [(p.file, p.reason) for p in verify(storage, "full")] == [
        ("data/00000005-s1a5-dense.safetensors", "is missing")
    ]


def _changes(root: Path, first: int, second: int, **options: Callable[[int], None]) -> Changes:
    chains = [open_chain(root, read_checkpoint(root, seq - 1).name) for seq in (first, second)]
    return find_changes(*chains, **options)


@pytest.mark.parametrize(
    ("first", "second", "by", "rows"),
    [
        (1, 2, "ids", {"C1": 2, "C3": 1}),
        (1, 3, "ids", {"C1": 4, "C3": 1}),
        (2, 3, "ids", {"C1": 3}),
        (3, 3, "ids", {}),
        (3, 4, "values", {}),
        (1, 4, "values", {"C1": 4, "C3": 1}),
        (4, 5, "ids", {"C2": 3}),
        (2, 5, "values", {"C1": 3, "C2": 3}),
        (5, 2, "values", {"C1": 3, "C2": 3}),
    ],
)
def test_rows_that_changed_are_counted_once(
    history: Path, first: int, second: int, by: str, rows: dict[str, int]
) -> None:
    read: list[int] = []
    found = _changes(history, first, second, progress=read.append)
    assert found.by == by
    assert {table.name: table.rows_changed for table in found.tables if table.rows_changed} == rows
    assert (found.first_step, found.second_step) == (first - 1, second - 1)
    new = {file.name for file in found.files}
    assert new == {f.name for step in range(5) for f in read_checkpoint(history, step).files if f.name in new}
    if by == "ids":
        assert new == {f.name for step in range(first, second) for f in read_checkpoint(history, step).files}
        per_row = {"C1": 16 * 4 + 4 + 4, "C3": 16 * 4 + 4 + 4}
        if (first, second) == (1, 2):
            sizes = {table.name: table.bytes for table in found.tables}
            assert sizes == {"C1": 2 * per_row["C1"], "C2": 0, "C3": per_row["C3"], "C4": 0}


def test_checkpoints_of_other_tables_are_not_compared(history: Path, tmp_path: Path) -> None:
    Run(tmp_path / "ck", make_layout("row_wise", 2), make_truth(TABLES, ["row", "element"])).save(1)
    other = find_chain(tmp_path / "ck")
    mine = find_chain(history)
    assert mine is not None
    assert other is not None
    with pytest.raises(CheckpointError, match="different tables"):
        find_changes(mine, other)


def test_the_command_shows_what_changed(history: Path) -> None:
    runner = CliRunner()
    told = runner.invoke(app, ["show", str(history), "0", "2"])
    assert told.exit_code == 0
    assert "from step 0 to step 2: rows that were saved again" in told.output
    shown = json.loads(runner.invoke(app, ["show", str(history), "0", "2", "--json"]).stdout)
    table = next(table for table in shown["tables"] if table["name"] == "C1")
    assert (table["rows_changed"], table["share"]) == (4, 4 / 97)
    assert len(shown["files"]) == 6
    assert torch.tensor([file["bytes"] for file in shown["files"]]).min() > 0
