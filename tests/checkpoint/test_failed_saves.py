"""A save that fails loses nothing: training goes on or stops as configured, and the next save has all rows."""

import copy
import errno
import json
import threading
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch

from dlrm_scale.checkpoint import SaveOutcome, find_chain, list_checkpoints, verify
from dlrm_scale.checkpoint.files.manifest_files import ManifestFile, read_manifests
from dlrm_scale.checkpoint.storage.storage import Storage
from dlrm_scale.errors import CheckpointError, SaveError
from tests.checkpoint.faulty_storage import Trace, TracedStorage, fail_at
from tests.checkpoint.simulated_run import TABLES, Run, load, make_layout, make_truth, on_ranks

NO_SPACE = OSError(errno.ENOSPC, "No space left on device")


def _traced_run(root: Path, trace: Trace, ranks: int = 2, **options: Any) -> Run:
    storages = [TracedStorage(root, trace) for _ in range(ranks)]
    return Run(root, make_layout("row_wise", ranks), make_truth(TABLES, ["row"]), storages=storages, **options)


def _operations_of_a_save(root: Path, **options: Any) -> tuple[int, int]:
    trace = Trace()
    run = _traced_run(root, trace, **options)
    run.save(1)
    run.change("C1", [3, 60], 1.0)
    begin = len(trace.operations)
    run.save(2)
    return begin, len(trace.operations)


@pytest.mark.parametrize(("staging_limit_bytes", "stride"), [(0, 4), (1 << 20, 1)])
def test_a_full_disk_at_any_operation_leaves_the_last_checkpoint_and_the_next_save_has_all_rows(
    tmp_path: Path, staging_limit_bytes: int, stride: int
) -> None:
    begin, end = _operations_of_a_save(tmp_path / "count", staging_limit_bytes=staging_limit_bytes)
    failures = 0
    for index in range(begin, end, stride):
        root = tmp_path / f"at{index}"
        trace = Trace()
        run = _traced_run(root, trace, staging_limit_bytes=staging_limit_bytes)
        run.save(1)
        before = copy.deepcopy(run.truth)
        run.change("C1", [3, 60], 1.0)
        trace.act = fail_at(index, NO_SPACE)
        outcomes = run.save_all(2)
        failed = trace.operations[index]
        # Only the removal of the temporary name comes after the commit.
        committed = failed == ("remove", "manifests/.00000002-s1a2.tmp")
        assert [o.committed for o in outcomes] == [committed] * 2, failed
        failures += not committed
        if not committed:
            assert all("No space left" in str(o.error) for o in outcomes)
        chain = find_chain(root, verify="full")
        assert chain is not None
        # What was linked and can't be synced stays, although nobody counts on it.
        there = committed or failed == ("sync_folder", "manifests")
        assert (chain.step, chain.skipped) == (2 if there else 1, ()), failed
        assert verify(root) == []
        assert load(root, make_layout("table_wise", 1), run.truth).equals(run.truth if there else before)
        run.change("C3", [1], 1.0)
        outcome = run.save(3)
        assert outcome.committed
        assert load(root, make_layout("table_wise", 2), run.truth).equals(run.truth)
    assert failures >= 12 / stride


def test_a_commit_counts_although_its_temporary_name_can_not_be_removed(tmp_path: Path) -> None:
    trace = Trace()
    run = _traced_run(tmp_path / "ck", trace)

    def act(index: int, operation: str, name: str) -> None:
        if operation == "remove" and name.endswith(".tmp"):
            raise PermissionError("no")

    trace.act = act
    assert [o.committed for o in run.save_all(1)] == [True, True]
    assert verify(tmp_path / "ck") == []
    assert load(tmp_path / "ck", make_layout("row_wise", 1), run.truth).equals(run.truth)


def test_a_link_that_can_not_be_synced_fails_the_save_and_stays_with_its_data(tmp_path: Path) -> None:
    root = tmp_path / "ck"
    trace = Trace()
    run = _traced_run(root, trace)
    run.save(1)
    run.change("C1", [3, 60], 1.0)
    linked = False

    def act(index: int, operation: str, name: str) -> None:
        nonlocal linked
        linked |= operation == "link"
        if linked and (operation, name) == ("sync_folder", "manifests"):
            raise OSError(errno.EIO, "Input/output error")

    trace.act = act
    outcomes = run.save_all(2)
    assert [o.committed for o in outcomes] == [False, False]
    assert all("Input/output error" in str(o.error) for o in outcomes)
    trace.act = None
    # Somebody may have removed older checkpoints for it by now.
    assert len(list((root / "data").glob("00000002-*"))) == 3
    assert verify(root) == []
    chain = find_chain(root, verify="full")
    assert chain is not None
    assert chain.step == 2
    run.change("C1", [4], 1.0)
    outcome = run.save(3)
    assert (outcome.committed, outcome.kind, outcome.rows) == (True, "delta", 3)
    assert load(root, make_layout("row_wise", 1), run.truth).equals(run.truth)


def test_a_failed_baseline_is_followed_by_a_baseline(tmp_path: Path) -> None:
    trace = Trace()
    run = _traced_run(tmp_path / "ck", trace)
    trace.act = lambda index, operation, name: (_ for _ in ()).throw(NO_SPACE) if operation == "sync" else None
    outcome = run.save(1)
    assert (outcome.kind, outcome.committed) == ("baseline", False)
    assert find_chain(tmp_path / "ck") is None
    assert list((tmp_path / "ck" / "data").iterdir()) == []
    trace.act = None
    assert run.save(2).kind == "baseline"
    assert load(tmp_path / "ck", make_layout("row_wise", 1), run.truth).equals(run.truth)


def test_on_failure_stop_raises_on_every_rank_and_names_the_rank_that_failed(tmp_path: Path) -> None:
    trace = Trace()
    run = _traced_run(tmp_path / "ck", trace, on_failure="stop")
    run.save(1)

    def act(index: int, operation: str, name: str) -> None:
        if operation == "write" and "-r1." in name:
            raise NO_SPACE

    trace.act = act

    def one(rank: int) -> str:
        with pytest.raises(SaveError) as caught:
            _save(run, rank, 2)
        assert caught.value.exit_code == 1  # nothing that is there is damaged
        return str(caught.value)

    messages = on_ranks(2, one)
    assert all("rank 1: OSError" in message and "step 2" in message for message in messages)


def _save(run: Run, rank: int, step: int) -> SaveOutcome:
    run.engines[rank].save(step=step, cursor={}, dense={}, rank_state={}, extra={})
    return run.engines[rank].wait()[-1]


def test_ranks_that_disagree_on_the_step_commit_nothing(tmp_path: Path) -> None:
    run = Run(tmp_path / "ck", make_layout("row_wise", 2), make_truth(TABLES, ["row"]))
    outcomes = on_ranks(2, lambda rank: _save(run, rank, 5 + rank))
    assert [o.committed for o in outcomes] == [False, False]
    assert "ranks disagree" in str(outcomes[0].error)
    assert find_chain(tmp_path / "ck") is None
    assert run.save(7).committed


def test_a_missing_vote_fails_the_save_on_the_others_after_the_timeout(tmp_path: Path) -> None:
    run = Run(tmp_path / "ck", make_layout("row_wise", 3), make_truth(TABLES, ["row"]))
    run.save(1)
    run.change("C1", [1], 1.0)
    run.set_vote_timeout(0.5)
    outcomes = on_ranks(3, lambda rank: _save(run, rank, 2) if rank != 2 else None)
    assert [o.committed for o in outcomes if o] == [False, False]
    assert "no vote from rank 2, and no progress for 0.5 s" in outcomes[0].error
    chain = find_chain(tmp_path / "ck", verify="full")
    assert chain is not None
    assert chain.step == 1


class _DeafStore:
    """A store in which one rank sees no outcome while `deaf` is set."""

    def __init__(self, store: Any) -> None:
        self._store, self.deaf = store, False

    def check(self, keys: list[str]) -> bool:
        return not (self.deaf and "/outcome/" in keys[0]) and self._store.check(keys)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._store, name)


@pytest.mark.parametrize("missed", ["baseline", "delta"])
def test_a_rank_that_misses_the_outcome_keeps_its_rows_and_catches_up(tmp_path: Path, missed: str) -> None:
    shared = torch.distributed.HashStore()
    run = Run(tmp_path / "ck", make_layout("row_wise", 2), make_truth(TABLES, ["row"]), store=shared)
    ballot = run.engines[1]._ballot
    deaf = _DeafStore(shared)
    ballot._store = deaf
    if missed == "delta":
        run.save(1)
    run.change("C1", [90], 1.0)
    deaf.deaf, ballot._timeout_seconds = True, 1.0
    first, second = run.save_all(2)
    assert (first.kind, first.committed, second.committed) == (missed, True, False)
    assert "rank 0 didn't say in time" in str(second.error)
    deaf.deaf, ballot._timeout_seconds = False, 60.0
    run.change("C1", [2], 1.0)
    outcomes = run.save_all(3)
    assert [(o.committed, o.kind, o.rows) for o in outcomes] == [(True, "delta", 2)] * 2
    assert load(tmp_path / "ck", make_layout("row_wise", 1), run.truth).equals(run.truth)


def test_a_store_that_breaks_after_the_commit_makes_no_rank_forget_rows(tmp_path: Path) -> None:
    run = Run(tmp_path / "ck", make_layout("row_wise", 2), make_truth(TABLES, ["row"]))
    run.save(1)
    run.change("C1", [1, 90], 1.0)
    run.set_vote_timeout(0.5)
    ballot = run.engines[0]._ballot
    announce = ballot.announce
    ballot.announce = lambda *_: (_ for _ in ()).throw(RuntimeError("store is gone"))
    first, second = run.save_all(2)
    assert (first.committed, second.committed) == (True, False)
    assert "store is gone" in str(first.warning)
    ballot.announce = announce
    run.set_vote_timeout(60)
    run.change("C1", [2], 1.0)
    assert run.save(3).committed
    assert load(tmp_path / "ck", make_layout("row_wise", 1), run.truth).equals(run.truth)


def test_what_is_not_json_is_refused_before_anything_is_frozen(tmp_path: Path) -> None:
    run = Run(tmp_path / "ck", make_layout("row_wise", 1), make_truth(TABLES, ["row"]))
    with pytest.raises(ValueError, match="JSON compliant"):
        run.engines[0].save(step=1, cursor={}, dense={}, rank_state={}, extra={"auc": float("nan")})
    assert run.save(1).committed


def test_files_and_folders_are_synced_before_the_manifest_is_linked_and_after(tmp_path: Path) -> None:
    trace = Trace()
    run = _traced_run(tmp_path / "ck", trace)
    begin = len(trace.operations)
    run.save(1)
    done = trace.operations[begin:]
    link = next(i for i, (operation, _) in enumerate(done) if operation == "link")
    for operation, name in done[:link]:
        if operation == "create":
            writes = [i for i, found in enumerate(done) if found == ("write", name)]
            syncs = [i for i, found in enumerate(done) if found == ("sync", name)]
            assert len(syncs) == 1
            assert max(writes) < syncs[0] < link
    data_syncs = [i for i, found in enumerate(done) if found == ("sync_folder", "data")]
    last_data_sync = max(i for i, (operation, name) in enumerate(done) if operation == "sync" and "data/" in name)
    assert last_data_sync < max(data_syncs) < link
    assert ("sync_folder", "manifests") in done[link:]


def test_a_trainer_that_was_replaced_can_not_commit_and_stops(tmp_path: Path) -> None:
    root = tmp_path / "ck"
    zombie = Run(root, make_layout("row_wise", 2), make_truth(TABLES, ["row"]))
    zombie.save(1)
    chain = find_chain(root)
    successor = Run(root, make_layout("row_wise", 2), make_truth(TABLES, ["row"]), resumed_from=chain)
    zombie.change("C1", [1], 5.0)

    def one(rank: int) -> str:
        with pytest.raises(SaveError) as caught:
            _save(zombie, rank, 2)
        return str(caught.value)

    assert all("start 2 has taken over" in message for message in on_ranks(2, one))
    successor.change("C1", [2], 1.0)
    assert successor.save(2).committed
    assert load(root, make_layout("row_wise", 1), successor.truth).equals(successor.truth)
    assert [json.loads(p.read_text())["start"] for p in sorted((root / "starts").iterdir())] == [1, 2]


def test_commits_of_a_later_start_win_over_what_a_zombie_slipped_in(tmp_path: Path) -> None:
    root = tmp_path / "ck"
    zombie = Run(root, make_layout("row_wise", 1), make_truth(TABLES, ["row"]))
    zombie.save(1)
    chain = find_chain(root)
    successor = Run(root, make_layout("row_wise", 1), make_truth(TABLES, ["row"]), resumed_from=chain)
    (root / "starts" / "2.json").rename(root / "hidden.json")
    for step in (2, 3, 4):
        zombie.change("C1", [1], 5.0)
        assert zombie.save(step).committed
    (root / "hidden.json").rename(root / "starts" / "2.json")
    successor.change("C1", [2], 1.0)
    assert successor.save(2).committed
    found = find_chain(root)
    assert found is not None
    assert (found.tip.start, found.step) == (2, 2)
    assert load(root, make_layout("row_wise", 1), successor.truth).equals(successor.truth)


class _UnlistedAfterLink(TracedStorage):
    """Can't list `starts/` once a manifest has been linked."""

    linked = False

    def link(self, source: str, target: str) -> None:
        super().link(source, target)
        self.linked = self.linked or target.startswith("manifests/")

    def list_names(self, folder: str) -> list[str]:
        if folder == "starts" and self.linked:
            self.linked = False
            raise OSError(errno.EIO, "Input/output error")
        return super().list_names(folder)


def test_a_commit_whose_fence_can_not_be_looked_for_again_fails_and_keeps_its_data(tmp_path: Path) -> None:
    root = tmp_path / "ck"
    layout = make_layout("row_wise", 1)
    run = Run(root, layout, make_truth(TABLES, ["row"]), storages=[_UnlistedAfterLink(root, Trace())])
    outcome = run.save(1)
    assert not outcome.committed
    assert "starts/ can't be read: [Errno 5]" in str(outcome.error)
    assert verify(root) == []
    assert [row.step for row in list_checkpoints(root)] == [1]  # it may be resumed from, as nobody has removed its data
    run.change("C1", [3], 1.0)
    assert not run.save(2).committed
    assert load(root, layout, run.truth).equals(run.truth)


@pytest.mark.parametrize("moment", ["before the link", "after the link", "while the manifests are read"])
def test_nothing_is_acknowledged_whose_data_a_later_start_may_have_swept(
    tmp_path: Path, moment: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = tmp_path / "ck"
    layout, trace = make_layout("row_wise", 1), Trace()
    zombie = Run(root, layout, make_truth(TABLES, ["row"]), storages=[TracedStorage(root, trace)])
    zombie.save(1)
    chain = find_chain(root)
    reads, linked = threading.Event(), threading.Event()
    successor = threading.Thread(target=lambda: take_over("link"))

    def take_over(operation: str) -> None:
        if operation == "link":
            trace.act = trace.after = None
            # it can't know what becomes of a link that is there before its claim
            refused = pytest.raises(CheckpointError, match=r"committed step 2 \(manifests/00000002-s1")
            with refused if moment == "after the link" else nullcontext():
                Run(root, layout, make_truth(TABLES, ["row"]), resumed_from=chain)

    def wait_for_the_reader(operation: str) -> None:
        if operation == "link":
            successor.start()
            assert reads.wait(30)

    def read_slowly(storage: Storage, progress: Callable[[], None]) -> list[ManifestFile]:
        found = read_manifests(storage, progress)
        reads.set()
        assert linked.wait(30)
        return found

    if moment == "before the link":
        trace.act = lambda index, operation, name: take_over(operation)
    elif moment == "after the link":
        trace.after = lambda operation, name: take_over(operation)
    else:
        monkeypatch.setattr("dlrm_scale.checkpoint.upkeep.sweep.read_manifests", read_slowly)
        trace.act = lambda index, operation, name: wait_for_the_reader(operation)
    zombie.change("C1", [3], 1.0)
    with pytest.raises(CheckpointError, match="start 2 has taken over"):
        zombie.save(2)
    linked.set()
    if successor.ident is not None:
        successor.join(30)
    assert verify(root) == []
    assert [row.step for row in list_checkpoints(root)] == ([1, 2] if moment == "after the link" else [1])
