"""gc and a trainer's retention remove what nobody needs: not chains, pins, what is in use or what can't be read."""

import copy
import time
from pathlib import Path

import pytest

from dlrm_scale.checkpoint import find_chain, list_checkpoints, open_chain, verify
from dlrm_scale.checkpoint.chain.chain import open_step
from dlrm_scale.checkpoint.chain.leases import LEASE_SECONDS, Lease, hold_chain
from dlrm_scale.checkpoint.chain.pins import pin_step, read_pins, unpin_step
from dlrm_scale.checkpoint.storage.local_storage import LocalStorage
from dlrm_scale.checkpoint.upkeep.collect_garbage import Garbage, collect_garbage
from dlrm_scale.checkpoint.upkeep.retention import remove_old_chains
from dlrm_scale.errors import CheckpointError, StorageError
from tests.checkpoint.faulty_storage import Trace, TracedStorage
from tests.checkpoint.merging import files_of, go_on, merge, start
from tests.checkpoint.simulated_run import TABLES, Run, load, load_chain, make_layout, make_truth


def _run(root: Path, **options: object) -> Run:
    """Baseline, delta, baseline, delta: a ratio of almost nothing."""
    return Run(root, make_layout("table_wise", 1), make_truth(TABLES, ["row"]), **{"baseline_ratio": 1e-9, **options})


def _kinds(root: Path) -> list[str]:
    return [f"{row.kind}{row.step}" for row in list_checkpoints(root)]


def test_a_merged_baseline_and_what_it_was_made_of_are_two_chains(tmp_path: Path) -> None:
    root = tmp_path / "ck"
    run = start(root)
    go_on(run, range(6))
    merge(root, "baseline", step=2, number=1)
    assert collect_garbage(LocalStorage(root), keep_baselines=2, dry_run=False).removed == ()
    go_on(run, range(6, 9))
    merge(root, "baseline", step=5, number=2)
    # The newest chain, and the newest one without its files; 1 to 3 aren't needed for either.
    found = collect_garbage(LocalStorage(root), keep_baselines=2, dry_run=False)
    assert _chains(found) == [["6-s1m2", "7-s1", "8-s1", "9-s1"], ["3-s1m1", "4-s1", "5-s1", "6-s1"]]
    assert {name for name in found.removed if name.startswith("manifests/")} == {
        f"manifests/0000000{seq}-s1.json" for seq in (1, 2, 3)
    }
    assert verify(root) == []
    assert load(root, make_layout("row_wise", 3), run.truth).equals(run.truth)
    for path in root.glob("data/*m2-*"):
        path.unlink()
    chain = find_chain(root, verify="full")
    assert chain is not None
    assert (chain.step, [m.seq for m in chain.manifests]) == (8, [3, 4, 5, 6, 7, 8, 9])
    assert load(root, make_layout("row_wise", 3), run.truth).equals(run.truth)


def _chains(found: Garbage) -> list[list[str]]:
    return [[f.name.removeprefix("manifests/0000000").removesuffix(".json") for f in c.files] for c in found.chains]


def test_a_dry_run_says_what_goes_and_removes_nothing(tmp_path: Path) -> None:
    root = tmp_path / "ck"
    run = start(root)
    go_on(run, range(4))
    for step in (1, 3):
        merge(root, "baseline", step=step)
    before = files_of(root)
    would = collect_garbage(LocalStorage(root), keep_baselines=2, dry_run=True)
    assert files_of(root) == before
    did = collect_garbage(LocalStorage(root), keep_baselines=2, dry_run=False)
    assert sorted(would.removed) == sorted(did.removed) == sorted(before - files_of(root))
    assert would.removed_bytes == did.removed_bytes > 0


def test_steps_pinned_in_the_root_are_kept_by_gc_and_by_the_trainer(tmp_path: Path) -> None:
    root = tmp_path / "ck"
    run = _run(root, keep_baselines=1)
    run.save(0)
    run.change("C1", [3], 1.0)
    run.save(1)
    expected = copy.deepcopy(run.truth)
    name = pin_step(LocalStorage(root), 1)
    for step in range(2, 7):
        run.change("C1", [step], 1.0)
        run.save(step)
    assert _kinds(root) == ["baseline0", "delta1", "baseline6"]
    run.save(7)
    run.save(8)
    collect_garbage(LocalStorage(root), keep_baselines=1, dry_run=False)
    assert _kinds(root) == ["baseline0", "delta1", "baseline8"]
    chain = open_chain(root, name)
    assert load_chain(chain, make_layout("row_wise", 2), run.truth, optimizer="rowwise_adagrad").equals(expected)
    unpin_step(LocalStorage(root), 1)
    collect_garbage(LocalStorage(root), keep_baselines=1, dry_run=False)
    assert _kinds(root) == ["baseline8"]


def test_a_pinned_step_that_was_merged_is_kept_by_its_cheapest_chain(tmp_path: Path) -> None:
    root = tmp_path / "ck"
    run = start(root)
    go_on(run, range(4))
    expected = copy.deepcopy(run.truth)
    merge(root, "baseline", number=1)
    pin_step(LocalStorage(root), 3)
    go_on(run, range(4, 6))
    for number, step in ((2, 4), (3, 5)):
        merge(root, "baseline", step=step, number=number)
    collect_garbage(LocalStorage(root), keep_baselines=2, dry_run=False)
    # The second chain leads to the newest step too, over the merge before.
    assert _kinds(root) == ["baseline3", "baseline4", "delta5", "baseline5"]
    chain = open_chain(root, "manifests/00000004-s1.json")
    assert load_chain(chain, make_layout("row_wise", 2), run.truth, optimizer="rowwise_adagrad").equals(expected)


def test_the_best_checkpoint_is_pinned_in_the_root_before_it_can_be_removed(tmp_path: Path) -> None:
    root = tmp_path / "ck"
    run = _run(root, keep_baselines=1)
    best = run.save(0)
    run.engines[0].pin([best.manifest])
    run.save(1)
    assert read_pins(LocalStorage(root), "best") == {best.manifest}
    for step in range(2, 5):
        run.save(step)
    collect_garbage(LocalStorage(root), keep_baselines=1, dry_run=False)
    assert _kinds(root) == ["baseline0", "baseline4"]
    run.engines[0].pin([run.save(5).manifest])
    run.save(6)
    run.save(7)
    assert _kinds(root)[0] != "baseline0"


def test_a_step_that_no_checkpoint_has_cannot_be_pinned_or_unpinned(tmp_path: Path) -> None:
    root = tmp_path / "ck"
    go_on(start(root), range(2))
    with pytest.raises(CheckpointError, match="no checkpoint of step 7") as error:
        pin_step(LocalStorage(root), 7)
    assert "0, 1" in str(error.value.remedy)
    with pytest.raises(CheckpointError, match="step 1 isn't pinned"):
        unpin_step(LocalStorage(root), 1)
    (root / "data" / "00000002-s1a2-dense.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"dense\.safetensors is missing"):
        pin_step(LocalStorage(root), 1)
    assert read_pins(LocalStorage(root)) == set()


def test_what_cannot_be_read_is_not_removed(tmp_path: Path) -> None:
    root = tmp_path / "ck"
    run = start(root)
    go_on(run, range(5))
    for step in (2, 3, 4):
        merge(root, "baseline", step=step, number=step)
    unread = root / "manifests" / "00000002-s1.json"
    unread.write_bytes(unread.read_bytes()[:-9])
    (root / "manifests" / "00000003-s1m2.json").write_bytes(b"{}")
    removed = collect_garbage(LocalStorage(root), keep_baselines=2, dry_run=False).removed
    assert "manifests/00000001-s1.json" in removed
    assert not [name for name in removed if "00000002" in name or "m2" in name]
    assert len(list(root.glob("data/00000002-*"))) == 3
    assert len(list(root.glob("data/*m2-*"))) == 3


def test_a_restore_in_progress_is_not_undercut(tmp_path: Path) -> None:
    root = tmp_path / "ck"
    run = start(root)
    go_on(run, range(3))
    expected = copy.deepcopy(run.truth)
    with hold_chain(LocalStorage(root), lambda: find_chain(root)) as chain:
        assert chain is not None
        go_on(run, range(3, 5))
        for step in (3, 4):
            merge(root, "baseline", step=step)
        found = collect_garbage(LocalStorage(root), keep_baselines=2, dry_run=False)
        assert any(user.startswith("restore by process") for user in found.users)
        assert load_chain(chain, make_layout("row_wise", 1), expected, optimizer="rowwise_adagrad").equals(expected)
    removed = collect_garbage(LocalStorage(root), keep_baselines=2, dry_run=False).removed
    assert "manifests/00000001-s1.json" in removed
    assert verify(root) == []


def test_a_restore_that_died_holds_nothing_for_longer_than_its_lease(tmp_path: Path) -> None:
    root = tmp_path / "ck"
    run = start(root)
    go_on(run, range(3))
    Lease(LocalStorage(root), "restore").take(["manifests/00000001-s1.json", "manifests/00000002-s1.json"])
    for step in (1, 2):
        merge(root, "baseline", step=step)
    kept = collect_garbage(LocalStorage(root), keep_baselines=2, dry_run=False).removed
    assert "manifests/00000001-s1.json" not in kept
    later = time.time() + 2 * LEASE_SECONDS
    gone = collect_garbage(LocalStorage(root), keep_baselines=2, dry_run=False, now=lambda: later).removed
    assert "manifests/00000001-s1.json" in gone
    assert any(name.startswith("leases/restore-") for name in gone)
    assert not list((root / "leases").iterdir())


def test_one_removal_runs_at_a_time(tmp_path: Path) -> None:
    root = tmp_path / "ck"
    run = _run(root, keep_baselines=1)
    for step in range(3):
        run.save(step)
    Lease(LocalStorage(root), "removal").take(["manifests/x"])
    with pytest.raises(StorageError, match="is removing checkpoints in"):
        collect_garbage(LocalStorage(root), keep_baselines=1, dry_run=False)
    before = files_of(root)
    assert remove_old_chains(LocalStorage(root), tip_name="manifests/00000003-s1.json", keep_baselines=1) == []
    assert files_of(root) == before


def test_the_baseline_of_deltas_since_it_is_kept_while_a_merge_stands_for_the_newest(tmp_path: Path) -> None:
    root = tmp_path / "ck"
    run = _run(root, policy="one_shot", baseline_ratio=9.0)
    for step in range(3):
        run.change("C1", [step], 1.0)
        run.save(step)
    for step in (1, 2):
        merge(root, "baseline", step=step)
    collect_garbage(LocalStorage(root), keep_baselines=2, dry_run=False)
    run.change("C1", [9], 1.0)
    assert run.save(3).kind == "delta"
    assert verify(root) == []
    assert load(root, make_layout("row_wise", 2), run.truth).equals(run.truth)


def test_what_a_start_goes_on_from_is_kept_until_it_has_saved(tmp_path: Path) -> None:
    root = tmp_path / "ck"
    run = start(root)
    go_on(run, range(2))
    older = find_chain(root)
    expected = copy.deepcopy(run.truth)
    go_on(run, range(2, 6))
    for step in (4, 5):
        merge(root, "baseline", step=step)
    assert older is not None
    chain = open_chain(root, older.name)  # passes over the newer ones, as for their damage
    resumed = start(root, truth=expected, resumed_from=chain)
    collect_garbage(LocalStorage(root), keep_baselines=2, dry_run=False)
    resumed.change("C1", [50], 3.0)
    assert resumed.save(9).kind == "delta"
    assert load(root, make_layout("row_wise", 2), expected).equals(expected)


def test_gc_beside_a_trainer_sweeps_older_saves_and_starts_and_dead_merges_alone(tmp_path: Path) -> None:
    root = tmp_path / "ck"
    run = start(root)
    go_on(run, range(2))
    go_on(start(root, truth=run.truth, resumed_from=find_chain(root)), range(2, 4))
    stale = {
        "data/00000002-s1a9-r0.safetensors",
        "data/00000099-s1a9-r0.safetensors",
        "manifests/.00000099-s1a9.tmp",
        "data/00000003-s2a8-dense.safetensors",
        "data/00000004-s2m77-r0.safetensors",
        "manifests/.00000004-s2m77.tmp",
    }
    live = {
        "data/00000005-s2a3-r1.safetensors",  # being written
        "manifests/.00000005-s2a3.tmp",
        "data/00000001-s3a1-r0.safetensors",  # of a newer start
        "data/00000004-s2m88-r0.safetensors",  # of a merge that has a lease
        "manifests/.00000004-s2m88.tmp",
        "data/notes.txt",
    }
    for name in stale | live:
        (root / name).write_bytes(b"x")
    Lease(LocalStorage(root), "merge", token="88").take()
    found = collect_garbage(LocalStorage(root), keep_baselines=2, dry_run=False)
    assert set(found.removed) == stale
    assert all((root / name).exists() for name in live)


def _full(root: Path) -> TracedStorage:
    """The same folder on a disk that has room for names and for no byte."""
    trace = Trace()
    trace.room_bytes = 0
    return TracedStorage(root, trace)


def test_on_a_full_disk_old_chains_and_dead_merges_are_removed(tmp_path: Path) -> None:
    root = tmp_path / "ck"
    run = _run(root, keep_baselines=9)
    for step in range(6):
        run.save(step)
    left = {"data/00000002-s1a9-r0.safetensors", "data/00000004-s1m77-r0.safetensors"}
    for name in left:
        (root / name).write_bytes(b"x" * 4096)
    found = collect_garbage(_full(root), keep_baselines=2, dry_run=False)
    assert left < set(found.removed)
    assert _kinds(root) == ["baseline2", "delta3", "baseline4", "delta5"]
    assert not list(root.glob("leases/*"))
    assert not list(root.glob("fences/*"))
    assert verify(root) == []


def test_on_a_full_disk_a_restore_in_progress_is_not_undercut(tmp_path: Path) -> None:
    root = tmp_path / "ck"
    run = _run(root, keep_baselines=9)
    for step in range(6):
        run.save(step)
    full = _full(root)
    with hold_chain(full, lambda: open_step(full, 1)) as chain:
        assert chain is not None
        assert [name.endswith(".all") for name in LocalStorage(root).list_names("leases")] == [True]
        found = collect_garbage(full, keep_baselines=2, dry_run=False)
        assert found.users == ("restore by a process that found the disk full",)
        assert found.removed == ()
        assert len(_kinds(root)) == 6
        # the trainer's own removal, and one that has room for its lease, leave it alone too
        assert remove_old_chains(LocalStorage(root), tip_name="manifests/00000006-s1.json", keep_baselines=1) == []
    assert collect_garbage(full, keep_baselines=2, dry_run=False).removed
    assert _kinds(root) == ["baseline2", "delta3", "baseline4", "delta5"]


def test_on_a_full_disk_a_restore_waits_for_a_removal_and_chooses_again(tmp_path: Path) -> None:
    root = tmp_path / "ck"
    run = _run(root, keep_baselines=9)
    for step in range(6):
        run.save(step)
    full = _full(root)
    stopped: list[int | None] = []

    def act(index: int, operation: str, name: str) -> None:
        if operation == "remove" and name == "manifests/00000002-s1.json":
            full._trace.act = None
            # a reader comes when the removal has looked for readers already
            with hold_chain(LocalStorage(root), lambda: open_step(root, 1), pause=waits) as chain:
                stopped.append(chain and chain.step)

    def waits(seconds: float) -> None:
        stopped.append(None)
        raise InterruptedError("the removal goes on first")

    full._trace.act = act
    with pytest.raises(InterruptedError):
        collect_garbage(full, keep_baselines=2, dry_run=False)
    assert stopped == [None]
    assert not list(root.glob("leases/*"))
