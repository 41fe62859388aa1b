"""A busy machine is told, and a spoilt calibration refused."""

import pytest

from dlrm_scale.errors import TrainingError
from dlrm_scale.planning.measuring.calibration_noise import judge_noise
from dlrm_scale.planning.measuring.micro_timing import Timing


def _timings(spread: float, delay: float) -> list[Timing]:
    return [Timing(milliseconds=1.0, spread=spread, delay_share=delay) for _ in range(5)]


def test_a_quiet_machine_is_quiet() -> None:
    noise = judge_noise(_timings(0.05, 0.01), 0.3, 2)
    assert not noise.busy
    assert "little" in noise.text


@pytest.mark.parametrize(("spread", "delay", "load"), [(0.2, 0.0, 0.0), (0.05, 0.1, 0.0), (0.05, 0.0, 1.5)])
def test_a_busy_machine_is_told_with_numbers(spread: float, delay: float, load: float) -> None:
    noise = judge_noise(_timings(spread, delay), load, 2)
    assert noise.busy
    assert f"{spread:.0%}" in noise.text
    assert f"load average {load:.2f} on 2 cores" in noise.text


@pytest.mark.parametrize(("spread", "delay"), [(0.6, 0.0), (0.05, 0.3)])
def test_what_would_mislead_is_refused_unless_it_is_asked_for(spread: float, delay: float) -> None:
    with pytest.raises(TrainingError, match="Nothing was written") as told:
        judge_noise(_timings(spread, delay), 4.0, 2)
    assert "--allow-noise" in str(told.value.remedy)
    assert judge_noise(_timings(spread, delay), 4.0, 2, allowed=True).busy


def test_processor_time_doesnt_mind_waiting_for_a_core() -> None:
    noise = judge_noise(_timings(0.05, 0.4), 9.0, 2, clock="processor")
    assert not noise.busy
    with pytest.raises(TrainingError):
        judge_noise(_timings(0.6, 0.0), 0.0, 2, clock="processor")
