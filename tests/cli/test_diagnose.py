"""`dlrm-scale diagnose` as a user runs it."""

from pathlib import Path

import pytest

from tests.support.command_line import run_command, run_json
from tests.support.datasets import make_dataset
from tests.support.training import SMALL_MODEL


@pytest.fixture
def words(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[str]:
    make_dataset(tmp_path / "dataset", [1024] * 4)
    folder = tmp_path / "here"
    folder.mkdir()
    monkeypatch.chdir(folder)
    settings = [f"data.path={tmp_path / 'dataset'}", *SMALL_MODEL]
    short = ["--steps", "4", "--rounds", "2", "--time-limit", "100"]
    return ["diagnose", "sample", *(part for s in settings for part in ("--set", s)), *short]


def test_it_prints_everything_as_json_and_writes_nothing(
    words: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    dataset = sorted(p.name for p in (tmp_path / "dataset").iterdir())
    found = run_json(capsys, *words, "--no-what-if")
    assert (found["ranks"], found["device"], found["steps"], found["rounds"]) == (1, "cpu", 4, 2)
    m = found["measurements"]
    for kind in ("synthetic", "warm", "cold"):
        assert len(m[f"{kind}_seconds"]) == 2
        assert min(m[f"{kind}_seconds"]) > 0
    assert m["rows_per_step"] == 32
    assert m["steps_per_epoch"] == 128
    assert (found["trials"], found["recommended"]) == ([], None)
    # the window of this small model lasts longer than a round
    assert len(found["notes"]) <= 2
    assert list((tmp_path / "here").iterdir()) == []
    assert sorted(p.name for p in (tmp_path / "dataset").iterdir()) == dataset


def test_it_ends_with_a_verdict_and_what_was_recommended(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(*words) == 0
    captured = capsys.readouterr()
    assert "round 2 of 2: ms a step: synthetic " in captured.err
    for line in ("batches in memory", "prep stall", "fetch stall", "verdict: ", "recommended: "):
        assert line in captured.out


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["diagnose", "sample"], "data.path is not set"),
        (["diagnose", "sample", "--set", "data.path=nowhere"], "nowhere"),
        (["diagnose", "sample", "--set", "data.path=d", "--set", "model.dim=6"], "model.dim"),
        (["diagnose", "sample", "--steps", "0"], "greater than or equal to 1"),
    ],
)
def test_a_users_mistake_is_named(arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_command(*arguments) in (1, 2)
    assert says in capsys.readouterr().err
