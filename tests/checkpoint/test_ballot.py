"""How long ranks wait for one another: as long as the other one moves, and no longer than the timeout after that."""

import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch.distributed

from dlrm_scale.checkpoint.saving.commit import Ballot, ChainState, Outcome, SaveKey, Vote
from dlrm_scale.errors import CheckpointError
from tests.checkpoint.faulty_storage import Trace, TracedStorage
from tests.checkpoint.simulated_run import TABLES, Run, make_layout, make_truth

KEY = SaveKey(seq=1, attempt=1, step=5, kind="baseline", layout_fingerprint="x")
OUTCOME = Outcome(committed=True, chain=ChainState())


class _World:
    """Ballots of several ranks on one store and a clock that only waiting moves."""

    def __init__(self, ranks: int) -> None:
        self.seconds = 0.0
        self.meanwhile: Callable[[], object] = lambda: None
        store = torch.distributed.HashStore()
        self.ballots = [
            Ballot(store, rank=rank, ranks=ranks, timeout_seconds=10, now=lambda: self.seconds, pause=self._pause)
            for rank in range(ranks)
        ]

    def _pause(self, seconds: float) -> None:
        self.seconds += seconds
        self.meanwhile()

    def vote(self, rank: int, error: str | None = None) -> None:
        self.ballots[rank].cast(Vote(save=KEY, rank=rank, error=error))


def test_a_rank_that_moves_on_may_vote_long_after_the_timeout() -> None:
    world = _World(3)
    world.vote(0)

    def meanwhile() -> None:
        for rank, done in ((1, 55.0), (2, 75.0)):
            if world.seconds < done:
                world.ballots[rank].progress()
            else:
                world.vote(rank)

    world.meanwhile = meanwhile
    assert [vote.rank for vote in world.ballots[0].collect(KEY)] == [0, 1, 2]
    assert 75 <= world.seconds < 76


def test_a_rank_that_stands_still_fails_the_save_one_timeout_after_its_last_move() -> None:
    world = _World(2)
    world.vote(0)
    world.meanwhile = lambda: world.ballots[1].progress() if world.seconds < 30 else None
    with pytest.raises(CheckpointError, match="no vote from rank 1, and no progress for 10 s"):
        world.ballots[0].collect(KEY)
    assert 39 <= world.seconds < 41


def test_a_rank_that_never_moves_is_not_covered_by_another_one_that_does() -> None:
    world = _World(3)
    world.vote(0)
    world.meanwhile = lambda: world.ballots[1].progress()
    with pytest.raises(CheckpointError, match="no vote from rank 2"):
        world.ballots[0].collect(KEY)
    assert world.seconds < 11


def test_a_no_ends_the_wait_for_the_other_ranks() -> None:
    world = _World(3)
    world.vote(0)
    world.vote(2, error="no space")
    with pytest.raises(CheckpointError, match="rank 2: no space"):
        world.ballots[0].collect(KEY)
    assert world.seconds == 0


def test_a_rank_that_is_done_waits_for_the_outcome_while_rank_0_moves_on() -> None:
    world = _World(2)

    def meanwhile() -> None:
        if world.seconds < 95:
            world.ballots[0].progress()
        else:
            world.ballots[0].announce(1, OUTCOME)

    world.meanwhile = meanwhile
    assert world.ballots[1].await_outcome(1) == OUTCOME


def test_a_rank_gives_up_on_an_outcome_two_timeouts_after_rank_0_last_moved() -> None:
    world = _World(2)
    world.meanwhile = lambda: world.ballots[0].progress() if world.seconds < 30 else None
    assert world.ballots[1].await_outcome(1) is None
    assert 49 <= world.seconds < 51


def test_rank_0_moves_on_in_the_others_eyes_while_a_slow_rank_does() -> None:
    world = _World(3)
    world.vote(0)
    watch = world.ballots[1].patience(0, 10)
    overdue: list[float] = []

    def meanwhile() -> None:
        if watch.is_over():
            overdue.append(world.seconds)
        if world.seconds < 55:
            world.ballots[2].progress()
        else:
            world.vote(1)
            world.vote(2)

    world.vote(1)
    world.meanwhile = meanwhile
    world.ballots[0].collect(KEY)
    assert world.seconds >= 55
    assert overdue == []


def test_a_slow_writer_tells_the_others_of_each_block_that_it_has_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dlrm_scale.checkpoint.saving.snapshot.BLOCK_BYTES", 256)
    trace = Trace()
    storages = [TracedStorage(tmp_path / "ck", trace) for _ in range(2)]
    run = Run(tmp_path / "ck", make_layout("row_wise", 2), make_truth(TABLES, ["row"]), storages=storages)
    seconds = 0.0
    rank_0_looked = threading.Event()
    for engine in run.engines:
        engine._ballot._now = lambda: seconds
        engine._ballot._timeout_seconds = 10

    def pause(_: float) -> None:
        rank_0_looked.set()
        threading.Event().wait(0.001)

    run.engines[0]._ballot._pause = pause

    def act(index: int, operation: str, name: str) -> None:
        nonlocal seconds
        if operation == "write" and name.endswith("-r1.safetensors"):
            rank_0_looked.clear()
            seconds += 2  # two writes a block, two for the header
            assert rank_0_looked.wait(20)

    trace.act = act
    assert [o.error for o in run.save_all(1)] == [None, None]
    assert seconds > 40
