"""What a save holds in memory besides the tables: row ids only where rows are named one by one."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from dlrm_scale.checkpoint.saving.snapshot import choose_rows, staging_bytes
from dlrm_scale.schema import TableSpec
from dlrm_scale.touched_rows import TouchedRows
from tests.checkpoint.simulated_run import TABLES, Run, make_layout, make_truth, shards_of

ROWS = 300_000
BIG = TableSpec(name="C1", rows=ROWS, dim=4)


class _LargestInteger(TorchDispatchMode):
    """Notes the bytes of the largest tensor of wide integers that is made."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = function(*args, **(kwargs or {}))
        for tensor in made if isinstance(made, (tuple, list)) else (made,):
            if isinstance(tensor, torch.Tensor) and tensor.dtype in (torch.int32, torch.int64):
                self.bytes = max(self.bytes, tensor.untyped_storage().nbytes())
        return made


def _integer_bytes_of(work: Callable[[], object]) -> int:
    with _LargestInteger() as made:
        work()
    return made.bytes


def test_a_baseline_of_touched_rows_makes_no_ids(tmp_path: Path) -> None:
    run = Run(tmp_path / "ck", make_layout("table_wise", 1, [BIG]), make_truth([BIG], ["row"]))
    run.touched[0].current(0)[: ROWS // 2] = 1
    made = _integer_bytes_of(
        lambda: run.engines[0].save(step=1, cursor={}, dense={}, rank_state={}, extra={}),
    )
    outcome = run.engines[0].wait()[-1]
    assert (outcome.kind, outcome.committed, outcome.rows) == ("baseline", True, ROWS)
    assert made < 1000


def test_a_shard_touched_almost_everywhere_makes_no_ids() -> None:
    layout = make_layout("table_wise", 1, [BIG])
    shards = shards_of(layout, make_truth([BIG], []), 0)
    touched = torch.ones(ROWS, dtype=torch.uint8)
    touched[: ROWS // 20] = 0
    assert _integer_bytes_of(lambda: choose_rows(layout, shards, [touched], 0)) < 1000
    assert choose_rows(layout, shards, [touched], 0)[0].rows == ROWS


def test_ids_take_4_bytes_a_touched_row(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dlrm_scale.checkpoint.saving.snapshot._MAP_BLOCK_ROWS", 1 << 15)
    layout = make_layout("table_wise", 1, [BIG])
    shards = shards_of(layout, make_truth([BIG], []), 0)
    touched = (torch.arange(ROWS) % 3 == 1).to(torch.uint8)
    expected = touched.nonzero().squeeze(1)
    made = _integer_bytes_of(lambda: choose_rows(layout, shards, [touched], 0))
    (snapshot,) = choose_rows(layout, shards, [touched], 0)
    assert snapshot.ids_local is not None
    assert snapshot.ids_local.dtype == torch.int32
    assert torch.equal(snapshot.ids_local.long(), expected)
    assert made == 4 * len(expected)
    assert staging_bytes([snapshot]) == len(expected) * 4 * BIG.dim


def test_a_freeze_that_fails_forgets_no_row(monkeypatch: pytest.MonkeyPatch) -> None:
    touched = TouchedRows([5, 4])
    touched.enabled = True
    touched.mark(1, torch.tensor([2]))
    with monkeypatch.context() as patch:
        patch.setattr(torch, "zeros_like", lambda *_: (_ for _ in ()).throw(MemoryError("no memory")))
        with pytest.raises(MemoryError):
            touched.freeze()
    frozen = touched.freeze()
    assert [frozen_map.tolist() for frozen_map in frozen] == [[0] * 5, [0, 0, 1, 0]]
    with pytest.raises(RuntimeError, match="still open"):
        touched.freeze()
    touched.mark(1, torch.tensor([0]))
    touched.merge_back()
    assert touched.current(1).tolist() == [1, 0, 1, 0]


def test_a_rank_without_memory_for_the_next_marks_votes_no(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(tmp_path / "ck", make_layout("row_wise", 2), make_truth(TABLES, ["row"]))
    run.save(1)
    run.change("C1", [3, 60], 1.0)
    freeze = run.touched[1].freeze
    monkeypatch.setattr(run.touched[1], "freeze", lambda: (_ for _ in ()).throw(MemoryError("no memory")))
    assert ["rank 1: MemoryError" in str(o.error) for o in run.save_all(2)] == [True, True]
    monkeypatch.setattr(run.touched[1], "freeze", freeze)
    assert run.save(3).rows == 2
