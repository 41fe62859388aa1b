"""What a run tells: JSON lines, TensorBoard, lines and bar."""

import io
import json
from pathlib import Path

import pytest
from rich.console import Console
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from dlrm_scale.train.report import RunReport
from dlrm_scale.train.run_folder import RunFolder

_STEP = {
    "epoch": 0,
    "rows": 64,
    "loss": 0.5,
    "auc": None,
    "samples_per_second": 1234.5,
    "data_wait_share": 0.25,
}


def test_a_record_is_one_json_line_and_its_numbers_are_curves(tmp_path: Path) -> None:
    folder = RunFolder(path=tmp_path)
    with RunReport(folder, total_steps=4, start_step=0, quiet=True) as report:
        report.record("train", 2, _STEP)
        report.record("validation", 4, {"auc": 0.75, "note": ""})
    assert [json.loads(line) for line in folder.log.read_text().splitlines()] == [
        {"event": "train", "step": 2, **_STEP},
        {"event": "validation", "step": 4, "auc": 0.75, "note": ""},
    ]
    curves = EventAccumulator(str(folder.tensorboard)).Reload()
    found = {tag: [(s.step, s.value) for s in curves.Scalars(tag)] for tag in curves.Tags()["scalars"]}
    assert found["train/loss"] == [(2, 0.5)]
    assert found["validation/auc"] == [(4, 0.75)]
    assert "train/auc" not in found  # undefined, and not drawn as zero


def test_a_resumed_run_appends_its_lines_and_drops_later_points(tmp_path: Path) -> None:
    folder = RunFolder(path=tmp_path)
    with RunReport(folder, total_steps=8, start_step=0, quiet=True) as report:
        for step in (2, 4, 6):
            report.record("train", step, {"loss": float(step)})
    with RunReport(folder, total_steps=8, start_step=4, quiet=True) as report:
        report.record("train", 6, {"loss": 60.0})
    assert len(folder.log.read_text().splitlines()) == 4
    curves = EventAccumulator(str(folder.tensorboard)).Reload()
    assert [(s.step, s.value) for s in curves.Scalars("train/loss")] == [(2, 2.0), (4, 4.0), (6, 60.0)]


def test_a_line_that_a_crash_left_unfinished_is_removed(tmp_path: Path) -> None:
    folder = RunFolder(path=tmp_path)
    folder.log.write_text('{"event": "train", "step": 1}\n{"event": "tra')
    with RunReport(folder, total_steps=4, start_step=1, quiet=True) as report:
        report.record("train", 2, {})
    assert [json.loads(line)["step"] for line in folder.log.read_text().splitlines()] == [1, 2]


def test_a_full_disk_costs_log_lines_and_not_the_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    if not Path("/dev/full").exists():
        pytest.skip("no /dev/full")
    folder = RunFolder(path=tmp_path)
    folder.log.symlink_to("/dev/full")
    with RunReport(folder, total_steps=4, start_step=0) as report:
        for step in (1, 2):
            report.record("train", step, {"loss": 1.0})
    assert report.lost_records >= 2
    assert capsys.readouterr().err.count("the run's log can't be written") == 1


def test_without_a_terminal_each_log_step_is_a_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with RunReport(RunFolder(path=tmp_path), total_steps=4, start_step=0) as report:
        report.show_step(2, _STEP)
    said = capsys.readouterr().err
    assert "step 2/4  1,234 samples/s  loss 0.5000  AUC -  data wait 25.0%" in said


def test_on_a_terminal_a_bar_shows_steps_rate_loss_and_time_left(tmp_path: Path) -> None:
    screen = io.StringIO()
    console = Console(file=screen, force_terminal=True, width=160)
    with RunReport(RunFolder(path=tmp_path), total_steps=4, start_step=0, console=console) as report:
        report.show_step(2, _STEP)
    text = screen.getvalue()
    for part in ("2/4 steps", "samples/s", "loss 0.5000", "data wait 25.0%"):
        assert part in text
