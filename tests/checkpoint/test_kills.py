"""A trainer killed at any point of a save leaves the checkpoint before or the new one, with exactly its rows."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

REPOSITORY = Path(__file__).resolve().parents[2]


def _kill_loop(root: Path, *arguments: str) -> dict[str, Any]:
    command = [sys.executable, "-m", "tests.checkpoint.kill_loop", str(root), *arguments]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def test_a_kill_before_an_operation_of_a_save_leaves_the_old_or_the_new_checkpoint(tmp_path: Path) -> None:
    result = _kill_loop(tmp_path, "operations", "7")
    assert result["kills"] >= 18
    assert result["steps"] == [2, 3, 4, 5]


def test_kills_at_random_moments_lose_no_acknowledged_step(tmp_path: Path) -> None:
    result = _kill_loop(tmp_path, "random", "10")
    assert result["kills"] == 10
    assert result["steps"] > 0


@pytest.mark.slow
def test_a_kill_before_every_operation_of_a_save_leaves_the_old_or_the_new_checkpoint(tmp_path: Path) -> None:
    result = _kill_loop(tmp_path, "operations", "1")
    assert result["kills"] >= 0.9 * result["operations"]


@pytest.mark.slow
def test_many_kills_at_random_moments_lose_no_acknowledged_step(tmp_path: Path) -> None:
    assert _kill_loop(tmp_path, "random", "150")["kills"] == 150


def test_a_rank_that_dies_while_it_saves_fails_the_save_and_the_last_checkpoint_loads(tmp_path: Path) -> None:
    result = _kill_loop(tmp_path, "rank")
    assert result["outcomes"] == ["True None", "False no vote from rank 1, and no progress for 1 s"]
    assert result["found"] == 0
