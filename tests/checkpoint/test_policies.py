"""Every policy restores the last committed step bit for bit: through failed saves, deaths, resumes, other policies."""

import copy
import random
from pathlib import Path
from typing import Any

import pytest
import torch

from dlrm_scale.checkpoint import Chain, find_chain, list_checkpoints, verify
from dlrm_scale.checkpoint.files.manifest import Manifest
from dlrm_scale.checkpoint.saving.commit import ChainState
from dlrm_scale.checkpoint.saving.policy import next_kind
from dlrm_scale.checkpoint.storage.local_storage import LocalStorage
from dlrm_scale.checkpoint.upkeep.merge import merge_chain
from dlrm_scale.schema import TableSpec
from dlrm_scale.touched_rows import TouchedRows
from tests.checkpoint.faulty_storage import Trace, TracedStorage
from tests.checkpoint.simulated_run import TABLES, Run, Truth, load, make_layout, make_truth

POLICIES = ("consecutive", "one_shot", "intermittent")


def _run(root: Path, policy: str, *, truth: Truth | None = None, **options: Any) -> Run:
    layout = options.pop("layout", None) or make_layout("row_wise", 2)
    return Run(root, layout, truth or make_truth(TABLES, ["row"]), policy=policy, **options)


def _chain(root: Path) -> Chain:
    chain = find_chain(root, verify="full")
    assert chain is not None
    return chain


def _ids(manifest: Manifest, table: str) -> int:
    return sum(e.rows for f in manifest.files for e in f.entries if e.table == table)


def _kinds(root: Path) -> list[str]:
    return [f"{row.kind}{row.step}" for row in list_checkpoints(root)]


def test_a_one_shot_delta_holds_all_rows_since_the_baseline_and_its_parent_is_the_baseline(tmp_path: Path) -> None:
    root = tmp_path / "ck"
    run = _run(root, "one_shot")
    run.change("C1", [50], 1.0)
    run.save(0)
    for step, rows in ((1, [3, 60]), (2, [60, 61]), (3, [])):
        run.change("C1", rows, float(step))
        run.save(step)
    chain = _chain(root)
    assert [m.kind for m in chain.manifests] == ["baseline", "delta"]
    assert (chain.step, _ids(chain.tip, "C1")) == (3, 3)
    assert chain.tip.parent is not None
    assert chain.tip.parent.name == chain.manifests[0].name
    assert chain.tip.covers == (2, 4)
    assert load(root, make_layout("table_wise", 1), run.truth).equals(run.truth)


def test_of_one_shot_deltas_as_many_stay_as_chains_are_kept(tmp_path: Path) -> None:
    root = tmp_path / "ck"
    run = _run(root, "one_shot", keep_baselines=2)
    for step in range(6):
        run.change("C1", [step], 1.0)
        assert run.save(step).warning is None
    assert _kinds(root) == ["baseline0", "delta4", "delta5"]
    assert len(list((root / "data").iterdir())) == 9
    assert verify(root) == []


def test_a_pinned_one_shot_delta_stays(tmp_path: Path) -> None:
    root = tmp_path / "ck"
    run = _run(root, "one_shot", keep_baselines=1)
    for step in range(5):
        run.change("C1", [step], 1.0)
        run.save(step)
        if step == 1:
            for engine in run.engines:
                engine.pin([_chain(root).tip.name])
    assert _kinds(root) == ["baseline0", "delta1", "delta4"]


def test_a_damaged_one_shot_delta_costs_one_step(tmp_path: Path) -> None:
    root = tmp_path / "ck"
    run = _run(root, "one_shot")
    run.save(0)
    for step in (1, 2, 3):
        before = copy.deepcopy(run.truth)
        run.change("C1", [step, 90], float(step))
        run.save(step)
    next((root / "data").glob("00000004-*-r1*")).unlink()
    assert _chain(root).step == 2
    assert load(root, make_layout("row_wise", 3), run.truth).equals(before)


def test_a_damaged_superseded_delta_does_not_count_as_kept(tmp_path: Path) -> None:
    root = tmp_path / "ck"
    run = _run(root, "one_shot", keep_baselines=2)
    for step in range(3):
        run.change("C1", [step], 1.0)
        run.save(step)
    next((root / "data").glob("00000003-*-r0*")).unlink()
    run.save(3)
    assert _kinds(root) == ["baseline0", "delta1", "delta3"]


def test_rows_since_the_baseline_are_forgotten_with_the_next_one(tmp_path: Path) -> None:
    root = tmp_path / "ck"
    run = _run(root, "one_shot", baseline_ratio=0.3)
    run.save(0)
    run.change("C1", range(0, 97, 2), 1.0)
    assert run.save(1).kind == "delta"
    run.change("C1", [7], 1.0)
    assert run.save(2).kind == "baseline"
    run.change("C1", [8], 1.0)
    outcome = run.save(3)
    assert (outcome.kind, outcome.rows) == ("delta", 1)
    assert load(root, make_layout("table_wise", 2), run.truth).equals(run.truth)


def _history_says(baseline: int, deltas: list[int]) -> str:
    state = ChainState(
        tip_name="manifests/00000009-s1.json",
        baseline_bytes=baseline,
        delta_bytes=deltas[-1] if deltas else 0,
        history_deltas=len(deltas),
        history_bytes=sum(deltas),
        needs_baseline=False,
    )
    return next_kind("intermittent", state, 1.0)


def test_intermittent_takes_a_baseline_once_check_n_runs_rule_says_so() -> None:
    assert _history_says(100, []) == "delta"
    assert _history_says(100, [25]) == "delta"  # 125 > 2 * 25
    assert _history_says(100, [25, 35, 42]) == "delta"  # 202 > 4 * 42
    assert _history_says(100, [25, 35, 42, 47, 50]) == "baseline"  # 299 <= 6 * 50
    assert _history_says(100, [100]) == "baseline"  # 200 <= 2 * 100
    # deltas that stop growing: 1 + i * S <= (i + 1) * S never holds while S < 1
    assert _history_says(100, [30] * 500) == "delta"


def test_intermittent_follows_the_rule_with_the_bytes_that_it_wrote_also_after_a_resume(tmp_path: Path) -> None:
    root = tmp_path / "ck"
    run = _run(root, "intermittent", keep_baselines=1)
    baseline_bytes = run.save(0).bytes
    sizes: list[int] = []
    kinds = []
    for step in range(1, 14):
        run.change("C1", range((step - 1) * 9, min(97, step * 9)), 1.0)
        expected = _history_says(baseline_bytes, sizes)
        outcome = run.save(step)
        kinds.append(outcome.kind)
        assert outcome.kind == expected
        if outcome.kind == "baseline":
            baseline_bytes, sizes = outcome.bytes, []
        else:
            sizes.append(outcome.bytes)
        # superseded deltas are gone: only the manifest knows of them
        run = _run(root, "intermittent", truth=run.truth, resumed_from=_chain(root), keep_baselines=1)
    assert kinds.index("baseline") > 2
    assert load(root, make_layout("row_wise", 3), run.truth).equals(run.truth)


WIDE = (TableSpec(name="C1", rows=3000, dim=16), TableSpec(name="C2", rows=40, dim=4))


def _advance(run: Run, step: int) -> None:
    chosen = random.Random(step)
    for spec in WIDE:
        run.change(spec.name, chosen.sample(range(spec.rows), 4), 0.25 * (step + 1))


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("after", POLICIES)
def test_a_run_that_resumes_under_another_policy_and_layout_stays_exact(
    tmp_path: Path, policy: str, after: str
) -> None:
    root = tmp_path / "ck"
    run = _run(root, policy, layout=make_layout("row_wise", 2, WIDE), truth=make_truth(WIDE, ["row"]))
    for step in range(4):
        _advance(run, step)
        run.save(step)
    for start, (kind, ranks) in enumerate([("table_wise", 1), ("data_parallel", 3), ("row_wise", 2)]):
        layout = make_layout(kind, ranks, WIDE)
        run = _run(root, after, layout=layout, truth=run.truth, resumed_from=_chain(root))
        for step in range(4 + 2 * start, 6 + 2 * start):
            _advance(run, step)
            assert run.save(step).kind == "delta"
            assert verify(root) == []
            assert load(root, make_layout("row_wise", 3, WIDE), run.truth).equals(run.truth)
    deltas = len(_chain(root).manifests) - 1
    assert deltas == (1 if after != "consecutive" else 7 if policy != "consecutive" else 9)


def test_a_resumed_one_shot_delta_has_the_rows_of_the_deltas_before_and_no_more(tmp_path: Path) -> None:
    root = tmp_path / "ck"
    run = _run(root, "one_shot")
    run.save(0)
    run.change("C1", [3, 60], 1.0)
    run.change("C3", range(40), 1.0)  # a whole table, stored without ids
    run.save(1)
    resumed = _run(root, "one_shot", truth=run.truth, resumed_from=_chain(root), layout=make_layout("row_wise", 3))
    resumed.change("C1", [4], 1.0)
    assert resumed.save(2).rows == 3 + 40
    assert load(root, make_layout("table_wise", 1), run.truth).equals(run.truth)


def _train_to_step_3(root: Path, policy: str, dies_at: int | None) -> tuple[int, Truth, Truth]:
    """Save steps 0 to 3; the save of step 2 fails, and the run dies at operation `dies_at` of the last one.

    Returns:
        Operations of the last save, and the tables at step 1 and 3.
    """
    trace = Trace()
    layout, truth = make_layout("row_wise", 2, WIDE), make_truth(WIDE, ["row"])
    storages = [TracedStorage(root, trace) for _ in range(2)]
    run = _run(root, policy, layout=layout, truth=truth, storages=storages, keep_baselines=1)
    for step in (0, 1):
        _advance(run, step)
        assert run.save(step).committed
    before = copy.deepcopy(run.truth)
    _advance(run, 2)
    trace.act = lambda index, operation, name: _die() if operation == "link" else None
    assert not run.save(2).committed
    _advance(run, 3)
    begin = len(trace.operations)
    trace.act = lambda index, *_: _die() if dies_at is not None and index >= begin + dies_at else None
    run.save_all(3)
    return len(trace.operations) - begin, before, run.truth


@pytest.mark.parametrize("policy", POLICIES)
def test_a_death_at_any_operation_leaves_the_last_commit_and_the_resumed_run_goes_on_exactly(
    tmp_path: Path, policy: str
) -> None:
    operations, _, _ = _train_to_step_3(tmp_path / "count", policy, None)
    steps = []
    for dies_at in range(0, operations + 1, 3):
        root = tmp_path / f"at{dies_at}"
        _, before, after = _train_to_step_3(root, policy, dies_at)
        chain = _chain(root)
        steps.append(chain.step)
        truth = after if chain.step == 3 else before
        assert load(root, make_layout("table_wise", 1, WIDE), truth).equals(truth)
        layout = make_layout("row_wise", 2, WIDE)
        resumed = _run(root, policy, layout=layout, truth=truth, resumed_from=chain, keep_baselines=1)
        for step in (4, 5):
            _advance(resumed, step)
            assert (resumed.save(step).kind, verify(root)) == ("delta", [])
        assert load(root, make_layout("table_wise", 2, WIDE), resumed.truth).equals(resumed.truth)
    assert set(steps) == {1, 3}


def _die() -> None:
    raise OSError("the process is gone")


def test_marks_since_the_baseline_outlive_commits_and_failures_of_deltas() -> None:
    touched = TouchedRows([6])
    touched.keep_since_baseline()
    touched.enabled = True

    def save(row: int) -> list[int]:
        touched.mark(0, torch.tensor([row]))
        touched.freeze()
        return touched.since_baseline()[0].tolist()

    assert save(0) == [1, 0, 0, 0, 0, 0]
    touched.release(baseline=True)
    assert touched.since_baseline()[0].tolist() == [0] * 6
    assert save(1) == [0, 1, 0, 0, 0, 0]
    touched.release()
    assert save(2) == [0, 1, 1, 0, 0, 0]
    touched.merge_back()
    assert save(3) == [0, 1, 1, 1, 0, 0]
    touched.merge_back()  # a baseline that failed
    assert touched.since_baseline()[0].tolist() == [0, 1, 1, 1, 0, 0]
    touched.mark(0, torch.tensor([5]))
    touched.freeze()
    touched.mark(0, torch.tensor([4]))
    touched.release(baseline=True)
    assert save(4) == [0, 0, 0, 0, 1, 0]


@pytest.mark.parametrize("policy", POLICIES)
def test_a_merge_beside_the_trainer_and_a_resume_from_it_keep_every_policy_exact(tmp_path: Path, policy: str) -> None:
    root = tmp_path / "ck"
    options = {"layout": make_layout("row_wise", 2, WIDE), "keep_baselines": 1}
    run = _run(root, policy, truth=make_truth(WIDE, ["row"]), **options)
    for step in range(4):
        _advance(run, step)
        run.save(step)
    merge_chain(LocalStorage(root), lambda: find_chain(root), "baseline")
    for step in (4, 5):
        _advance(run, step)
        assert run.save(step).committed
    assert verify(root) == []
    assert load(root, make_layout("row_wise", 3, WIDE), run.truth).equals(run.truth)
    merge_chain(LocalStorage(root), lambda: find_chain(root), "baseline")
    chain = _chain(root)
    assert [m.merge is not None for m in chain.manifests] == [True]
    resumed = _run(root, policy, truth=run.truth, resumed_from=chain, **options)
    for step in (6, 7):
        _advance(resumed, step)
        assert resumed.save(step).kind == "delta"
    assert verify(root) == []
    deltas = _chain(root).manifests[1:]
    assert _chain(root).manifests[0] == chain.tip
    assert [m.step for m in deltas] == ([6, 7] if policy == "consecutive" else [7])
    assert load(root, make_layout("table_wise", 1, WIDE), resumed.truth).equals(resumed.truth)
