"""Seconds by name."""

import pytest

from dlrm_scale.telemetry import StepClock


class _Time:
    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def test_intervals_add_up_by_name_and_the_rest_is_elapsed() -> None:
    time = _Time()
    clock = StepClock(time)
    time.now += 1
    for seconds in (2, 3):
        with clock.interval("validation"):
            time.now += seconds
    with clock.interval("checkpoint"):
        time.now += 7
    time.now += 0.5
    assert clock.seconds == {"validation": 5.0, "checkpoint": 7.0}
    assert clock.elapsed() == 13.5


def test_an_interval_that_ends_in_an_error_is_charged() -> None:
    time = _Time()
    clock = StepClock(time)

    def fails() -> None:
        with clock.interval("checkpoint"):
            time.now += 4
            raise RuntimeError("disk full")

    with pytest.raises(RuntimeError, match="disk full"):
        fails()
    assert clock.seconds == {"checkpoint": 4.0}


def test_a_new_clock_has_charged_nothing() -> None:
    clock = StepClock(_Time())
    assert (clock.seconds, clock.elapsed()) == ({}, 0.0)
