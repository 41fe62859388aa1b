"""A run that is killed and resumed logs the losses and AUCs of the uninterrupted one."""

from pathlib import Path

import pytest

from dlrm_scale.train.log_window import LogWindow
from dlrm_scale.train.run_folder import resolve_run
from dlrm_scale.train.stop import StopRequest
from dlrm_scale.train.trainer import train_rank
from tests.support.datasets import make_dataset
from tests.support.rank_runner import run_ranks
from tests.support.training import SMALL_MODEL, log_records, run_training

_NAMES = ("loss", "window_steps", "partial_window", "auc", "auc_rows", "gradient_norm", "clipped_share")


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("data") / "dataset"
    make_dataset(path, 500, table_rows=[30, 4, *[40] * 24], split={"train": [(0, 500)], "validation": []})
    return path


_SETTINGS = [
    "train.log_every_steps=4",
    "train.gradient_clip_norm=0.05",
    "checkpoint.every_steps=3",
    "sharding.kind=row_wise",
]


def _lines(run: Path) -> dict[object, dict[str, object]]:
    """What was logged of each step, the later line of two."""
    return {line["step"]: {name: line[name] for name in _NAMES} for line in log_records(run, "train")}


def _train_without_windows(run: str, dataset: str) -> None:
    """As before windows were saved."""
    state = LogWindow.state
    LogWindow.state = lambda self: {}  # type: ignore[method-assign]
    try:
        settings = [f"run.path={run}", f"data.path={dataset}", *SMALL_MODEL, *_SETTINGS, "train.max_steps=6"]
        train_rank(resolve_run("sample", settings), StopRequest())
    finally:
        LogWindow.state = state  # type: ignore[method-assign]


@pytest.mark.parametrize(("ranks", "pipeline"), [(1, "plain"), (1, "sparse_dist"), (2, "plain")])
def test_a_run_that_goes_on_within_a_window_logs_the_same_as_an_uninterrupted_one(
    ranks: int, pipeline: str, dataset: Path, tmp_path: Path
) -> None:
    """Checkpoints 3, 9 and 15 of a run that went on are what a kill a step later leaves; none ends with a window."""
    run = tmp_path / "run"
    run_training(ranks, run, dataset, [*_SETTINGS, f"train.pipeline={pipeline}"])
    expected = _lines(run)
    assert list(expected) == [4, 8, 12, 16]
    # more than the windows' own steps count for the AUC
    assert [line["auc_rows"] for line in expected.values()] == [128, 256, 384, 500]
    assert not any(line["partial_window"] for line in expected.values())
    for step in (9, 3):
        (run / "log.jsonl").write_text("")
        run_training(ranks, run, dataset, resume=True, step=step)
        assert _lines(run) == {at: line for at, line in expected.items() if at > step}


def test_a_run_of_many_starts_and_none_that_ends_with_a_window_logs_the_same(dataset: Path, tmp_path: Path) -> None:
    straight, run = tmp_path / "straight", tmp_path / "run"
    run_training(1, straight, dataset, _SETTINGS)
    for start, stop in enumerate((1, 3, 3, 10, 0)):
        settings = [] if start else _SETTINGS
        run_training(1, run, dataset, [*settings, f"train.max_steps={stop}"], resume=start > 0)
    found = _lines(run)
    # a start that ends within a window tells of the steps so far, and how many
    assert {step: line["window_steps"] for step, line in found.items()} == {
        step: {1: 1, 3: 3, 10: 2}.get(step, 4) for step in (1, 3, 4, 8, 10, 12, 16)
    }
    assert {step: found[step] for step in (4, 8, 12, 16)} == _lines(straight)


def test_a_checkpoint_without_the_window_resumes_and_the_line_tells_its_steps(dataset: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    run_ranks(1, _train_without_windows, str(run), str(dataset))
    run_training(1, run, dataset, ["train.max_steps=0"], resume=True)
    found = _lines(run)
    assert (found[8]["window_steps"], found[8]["partial_window"], found[8]["auc_rows"]) == (2, True, 64)
    assert (found[12]["window_steps"], found[12]["partial_window"]) == (4, False)


def test_on_another_number_of_ranks_the_first_line_tells_how_few_steps_it_is_of(dataset: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    run_training(2, run, dataset, [*_SETTINGS, "train.max_steps=6"])
    run_training(1, run, dataset, ["train.max_steps=0"], resume=True)
    assert [_lines(run)[step]["window_steps"] for step in (8, 12, 16)] == [2, 4, 4]
