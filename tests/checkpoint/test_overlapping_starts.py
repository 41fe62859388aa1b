"""Trainers that overlap on one folder leave no saved step behind unknowingly, and no run mixes with another."""

import json
from collections.abc import Callable
from contextlib import suppress
from itertools import count
from pathlib import Path

import pytest

from dlrm_scale.checkpoint import find_chain
from dlrm_scale.checkpoint.chain.chain import open_step
from dlrm_scale.checkpoint.chain.starts import RunIdentity, check_owner
from dlrm_scale.checkpoint.storage.local_storage import LocalStorage
from dlrm_scale.errors import CheckpointError, ConfigError, DlrmScaleError, SaveError
from tests.checkpoint.crash_life import Life, Meets
from tests.checkpoint.faulty_storage import Trace, TracedStorage
from tests.checkpoint.simulated_run import TABLES, Run, load, make_layout, make_truth, on_ranks
from tests.checkpoint.stepped_run import OPTIMIZER, truth_of
from tests.checkpoint.stepped_run import TABLES as STEPPED_TABLES

A = RunIdentity(id="aa", path="/runs/a")
B = RunIdentity(id="bb", path="/runs/b")


def _run(root: Path, ranks: int = 2, **options: object) -> Run:
    return Run(root, make_layout("row_wise", ranks), make_truth(TABLES, ["row"]), **options)


@pytest.mark.parametrize("policy", ["consecutive", "one_shot"])
@pytest.mark.parametrize("kind", ["table_wise", "column_wise"])
def test_a_start_that_chose_before_its_predecessors_last_commit_refuses_to_go_on(
    tmp_path: Path, policy: str, kind: str
) -> None:
    root = tmp_path / "ck"
    before = _run(root, policy=policy)
    before.save(1)
    chosen = find_chain(root)
    before.change("C1", [3], 1.0)
    assert before.save(2).committed
    with pytest.raises(CheckpointError) as caught:
        # another plan too: then its first save would be a baseline
        Run(root, make_layout(kind, 2), make_truth(TABLES, ["row"]), resumed_from=chosen, policy=policy)
    assert "another trainer has committed step 2 (manifests/00000002-s1.json) after this start had chosen" in str(
        caught.value
    )
    assert "go on from step 1" in caught.value.message
    assert "start again with --resume auto" in str(caught.value.remedy)
    # the other one is fenced off by then, and a start that looks again goes on from its last step
    before.change("C1", [4], 1.0)
    with pytest.raises(CheckpointError, match="start 2 has taken over"):
        before.save(3)
    after = _run(root, resumed_from=find_chain(root), policy=policy)
    assert after.save(3).committed
    found = find_chain(root)
    assert found is not None
    assert (found.step, found.tip.start, found.manifests[-2].step) == (3, 3, 2 if policy == "consecutive" else 1)


@pytest.mark.parametrize(
    ("run", "error", "says"),
    [
        (A, SaveError, "remedy: start again with --resume auto"),
        (B, ConfigError, "remedy: set checkpoint.path to"),
    ],
    ids=["the same run", "another run"],
)
def test_every_rank_is_told_why(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, run: RunIdentity, error: type[DlrmScaleError], says: str
) -> None:
    root = tmp_path / "ck"
    before = _run(root, run=A)
    before.save(1)
    chosen = find_chain(root)
    before.save(2)

    def each(ranks: int, work: Callable[[int], object]) -> None:
        def one(rank: int) -> str:
            with pytest.raises(error) as caught:
                work(rank)
            assert caught.value.exit_code == error.exit_code  # no damage: 1 or 2, and not 4
            return str(caught.value)

        told = on_ranks(ranks, one)
        assert told[0] == told[1]
        assert says in told[0]
        raise StopIteration

    monkeypatch.setattr("tests.checkpoint.simulated_run.on_ranks", each)
    with pytest.raises(StopIteration):
        _run(root, resumed_from=chosen, run=run)


def test_a_start_that_found_nothing_refuses_when_something_has_come(tmp_path: Path) -> None:
    root = tmp_path / "ck"
    _run(root).save(1)
    with pytest.raises(CheckpointError, match=r"step 1 .* after this start had found no checkpoint"):
        _run(root)


def test_an_older_step_on_purpose_leaves_the_newer_ones_behind_but_not_those_that_come_meanwhile(
    tmp_path: Path,
) -> None:
    root = tmp_path / "ck"
    before = _run(root)
    for step in (1, 2, 3):
        before.save(step)
    back = open_step(root, 1)
    assert before.save(4).committed
    with pytest.raises(CheckpointError, match=r"step 4 .* chosen to go on from step 1") as caught:
        _run(root, resumed_from=back)
    assert "or leave it behind with --resume 1" in str(caught.value.remedy)
    branch = _run(root, resumed_from=open_step(root, 1))
    assert branch.save(2).committed
    found = find_chain(root)
    assert found is not None
    assert [m.step for m in found.manifests] == [1, 2]
    assert load(root, make_layout("row_wise", 1), branch.truth).equals(branch.truth)


def _claim_within_a_save(nth: int) -> tuple[bool, bool]:
    """Another trainer, which chose before this save, claims the folder before the save's operation `nth`.

    Returns:
        Whether there is such an operation, and whether the other one goes on.
    """
    life = Life()
    assert life.start(1)
    assert life.save()
    chosen = find_chain(life.storage)
    assert chosen is not None
    met: list[bool] = []
    counts = Meets(nth=nth)

    def act(index: int, operation: str, name: str) -> None:
        if not counts(operation, name):
            life._act(index, operation, name)
            return
        try:
            Run(
                life.storage,
                make_layout("row_wise", 1, STEPPED_TABLES),
                truth_of(chosen.step),
                resumed_from=chosen,
                optimizer=OPTIMIZER,
                storages=[TracedStorage(life.storage, Trace())],
            )
        except CheckpointError:
            met.append(False)
        else:
            met.append(True)
        life._act(index, operation, name)

    life.trace.act = act
    before = life.acknowledged
    with suppress(CheckpointError):
        life.save()
    if True in met:
        assert life.acknowledged == before, f"operation {nth}: an acknowledged step is left behind"
    return bool(met), True in met


def test_whenever_a_successor_claims_no_acknowledged_step_is_left_behind() -> None:
    claims = []
    for nth in count(1):
        met, goes_on = _claim_within_a_save(nth)
        if not met:
            break
        claims.append(goes_on)
    # before the link it goes on, and the save fails; from the link on it looks again
    assert claims == sorted(claims, reverse=True)
    assert claims.count(True) > 10
    assert claims.count(False) >= 3


def test_a_folder_belongs_to_the_run_that_began_there(tmp_path: Path) -> None:
    root = tmp_path / "ck"
    first = _run(root, run=A)
    assert json.loads((root / "starts" / "1.json").read_text())["run_id"] == "aa"
    for options in ({"run": B}, {"run": RunIdentity(id="", path="/runs/c")}):
        with pytest.raises(ConfigError, match=r"belongs to another run, /runs/a \(id aa.*saved nothing yet") as caught:
            _run(root, **options)
        assert "set checkpoint.path to another folder" in str(caught.value.remedy)
    # nobody was fenced off by that
    assert first.save(1).committed
    with pytest.raises(ConfigError, match=r"belongs to another run, /runs/a .*holds its checkpoints"):
        _run(root, run=B, resumed_from=find_chain(root))
    assert len(list((root / "starts").iterdir())) == 1
    moved = RunIdentity(id="aa", path="/elsewhere/a")
    assert _run(root, run=moved, resumed_from=find_chain(root)).save(2).committed


def test_of_two_runs_that_begin_in_one_folder_at_once_the_first_stays(tmp_path: Path) -> None:
    root, trace = tmp_path / "ck", Trace()
    first: list[Run] = []

    def begin_before(index: int, operation: str, name: str) -> None:
        if operation == "create" and name == "starts/1.json":
            trace.act = None
            first.append(_run(root, run=A))

    trace.act = begin_before
    storage = TracedStorage(root, trace)
    with pytest.raises(ConfigError, match="belongs to another run, /runs/a"):
        _run(root, ranks=1, run=B, storages=[storage])
    assert first[0].save(1).committed
    assert [path.name for path in (root / "starts").iterdir()] == ["1.json"]


def test_a_run_begun_anew_in_the_same_folder_takes_over_what_holds_no_checkpoint(tmp_path: Path) -> None:
    root = tmp_path / "ck"
    _run(root, run=A)
    anew = _run(root, run=RunIdentity(id="a2", path=A.path))
    assert anew.save(1).committed
    with pytest.raises(ConfigError, match="id a2"):
        check_owner(LocalStorage(root), A)


def test_folders_from_before_runs_were_named_and_damaged_records_keep_nobody_out(tmp_path: Path) -> None:
    root = tmp_path / "ck"
    _run(root).save(1)
    check_owner(LocalStorage(root), A)
    assert _run(root, run=A, resumed_from=find_chain(root)).save(2).committed
    with pytest.raises(ConfigError):
        check_owner(LocalStorage(root), B)
    (root / "starts" / "2.json").write_bytes(b'{"run_')
    check_owner(LocalStorage(root), B)
