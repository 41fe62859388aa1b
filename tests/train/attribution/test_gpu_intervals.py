"""Intervals on a GPU's timeline, read only when they have passed."""

import pytest
import torch

from dlrm_scale.telemetry import OTHER, StepClock
from dlrm_scale.train.attribution.gpu_intervals import GpuIntervals


class _Gpu:
    """A timeline that the test moves: `queued` is where it will be after the work so far, `passed` where it is."""

    queued = 0.0
    passed = 0.0
    events = 0
    stream = "computing"
    copied = 0.0


class _Event:
    def __init__(self, enable_timing: bool = False) -> None:
        assert enable_timing
        _Gpu.events += 1
        self.at = -1.0

    def record(self, stream: str | None = None) -> None:
        self.at = _Gpu.queued if (stream or _Gpu.stream) == "computing" else _Gpu.copied

    def query(self) -> bool:
        return self.at <= _Gpu.passed

    def elapsed_time(self, end: "_Event") -> float:
        assert end.query(), "would raise on a GPU"
        return 1000 * (end.at - self.at)


@pytest.fixture(autouse=True)
def _fake_events(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    if request.node.get_closest_marker("gpu"):
        return
    monkeypatch.setattr(torch.cuda, "Event", _Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: _Gpu.stream)
    _Gpu.queued, _Gpu.passed, _Gpu.events = 0.0, -1.0, 0


def _step(clock: StepClock) -> None:
    with clock.interval("dense_forward"):
        _Gpu.queued += 1
        with clock.interval("lookup"):
            _Gpu.queued += 2
        _Gpu.queued += 4
    _Gpu.queued += 8


def test_what_has_passed_is_read_and_the_rest_waits_without_a_synchronisation() -> None:
    gpu, clock = GpuIntervals(), StepClock()
    clock.listeners.append(gpu.mark)
    _step(clock)
    gpu.read()
    assert gpu.seconds == {}
    _Gpu.passed = 3.5
    gpu.read()
    assert gpu.seconds == {"dense_forward": 1.0, "lookup": 2.0}
    _step(clock)
    _Gpu.passed = 100.0
    gpu.read()
    # the last switch, to OTHER, has no end yet
    assert gpu.seconds == {"dense_forward": 10.0, "lookup": 4.0, OTHER: 8.0}


def test_events_are_used_again() -> None:
    gpu, clock = GpuIntervals(), StepClock()
    clock.listeners.append(gpu.mark)
    for _ in range(5):
        _step(clock)
        _Gpu.passed = _Gpu.queued
        gpu.read()
    assert gpu.seconds["lookup"] == 10.0
    assert _Gpu.events <= 5


def test_a_batch_taken_inside_the_stream_of_copies_has_no_negative_time(monkeypatch: pytest.MonkeyPatch) -> None:
    gpu, clock = GpuIntervals(), StepClock()
    clock.listeners.append(gpu.mark)
    _step(clock)
    # as TorchRec's SparseDist pipeline does it
    with clock.interval("copy"):
        monkeypatch.setattr(_Gpu, "stream", "copying")
        with clock.interval("data_wait"):
            monkeypatch.setattr(_Gpu, "copied", 5.0)  # of the main thread's time: nothing is queued meanwhile
        monkeypatch.setattr(_Gpu, "stream", "computing")
    _step(clock)
    _Gpu.passed = 100.0
    gpu.read()
    assert gpu.seconds == {"dense_forward": 10.0, "lookup": 4.0, OTHER: 8.0, "copy": 0.0, "data_wait": 0.0}


def test_an_evaluation_is_one_interval_however_many_batches_it_has() -> None:
    gpu, clock = GpuIntervals(), StepClock()
    clock.listeners.append(gpu.mark)
    with clock.whole("evaluation"):
        for _ in range(100):
            _step(clock)
    _Gpu.passed = _Gpu.queued
    gpu.read()
    assert gpu.seconds == {"evaluation": 1500.0}
    assert _Gpu.events == 2


@pytest.mark.gpu
def test_a_kernels_time_on_a_real_gpu_is_in_its_interval() -> None:
    gpu, clock = GpuIntervals(), StepClock()
    clock.listeners.append(gpu.mark)
    matrix = torch.ones(4096, 4096, device="cuda")
    with clock.interval("dense_forward"):
        for _ in range(20):
            matrix = matrix @ matrix / 4096
    torch.cuda.synchronize()
    gpu.read()
    assert gpu.seconds["dense_forward"] > 1e-3
