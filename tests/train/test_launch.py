"""Local ranks start, end, fail and stop as a user expects."""

import logging
import os
import signal
import time
from pathlib import Path

import pytest

from dlrm_scale.errors import ConfigError, DatasetError, DlrmScaleError
from dlrm_scale.train.launch import launch
from dlrm_scale.train.stop import StopRequest

_LIMIT_SECONDS = 60.0


def _report(folder: str, stop: StopRequest) -> tuple[str, str]:
    Path(folder, f"saw-{os.environ['RANK']}").touch()
    return os.environ["RANK"], os.environ["WORLD_SIZE"]


def _second_rank_fails(folder: str, stop: StopRequest) -> None:
    if os.environ["RANK"] == "1":
        raise DatasetError("part-00003.arrow is 12 bytes short", remedy="preprocess again")
    _wait_for(lambda: stop.requested)
    raise RuntimeError("Connection closed by peer")


def _second_rank_is_killed(folder: str, stop: StopRequest) -> None:
    if os.environ["RANK"] == "1":
        os.kill(os.getpid(), signal.SIGKILL)
    _wait_for(lambda: stop.requested)
    raise RuntimeError("Connection closed by peer")


def _until_stopped(folder: str, stop: StopRequest) -> str:
    if os.environ["RANK"] == "0":
        for _ in range(3):
            os.kill(os.getppid(), signal.SIGTERM)
    _wait_for(lambda: stop.requested)
    Path(folder, f"stopped-{os.environ['RANK']}").touch()
    return stop.signal_name


def _wait_for(condition) -> None:
    end = time.monotonic() + _LIMIT_SECONDS
    while not condition() and time.monotonic() < end:
        time.sleep(0.01)


def test_every_rank_runs_and_rank_zero_answers(tmp_path: Path) -> None:
    assert launch(_report, str(tmp_path), 2, 10) == ("0", "2")
    assert sorted(p.name for p in tmp_path.iterdir()) == ["saw-0", "saw-1"]


def test_the_failing_ranks_own_message_reaches_the_user_and_nothing_of_the_launchers(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with pytest.raises(DlrmScaleError) as error:
        launch(_second_rank_fails, str(tmp_path), 2, 1)
    assert str(error.value) == "rank 1: part-00003.arrow is 12 bytes short\n  remedy: preprocess again"
    # torch warns of each rank that it ends
    assert [r.getMessage() for r in caplog.records if r.levelno >= logging.WARNING] == []


def test_a_killed_rank_is_named(tmp_path: Path) -> None:
    with pytest.raises(DlrmScaleError, match="rank 1: ended without a word"):
        launch(_second_rank_is_killed, str(tmp_path), 2, 10)


def test_a_signal_to_the_launcher_lets_every_rank_finish(tmp_path: Path) -> None:
    assert launch(_until_stopped, str(tmp_path), 2, 30) == "SIGTERM"
    assert sorted(p.name for p in tmp_path.iterdir()) == ["stopped-0", "stopped-1"]


def test_no_ranks_are_refused() -> None:
    with pytest.raises(ConfigError, match="at least one rank"):
        launch(_report, "", 0, 10)
