"""After a loss of power at any moment a resume finds a saved step whole, and none older than was acknowledged."""

import errno
import random
import sys
from functools import partial

import pytest

from tests.checkpoint.crash_examine import Findings, examine, random_life
from tests.checkpoint.crash_life import Life, Meets
from tests.checkpoint.crash_lives import life_of_policy, life_with_merges, quantized_life, resized_life, whole_life
from tests.checkpoint.crash_states import Disk
from tests.checkpoint.faulty_storage import Event

# A start may find that a removal that died has said it would take everything: it then begins with a baseline.
pytestmark = pytest.mark.filterwarnings("ignore:.*has been removed since it was restored:RuntimeWarning")


def test_no_sampled_crash_state_of_a_whole_life_is_wrong_or_older_than_acknowledged() -> None:
    found = examine(whole_life(), share=0.01, resume_every=60)
    assert found.problems == []
    assert found.states > 200
    assert found.resumed > 2


@pytest.mark.parametrize(
    ("operation", "part"), [("create", "FORMAT"), ("sync", "FORMAT"), ("link", "FORMAT"), ("sync_folder", ".")]
)
def test_a_start_takes_nothing_for_durable_that_one_before_it_was_killed_at(operation: str, part: str) -> None:
    life = Life()
    assert not life.start(kill=Meets(operation, part))
    assert life.start()
    life.save()
    found = examine(life)
    assert found.problems == []
    assert life.acknowledged == 1


LIVES = {
    "merges": life_with_merges,
    "quantized": quantized_life,
    "resized": resized_life,
    "one_shot": partial(life_of_policy, "one_shot"),
    "intermittent": partial(life_of_policy, "intermittent"),
}


@pytest.mark.parametrize("seed", range(4))
def test_no_sampled_crash_state_of_a_random_life_is_wrong_or_older_than_acknowledged(seed: int) -> None:
    found = examine(random_life(seed), share=0.02, seed=seed)
    assert found.problems == []
    assert found.states > 15


@pytest.mark.parametrize("name", LIVES)
def test_no_sampled_crash_state_of_a_special_life_is_wrong_or_older_than_acknowledged(name: str) -> None:
    found = examine(LIVES[name](), share=0.004, resume_every=100)
    assert found.problems == []
    assert found.states > 60


@pytest.mark.slow
@pytest.mark.parametrize(("name", "share"), [("whole", 0.8), *((name, 0.1) for name in LIVES)])
def test_no_crash_state_of_a_whole_life_is_wrong_or_older_than_acknowledged(
    name: str, share: float, capsys: pytest.CaptureFixture[str]
) -> None:
    live = LIVES.get(name, whole_life)
    found = examine(live(), share=share, resume_every=400)
    _say(found, capsys)
    assert found.problems == []
    assert found.states > 4000


@pytest.mark.slow
@pytest.mark.parametrize("first", range(0, 24, 3))
def test_no_crash_state_of_more_random_lives_is_wrong_or_older_than_acknowledged(
    first: int, capsys: pytest.CaptureFixture[str]
) -> None:
    total = Findings()
    for seed in range(first, first + 3):
        found = examine(random_life(seed), share=0.25, seed=seed, resume_every=1000)
        total = Findings(total.states + found.states, total.resumed + found.resumed, total.problems + found.problems)
    _say(total, capsys)
    assert total.problems == []
    assert total.states > 3000


def test_a_start_removes_no_data_whose_manifest_may_come_back_after_a_loss_of_power() -> None:
    life = Life(baseline_ratio=1e-9)
    life.start(1)
    assert life.save()
    # A commit that can't be made durable, and the trainer is killed before the next one.
    life.save(fail=Meets("sync_folder", "manifests"), error=errno.EIO)
    assert life.start(1)
    found = examine(life)
    assert found.problems == []


def test_what_was_synced_stays_and_the_rest_may_be_there_missing_or_torn() -> None:
    events = [
        Event("make_folder", "d"),
        Event("create", "d/a"),
        Event("write", "d/a", data=b"x" * 1024),
        Event("sync", "d/a"),
        Event("sync_folder", "d"),
        Event("write", "d/a", data=b"y" * 2048),
        Event("create", "d/b"),
        Event("link", "d/c", source="d/a"),
        Event("remove", "d/a"),
    ]
    disk = Disk()
    for event in events:
        disk.perform(event)
    found = [make() for make, _ in disk.states(random.Random(0), 200)]
    a, c = ([files.get(name) for files in found] for name in ("d/a", "d/c"))
    x, y, zero = b"x" * 1024, b"y" * 512, bytes(512)
    for content in (x, x + 4 * y, x + 4 * zero, x + 2 * y + 2 * zero, x + 3 * zero + y):
        assert content in c
    assert {x, x + 4 * y} <= set(a)
    assert None in a
    assert None in c
    assert all(files.get("d/b") in (None, b"") for files in found)
    # a name that wasn't synced may be lost although a later one is kept
    assert any("d/b" not in files and "d/c" in files for files in found)
    assert any("d/b" in files and "d/c" not in files and "d/a" in files for files in found)
    disk.perform(Event("sync", "d/c"))
    disk.perform(Event("sync_folder", "d"))
    assert [make() for make, _ in disk.states(random.Random(0), 8)] == [{"d/b": b"", "d/c": x + 4 * y}]


def _say(found: Findings, capsys: pytest.CaptureFixture[str]) -> None:
    with capsys.disabled():
        sys.stdout.write(
            f"\n{found.states} crash states, {found.resumed} gone on from, {len(found.problems)} wrong or lost\n"
        )
