"""Storage that neither works nor fails holds a trainer up for two vote timeouts, not for ever."""

import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from dlrm_scale.checkpoint import find_chain
from dlrm_scale.errors import CheckpointError
from tests.checkpoint.faulty_storage import Trace, TracedStorage
from tests.checkpoint.simulated_run import TABLES, Run, load, make_layout, make_truth


class _Hung:
    """A run with a good checkpoint of step 1 whose storage hangs in the save of step 2."""

    def __init__(self, root: Path) -> None:
        trace = Trace()
        self.run = Run(
            root,
            make_layout("table_wise", 1),
            make_truth(TABLES, ["row"]),
            storages=[TracedStorage(root, trace)],
            on_failure="warn",
        )
        assert self.run.save(1).committed
        self.repaired = threading.Event()
        self.reached = threading.Event()

        def act(index: int, operation: str, name: str) -> None:
            if operation == "sync":
                self.reached.set()
                assert self.repaired.wait(60)

        trace.act = act
        self.run.change("C1", [3], 1.0)
        self.engine = self.run.engines[0]
        self.save(2)
        assert self.reached.wait(30)
        self.run.set_vote_timeout(0.1)
        assert self.engine._flight is not None
        self.thread = self.engine._flight.thread

    def save(self, step: int) -> None:
        self.engine.save(step=step, cursor={}, dense={}, rank_state={}, extra={})


@pytest.fixture
def hung(tmp_path: Path) -> Iterator[_Hung]:
    made = _Hung(tmp_path / "ck")
    yield made
    made.repaired.set()
    made.thread.join(30)
    assert not made.thread.is_alive()


def test_wait_gives_up_and_names_the_step(hung: _Hung, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"step 2 isn't saved: .*hangs: nothing has moved for 0\.2 s"):
        hung.engine.wait()
    assert hung.thread.is_alive()
    (outcome,) = hung.engine.poll()
    assert (outcome.step, outcome.committed) == (2, False)
    # The row is marked again, and what was committed before is untouched.
    assert int(hung.run.touched[0].current(0)[3]) == 1
    chain = find_chain(tmp_path / "ck", verify="full")
    assert chain is not None
    assert chain.step == 1


def test_save_gives_up_on_the_save_before_and_freezes_nothing(hung: _Hung) -> None:
    for _ in range(2):
        with pytest.raises(CheckpointError, match="step 2 isn't saved"):
            hung.save(3)
    hung.run.touched[0].freeze()


def test_close_reports_the_step_and_returns(hung: _Hung) -> None:
    with pytest.warns(RuntimeWarning, match="step 2 isn't saved"):
        hung.engine.close()
    assert hung.thread.is_alive()
    assert hung.thread.daemon
    assert [outcome.step for outcome in hung.engine.poll()] == [2]
    hung.engine.close()


def test_a_save_that_ends_in_time_is_waited_for_however_slow(hung: _Hung, tmp_path: Path) -> None:
    hung.run.set_vote_timeout(60)
    threading.Timer(0.3, hung.repaired.set).start()
    assert [outcome.committed for outcome in hung.engine.wait()] == [True]
    assert load(tmp_path / "ck", make_layout("row_wise", 2), hung.run.truth).equals(hung.run.truth)
