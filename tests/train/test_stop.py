"""Signals ask for a stop; only a late second one ends the process."""

import signal

import pytest

from dlrm_scale.train.stop import StopRequest


class _Clock:
    def __init__(self) -> None:
        self.seconds = 0.0

    def __call__(self) -> float:
        return self.seconds


def test_repeats_within_two_seconds_count_once() -> None:
    clock, codes = _Clock(), list[int]()
    stop = StopRequest(now=clock, abandon=codes.append)
    assert not stop.requested
    stop.handle(signal.SIGINT)
    clock.seconds = 1.9
    stop.handle(signal.SIGTERM)
    assert stop.requested
    assert stop.signal_name == "SIGINT"
    assert codes == []


def test_a_second_signal_later_ends_the_process() -> None:
    clock, codes = _Clock(), list[int]()
    stop = StopRequest(now=clock, abandon=codes.append)
    stop.handle(signal.SIGINT)
    clock.seconds = 2.1
    stop.handle(signal.SIGINT)
    assert codes == [130]


def test_the_process_ends_even_where_leases_cannot_be_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    clock, codes = _Clock(), list[int]()

    def fail() -> None:
        raise RuntimeError("can't start new thread")

    monkeypatch.setattr("dlrm_scale.train.stop.give_back_leases", fail)
    monkeypatch.setattr("os._exit", codes.append)
    stop = StopRequest(now=clock)
    stop.handle(signal.SIGTERM)
    clock.seconds = 2.1
    with pytest.raises(RuntimeError):  # only because this exit comes back
        stop.handle(signal.SIGTERM)
    assert codes == [143]
