"""Progress lines where there is no terminal."""

import pytest

from dlrm_scale.cli.preprocess_progress import PassBars
from dlrm_scale.data.passes import ProgressReport


def _report(done: int, rows: int, bad_rows: int = 0) -> ProgressReport:
    return ProgressReport(
        name="count", step=2, steps=3, done_bytes=done, total_bytes=1000, rows=rows, bad_rows=bad_rows
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
