"""Tables and optimizer state that don't match are listed by name and stop the restore."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from dlrm_scale.checkpoint import CheckpointEngine, find_chain, restore
from dlrm_scale.checkpoint.saving.staging import HostStaging
from dlrm_scale.config import CheckpointConfig
from dlrm_scale.errors import CheckpointError, StorageError
from dlrm_scale.schema import TableSpec
from dlrm_scale.touched_rows import TouchedRows
from tests.checkpoint.simulated_run import TABLES, Run, load, make_layout, make_truth, on_ranks, shards_of


def _saved(tmp_path: Path, states: list[str], optimizer: str = "rowwise_adagrad") -> Path:
    run = Run(tmp_path / "ck", make_layout("row_wise", 2), make_truth(TABLES, states), optimizer=optimizer)
    run.save(1)
    return tmp_path / "ck"


def _refusal(
    root: Path, tables: tuple[TableSpec, ...], states: list[str], optimizer: str = "rowwise_adagrad"
) -> CheckpointError:
    layout = make_layout("row_wise", 1, tables)
    with pytest.raises(CheckpointError) as caught:
        load(root, layout, make_truth(tables, states), optimizer=optimizer)
    assert caught.value.remedy is not None
    return caught.value


def test_missing_unexpected_and_resized_tables_are_all_listed(tmp_path: Path) -> None:
    changed = (
        TableSpec(name="C1", rows=120, dim=16),
        TableSpec(name="C2", rows=3, dim=16),
        TableSpec(name="C33", rows=40, dim=16),
        TABLES[3],
    )
    message = _refusal(_saved(tmp_path, ["row"]), changed, ["row"]).message
    assert "table C1 is 97 x 16 in the checkpoint, 120 x 16 in the model" in message
    assert "table C2 is 3 x 8 in the checkpoint, 3 x 16 in the model" in message
    assert "table C33 is missing in the checkpoint" in message
    assert "table C3 is unexpected: the model has none" in message
    assert "C4" not in message


def test_a_refused_restore_changes_nothing(tmp_path: Path) -> None:
    root = _saved(tmp_path, ["row"])
    tables = TABLES[:3]
    layout = make_layout("row_wise", 1, tables)
    shards = shards_of(layout, make_truth(tables, ["row"], seed=5), 0)
    before = [s.weight.clone() for s in shards]
    chain = find_chain(root)
    assert chain is not None
    with pytest.raises(CheckpointError, match="table C4 is unexpected"):
        restore(chain, layout=layout, shards=shards, rank=0, ranks=1, optimizer="rowwise_adagrad")
    assert all(torch.equal(s.weight, w) for s, w in zip(shards, before, strict=True))


def test_missing_and_unexpected_optimizer_state_is_listed(tmp_path: Path) -> None:
    root = _saved(tmp_path, ["row"])
    message = _refusal(root, TABLES, ["row", "element"]).message
    assert message.count("optimizer state moment2 of table") == 4
    assert "is missing in the checkpoint" in message
    message = _refusal(root, TABLES, []).message
    assert "optimizer state momentum1 of table C1 is unexpected" in message


def test_state_of_another_shape_is_listed(tmp_path: Path) -> None:
    root = _saved(tmp_path, ["row"])
    truth = make_truth(TABLES, ["row"])
    for name, state in truth.state.items():
        state["momentum1"] = torch.zeros_like(truth.weight[name])
    with pytest.raises(
        CheckpointError, match="momentum1 of table C2 is F32 per row in the checkpoint, F32 per element"
    ):
        load(root, make_layout("row_wise", 1), truth)


def test_another_optimizer_is_refused(tmp_path: Path) -> None:
    message = _refusal(_saved(tmp_path, [], "sgd"), TABLES, [], "adam").message
    assert "the tables' optimizer is sgd in the checkpoint, adam in the model" in message


def test_a_changed_model_starts_with_a_new_baseline(tmp_path: Path) -> None:
    root = _saved(tmp_path, ["row"])
    chain = find_chain(root)
    tables = TABLES[:3]
    run = Run(root, make_layout("row_wise", 2, tables), make_truth(tables, ["row"]), resumed_from=chain)
    assert run.save(2).kind == "baseline"


def test_a_chain_of_another_run_is_not_continued(tmp_path: Path) -> None:
    chain = find_chain(_saved(tmp_path, ["row"]))
    run = Run(tmp_path / "new", make_layout("row_wise", 2), make_truth(TABLES, ["row"]), resumed_from=chain)
    assert run.save(2).kind == "baseline"


def test_shards_that_are_not_the_layouts_are_our_own_mistake(tmp_path: Path) -> None:
    layout = make_layout("row_wise", 2)
    shards = shards_of(layout, make_truth(TABLES, []), 1)
    with pytest.raises(ValueError, match="aren't those of the layout"):
        CheckpointEngine(
            tmp_path / "ck",
            layout=layout,
            shards=shards,
            touched=TouchedRows([s.region.rows for s in shards]),
            rank=0,
            ranks=2,
            store=torch.distributed.HashStore(),
            config=CheckpointConfig(),
            optimizer="sgd",
            staging=HostStaging(1 << 20),
        )


def test_a_folder_that_can_not_be_made_is_an_error_and_no_damage_on_every_rank(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("in the way")
    told: list[str] = []

    def each(ranks: int, work: Callable[[int], object]) -> list[object]:
        def one(rank: int) -> object:
            with pytest.raises(StorageError, match="can't open checkpoints") as caught:
                work(rank)
            told.append(str(caught.value))
            assert caught.value.exit_code == 1
            return None

        on_ranks(ranks, one)
        raise StopIteration

    monkeypatch.setattr("tests.checkpoint.simulated_run.on_ranks", each)
    with pytest.raises(StopIteration):
        Run(tmp_path / "file" / "ck", make_layout("row_wise", 2), make_truth(TABLES, []))
    assert told[0] == told[1]


RESIZED = (
    TableSpec(name="C1", rows=120, dim=16),  # grown
    TABLES[1],
    TableSpec(name="C3", rows=25, dim=16),  # shrunk
    TableSpec(name="C4", rows=1, dim=4),
    TableSpec(name="C9", rows=5, dim=8),  # new
)


def _changed(root: Path) -> Run:
    """A baseline and a delta."""
    run = Run(root, make_layout("row_wise", 2), make_truth(TABLES, ["row"]))
    run.save(1)
    run.change("C1", [3, 96], 0.5)
    run.change("C3", [1, 24, 25, 39], 0.25)
    run.save(2)
    return run


@pytest.mark.parametrize("kind", ["row_wise", "table_wise", "data_parallel"])
def test_grown_shrunk_and_new_tables_get_what_the_checkpoint_has_and_the_rest_is_left_alone(
    tmp_path: Path, kind: str
) -> None:
    run = _changed(tmp_path / "ck")
    chain = find_chain(tmp_path / "ck")
    assert chain is not None
    for ranks in (1, 3):
        layout = make_layout(kind, ranks, RESIZED)
        fresh = make_truth(RESIZED, ["row"], seed=7)
        for rank in range(ranks):
            shards = shards_of(layout, fresh, rank)
            restored = restore(
                chain,
                layout=layout,
                shards=shards,
                rank=rank,
                ranks=ranks,
                optimizer="rowwise_adagrad",
                allow_new_tables=True,
                allow_resized_tables=True,
            )
            assert restored.changes.new == ("C9",)
            assert restored.changes.resized == {"C1": (97, 120), "C3": (40, 25)}
            for shard in shards:
                name = shard.region.table
                kept = restored.changes.rows_before(name, fresh.weight[name].shape[0])
                for now, old, new in (
                    (shard.weight, run.truth.weight.get(name), fresh.weight[name]),
                    (
                        shard.state["momentum1"],
                        run.truth.state.get(name, {}).get("momentum1"),
                        fresh.state[name]["momentum1"],
                    ),
                ):
                    expected = new.clone()
                    if old is not None:
                        expected[:kept] = old[:kept]
                    assert torch.equal(now, expected[shard.region.row_start : shard.region.row_end])


def test_each_flag_allows_its_own_kind_of_change_alone(tmp_path: Path) -> None:
    _changed(tmp_path / "ck")
    truth = make_truth(RESIZED, ["row"])
    layout = make_layout("row_wise", 1, RESIZED)
    with pytest.raises(CheckpointError, match="doesn't fit") as caught:
        load(tmp_path / "ck", layout, truth, allow_new_tables=True)
    assert "C9" not in caught.value.message
    assert "table C1 is 97 x 16 in the checkpoint, 120 x 16 in the model" in caught.value.message
    with pytest.raises(CheckpointError, match="doesn't fit") as caught:
        load(tmp_path / "ck", layout, truth, allow_resized_tables=True)
    assert "table C9 is missing in the checkpoint" in caught.value.message
    assert "C1" not in caught.value.message
    wide = (TableSpec(name="C1", rows=97, dim=32), *TABLES[1:3])
    with pytest.raises(CheckpointError, match="doesn't fit") as caught:
        load(
            tmp_path / "ck",
            make_layout("row_wise", 1, wide),
            make_truth(wide, ["row"]),
            allow_new_tables=True,
            allow_resized_tables=True,
        )
    assert "table C1 is 97 x 16 in the checkpoint, 97 x 32 in the model" in caught.value.message
    assert "table C4 is unexpected: the model has none" in caught.value.message


def test_after_a_resize_a_fresh_baseline_is_written_and_deltas_follow_it(tmp_path: Path) -> None:
    root = tmp_path / "ck"
    _changed(root)
    truth = make_truth(RESIZED, ["row"], seed=7)
    layout = make_layout("row_wise", 2, RESIZED)
    chain = find_chain(root)
    assert chain is not None
    for rank in range(2):
        shards = shards_of(layout, truth, rank)
        restore(
            chain,
            layout=layout,
            shards=shards,
            rank=rank,
            ranks=2,
            optimizer="rowwise_adagrad",
            allow_new_tables=True,
            allow_resized_tables=True,
        )
        for shard in shards:
            region = shard.region
            truth.weight[region.table][region.row_start : region.row_end] = shard.weight
            truth.state[region.table]["momentum1"][region.row_start : region.row_end] = shard.state["momentum1"]
    run = Run(root, layout, truth, resumed_from=chain)
    assert run.save(3).kind == "baseline"
    run.change("C1", [110], 1.0)
    run.change("C9", [4], 1.0)
    assert run.save(4).kind == "delta"
    assert load(root, make_layout("table_wise", 1, RESIZED), run.truth).equals(run.truth)
