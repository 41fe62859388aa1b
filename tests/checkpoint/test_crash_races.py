"""After a loss of power in the middle of two programs at once a resume finds a saved step whole, as after one alone.

One program stands still before an operation, another runs from start to end there, and the first goes on; a trainer's
ranks write beside that as ever. Then every crash state of both is judged. `test_races.py` tells what is left when
nothing crashes, with reads as places of their own.
"""

import errno
import sys
from collections.abc import Callable
from functools import partial

import pytest

from tests.checkpoint.crash_examine import Findings, examine
from tests.checkpoint.crash_judge import judge
from tests.checkpoint.crash_life import Life, Meets

# A start may find that a removal that died has said it would take everything: it then begins with a baseline.
pytestmark = pytest.mark.filterwarnings("ignore:.*has been removed since it was restored:RuntimeWarning")

PLACES = {
    "save": (
        ("create", "-r1."),
        ("sync_folder", "data"),
        ("create", ".tmp"),
        ("link", "manifests"),
        ("sync_folder", "manifests"),
        ("outcome", ""),
        ("create", "leases/removal"),
        ("remove", ".json"),
        ("remove", "data/"),
    ),
    "merge": (("create", "data/"), ("create", ".tmp"), ("link", "manifests"), ("sync_folder", "manifests")),
    "gc": (("create", "leases/removal"), ("remove", "manifests/0"), ("sync_folder", "manifests"), ("remove", "data/")),
    "restore": (("create", "leases/restore"), ("remove", "leases/restore")),
}
"""Operations before which another program runs."""

PAIRS = [
    *(("save", inner) for inner in ("merge", "gc", "restore")),
    *(("merge", inner) for inner in ("save", "gc", "restore")),
    *(("gc", inner) for inner in ("save", "merge", "restore")),
    *(("restore", inner) for inner in ("save", "merge", "gc")),
]


def _save(life: Life) -> None:
    assert life.save()


def _inner(life: Life, name: str) -> Callable[[], object]:
    return {
        "save": partial(_save, life),
        "merge": partial(life.merge_within, "baseline"),
        "gc": life.collect_within,
        "restore": life.restore_within,
    }[name]


def racing_life(outer: str, inner: str, **config: object) -> Life:
    """One program within another, at every place of that."""
    life = Life(baseline_ratio=0.6, **config)
    life.start()
    assert all([life.save() for _ in range(2)])
    for place in PLACES[outer]:
        beside = (Meets(*place), _inner(life, inner))
        before = life.ran_beside
        for _ in range(12):
            if outer == "save":
                assert life.save(beside=beside)
            else:
                # Something to merge, to remove and to restore.
                assert life.save()
                if outer == "gc":
                    assert life.merge("baseline")
                    assert life.save()
                {"merge": partial(life.merge, "baseline"), "gc": life.collect, "restore": life.restore}[outer](
                    beside=beside
                )
            if life.ran_beside > before:
                break
        assert life.ran_beside == before + 1, f"{outer} never came to {place}"
    assert life.save()
    return life


def removal_within_a_commit() -> Life:
    """Old checkpoints are removed after a new manifest was linked, and before that was synced."""
    life = Life(baseline_ratio=1e-9)
    life.start(1)
    assert all([life.save() for _ in range(2)])
    assert life.save(beside=(Meets("sync_folder", "manifests"), life.collect_within))
    assert life.ran_beside == 1
    return life


def test_no_checkpoint_is_removed_for_one_whose_name_is_not_durable() -> None:
    assert examine(removal_within_a_commit(), share=0.2).problems == []


def test_a_commit_that_is_taken_back_leaves_one_for_which_older_ones_were_removed() -> None:
    life = Life(baseline_ratio=1e-9)
    life.start(1)
    assert all([life.save() for _ in range(2)])

    def remove_and_fail() -> None:
        life.collect_within()
        raise OSError(errno.EIO, "Input/output error")

    assert not life.save(beside=(Meets("sync_folder", "manifests"), remove_and_fail))
    assert life.acknowledged == 2
    assert judge(life.storage) == (3, [])
    assert life.save()
    assert examine(life, share=0.1).problems == []


@pytest.mark.parametrize(("outer", "inner"), [("save", "merge"), ("save", "gc"), ("merge", "save"), ("gc", "restore")])
def test_no_sampled_crash_state_of_two_programs_at_once_is_wrong_or_older_than_acknowledged(
    outer: str, inner: str
) -> None:
    found = examine(racing_life(outer, inner), share=0.003)
    assert found.problems == []
    assert found.states > 30


@pytest.mark.slow
@pytest.mark.parametrize("outer", PLACES)
def test_no_crash_state_of_two_programs_at_once_is_wrong_or_older_than_acknowledged(
    outer: str, capsys: pytest.CaptureFixture[str]
) -> None:
    total, gave_way = Findings(), 0
    for one, inner in PAIRS:
        if one == outer:
            life = racing_life(outer, inner)
            found = examine(life, share=0.03, resume_every=400)
            total = Findings(
                total.states + found.states, total.resumed + found.resumed, total.problems + found.problems
            )
            gave_way += life.gave_way
    with capsys.disabled():
        sys.stdout.write(
            f"\n{outer}: {total.states} crash states, {total.resumed} gone on from, {len(total.problems)} wrong or "
            f"lost; {gave_way} times one left the root to the other\n"
        )
    assert total.problems == []
    assert total.states > 1000
