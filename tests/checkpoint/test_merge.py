"""A merge restores what it was made of, and leaves nothing behind when it can't."""

import copy
import errno
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from dlrm_scale.checkpoint import find_chain, restore, verify
from dlrm_scale.checkpoint.chain.leases import LEASE_SECONDS, Lease
from dlrm_scale.checkpoint.files.manifest import Manifest
from dlrm_scale.checkpoint.storage.local_storage import LocalStorage
from dlrm_scale.checkpoint.upkeep.merge_memory import merge_memory_bytes
from dlrm_scale.checkpoint.upkeep.merge_plan import MergeTarget
from dlrm_scale.checkpoint.upkeep.sweep import sweep_merges
from dlrm_scale.errors import CheckpointError, ConfigError, StorageError
from tests.checkpoint.faulty_storage import Trace, TracedStorage, fail_at
from tests.checkpoint.merging import ADAGRAD, files_of, go_on, merge, start
from tests.checkpoint.simulated_run import TABLES, Truth, load, load_chain, make_layout, make_truth, shards_of

FAR = LEASE_SECONDS * 10.0
BOTH: list[MergeTarget] = ["delta", "baseline"]


def _chain_names(root: Path) -> list[str]:
    chain = find_chain(root, verify="full")
    assert chain is not None
    return [manifest.name for manifest in chain.manifests]


@pytest.mark.parametrize("to", BOTH)
@pytest.mark.parametrize(("kind", "states"), [("row_wise", ["row"]), ("grid_shard", ["element"]), ("column_wise", [])])
def test_a_merge_restores_rows_and_state_to_any_layout(
    tmp_path: Path, kind: str, states: list[str], to: MergeTarget
) -> None:
    run = start(tmp_path / "ck", make_layout(kind, 2), make_truth(TABLES, states))
    go_on(run, range(7))
    (merged,) = merge(tmp_path / "ck", to)
    assert merged.manifest.kind == ("merged" if to == "delta" else "baseline")
    assert _chain_names(tmp_path / "ck")[-1] == merged.manifest.name
    assert verify(tmp_path / "ck") == []
    for target in (make_layout(kind, 1), make_layout(kind, 3)):
        assert load(tmp_path / "ck", target, run.truth).equals(run.truth)


def test_a_merge_says_what_it_is_equal_to_and_what_it_covers(tmp_path: Path) -> None:
    run = start(tmp_path / "ck")
    go_on(run, range(5))
    before = find_chain(tmp_path / "ck")
    assert before is not None
    merged = merge(tmp_path / "ck", "delta", number=7)[0].manifest
    assert merged.name == "manifests/00000005-s1m7.json"
    assert merged.merge is not None
    assert (merged.merge.equal_to.name, merged.merge.equal_to.sha256) == (before.tip.name, before.tip_sha256)
    assert merged.merge.manifests == tuple(manifest.name for manifest in before.manifests[1:])
    assert (merged.parent, merged.covers, merged.step) == (before.manifests[1].parent, (2, 5), 4)
    assert (merged.cursor, merged.extra, merged.ranks) == (before.tip.cursor, before.tip.extra, 2)
    baseline = merge(tmp_path / "ck", "baseline", number=8)[0].manifest
    assert (baseline.kind, baseline.covers, baseline.merge and baseline.merge.manifests) == (
        "baseline",
        (1, 5),
        ("manifests/00000001-s1.json", merged.name),
    )


@pytest.mark.parametrize("to", BOTH)
def test_dense_tensors_and_every_ranks_state_come_from_the_newest_checkpoint(tmp_path: Path, to: MergeTarget) -> None:
    run = start(tmp_path / "ck")
    go_on(run, range(4))
    merge(tmp_path / "ck", to)
    chain = find_chain(tmp_path / "ck")
    assert chain is not None
    for rank in range(2):
        shards = shards_of(run.layout, run.truth, rank, blank=True)
        restored = restore(chain, layout=run.layout, shards=shards, rank=rank, ranks=2, optimizer=ADAGRAD)
        assert torch.equal(restored.dense["over.weight"], torch.full((3, 2), 3.0))
        assert restored.rank_state is not None
        assert restored.rank_state["rng"].tolist() == [rank, 3]


@pytest.mark.parametrize("to", BOTH)
def test_deltas_on_what_a_merge_is_equal_to_are_applied_to_the_merge(tmp_path: Path, to: MergeTarget) -> None:
    run = start(tmp_path / "ck")
    go_on(run, range(4))
    merged = merge(tmp_path / "ck", to)[0].manifest
    go_on(run, range(4, 6))
    names = _chain_names(tmp_path / "ck")
    assert names[-3:] == [merged.name, "manifests/00000005-s1.json", "manifests/00000006-s1.json"]
    assert load(tmp_path / "ck", make_layout("row_wise", 3), run.truth).equals(run.truth)
    (again,) = merge(tmp_path / "ck", "baseline")
    assert again.manifest.merge is not None
    assert merged.name in again.manifest.merge.manifests
    assert load(tmp_path / "ck", make_layout("row_wise", 1), run.truth).equals(run.truth)


def test_a_trainer_that_resumes_from_a_merge_goes_on_from_the_checkpoint_it_is_equal_to(tmp_path: Path) -> None:
    root = tmp_path / "ck"
    run = start(root)
    go_on(run, range(4))
    merge(root, "baseline")
    # its own files may be gone
    for path in [*(root / "manifests").glob("0000000[1-4]-s1.json"), *(root / "data").glob("*a[1-4]-*")]:
        path.unlink()
    chain = find_chain(root, verify="full")
    assert chain is not None
    assert (chain.step, chain.name, len(chain.manifests)) == (3, "manifests/00000004-s1.json", 1)
    resumed = start(root, truth=run.truth, resumed_from=chain)
    resumed.change("C1", [3], 9.0)
    outcome = resumed.save(4)
    assert (outcome.kind, outcome.manifest, outcome.rows) == ("delta", "manifests/00000005-s2.json", 1)
    tip = find_chain(root, verify="full")
    assert tip is not None
    assert tip.tip.parent == chain.checkpoint
    assert load(root, make_layout("table_wise", 1), resumed.truth).equals(resumed.truth)
    assert verify(root) == []


@pytest.mark.parametrize("to", BOTH)
def test_checkpoints_of_other_rank_counts_and_column_splits_are_merged_together(
    tmp_path: Path, to: MergeTarget
) -> None:
    root = tmp_path / "ck"
    truth = make_truth(TABLES, ["element"])
    for kind, ranks, steps in (
        ("row_wise", 2, range(3)),
        ("column_wise", 3, range(3, 5)),
        ("grid_shard", 4, range(5, 7)),
    ):
        layout = make_layout(kind, ranks)
        go_on(start(root, layout, truth, resumed_from=find_chain(root)), steps)
    (merged,) = merge(root, to)
    assert merged.manifest.column_splits("C1") == ((0, 8), (8, 16))
    assert merged.manifest.all_column_splits() == {t.name: merged.manifest.column_splits(t.name) for t in TABLES}
    assert merged.manifest.ranks == 4
    for target in (make_layout("table_wise", 1), make_layout("column_wise", 2)):
        assert load(root, target, truth).equals(truth)


@pytest.mark.parametrize("to", BOTH)
def test_many_small_blocks_and_windows_give_the_same_rows(
    tmp_path: Path, to: MergeTarget, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Blocks of 3 rows of the run and of 5 of the merge, which don't fall together, and windows of 11.
    monkeypatch.setattr("dlrm_scale.checkpoint.saving.snapshot.BLOCK_BYTES", 3 * 16 * 4)
    monkeypatch.setattr("dlrm_scale.checkpoint.upkeep.merge_rows.BLOCK_BYTES", 5 * 16 * 4)
    monkeypatch.setattr("dlrm_scale.checkpoint.upkeep.merge_rows._WINDOW_ROWS", 11)
    run = start(tmp_path / "ck")
    go_on(run, range(30))
    (merged,) = merge(tmp_path / "ck", to)
    entries = [entry for file in merged.manifest.files for entry in file.entries]
    assert max(len(entry.tensors["weight"].blocks) for entry in entries) >= (7 if to == "delta" else 20)
    assert load(tmp_path / "ck", make_layout("row_wise", 3), run.truth).equals(run.truth)
    assert verify(tmp_path / "ck") == []


def test_a_big_table_is_cut_by_rows_over_the_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dlrm_scale.checkpoint.upkeep.merge_rows.BLOCK_BYTES", 16 * 4)
    monkeypatch.setattr("dlrm_scale.checkpoint.upkeep.merge_run.PIECE_BYTES", 20 * (16 * 4 + 4))
    run = start(tmp_path / "ck")
    go_on(run, range(4))
    for to in BOTH:
        (merged,) = merge(tmp_path / "ck", to)
        cuts = sorted((e.row_start, e.row_end) for f in merged.manifest.files for e in f.entries if e.table == "C1")
        assert cuts == [(0, 20), (20, 40), (40, 60), (60, 80), (80, 97)]
        assert all(len(file.entries) >= 3 for file in merged.manifest.files if file.role == "rank")
        assert load(tmp_path / "ck", make_layout("row_wise", 3), run.truth).equals(run.truth)


@pytest.mark.parametrize("to", BOTH)
def test_encoded_rows_come_out_of_a_merge_with_the_same_bits(tmp_path: Path, to: MergeTarget) -> None:
    root = tmp_path / "ck"
    run = start(root, delta_rows="int8", delta_state="bf16")
    run.truth.weight["C1"][5, 0] = 1e30  # a row that int8 would spoil: kept exact, in an entry of its own
    go_on(run, range(5))
    expected = load(root, make_layout("row_wise", 3), run.truth)
    assert not expected.equals(run.truth)
    merged = merge(root, to)[0].manifest
    codecs = {entry.tensors["weight"].codec for file in merged.files for entry in file.entries if entry.rows}
    assert codecs == ({"int8_rows", "none"} if to == "delta" else {"none"})
    assert merged.lossy
    assert load(root, make_layout("row_wise", 3), run.truth).equals(expected)
    errors = [e.tensors["weight"].error for f in merged.files for e in f.entries if e.tensors["weight"].codec != "none"]
    assert all(error is not None and error.max_absolute > 0 for error in errors)


def test_a_row_that_was_exact_and_then_encoded_is_in_one_entry(tmp_path: Path) -> None:
    root = tmp_path / "ck"
    run = start(root, make_layout("table_wise", 1), delta_rows="int8")
    run.save(0)
    for step, value in ((1, 1e30), (2, -1e30)):
        # far out first, an ordinary row again after it
        run.change("C1", [1, 2], value)
        run.save(step)
    run.change("C1", [2], 1e30)
    run.save(3)
    expected = load(root, make_layout("row_wise", 3), run.truth)
    merged = merge(root, "delta")[0].manifest
    assert merged.table_rows_written == 2
    assert load(root, make_layout("row_wise", 3), run.truth).equals(expected)


def test_without_room_for_all_manifests_groups_are_merged_first(tmp_path: Path) -> None:
    root = tmp_path / "ck"
    run = start(root, make_layout("table_wise", 1))
    go_on(run, range(10))
    chain = find_chain(root)
    assert chain is not None
    limit = merge_memory_bytes(chain.manifests[:3]) + 1024
    merged = merge(root, "baseline", memory_limit_bytes=limit)
    assert len(merged) >= 2
    assert max(merge_memory_bytes(one.plan.manifests) for one in merged) <= limit < merge_memory_bytes(chain.manifests)
    assert [one.plan.kind for one in merged] == ["delta"] * (len(merged) - 1) + ["baseline"]
    assert _chain_names(root) == [merged[-1].manifest.name]
    assert load(root, make_layout("row_wise", 2), run.truth).equals(run.truth)
    assert verify(root) == []


def test_memory_for_less_than_two_manifests_is_refused_with_the_numbers(tmp_path: Path) -> None:
    run = start(tmp_path / "ck")
    go_on(run, range(3))
    before = files_of(tmp_path / "ck")
    with pytest.raises(ConfigError, match=r"KiB of memory, and 1\.0 KiB are allowed"):
        merge(tmp_path / "ck", "baseline", memory_limit_bytes=1024)
    assert files_of(tmp_path / "ck") == before


def test_nothing_is_merged_of_a_baseline_alone_or_for_auto_of_a_short_chain(tmp_path: Path) -> None:
    run = start(tmp_path / "ck")
    run.save(0)
    before = files_of(tmp_path / "ck")
    assert [merge(tmp_path / "ck", to) for to in ("auto", "delta", "baseline")] == [[], [], []]
    assert files_of(tmp_path / "ck") == before


def test_a_damaged_source_is_named_and_nothing_is_left(tmp_path: Path) -> None:
    root = tmp_path / "ck"
    go_on(start(root), range(4))
    path = next((root / "data").glob("00000002-*-r0*"))
    data = bytearray(path.read_bytes())
    data[-3] ^= 1
    path.write_bytes(data)
    before = files_of(root)
    with pytest.raises(CheckpointError, match=r"data/00000002-s1a2-r0\.safetensors.*damaged"):
        merge(root, "baseline")
    assert files_of(root) == before


def _merged(root: Path, trace: Trace) -> str:
    """Merge with a trace; what came out of it."""
    try:
        merge(TracedStorage(root, trace), "baseline", number=1)
    except (OSError, CheckpointError) as error:
        return type(error).__name__
    return "committed"


def _operations(root: Path) -> list[str]:
    """Names of the operations of a merge; its result is removed again."""
    trace = Trace()
    assert _merged(root, trace) == "committed"
    _undo(root)
    return [f"{operation} {name}" for operation, name in trace.operations]


def _undo(root: Path) -> None:
    for path in [
        *root.glob("manifests/*m1.json"),
        *root.glob("manifests/.*m1.tmp"),
        *root.glob("data/*m1-*"),
        *root.glob("leases/*"),
    ]:
        path.unlink()


def _sweep_all(root: Path, trace: Trace | None = None) -> None:
    """Sweep by a clock for which every lease has ended: as if the merge had been stopped for hours."""
    sweep_merges(TracedStorage(root, trace or Trace()), now=time.time() + FAR)


@pytest.mark.parametrize("stride", [5, pytest.param(1, marks=pytest.mark.slow)])
def test_a_merge_that_fails_at_any_operation_leaves_the_chain_and_no_data(tmp_path: Path, stride: int) -> None:
    root = tmp_path / "ck"
    run = start(root)
    go_on(run, range(3))
    before = {name for name in files_of(root) if not name.startswith("leases/")}
    results = []
    for index in range(0, len(_operations(root)), stride):
        trace = Trace()
        trace.act = fail_at(index, OSError(errno.EIO, "Input/output error"))
        results.append(_merged(root, trace))
        assert find_chain(root, verify="full") is not None
        assert verify(root) == []
        if results[-1] != "committed":
            _sweep_all(root)
            names = {name for name in files_of(root) if not name.startswith("leases/")}
            # One that was linked and could not be synced stays, with its data.
            linked = trace.operations[index] == ("sync_folder", "manifests") and len(names) > len(before)
            assert len([name for name in names if name.endswith("m1.json")]) == linked
            assert names == before or linked
            assert verify(root) == []
        _undo(root)
    assert results.count("OSError") > 0.7 * len(results)
    assert load(root, make_layout("row_wise", 3), run.truth).equals(run.truth)


@pytest.mark.parametrize("stops", [("link",), pytest.param(("",), marks=pytest.mark.slow)])
def test_a_merge_whose_files_are_swept_in_the_middle_commits_whole_or_not_at_all(
    tmp_path: Path, stops: tuple[str, ...]
) -> None:
    root = tmp_path / "ck"
    run = start(root)
    go_on(run, range(2))
    operations = _operations(root)
    first = next(i for i, o in enumerate(operations) if o.startswith("create manifests/"))
    outcomes = set()
    # The merge stops before an operation of its commit; when the sweeper is before one of its own, the merge goes on.
    for stop in range(first, len(operations)):
        if not operations[stop].startswith(stops):
            continue
        for meanwhile in range(12):
            outcomes.add(_merge_while_swept(root, stop, meanwhile))
            assert verify(root, "full") == []
            _sweep_all(root)
            _undo(root)
    assert outcomes == {"committed", "StorageError"}
    assert load(root, make_layout("row_wise", 3), run.truth).equals(run.truth)


def _merge_while_swept(root: Path, stop: int, meanwhile: int) -> str:
    stopped, goes_on, ended = threading.Event(), threading.Event(), threading.Event()
    merging, sweeping = Trace(), Trace()

    def wait(index: int, operation: str, name: str) -> None:
        if index == stop:
            stopped.set()
            assert goes_on.wait(30)

    def go(index: int, operation: str, name: str) -> None:
        if index == meanwhile:
            goes_on.set()
            assert ended.wait(30)

    merging.act, sweeping.act = wait, go
    with ThreadPoolExecutor(1) as pool:
        result = pool.submit(_merged, root, merging)
        result.add_done_callback(lambda _: (stopped.set(), ended.set()))
        assert stopped.wait(30)
        _sweep_all(root, sweeping)
        goes_on.set()
        return result.result(30)


def test_a_second_merge_is_refused_until_the_lease_of_the_first_is_over(tmp_path: Path) -> None:
    root = tmp_path / "ck"
    go_on(start(root), range(3))
    clock = [1000.0]
    dead = Lease(LocalStorage(root), "merge", token="5", now=lambda: clock[0])
    dead.take()
    (root / "data" / "00000003-s1m5-r0.safetensors").write_bytes(b"half")
    with pytest.raises(StorageError, match=r"process \d+ on .* is merging in .*, or has been killed"):
        merge(root, "baseline", now=lambda: clock[0] + 100)
    assert (root / "data" / "00000003-s1m5-r0.safetensors").exists()
    (merged,) = merge(root, "baseline", now=lambda: clock[0] + FAR)
    assert merged.manifest.step == 2
    assert not (root / "data" / "00000003-s1m5-r0.safetensors").exists()


def test_a_trainers_start_leaves_a_running_merge_alone_and_takes_no_number_from_it(tmp_path: Path) -> None:
    root = tmp_path / "ck"
    run = start(root)
    go_on(run, range(4))
    trace, seen = Trace(), []

    def act(index: int, operation: str, name: str) -> None:
        if operation == "link" and not seen:
            seen.append(name)
            resumed = start(root, truth=run.truth, resumed_from=find_chain(root))
            go_on(resumed, range(4, 6))

    trace.act = act
    (merged,) = merge(TracedStorage(root, trace), "baseline")
    assert seen == [merged.manifest.name]
    assert _chain_names(root) == [merged.manifest.name, "manifests/00000005-s2.json", "manifests/00000006-s2.json"]
    assert verify(root) == []
    assert load(root, make_layout("row_wise", 3), run.truth).equals(run.truth)


def test_a_chain_of_a_step_is_merged_without_what_comes_after(tmp_path: Path) -> None:
    root = tmp_path / "ck"
    run = start(root)
    go_on(run, range(3))
    expected: Truth = copy.deepcopy(run.truth)
    go_on(run, range(3, 5))
    manifest: Manifest = merge(root, "baseline", step=2)[0].manifest
    assert (manifest.step, manifest.seq) == (2, 3)
    chain = find_chain(root)
    assert chain is not None
    assert [m.seq for m in chain.manifests] == [3, 4, 5]
    assert load(root, make_layout("row_wise", 1), run.truth).equals(run.truth)
    for path in [*(root / "manifests").glob("0000000[4-5]-s1.json")]:
        path.unlink()
    chain = find_chain(root)
    assert chain is not None
    assert load_chain(chain, make_layout("row_wise", 1), run.truth, optimizer=ADAGRAD).equals(expected)
