"""Old chains go, the newest ones stay whole."""

import copy
import threading
import warnings
from pathlib import Path

import pytest

from dlrm_scale.checkpoint import find_chain, list_checkpoints, open_chain, verify
from dlrm_scale.checkpoint.storage.local_storage import LocalStorage
from dlrm_scale.checkpoint.upkeep.retention import remove_old_chains, remove_superseded
from dlrm_scale.checkpoint.upkeep.sweep import sweep_orphans
from tests.checkpoint.faulty_storage import Trace, TracedStorage, fail_at
from tests.checkpoint.merging import ADAGRAD, go_on, merge, start
from tests.checkpoint.simulated_run import TABLES, Run, load, load_chain, make_layout, make_truth, on_ranks


def _run(root: Path, trace: Trace | None = None, **options: object) -> Run:
    storages = [TracedStorage(root, trace)] if trace else None
    settings = {"baseline_ratio": 1e-9, "keep_baselines": 2, "storages": storages, **options}
    return Run(root, make_layout("table_wise", 1), make_truth(TABLES, ["row"]), **settings)


def _kinds(root: Path) -> list[str]:
    return [f"{row.kind}{row.step}" for row in list_checkpoints(root)]


def test_the_last_two_chains_are_kept_with_their_deltas(tmp_path: Path) -> None:
    run = _run(tmp_path / "ck")  # a ratio of almost nothing: baseline, delta, baseline, delta
    for step in range(7):
        run.change("C1", [step], 1.0)
        assert run.save(step).warning is None
    assert _kinds(tmp_path / "ck") == ["baseline4", "delta5", "baseline6"]
    assert len(list((tmp_path / "ck" / "data").iterdir())) == 6
    assert verify(tmp_path / "ck") == []
    assert load(tmp_path / "ck", make_layout("row_wise", 2), run.truth).equals(run.truth)


def test_a_chain_with_a_missing_file_does_not_count_as_kept(tmp_path: Path) -> None:
    root = tmp_path / "ck"
    run = _run(root)
    for step in range(4):
        run.save(step)
    next((root / "data").glob("00000003-*-dense*")).unlink()
    run.save(4)
    assert _kinds(root) == ["baseline0", "delta1", "baseline2", "delta3", "baseline4"]
    run.save(5)
    run.save(6)
    assert _kinds(root) == ["baseline4", "delta5", "baseline6"]


def test_a_chain_that_a_resume_passed_over_does_not_count_as_kept(tmp_path: Path) -> None:
    root = tmp_path / "ck"
    run = _run(root)
    for step in range(3):
        run.save(step)
    path = next((root / "data").glob("00000003-*-r0*"))
    path.write_bytes(bytes(path.stat().st_size))
    chain = find_chain(root, verify="full")
    assert chain is not None
    assert chain.step == 1
    resumed = _run(root, resumed_from=chain)
    assert resumed.save(2).kind == "baseline"
    assert _kinds(root) == ["baseline0", "delta1", "baseline2"]
    assert verify(root) == []


def test_what_is_newer_than_the_commit_is_never_removed(tmp_path: Path) -> None:
    root = tmp_path / "ck"
    run = _run(root, keep_baselines=9)
    for step in range(5):
        run.save(step)
    tip = next(row.name for row in list_checkpoints(root) if row.step == 2)
    moves: list[None] = []
    removed = remove_old_chains(LocalStorage(root), tip_name=tip, keep_baselines=1, progress=lambda: moves.append(None))
    assert len(removed) == 6
    assert len(moves) > 6  # also for each file that was looked at: what takes long isn't taken for hung
    assert _kinds(root) == ["baseline2", "delta3", "baseline4"]


def test_a_pinned_checkpoint_stays_with_what_it_is_based_on(tmp_path: Path) -> None:
    root = tmp_path / "ck"
    run = _run(root, keep_baselines=1)
    run.save(0)
    run.change("C1", [3], 1.0)
    pinned = run.save(1)
    expected = copy.deepcopy(run.truth)
    run.engines[0].pin([pinned.manifest])
    for step in range(2, 7):
        run.change("C1", [step], 1.0)
        run.save(step)
    assert _kinds(root) == ["baseline0", "delta1", "baseline6"]
    assert verify(root) == []
    chain = open_chain(root, pinned.manifest)
    assert load_chain(chain, make_layout("row_wise", 2), run.truth, optimizer="rowwise_adagrad").equals(expected)
    # another one takes its place
    run.engines[0].pin([list_checkpoints(root)[-1].name])
    run.save(7)
    run.save(8)
    assert _kinds(root) == ["baseline6", "baseline8"]


def test_a_removal_that_fails_is_a_warning_and_the_save_counts(tmp_path: Path) -> None:
    trace = Trace()
    run = _run(tmp_path / "ck", trace)
    for step in range(4):
        run.save(step)
    trace.act = lambda index, operation, name: (
        fail_at(index, PermissionError("no"))(index, operation, name)
        if operation == "remove" and name.startswith("manifests/0")
        else None
    )
    outcome = run.save(4)
    assert outcome.committed
    assert "old checkpoints aren't removed: PermissionError" in str(outcome.warning)
    trace.act = None
    run.save(5)
    run.save(6)
    assert _kinds(tmp_path / "ck") == ["baseline4", "delta5", "baseline6"]


def test_a_slow_removal_on_rank_0_leaves_alone_what_rank_1_writes_for_the_next_save(tmp_path: Path) -> None:
    root = tmp_path / "ck"
    trace = Trace()
    run = Run(
        root,
        make_layout("row_wise", 2),
        make_truth(TABLES, ["row"]),
        storages=[TracedStorage(root, trace) for _ in range(2)],
        baseline_ratio=1e-9,
        keep_baselines=1,
    )
    for step in (1, 2):
        run.change("C1", [step, 60 + step], 1.0)
        assert run.save(step).committed
    next_is_written = threading.Event()
    waited: list[bool] = []

    def act(index: int, operation: str, name: str) -> None:
        if operation == "remove" and name == "manifests/00000001-s1.json":
            waited.append(next_is_written.wait(30))
        if operation == "sync" and name == "data/00000004-s1a4-r1.safetensors":
            next_is_written.set()

    trace.act = act

    def save_twice(rank: int) -> list[str | None]:
        engine = run.engines[rank]
        for step in (3, 4):
            engine.save(step=step, cursor={}, dense={}, rank_state={}, extra={})
        return [outcome.error for outcome in engine.wait()]

    assert on_ranks(2, save_twice) == [[None, None]] * 2
    assert waited == [True]
    assert _kinds(root) == ["baseline3", "delta4"]
    assert len(list((root / "data").iterdir())) == 6
    assert load(root, make_layout("row_wise", 1), run.truth).equals(run.truth)


def test_a_start_sweeps_what_older_starts_left_and_nothing_of_a_newer_one(tmp_path: Path) -> None:
    root = tmp_path / "ck"
    run = _run(root)
    run.save(0)
    kept = {path.name for path in (root / "data").iterdir()}
    left = ["data/00000002-s1a2-r0.safetensors", "data/00000009-s2a1-dense.safetensors", "manifests/.00000002-s1a2.tmp"]
    newer = ["data/00000002-s3a1-r0.safetensors", "manifests/.00000002-s3a1.tmp", "data/notes.txt"]
    for name in (*left, *newer):
        (root / name).write_bytes(b"x")
    assert sorted(sweep_orphans(LocalStorage(root), start=2)) == sorted(left)
    assert all((root / name).exists() for name in newer)
    assert kept <= {path.name for path in (root / "data").iterdir()}


def test_what_newer_checkpoints_are_based_on_stays_although_the_tip_does_not_need_it(tmp_path: Path) -> None:
    root = tmp_path / "ck"
    go_on(start(root), range(5))
    chain = open_chain(root, "manifests/00000002-s1.json")
    truth = load_chain(chain, make_layout("row_wise", 2), make_truth(TABLES, ["row"]), optimizer=ADAGRAD)
    resumed = start(root, truth=truth, resumed_from=chain)
    go_on(resumed, range(10, 12))
    for step in (3, 4):
        merge(root, "baseline", step)  # two chains of the fork that was left, which need nothing before them
    removed = remove_old_chains(LocalStorage(root), tip_name="manifests/00000005-s1.json", keep_baselines=2)
    manifests = [name for name in removed if name.startswith("manifests/")]
    assert manifests == ["manifests/00000004-s1.json", "manifests/00000003-s1.json"]
    found = find_chain(root, verify="full")
    assert found is not None
    assert found.step == 11
    assert load(root, make_layout("row_wise", 1), resumed.truth).equals(resumed.truth)


@pytest.mark.parametrize("saved", [False, True])
def test_a_superseded_delta_stays_while_a_later_start_goes_on_from_it(tmp_path: Path, saved: bool) -> None:
    root = tmp_path / "ck"
    run = _run(root, policy="one_shot", baseline_ratio=9.0, keep_baselines=9)
    for step in range(4):
        run.change("C1", [step], 1.0)
        assert run.save(step).committed
    chain = open_chain(root, "manifests/00000003-s1.json")
    truth = load_chain(chain, run.layout, run.truth, optimizer=ADAGRAD)
    resumed = Run(root, run.layout, truth, resumed_from=chain)
    if saved:
        resumed.change("C1", [50], 1.0)
        assert resumed.save(10).kind == "delta"
    # the start before had committed, and removes only now what its last delta replaces
    remove_superseded(LocalStorage(root), tip_name="manifests/00000004-s1.json", keep_baselines=1)
    assert _kinds(root) == ["baseline0", "delta2", "delta3"] + ["delta10"] * saved
    assert (
        load_chain(open_chain(root, "manifests/00000003-s1.json"), run.layout, run.truth, optimizer=ADAGRAD)
        .weight["C1"][2]
        .equal(run.truth.weight["C1"][2])
    )


@pytest.mark.parametrize("moment", ["before the claim", "before it says what goes", "after it has said what goes"])
def test_what_a_start_goes_on_from_is_kept_or_its_first_save_is_a_baseline(tmp_path: Path, moment: str) -> None:
    root = tmp_path / "ck"
    run = _run(root, keep_baselines=9)
    for step in range(6):
        run.change("C1", [step], 1.0)
        run.save(step)
    for seq in (3, 5):  # two chains that a restore passes over and that a removal, which reads no data, counts
        path = next((root / "data").glob(f"{seq:08d}-*-r0*"))
        path.write_bytes(bytes(path.stat().st_size))
    chain = find_chain(root, verify="full")
    assert chain is not None
    assert chain.step == 1
    truth = load_chain(chain, run.layout, run.truth, optimizer=ADAGRAD)
    runs: list[Run] = []

    def claim() -> None:
        trace.act = trace.after = None
        runs.append(Run(root, run.layout, truth, resumed_from=chain, merger=True))

    trace = Trace()
    leases: list[str] = []

    def act(operation: str, name: str) -> None:
        if operation == "create" and name.startswith("leases/removal"):
            leases.append(name)
            if len(leases) == 2:  # the first holds nothing yet
                claim()

    if moment == "before it says what goes":
        trace.act = lambda index, operation, name: act(operation, name)
    elif moment == "after it has said what goes":
        trace.after = lambda operation, name: (
            claim() if operation == "remove" and name.startswith("manifests/") else None
        )
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        remove_old_chains(TracedStorage(root, trace), tip_name=list_checkpoints(root)[-1].name, keep_baselines=2)
        if not runs:
            claim()
    runs[0].change("C1", [50], 1.0)
    saved = runs[0].save(10)
    assert saved.committed
    assert saved.kind == ("delta" if moment == "before it says what goes" else "baseline")
    assert len(caught) == (0 if saved.kind == "delta" else 1)
    assert load(root, make_layout("row_wise", 2), runs[0].truth).equals(runs[0].truth)
