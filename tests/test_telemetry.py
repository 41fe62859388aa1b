"""Seconds by name: exclusive, nested, complete."""

import time
from collections.abc import Callable

import pytest

from dlrm_scale.telemetry import OTHER, StepClock


class _Time:
    """Moves when it is told to. Steps of 1/8 s are exact in floating point."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def now() -> _Time:
    return _Time()


def test_intervals_add_up_by_name_and_the_rest_is_other(now: _Time) -> None:
    clock = StepClock(now)
    now.now += 1
    for seconds in (2, 3):
        with clock.interval("evaluation"):
            now.now += seconds
    with clock.interval("checkpoint"):
        now.now += 7
    now.now += 0.5
    assert clock.seconds == {"evaluation": 5.0, "checkpoint": 7.0, OTHER: 1.5}
    assert clock.elapsed() == 13.5


def test_an_inner_interval_pauses_the_outer_one(now: _Time) -> None:
    clock = StepClock(now)
    with clock.interval("dense_forward"):
        now.now += 1
        with clock.interval("lookup"):
            now.now += 2
            with clock.interval("dense_forward"):  # of the same name as an outer one
                now.now += 4
            now.now += 8
        now.now += 16
    assert clock.seconds == {"dense_forward": 21.0, "lookup": 10.0, OTHER: 0.0}


def test_every_second_is_charged_once_however_intervals_nest(now: _Time) -> None:
    clock = StepClock(now)
    names = ["a", "b", "c"]

    def nest(depth: int) -> None:
        now.now += 0.125 * depth
        for name in names[depth:]:
            with clock.interval(name):
                now.now += 0.25
                nest(depth + 1)
                now.now += 0.5
        now.now += 0.125

    nest(0)
    assert sum(clock.seconds.values()) == clock.elapsed() == now.now - 100.0
    assert set(clock.seconds) == {*names, OTHER}


def test_seconds_include_those_of_the_interval_that_runs(now: _Time) -> None:
    clock = StepClock(now)
    with clock.interval("logging"):
        now.now += 2
        assert clock.seconds == {"logging": 2.0, OTHER: 0.0}
        now.now += 1
    assert clock.seconds == {"logging": 3.0, OTHER: 0.0}


def test_begin_and_end_do_what_a_with_block_does(now: _Time) -> None:
    clock = StepClock(now)
    clock.begin("input_all_to_all")
    now.now += 1
    clock.begin("lookup")
    now.now += 2
    clock.end()
    now.now += 4
    clock.end()
    now.now += 8
    assert clock.seconds == {"input_all_to_all": 5.0, "lookup": 2.0, OTHER: 8.0}


def test_a_whole_interval_keeps_what_happens_inside_it(now: _Time) -> None:
    clock = StepClock(now)
    with clock.whole("evaluation"):
        now.now += 1
        with clock.interval("lookup"):
            now.now += 2
    with clock.interval("lookup"):
        now.now += 4
    assert clock.seconds == {"evaluation": 3.0, "lookup": 4.0, OTHER: 0.0}


def test_busy_tells_work_from_waiting(now: _Time) -> None:
    core = _Time()
    clock = StepClock(now, core)
    for work, wait in ((2, 1), (4, 8)):
        with clock.busy("backward"):
            now.now += work + wait
            core.now += work
    assert clock.seconds["backward"] == 15.0
    assert clock.busy_seconds == {"backward": 6.0}


@pytest.mark.parametrize("kind", ["interval", "busy", "whole"])
def test_an_interval_that_ends_in_an_error_is_charged_and_left(now: _Time, kind: str) -> None:
    clock = StepClock(now, now)
    enter: Callable[[str], object] = getattr(clock, kind)

    def fails() -> None:
        with enter("checkpoint"):  # type: ignore[attr-defined]
            now.now += 4
            raise RuntimeError("disk full")

    with pytest.raises(RuntimeError, match="disk full"):
        fails()
    now.now += 1
    with clock.interval("lookup"):
        now.now += 2
    assert clock.seconds == {"checkpoint": 4.0, OTHER: 1.0, "lookup": 2.0}


def test_listeners_hear_which_interval_runs_from_now_on(now: _Time) -> None:
    clock = StepClock(now)
    heard: list[str] = []
    clock.listeners.append(heard.append)
    with clock.interval("dense_forward"), clock.interval("lookup"):
        pass
    assert heard == ["dense_forward", "lookup", "dense_forward", OTHER]


def test_a_restarted_clock_begins_anew_and_tells_what_was_before(now: _Time) -> None:
    clock = StepClock(now, now)
    with clock.busy("backward"):
        now.now += 3
        with pytest.raises(AssertionError, match="backward"):
            clock.restart()
    now.now += 1
    assert clock.restart() == 4.0
    now.now += 2
    assert (clock.seconds, clock.busy_seconds, clock.elapsed()) == ({OTHER: 2.0}, {}, 2.0)


def test_a_new_clock_has_charged_nothing(now: _Time) -> None:
    clock = StepClock(now)
    assert (clock.seconds, clock.elapsed()) == ({OTHER: 0.0}, 0.0)


def test_real_intervals_add_up_to_the_real_time() -> None:
    clock = StepClock()
    for _ in range(1000):
        with clock.interval("dense_forward"), clock.interval("lookup"):
            pass
    before = time.perf_counter()
    total = sum(clock.seconds.values())
    assert total <= clock.elapsed()
    assert clock.elapsed() - total < time.perf_counter() - before + 1e-6
