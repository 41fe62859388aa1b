"""Ranks killed at any point of a save leave the checkpoint before or the new one, with exactly its rows."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.checkpoint.failpoints import POINTS

REPOSITORY = Path(__file__).resolve().parents[2]
MAIN_POINTS = (
    "in_sweep",
    "after_vote",
    "before_link",
    "after_link",
    "before_outcome",
    "in_retention",
    "before_release",
)


def _kill_loop(root: Path, *arguments: str) -> dict[str, Any]:
    """Run the loop; it fails at the first wrong row, lost step, or trainer that ends by itself."""
    command = [sys.executable, "-m", "tests.checkpoint.kill_loop", str(root), *arguments]
    done = subprocess.run(command, cwd=REPOSITORY, capture_output=True, text=True, timeout=290, check=False)
    assert done.returncode == 0, done.stderr
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result


def test_a_rank_killed_at_a_main_point_of_a_save_leaves_what_training_goes_on_from(tmp_path: Path) -> None:
    result = _kill_loop(tmp_path, "points", *MAIN_POINTS)
    assert len(result["points"]) == 5 + 2 * 2


def test_kills_at_random_moments_lose_no_acknowledged_step(tmp_path: Path) -> None:
    result = _kill_loop(tmp_path, "random", "5", "0")
    assert result["kills"] == 5
    assert result["steps"] > 0


def test_a_rank_that_dies_while_it_saves_fails_the_save_and_the_last_checkpoint_loads(tmp_path: Path) -> None:
    result = _kill_loop(tmp_path, "survivor")
    assert result["outcomes"] == ["failed no vote from rank 1, and no progress for 1 s"]
    assert result["found"] == 2


@pytest.mark.slow
def test_each_rank_killed_at_every_point_of_a_save_leaves_what_training_goes_on_from(tmp_path: Path) -> None:
    result = _kill_loop(tmp_path, "points")
    assert len(result["points"]) == sum(2 if point.every_rank else 1 for point in POINTS.values())


@pytest.mark.slow
def test_each_rank_killed_before_operations_of_a_save_leaves_the_old_or_a_new_checkpoint(tmp_path: Path) -> None:
    result = _kill_loop(tmp_path, "operations", "2")
    assert result["kills"] >= 80
    assert result["steps"] == [3, 4, 5, 6]


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(6))
def test_many_kills_at_random_moments_lose_no_acknowledged_step(
    seed: int, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    result = _kill_loop(tmp_path, "random", "100", str(seed))
    with capsys.disabled():
        sys.stdout.write(f"\n{result['kills']} kills, {result['steps']} steps, none wrong, none lost\n")
    assert result["kills"] == 100
    assert result["kills_that_left_orphans"] > 10
