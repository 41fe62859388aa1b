"""Progress lines where there is no terminal."""

import io

import pytest
from rich.console import Console

from dlrm_scale.cli.preprocess_progress import PassBars
from dlrm_scale.data.preprocess.passes import ProgressReport


def _report(done: int, rows: int, bad_rows: int = 0, *, earlier: tuple[int, int] = (0, 0)) -> ProgressReport:
    return ProgressReport(
        name="count",
        step=2,
        steps=3,
        done_bytes=done,
        total_bytes=1000,
        rows=rows,
        bad_rows=bad_rows,
        earlier_bytes=earlier[0],
        earlier_rows=earlier[1],
    )


def test_a_line_twice_a_minute_says_how_far_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    time = 0.0
    with PassBars(now=lambda: time) as bars:
        bars.update(_report(0, 0))
        time = 10.0
        bars.update(_report(100, 1000))
        time = 40.0
        bars.update(_report(400, 4000, bad_rows=2))
        time = 50.0
        bars.update(_report(500, 5000))
    assert capsys.readouterr().err == "2/3 counting ids: 40 %, 100 rows/s, 2 bad rows, 1:00 left\n"


def test_what_an_earlier_process_finished_tells_no_speed(capsys: pytest.CaptureFixture[str]) -> None:
    time = 0.0
    with PassBars(now=lambda: time) as bars:
        bars.update(_report(800, 8000, earlier=(800, 8000)))
        time = 31.0
        # 20 of the 200 bytes that are left took 31 s.
        bars.update(_report(820, 8062, earlier=(800, 8000)))
        time = 62.0
        # A further file turns out to be finished.
        bars.update(_report(900, 8186, earlier=(860, 8062)))
    assert capsys.readouterr().err == (
        "2/3 counting ids: 82 %, 2 rows/s, 4:39 left\n2/3 counting ids: 90 %, 2 rows/s, 2:35 left\n"
    )


def test_time_left_is_unknown_before_anything_was_done(capsys: pytest.CaptureFixture[str]) -> None:
    time = 0.0
    with PassBars(now=lambda: time) as bars:
        bars.update(_report(800, 8000, earlier=(800, 8000)))
        time = 31.0
        bars.update(_report(900, 9000, earlier=(900, 9000)))
    assert capsys.readouterr().err == "2/3 counting ids: 90 %, reading\n"


@pytest.mark.parametrize("left", ["3:00 left", ""])
def test_a_terminal_shows_the_same_numbers(left: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dlrm_scale.cli.preprocess_progress.Console", lambda stderr: terminal)
    terminal = Console(file=io.StringIO(), force_terminal=True, width=100)
    time = 0.0
    with PassBars(now=lambda: time) as bars:
        bars.update(_report(600, 6000, earlier=(600, 6000)))
        time = 60.0
        if left:
            bars.update(_report(700, 6600, earlier=(600, 6000)))
    shown = terminal.file.getvalue()
    assert left in shown
    assert ("10 rows/s" in shown) == bool(left)
