"""Any layout, written and read on any number of ranks, holds the same rows and optimizer state."""

from pathlib import Path

import pytest
import torch

from dlrm_scale.checkpoint import find_chain, restore
from dlrm_scale.checkpoint.storage.local_storage import LocalReadableFile
from dlrm_scale.errors import CheckpointError
from dlrm_scale.layout import ShardLayout, ShardRegion, TableLayout
from dlrm_scale.schema import TableSpec
from tests.checkpoint.simulated_run import (
    SHARDING_TYPES,
    TABLES,
    Run,
    load,
    load_chain,
    make_layout,
    make_truth,
    shards_of,
)

COLUMN_SPLITTING = {"column_wise", "grid_shard"}


def _targets() -> list[ShardLayout]:
    return [make_layout(kind, ranks) for kind in SHARDING_TYPES for ranks in (1, 2, 3, 4)]


def _trained(root: Path, layout: ShardLayout, states: list[str], **options: object) -> Run:
    run = Run(root, layout, make_truth(TABLES, states), **options)
    run.save(1)
    run.change("C1", [0, 5, 5, 96], 0.25)
    run.change("C2", [2], -1.0)
    run.save(2)
    run.change("C1", range(10, 90), 0.5)
    run.change("C3", range(40), 0.125)
    run.change("C4", [0], 3.0)
    run.save(3)
    return run


@pytest.mark.parametrize("kind", SHARDING_TYPES)
@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_state_by_element_restores_exactly_from_and_to_any_layout(tmp_path: Path, kind: str, ranks: int) -> None:
    run = _trained(tmp_path / "ck", make_layout(kind, ranks), ["element"], optimizer="adam")
    chain = find_chain(tmp_path / "ck", verify="full")
    assert chain is not None
    for target in _targets():
        assert load_chain(chain, target, run.truth, optimizer="adam").equals(run.truth)


@pytest.mark.parametrize("kind", SHARDING_TYPES)
@pytest.mark.parametrize("ranks", [1, 3, 4])
def test_row_wise_state_restores_exactly_wherever_the_column_split_stays(tmp_path: Path, kind: str, ranks: int) -> None:
    run = _trained(tmp_path / "ck", make_layout(kind, ranks), ["row", "element"])
    chain = find_chain(tmp_path / "ck", verify="full")
    assert chain is not None
    for target in _targets():
        same_split = (target.tables[0].sharding_type in COLUMN_SPLITTING) == (kind in COLUMN_SPLITTING)
        if same_split:
            assert load_chain(chain, target, run.truth, optimizer="rowwise_adagrad").equals(run.truth)
        else:
            with pytest.raises(CheckpointError, match="another column split exactly: C1, C2, C3, C4"):
                load_chain(chain, target, run.truth, optimizer="rowwise_adagrad")


def test_each_table_may_have_its_own_sharding_type(tmp_path: Path) -> None:
    mixed = make_layout(["grid_shard", "data_parallel", "row_wise", "table_wise"], 4)
    run = _trained(tmp_path / "ck", mixed, ["element"], optimizer="adam")
    target = make_layout(["row_wise", "column_wise", "data_parallel", "table_row_wise"], 3)
    assert load(tmp_path / "ck", target, run.truth, optimizer="adam").equals(run.truth)


def test_three_rows_on_four_ranks_leave_an_empty_shard_that_saves_and_loads(tmp_path: Path) -> None:
    layout = make_layout("row_wise", 4)
    assert [region.rows for region in layout.table("C2").regions] == [1, 1, 1, 0]
    run = _trained(tmp_path / "ck", layout, ["row"])
    for ranks in (1, 2, 3, 4):
        assert load(tmp_path / "ck", make_layout("row_wise", ranks), run.truth).equals(run.truth)


def test_a_run_goes_from_2_to_1_to_4_to_2_ranks_and_keeps_every_row(tmp_path: Path) -> None:
    root = tmp_path / "ck"
    truth = make_truth(TABLES, ["row"])
    chain = None
    for start, (ranks, kind) in enumerate([(2, "row_wise"), (1, "table_wise"), (4, "row_wise"), (2, "data_parallel")]):
        layout = make_layout(kind, ranks)
        if chain is not None:
            assert load(root, layout, truth).equals(truth)
        run = Run(root, layout, truth, resumed_from=chain, baseline_ratio=100)
        for step in (1, 2):
            run.change("C1", [start, 20 + step, 80], 0.5)
            outcome = run.save(10 * start + step)
            assert outcome.committed
            assert outcome.kind == ("baseline" if start == 0 and step == 1 else "delta")
        chain = find_chain(root)
    assert chain is not None
    assert chain.step == 32
    assert chain.tip.ranks == 2
    assert len(chain.manifests) == 8
    assert load(root, make_layout("row_wise", 3), truth).equals(truth)


def test_blocks_smaller_than_a_shard_are_put_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dlrm_scale.checkpoint.saving.snapshot.BLOCK_BYTES", 300)
    run = _trained(tmp_path / "ck", make_layout("row_wise", 2), ["row", "element"])
    chain = find_chain(tmp_path / "ck", verify="full")
    assert chain is not None
    weights = [e.tensors["weight"] for f in chain.manifests[0].files for e in f.entries if e.table == "C1"]
    assert [len(weight.blocks) for weight in weights] == [13, 12]
    for target in _targets():
        if target.tables[0].sharding_type not in COLUMN_SPLITTING:
            assert load(tmp_path / "ck", target, run.truth).equals(run.truth)


def test_rows_that_are_not_staged_are_written_from_the_live_tables(tmp_path: Path) -> None:
    layout = make_layout(["grid_shard", "data_parallel", "row_wise", "table_wise"], 3)
    run = _trained(tmp_path / "ck", layout, ["element"], optimizer="adam", staging_limit_bytes=0)
    run.change("C1", [7], 1.0)
    assert all(run.save(4).unstaged_bytes)
    assert load(tmp_path / "ck", make_layout("row_wise", 2), run.truth, optimizer="adam").equals(run.truth)


def test_a_snapshot_keeps_the_values_of_its_step_while_training_goes_on(tmp_path: Path) -> None:
    run = Run(tmp_path / "ck", make_layout("table_wise", 1), make_truth(TABLES, ["row"]))
    frozen = make_truth(TABLES, ["row"])
    engine = run.engines[0]
    dense = {"w": torch.ones(2)}
    engine.save(step=1, cursor={}, dense=dense, rank_state={}, extra={})
    run.change("C1", range(97), 9.0)
    dense["w"].fill_(5.0)
    assert engine.wait()[0].committed
    assert load(tmp_path / "ck", make_layout("row_wise", 2), frozen).equals(frozen)
    assert run.save(2).rows == 97


def test_split_row_state_becomes_the_mean_by_common_columns_only_when_allowed(tmp_path: Path) -> None:
    tables = TABLES[:1]
    truth = make_truth(tables, ["row"])
    layout = make_layout("column_wise", 2, tables)
    run = Run(tmp_path / "ck", layout, truth)
    for rank in (0, 1):
        run.shards[rank][0].state["momentum1"].fill_(1.0 + 2 * rank)
    run.save(1)
    for shards, touched in zip(run.shards, run.touched, strict=True):
        shards[0].state["momentum1"][5] += 4.0
        touched.mark(0, torch.tensor([5]))
    assert run.save(2).kind == "delta"
    expected = torch.full((97,), 2.0)
    expected[5] = 6.0
    target = make_layout("row_wise", 2, tables)
    loaded = load(tmp_path / "ck", target, truth, allow_split_row_state=True)
    assert torch.equal(loaded.weight["C1"], truth.weight["C1"])
    assert torch.equal(loaded.state["C1"]["momentum1"], expected)
    resumed = Run(tmp_path / "ck", target, truth, resumed_from=find_chain(tmp_path / "ck"))
    assert resumed.save(3).kind == "baseline"


def test_dense_tensors_cursor_and_extra_come_back_on_any_rank_count_and_rank_state_on_the_same(tmp_path: Path) -> None:
    run = Run(tmp_path / "ck", make_layout("row_wise", 2), make_truth(TABLES, ["row"]))
    dense = {"a": torch.randn(3, 5), "b": torch.tensor(7, dtype=torch.int64), "c": torch.zeros(0, 4).bfloat16()}
    extra = {"schedule": {"step": 9}, "auc": None}
    run.save_all(9, dense=dense, cursor={"epoch": 1, "rows": [1, 2]}, extra=extra, rows_consumed=640)
    chain = find_chain(tmp_path / "ck")
    assert chain is not None
    for ranks in (1, 2, 3):
        layout = make_layout("row_wise", ranks)
        for rank in range(ranks):
            got = restore(
                chain,
                layout=layout,
                shards=shards_of(layout, run.truth, rank, blank=True),
                rank=rank,
                ranks=ranks,
                optimizer="rowwise_adagrad",
            )
            assert (got.step, got.rows_consumed, got.cursor, got.extra) == (
                9,
                640,
                {"epoch": 1, "rows": [1, 2]},
                extra,
            )
            assert got.dense.keys() == dense.keys()
            assert all(torch.equal(got.dense[n], t) and got.dense[n].dtype == t.dtype for n, t in dense.items())
            if ranks == 2:
                assert got.rank_state is not None
                assert torch.equal(got.rank_state["rng"], torch.tensor([rank, 9], dtype=torch.uint8))
            else:
                assert got.rank_state is None


def test_a_rank_reads_only_what_it_needs_of_a_row_wise_baseline(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dlrm_scale.checkpoint.saving.snapshot.BLOCK_BYTES", 256)
    run = Run(tmp_path / "ck", make_layout("table_wise", 1), make_truth(TABLES, []), optimizer="sgd")
    run.save(1)
    chain = find_chain(tmp_path / "ck")
    assert chain is not None
    layout = make_layout("row_wise", 4)
    read: list[int] = []
    read_into = LocalReadableFile.read_into

    def counted(file: LocalReadableFile, buffer: memoryview, offset_bytes: int) -> None:
        read.append(len(buffer))
        read_into(file, buffer, offset_bytes)

    monkeypatch.setattr(LocalReadableFile, "read_into", counted)
    for rank in range(4):
        shards = shards_of(layout, run.truth, rank, blank=True)
        restore(chain, layout=layout, shards=shards, rank=rank, ranks=4, optimizer="sgd")
    weights = sum(4 * spec.rows * spec.dim for spec in TABLES)
    assert weights <= sum(read) < 1.2 * weights


def test_uneven_column_cuts_of_the_same_width_are_not_mixed_up(tmp_path: Path) -> None:
    spec = TableSpec(name="C1", rows=7, dim=24)

    def cut(at: int) -> ShardLayout:
        regions = tuple(
            ShardRegion(table="C1", row_start=0, row_end=7, column_start=start, column_end=end, rank=rank)
            for rank, (start, end) in enumerate([(0, at), (at, 24)])
        )
        return ShardLayout(ranks=2, tables=(TableLayout(spec=spec, sharding_type="column_wise", regions=regions),))

    run = Run(tmp_path / "ck", cut(8), make_truth([spec], ["element"]), optimizer="adam")
    run.save(1)
    run.change("C1", [3], 1.0)
    run.save(2)
    assert load(tmp_path / "ck", cut(16), run.truth, optimizer="adam").equals(run.truth)
