"""Snapshots use host memory that was allocated once; what doesn't fit is written while all ranks wait."""

import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from dlrm_scale.checkpoint.saving.staging import HostCopies, HostStaging, padded_bytes
from tests.checkpoint.faulty_storage import Trace, TracedStorage
from tests.checkpoint.simulated_run import TABLES, Run, load, make_layout, make_truth, on_ranks


def test_snapshots_lie_in_one_block_that_is_used_again() -> None:
    staging = HostStaging(1024)
    places = []
    for _ in range(2):
        staging.begin()
        first, second = staging.take((3, 5), torch.float32), staging.take((7,), torch.int64)
        staging.fill(first, torch.ones(3, 5))
        staging.fill(second, torch.arange(7))
        staging.settle()
        assert (first.sum().item(), second.tolist()) == (15.0, list(range(7)))
        assert second.data_ptr() - first.data_ptr() == padded_bytes((3, 5), torch.float32) == 64
        places.append(first.data_ptr())
    assert places[0] == places[1]
    assert staging.size_bytes == 1024


def test_copies_of_dense_tensors_are_made_in_the_same_memory_each_time() -> None:
    copies, live = HostCopies(), {"a": torch.zeros(4), "b": torch.zeros(2, 2, dtype=torch.float64)}
    first = copies.of(live)
    live["a"] += 1
    assert first["a"].tolist() == [0.0] * 4
    second = copies.of(live)
    assert second["a"].tolist() == [1.0] * 4
    assert {n: t.data_ptr() for n, t in first.items()} == {n: t.data_ptr() for n, t in second.items()}
    grown = copies.of({"a": torch.ones(5)})
    assert grown["a"].tolist() == [1.0] * 5


def test_a_save_makes_no_large_tensor(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(tmp_path / "ck", make_layout("table_wise", 1), make_truth(TABLES, ["row"]), staging_limit_bytes=1 << 16)
    run.save(1)
    made: list[int] = []
    empty = torch.empty

    def counting(*args: Any, **kwargs: Any) -> torch.Tensor:
        tensor = empty(*args, **kwargs)
        made.append(tensor.nbytes)
        return tensor

    monkeypatch.setattr(torch, "empty", counting)
    run.change("C1", range(50), 1.0)
    run.save(2)
    assert max(made) < 50 * 16 * 4  # row ids alone, never the rows


def test_of_a_save_that_does_not_fit_every_rank_hears_which_rank_had_how_much(tmp_path: Path) -> None:
    root = tmp_path / "ck"
    limits = [1 << 20, 2048]
    layout = make_layout("row_wise", 2)
    run = Run(root, layout, make_truth(TABLES, ["row"]), staging_limit_bytes=limits, staging_is_short=True)
    held = 48 * 16 + 1 * 8 + 20 * 16  # rows of rank 1, with 4 bytes of state a row
    expected = sum(padded_bytes((r, c), torch.float32) for r, c in ((48, 16), (1, 8), (20, 16)))
    expected += sum(padded_bytes((r,), torch.float32) for r in (48, 1, 20))
    assert expected > 4 * held > limits[1]
    assert [o.unstaged_bytes for o in run.save_all(1)] == [(0, expected)] * 2
    run.change("C1", [3, 60], 1.0)
    assert [o.unstaged_bytes for o in run.save_all(2)] == [(0, 0)] * 2
    assert load(root, make_layout("table_wise", 1), run.truth).equals(run.truth)


@pytest.mark.parametrize("short", [True, False])
def test_ranks_wait_for_the_one_that_writes_within_its_save_and_only_where_memory_is_short(
    tmp_path: Path, short: bool
) -> None:
    returned, went_on = threading.Event(), []
    trace = Trace()
    storages = [TracedStorage(tmp_path / "ck", trace) for _ in range(2)]
    layout = make_layout("row_wise", 2)
    limits = [1 << 20, 0]
    run = Run(
        tmp_path / "ck",
        layout,
        make_truth(TABLES, ["row"]),
        storages=storages,
        staging_limit_bytes=limits,
        staging_is_short=short,
    )

    def act(index: int, operation: str, name: str) -> None:
        if operation == "sync" and "-r1." in name:
            went_on.append(returned.wait(0.5 if short else 60))

    trace.act = act

    def one(rank: int) -> bool:
        run.engines[rank].save(step=1, cursor={}, dense={}, rank_state={}, extra={})
        if rank == 0:
            returned.set()
        return run.engines[rank].wait()[-1].committed

    assert on_ranks(2, one) == [True, True]
    assert went_on == [not short]


def test_a_rank_that_fails_before_it_writes_holds_up_nobody(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    layout = make_layout("row_wise", 2)
    run = Run(
        tmp_path / "ck", layout, make_truth(TABLES, ["row"]), staging_limit_bytes=[1 << 20, 0], staging_is_short=True
    )
    monkeypatch.setattr(run.touched[1], "freeze", lambda: (_ for _ in ()).throw(MemoryError("no memory")))
    assert [o.committed for o in run.save_all(1)] == [False, False]
    monkeypatch.undo()
    run.set_vote_timeout(0.3)
    run.engines[0].save(step=2, cursor={}, dense={}, rank_state={}, extra={})
    assert "no vote from rank 1" in str(run.engines[0].wait()[-1].error)
