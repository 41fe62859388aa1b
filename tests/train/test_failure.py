"""What a user sees of a failed run is its first cause."""

import json
from pathlib import Path

from dlrm_scale.errors import DatasetError
from dlrm_scale.train.failure import first_cause, mark_done, mark_started, record_failure


def _fail(folder: Path, rank: int, error: Exception, seconds: float) -> None:
    record_failure(folder, rank, error)
    path = folder / f"rank-{rank}.failed"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"seconds": seconds}))


def test_a_neighbours_closed_connection_is_not_the_cause(tmp_path: Path) -> None:
    for rank in range(3):
        mark_started(tmp_path, rank)
    _fail(tmp_path, 0, RuntimeError("[..] Connection closed by peer [127.0.0.1]:1234"), 1.0)
    _fail(tmp_path, 2, DatasetError("part-00001.arrow was cut", remedy="preprocess again"), 2.0)
    mark_done(tmp_path, 1)
    cause = first_cause(tmp_path)
    assert cause is not None
    assert str(cause.error()) == "rank 2: part-00001.arrow was cut\n  remedy: preprocess again"
    assert cause.traceback == ""


def test_the_earliest_own_failure_is_the_cause(tmp_path: Path) -> None:
    _fail(tmp_path, 0, DatasetError("late"), 5.0)
    _fail(tmp_path, 1, DatasetError("early"), 4.0)
    cause = first_cause(tmp_path)
    assert cause is not None
    assert cause.message == "early"


def test_a_killed_rank_is_named_when_the_others_only_lost_it(tmp_path: Path) -> None:
    for rank in range(2):
        mark_started(tmp_path, rank)
    _fail(tmp_path, 0, RuntimeError("Connection reset by peer"), 1.0)
    cause = first_cause(tmp_path)
    assert cause is not None
    assert cause.rank == 1
    assert "killed from outside" in cause.message


def test_our_own_mistake_keeps_its_traceback(tmp_path: Path) -> None:
    try:
        raise KeyError("x")
    except KeyError as error:
        record_failure(tmp_path, 3, error)
    cause = first_cause(tmp_path)
    assert cause is not None
    assert "test_failure.py" in cause.traceback
