"""A resume that meets a damaged file takes the next best checkpoint, on all ranks, and says what was lost."""

import json
import shutil
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from dlrm_scale.checkpoint import open_chain
from dlrm_scale.checkpoint.files.manifest import FileRecord, Manifest
from dlrm_scale.data.dataset.dataset import Dataset
from dlrm_scale.errors import CheckpointError, ConfigError
from dlrm_scale.sharding.ranks import close_ranks, init_ranks
from dlrm_scale.train.run_folder import resolve_run
from dlrm_scale.train.setup import build_on_ranks
from dlrm_scale.train.starting_values import choose_start, fill_model
from tests.checkpoint.merging import merge
from tests.support.datasets import make_dataset
from tests.support.rank_runner import run_ranks
from tests.support.training import log_records, losses, read_tables, run_training, same_tables

STEPS = (3, 6, 9, 12)
SETTINGS = ["sharding.kind=row_wise", "train.epochs=2", "checkpoint.keep_baselines=9"]


@dataclass
class History:
    """A run with two chains of a baseline and a delta, the same run without an end, and its tables at each step."""

    run: Path
    straight: Path
    dataset: Path
    tables: dict[int, dict[str, np.ndarray]]
    manifests: dict[int, Manifest]


@pytest.fixture(scope="module")
def history(tmp_path_factory: pytest.TempPathFactory) -> History:
    base = tmp_path_factory.mktemp("damage")
    make_dataset(base / "dataset", 227, table_rows=[3, 4, 10, 2, *[40] * 22])
    run = base / "run"
    tables = {}
    # a tiny ratio makes the delta after a delta a baseline: 3 and 9 are baselines, 6 and 12 deltas
    for step in STEPS:
        stop = [f"train.max_steps={step}"]
        if step == STEPS[0]:
            run_training(2, run, base / "dataset", [*SETTINGS, "checkpoint.baseline_ratio=1e-9", *stop])
        else:
            run_training(2, run, base / "dataset", stop, resume=True)
        tables[step] = read_tables(run)
    run_training(2, base / "straight", base / "dataset", SETTINGS)
    manifests = {}
    for path in sorted((run / "checkpoints" / "manifests").iterdir()):
        tip = open_chain(run / "checkpoints", f"manifests/{path.name}").tip
        manifests[tip.step] = tip
    assert [manifests[step].kind for step in STEPS] == ["baseline", "delta", "baseline", "delta"]
    return History(run=run, straight=base / "straight", dataset=base / "dataset", tables=tables, manifests=manifests)


@pytest.fixture
def damaged(history: History, tmp_path: Path) -> Path:
    """A copy to be damaged."""
    shutil.copytree(history.run, tmp_path / "run")
    return tmp_path / "run"


def _flip(path: Path, position: int) -> None:
    data = bytearray(path.read_bytes())
    data[position] ^= 16
    path.write_bytes(data)


def _used(file: FileRecord, chain_tip: bool) -> list[int]:
    """A byte of each tensor that a restore on two ranks uses: its last."""
    tensors = [tensor for entry in file.entries for tensor in entry.tensors.values()]
    if chain_tip:
        tensors += file.tensors.values()
    return [tensor.offset_bytes + tensor.size_bytes - 1 for tensor in tensors if tensor.size_bytes]


def _rank_file(manifest: Manifest, rank: int) -> FileRecord:
    return next(file for file in manifest.files if file.role == "rank" and file.rank == rank)


@dataclass
class Filled:
    """What a rank holds after a restore: places and values of its shards, dense tensors, and what it was told."""

    step: int
    shards: list[tuple[str, int, str, np.ndarray]]
    dense: dict[str, np.ndarray]
    notes: list[str]


def _fill(run: str, dataset: str, step: int | None) -> Filled:
    request = resolve_run(None, [f"run.path={run}"], resume=True, step=step)
    ranks = init_ranks("cpu", 60)
    try:
        opened = Dataset.open(Path(dataset))
        model = build_on_ranks(request.config, opened, ranks)
        chain, continues = choose_start(request, ranks)
        notes: list[str] = []
        restored = fill_model(model, chain, continues, opened, request, ranks, notes)
        assert restored is not None
        shards = [
            (shard.region.table, shard.region.row_start, name, values.detach().clone().numpy())
            for shard in model.sharded.local_shards
            for name, values in (("weight", shard.weight), *shard.state.items())
        ]
        dense = {name: value.detach().clone().numpy() for name, value in model.sharded.dense_state().items()}
        return Filled(step=restored.step, shards=shards, dense=dense, notes=notes)
    finally:
        close_ranks()


def _check(filled: list[Filled], tables: dict[str, np.ndarray]) -> None:
    """Every rank has the tables' values, bit for bit."""
    rows = {name: 0 for name in tables if not name.startswith("dense.")}
    for rank in filled:
        for table, start, name, values in rank.shards:
            assert np.array_equal(values, tables[f"{table}.{name}"][start : start + len(values)])
            rows[f"{table}.{name}"] += len(values)
        for name, values in rank.dense.items():
            assert np.array_equal(values, tables[f"dense.{name}"])
    assert rows == {name: len(tables[name]) for name in rows}


@pytest.mark.slow
def test_a_flipped_bit_in_any_file_of_the_chain_leads_two_ranks_to_the_next_best_one(
    history: History, damaged: Path
) -> None:
    newest_sound = {9: 6, 12: 9}
    for step, instead in newest_sound.items():
        for file in history.manifests[step].files:
            positions = _used(file, chain_tip=step == STEPS[-1])
            if not positions:
                assert file.role == "dense"  # that of a baseline under a delta, which no restore reads
                continue
            path = damaged / "checkpoints" / file.name
            # the first tensor of a file, and the last: what comes before it has been written to the live tables by then
            for position in (positions[0], positions[-1]):
                _flip(path, position)
                filled = run_ranks(2, _fill, str(damaged), str(history.dataset), None)
                assert [rank.step for rank in filled] == [instead, instead]
                _check(filled, history.tables[instead])
                told = " ".join(filled[0].notes)
                assert f"{file.name}, tensor" in told
                assert f"{12 - instead} steps are lost: step {instead} is the newest" in told
                shutil.copy(history.run / "checkpoints" / file.name, path)
    filled = run_ranks(2, _fill, str(damaged), str(history.dataset), None)
    assert filled[0].step == 12
    _check(filled, history.tables[12])


def test_damaged_manifests_lead_to_the_next_best_checkpoint_too(history: History, damaged: Path) -> None:
    for step, instead in ((12, 9), (9, 6)):
        _flip(damaged / "checkpoints" / history.manifests[step].name, 300)
        filled = run_ranks(2, _fill, str(damaged), str(history.dataset), None)
        assert [rank.step for rank in filled] == [instead, instead]
        _check(filled, history.tables[instead])
        assert history.manifests[step].name in " ".join(filled[0].notes)


def test_damage_in_two_chains_one_after_the_other_is_stepped_over(history: History, damaged: Path) -> None:
    for step, rank in ((9, 0), (6, 1)):
        file = _rank_file(history.manifests[step], rank)
        _flip(damaged / "checkpoints" / file.name, _used(file, chain_tip=False)[-1])
    filled = run_ranks(2, _fill, str(damaged), str(history.dataset), None)
    assert [rank.step for rank in filled] == [3, 3]
    _check(filled, history.tables[3])
    assert "9 steps are lost" in " ".join(filled[0].notes)


def test_without_a_sound_chain_every_file_is_named_and_nothing_begins_anew(history: History, damaged: Path) -> None:
    for step in (3, 9):
        file = _rank_file(history.manifests[step], 0)
        _flip(damaged / "checkpoints" / file.name, _used(file, chain_tip=False)[0])
    with pytest.raises(CheckpointError, match=r"no checkpoint in .* is valid") as caught:
        run_ranks(2, _fill, str(damaged), str(history.dataset), None)
    for step in (3, 9):
        assert _rank_file(history.manifests[step], 0).name in caught.value.message


def test_a_checkpoint_that_was_asked_for_is_not_replaced_by_another(history: History, damaged: Path) -> None:
    file = _rank_file(history.manifests[9], 1)
    _flip(damaged / "checkpoints" / file.name, _used(file, chain_tip=False)[0])
    with pytest.raises(CheckpointError, match=rf"\(step 12\) is damaged:\s+{file.name}, tensor") as caught:
        run_ranks(2, _fill, str(damaged), str(history.dataset), 12)
    assert caught.value.remedy is not None
    assert "--resume auto" in caught.value.remedy


def test_a_checkpoint_that_was_asked_for_is_restored_by_another_way_if_a_merge_left_one(
    history: History, damaged: Path
) -> None:
    (merged,) = merge(damaged / "checkpoints", "baseline", 12)
    file = _rank_file(merged.manifest, 1)
    _flip(damaged / "checkpoints" / file.name, _used(file, chain_tip=True)[0])
    filled = run_ranks(2, _fill, str(damaged), str(history.dataset), 12)
    assert [rank.step for rank in filled] == [12, 12]
    _check(filled, history.tables[12])
    told = " ".join(filled[0].notes)
    assert f"went by other files, as {file.name}, tensor" in told
    assert "lost" not in told


def test_a_new_run_is_not_put_among_the_checkpoints_of_another(history: History, damaged: Path, tmp_path: Path) -> None:
    settings = [*SETTINGS, "train.max_steps=1", f"checkpoint.path={damaged / 'checkpoints'}"]
    with pytest.raises(ConfigError, match=rf"belongs to another run, {history.run} .*start 4 .*holds its"):
        run_training(2, tmp_path / "new", history.dataset, settings)
    assert not (tmp_path / "new").exists()
    assert len(list((damaged / "checkpoints" / "starts").iterdir())) == 4


def test_training_goes_on_from_the_next_best_position_as_if_nothing_had_happened(
    history: History, damaged: Path
) -> None:
    file = _rank_file(history.manifests[12], 1)
    _flip(damaged / "checkpoints" / file.name, _used(file, chain_tip=True)[-1])
    observed = run_training(2, damaged, history.dataset, ["train.max_steps=0"], resume=True)
    assert observed[0].result.start_step == 9
    assert losses(damaged) == losses(history.straight)
    assert same_tables(read_tables(damaged), read_tables(history.straight))
    report = json.loads((damaged / "result.json").read_text())["restore"]
    assert (report["step"], report["checkpoints"]) == (9, 1)
    assert report["chain_bytes"] == history.manifests[9].size_bytes
    # each row once, the dense tensors by both ranks; headers aren't read
    dense = next(file.size_bytes for file in history.manifests[9].files if file.role == "dense")
    assert report["chain_bytes"] < report["read_bytes"] < report["chain_bytes"] + dense
    assert [file.name in reason for reason in report["damaged"]] == [True]
    # what follows the older checkpoint is newer than the damaged one
    assert log_records(damaged, "checkpoint")[-1]["step"] == 16
