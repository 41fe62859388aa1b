"""After a crash at any request to an object store a resume finds a saved step whole, none older than acknowledged."""

import random
import sys
from functools import partial

import pytest

from dlrm_scale.checkpoint.upkeep.merge_plan import MergeTarget
from tests.checkpoint.crash_buckets import BucketLife, Done, Sent, Told, bucket_states, examine_bucket
from tests.checkpoint.crash_examine import Findings, random_life
from tests.checkpoint.crash_life import Meets

# A start may find that a removal that died has said it would take everything: it then begins with a baseline.
pytestmark = pytest.mark.filterwarnings("ignore:.*has been removed since it was restored:RuntimeWarning")

MANIFEST = ("put", "manifests/0")


class Makes(Meets):
    """Holds where an object is made, in one request or at the end of several."""

    def __call__(self, operation: str, name: str) -> bool:
        return operation in ("put", "end") and super().__call__(operation, name)


def whole_life(**config: object) -> BucketLife:
    """Saves, failures, kills, merges and removals, and commits that no answer came for."""
    life = BucketLife(**config)
    life.start()
    assert all([life.save() for _ in range(3)])
    assert not life.save(fail=Makes(part="-r1."))
    assert life.save()
    # Nobody knows whether this manifest is there. It comes when the next one is about to.
    assert not life.save(hang=Meets(*MANIFEST))
    assert life.save(beside=(Meets(*MANIFEST), life.land))
    life.save(kill=Meets("delete", ".tmp"))
    assert life.start(1)
    # The deltas outgrow the baseline, so that the next save removes old chains.
    kills = Meets("delete", ".json")
    while life.save(kill=kills):
        pass
    assert life.start(3, kind="data_parallel")
    assert all([life.save() for _ in range(2)])
    assert life.merge("baseline")
    while life.merge("baseline", kill=Meets(*MANIFEST)):
        assert life.save()
    assert life.collect()
    # No answer to a merge's commit. It comes beside a trainer, before anybody may take the merge for dead.
    assert life.save()
    while life.merge("baseline", hang=Meets(*MANIFEST)):
        assert life.save()
    assert life.save(beside=(Meets(*MANIFEST), life.land))
    while life.merge("baseline", hang=Meets(*MANIFEST)):
        assert life.save()
    # After the end of its lease another merge has swept its data.
    assert life.merge("baseline")
    life.land()
    assert life.save()
    assert not life.save(hang=Makes(part="-dense."))
    assert life.save()
    life.land()
    assert life.save()
    return life


def life_with_late_manifests(place: tuple[str, str]) -> BucketLife:
    """A trainer is dead and its manifest on its way, and comes when the next trainer, or the one after, is at work."""
    life = BucketLife(baseline_ratio=0.4)
    life.start()
    for _ in range(3):
        assert all([life.save() for _ in range(2)])
        assert not life.save(hang=Meets(*MANIFEST), kill=lambda *_: life.hangs)
        assert life.hangs
        if place[0] == "put":
            assert life.start(1)
            assert life.save(beside=(Meets(*place), life.land))
        else:
            assert life.start(2, beside=(Meets(*place), life.land))
        assert not life.hangs
        assert life.save()
        assert life.start(3)
    assert life.save()
    return life


def random_bucket_life(seed: int) -> BucketLife:
    """As `random_life`; now and then a request gets no answer, and is carried out later, or by the end."""
    chance = random.Random(f"bucket {seed}")

    class Hanging(BucketLife):
        def save(self, **how: object) -> bool:
            if self.hangs and chance.random() < 0.5:
                self.land()
            hang = Meets(chance.choice(["put", "delete", "end"]), nth=chance.randint(1, 6))
            return super().save(hang=hang if chance.random() < 0.3 else None, **how)

        def merge(self, *to: MergeTarget, **how: object) -> bool:
            if self.hangs and chance.random() < 0.5:
                self.land()
            hang = Meets("put", nth=chance.randint(1, 8))
            return super().merge(*to, hang=hang if chance.random() < 0.5 else None, **how)

    part_bytes = chance.choice([256, 1 << 20])
    life = random_life(seed, partial(Hanging, part_bytes=part_bytes))
    assert isinstance(life, BucketLife)
    life.land()
    return life


PLACES = [("list", "starts"), ("list", "manifests"), ("delete", "data/"), ("put", "-r0."), MANIFEST]


def test_no_state_that_a_crash_leaves_of_a_life_in_a_bucket_is_wrong_or_older_than_acknowledged() -> None:
    found = examine_bucket(whole_life(), resume_every=150)
    assert found.problems == []
    assert found.states > 150
    assert found.resumed > 0


@pytest.mark.parametrize("place", PLACES, ids=" ".join)
def test_a_manifest_of_a_dead_trainer_that_comes_late_is_no_harm(place: tuple[str, str]) -> None:
    life = life_with_late_manifests(place)
    found = examine_bucket(life)
    assert found.problems == []
    assert found.states > 100
    # One that comes before the sweep has its data kept; later its data is gone, or another's.
    assert len(life.late) == 3


@pytest.mark.parametrize("seed", range(3))
def test_no_state_that_a_crash_leaves_of_a_random_life_in_a_bucket_is_wrong(seed: int) -> None:
    found = examine_bucket(random_bucket_life(seed))
    assert found.problems == []


@pytest.mark.slow
@pytest.mark.parametrize("policy", ["consecutive", "one_shot", "intermittent"])
def test_no_state_of_a_crash_in_a_bucket_is_wrong_under_any_policy_and_resumes(
    policy: str, capsys: pytest.CaptureFixture[str]
) -> None:
    total = Findings()
    for part_bytes in (256, 1 << 20):
        found = examine_bucket(whole_life(policy=policy, part_bytes=part_bytes), resume_every=10)
        total = Findings(total.states + found.states, total.resumed + found.resumed, total.problems + found.problems)
    _say(total, capsys)
    assert total.problems == []
    assert total.resumed > 30


@pytest.mark.slow
@pytest.mark.parametrize("first", range(0, 60, 20))
def test_no_state_that_a_crash_leaves_of_more_random_lives_in_a_bucket_is_wrong(
    first: int, capsys: pytest.CaptureFixture[str]
) -> None:
    total = Findings()
    for seed in range(first, first + 20):
        found = examine_bucket(random_bucket_life(seed), resume_every=50)
        total = Findings(total.states + found.states, total.resumed + found.resumed, total.problems + found.problems)
    _say(total, capsys)
    assert total.problems == []
    assert total.states > 2000


def test_a_request_on_its_way_is_carried_out_or_not_and_what_was_answered_stays() -> None:
    log = [
        Sent(1),
        Done(1, "put a", (("a", b"1"),)),
        Told(1),
        Sent(2),
        Sent(3),
        Done(3, "delete a", (("a", None),)),
        Done(2, "put b", (("b", b"2"),)),
        Sent(4),  # never carried out
    ]
    found = [(state.acknowledged, state.objects) for state in bucket_states(log)]
    assert found == [
        (0, {}),
        (0, {"a": b"1"}),
        (1, {"a": b"1"}),
        (1, {"a": b"1", "b": b"2"}),
        (1, {}),
        (1, {"b": b"2"}),
    ]


def _say(found: Findings, capsys: pytest.CaptureFixture[str]) -> None:
    with capsys.disabled():
        sys.stdout.write(
            f"\n{found.states} states of a bucket, {found.resumed} gone on from, {len(found.problems)} wrong or lost\n"
        )
