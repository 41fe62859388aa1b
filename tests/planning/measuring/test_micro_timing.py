"""Work that is timed in several passes is told as the median over them."""

from types import SimpleNamespace
from typing import cast

import pytest

from dlrm_scale.planning.measuring.micro_timing import RankTimer, Timing
from dlrm_scale.sharding.ranks import Ranks


def test_each_piece_of_work_has_the_median_of_its_own_passes(monkeypatch: pytest.MonkeyPatch) -> None:
    taken = iter([10.0, 1.0, 5.0, 30.0, 3.0, 4.0, 20.0, 9.0, 6.0])

    def summary(self: RankTimer, seconds: object) -> Timing:
        return Timing(milliseconds=next(taken), spread=0.1, delay_share=0.0)

    monkeypatch.setattr(RankTimer, "summary", summary)
    monkeypatch.setattr(RankTimer, "once", lambda self, work: (0.0, 0.0, 0.0))
    timer = RankTimer(cast(Ranks, SimpleNamespace()), repeats=3)
    told = []
    for _ in range(3):
        timer.begin_pass()
        both = timer.time(int, int)
        (last,) = timer.time(int)
        told.append([timing.milliseconds for timing in (*both, last)])
    assert told == [[10.0, 1.0, 5.0], [20.0, 2.0, 4.5], [20.0, 3.0, 5.0]]
    assert [timing.milliseconds for timing in timer.timings] == [10.0, 1.0, 5.0, 30.0, 3.0, 4.0, 20.0, 9.0, 6.0]
