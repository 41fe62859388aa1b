"""What a start leaves behind by going on from an older checkpoint is marked, and gc says what becomes of it."""

import json
from pathlib import Path

import pytest

from dlrm_scale.checkpoint import find_chain, list_checkpoints
from dlrm_scale.checkpoint.chain.chain import open_step
from dlrm_scale.checkpoint.chain.dead_branches import LeftBehind, dead_branches
from dlrm_scale.checkpoint.chain.pins import pin_step
from dlrm_scale.checkpoint.storage.local_storage import LocalStorage
from dlrm_scale.checkpoint.upkeep.collect_garbage import collect_garbage
from tests.checkpoint.merging import merge
from tests.checkpoint.simulated_run import TABLES, Run, make_layout, make_truth
from tests.support.command_line import run_command, run_json


def _go_on(root: Path, steps: range, back_to: int | None = None, **options: object) -> None:
    """A start that goes on from the newest checkpoint, or on purpose from an older one, and saves."""
    chain = find_chain(root) if back_to is None else open_step(root, back_to)
    run = Run(root, make_layout("table_wise", 1), make_truth(TABLES, ["row"]), resumed_from=chain, **options)
    for step in steps:
        run.change("C1", [step], 1.0)
        assert run.save(step).committed


def _dead(root: Path) -> dict[str, str]:
    return {
        row.name.removeprefix("manifests/0000000").removesuffix(".json"): str(row.dead_branch)
        for row in list_checkpoints(root)
        if row.dead_branch is not None
    }


@pytest.mark.parametrize("policy", ["consecutive", "one_shot", "intermittent"])
def test_what_lies_between_an_older_checkpoint_and_the_start_that_went_back_to_it_is_dead(
    tmp_path: Path, policy: str
) -> None:
    root = tmp_path / "ck"
    options = {"policy": policy, "keep_baselines": 9}
    _go_on(root, range(1, 4), **options)
    _go_on(root, range(4, 6), **options)
    assert _dead(root) == {}
    _go_on(root, range(0), back_to=2, **options)
    assert _dead(root) == {}, "a start that has saved nothing has left nothing behind"
    _go_on(root, range(3, 5), back_to=2, **options)
    left = "dead branch: start 4 went on from step 2"
    assert _dead(root) == {"3-s1": left, "4-s2": left, "5-s2": left}
    # and back to the dead branch: its end stays dead, and so does what came instead
    _go_on(root, range(6, 7), back_to=5, **options)
    left = "dead branch: start 5 went on from step 5"
    assert _dead(root) == {"6-s4": left, "7-s4": left}


def test_a_merge_is_as_dead_as_what_it_stands_for(tmp_path: Path) -> None:
    root = tmp_path / "ck"
    _go_on(root, range(1, 5), merger=True)
    merge(root, "baseline", step=2, number=7)
    merge(root, "baseline", step=4, number=8)
    _go_on(root, range(3, 4), back_to=2, merger=True)
    assert set(_dead(root)) == {"3-s1", "4-s1", "4-s1m8"}


def test_below_a_start_without_a_readable_record_nothing_is_called_dead(tmp_path: Path) -> None:
    root = tmp_path / "ck"
    _go_on(root, range(1, 4))
    _go_on(root, range(2, 4), back_to=1)
    _go_on(root, range(3, 4), back_to=2)  # of the newest start that has a step 2
    assert set(_dead(root)) == {"2-s1", "3-s1", "5-s2"}
    (root / "starts" / "2.json").write_bytes(b"{")
    assert set(_dead(root)) == {"5-s2"}
    (root / "starts" / "3.json").write_text(json.dumps({"continues": "manifests/00000009-s9.json"}))
    assert _dead(root) == {}
    assert dead_branches(LocalStorage(root), {}) == {}


def test_ls_marks_dead_branches_in_words_and_json(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "160")
    root = tmp_path / "ck"
    _go_on(root, range(1, 4))
    _go_on(root, range(2, 3), back_to=1)
    rows = run_json(capsys, "checkpoint", "ls", root)
    left = {"start": 2, "from_step": 1}
    assert [row["dead_branch"] for row in rows] == [None, left, left, None]
    assert run_command("checkpoint", "ls", root) == 0
    shown = capsys.readouterr().out
    assert shown.count("ok, dead branch") == 2
    assert "\ndead branch: start 2 went on from step 1, not from steps 2 to 3\n" in shown


def test_gc_says_what_it_keeps_and_removes_of_a_dead_branch(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    root = tmp_path / "ck"
    options = {"baseline_ratio": 1e-9, "keep_baselines": 9}
    _go_on(root, range(1, 7), **options)
    name = pin_step(LocalStorage(root), 5)
    _go_on(root, range(3, 8), back_to=2, **options)
    found = collect_garbage(LocalStorage(root), keep_baselines=2, dry_run=True)
    [branch] = found.dead_branches
    assert branch.left == LeftBehind(start=2, from_step=2)
    assert (branch.first_step, branch.last_step) == (3, 6)
    assert name in branch.kept
    assert branch.removed
    assert {*branch.kept, *branch.removed} == {f"manifests/0000000{seq}-s1.json" for seq in range(3, 7)}
    assert run_command("checkpoint", "gc", root) == 0
    told = capsys.readouterr().out
    count, kept = len(branch.removed), len(branch.kept)
    assert f"dead branch of steps 3 to 6 (start 2 went on from step 2): removed {count}, keeps {kept}" in told
    after = run_json(capsys, "checkpoint", "gc", root)["dead_branches"]
    assert [(one["start"], one["from_step"], one["kept"], one["removed"]) for one in after] == [
        (2, 2, list(branch.kept), [])
    ]


def test_without_enough_chains_gc_keeps_the_dead_branch_and_says_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    root = tmp_path / "ck"
    _go_on(root, range(1, 4))
    _go_on(root, range(2, 3), back_to=1)
    assert run_command("checkpoint", "gc", root) == 0
    told = capsys.readouterr().out
    assert "dead branch of steps 2 to 3 (start 2 went on from step 1): removed 0, keeps 2" in told
    assert "1 of 2 chains" in told
    assert len(list((root / "manifests").iterdir())) == 4
