"""Whole tables come out of a chain as a restore gives them, in any window and within bounds."""

from pathlib import Path

import pytest
import torch

from dlrm_scale.checkpoint import find_chain
from dlrm_scale.checkpoint.chain.chain import Chain
from dlrm_scale.checkpoint.chain.table_stream import TableStream, state_columns
from dlrm_scale.errors import CheckpointError
from tests.checkpoint.merging import go_on, merge, start
from tests.checkpoint.simulated_run import SHARDING_TYPES, TABLES, Run, Truth, load_chain, make_layout, make_truth


def _run(root: Path, kind: str, states: list[str], block_bytes: int, monkeypatch: pytest.MonkeyPatch) -> Run:
    monkeypatch.setattr("dlrm_scale.checkpoint.saving.snapshot.BLOCK_BYTES", block_bytes)
    run = Run(root, make_layout(kind, 2), make_truth(TABLES, states), baseline_ratio=1e9)
    run.save(1)
    for step, ids in enumerate(([0, 5, 96], range(0, 97, 2), [], range(30, 60)), 2):
        run.change("C1", list(ids), 0.5)
        run.change("C3", [step, 39], 0.25)
        assert run.save(step).committed
    return run


def _chain(root: Path) -> Chain:
    chain = find_chain(root)
    assert chain is not None
    return chain


def _assert_equal(chain: Chain, truth: Truth, window_bytes: int, kept_bytes: int) -> None:
    for table in chain.tip.tables:
        stream = TableStream(chain, table, window_bytes=window_bytes, kept_bytes=kept_bytes)
        next_row = 0
        for block in stream:
            assert block.row_start == next_row
            rows = slice(next_row, next_row + len(block.weight))
            next_row = rows.stop
            assert torch.equal(block.weight, truth.weight[table.name][rows])
            for column in stream.state:
                expected = truth.state[table.name][column.state][rows]
                assert torch.equal(block.state[column.name], expected), column
        assert next_row == table.rows


@pytest.mark.parametrize(
    ("kind", "states"),
    [*((kind, ["row", "element"]) for kind in SHARDING_TYPES), ("row_wise", []), ("grid_shard", ["row"])],
)
def test_a_table_is_as_it_was_saved_under_every_sharding_type(
    kind: str, states: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = _run(tmp_path / "ck", kind, states, 512, monkeypatch)
    chain = _chain(tmp_path / "ck")
    assert len(chain.manifests) == 5
    for window_bytes, kept_bytes in [(1, 0), (1000, 1 << 20), (1000, 300), (1 << 20, 0)]:
        _assert_equal(chain, run.truth, window_bytes, kept_bytes)


def test_blocks_are_read_once_if_they_may_be_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _run(tmp_path / "ck", "row_wise", ["row"], 512, monkeypatch)
    chain = _chain(tmp_path / "ck")
    table = chain.tip.table_schema()["C1"]
    stored = sum(
        t.size_bytes
        for m in chain.manifests
        for f in m.files
        for e in f.entries
        if e.table == "C1"
        for t in e.tensors.values()
    )
    read = {}
    for kept_bytes in (0, 1 << 20):
        stream = TableStream(chain, table, window_bytes=640, kept_bytes=kept_bytes)
        for _ in stream:
            assert kept_bytes - stream._budget.left_bytes <= kept_bytes
        assert stream._budget.left_bytes == kept_bytes
        read[kept_bytes] = stream.bytes_read
    assert read[1 << 20] == stored
    assert read[0] > stored


def test_row_wise_state_of_column_shards_is_named_by_its_columns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _run(tmp_path / "ck", "column_wise", ["row", "element"], 512, monkeypatch)
    chain = _chain(tmp_path / "ck")
    names = [column.name for column in state_columns(chain, chain.tip.table_schema()["C1"])]
    assert names == ["moment2", "momentum1[0:8]", "momentum1[8:16]"]


def test_state_of_different_column_splits_in_one_chain_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _run(tmp_path / "ck", "column_wise", ["row"], 512, monkeypatch)
    chain = _chain(tmp_path / "ck")
    other = _run(tmp_path / "other", "row_wise", ["row"], 512, monkeypatch)
    assert other is not None
    mixed = Chain(
        storage=chain.storage,
        manifests=(_chain(tmp_path / "other").manifests[0], *chain.manifests[1:]),
        tip_sha256=chain.tip_sha256,
    )
    with pytest.raises(CheckpointError, match="C1 was kept under different column splits"):
        state_columns(mixed, chain.tip.table_schema()["C1"])


def test_rows_that_no_file_has_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _run(tmp_path / "ck", "row_wise", ["row"], 512, monkeypatch)
    chain = _chain(tmp_path / "ck")
    baseline = chain.manifests[0]
    cut = tuple(file.model_copy(update={"entries": ()}) if file.rank == 1 else file for file in baseline.files)
    holed = Chain(
        storage=chain.storage,
        manifests=(baseline.model_copy(update={"files": cut}), *chain.manifests[1:]),
        tip_sha256=chain.tip_sha256,
    )
    stream = TableStream(holed, chain.tip.table_schema()["C1"])
    with pytest.raises(CheckpointError, match="768 of 1552 values of table C1, rows 0 to 97, are in no file"):
        next(iter(stream))


@pytest.mark.parametrize("codecs", [{}, {"delta_rows": "int8", "delta_state": "bf16"}])
@pytest.mark.parametrize("kind", ["row_wise", "grid_shard"])
def test_merged_and_encoded_chains_give_what_a_restore_gives(
    kind: str, codecs: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dlrm_scale.checkpoint.saving.snapshot.BLOCK_BYTES", 512)
    run = start(tmp_path / "ck", make_layout(kind, 2), make_truth(TABLES, ["row", "element"]), **codecs)
    for to in (None, "delta", "baseline"):
        if to is not None:
            merge(tmp_path / "ck", to)
        go_on(run, range(5))
        run.truth.weight["C1"][3] = torch.linspace(-1e30, 1e30, 16)  # int8 would lose too much of such a row
        run.change("C1", [3], 0.0)
        assert run.save(9).committed
        chain = _chain(tmp_path / "ck")
        assert any(manifest.merge for manifest in chain.manifests) == (to is not None)
        restored = load_chain(chain, make_layout(kind, 2), run.truth, optimizer="rowwise_adagrad")
        _assert_equal(chain, restored, 1000, 1 << 20)
