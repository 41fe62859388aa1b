"""A busy machine is told, and a spoilt calibration refused: by what was timed, and by what the fit itself says."""

import pytest

from dlrm_scale.errors import TrainingError
from dlrm_scale.planning.measuring.calibration_noise import Noise, judge_noise
from dlrm_scale.planning.measuring.micro_timing import Timing
from dlrm_scale.planning.measuring.probe_steps import TypeEvidence


def _timings(spread: float, delay: float, part: str = "collectives", count: int = 5) -> dict[str, list[Timing]]:
    return {part: [Timing(milliseconds=1.0, spread=spread, delay_share=delay) for _ in range(count)]}


def _refused(noisy: dict[str, list[Timing]], **evidence: object) -> str:
    with pytest.raises(TrainingError, match="Nothing was written") as told:
        judge_noise(noisy, 0.3, 2, **evidence)
    assert "--allow-noise" in str(told.value.remedy)
    allowed = judge_noise(noisy, 0.3, 2, allowed=True, **evidence)
    assert allowed.busy
    assert all(fault in told.value.message for fault in allowed.faults)
    assert all(fault in allowed.reason for fault in allowed.faults)
    return told.value.message


def test_a_quiet_machine_is_quiet() -> None:
    noise = judge_noise(_timings(0.05, 0.01), 0.3, 2)
    assert not noise.busy
    assert noise.reason == ""
    assert "little" in noise.text


@pytest.mark.parametrize(("spread", "delay", "load"), [(0.3, 0.0, 0.0), (0.05, 0.2, 0.0), (0.05, 0.0, 1.5)])
def test_a_busy_machine_is_told_with_numbers(spread: float, delay: float, load: float) -> None:
    noise = judge_noise(_timings(spread, delay), load, 2)
    assert noise.busy
    assert not noise.faults
    assert noise.reason.startswith("measured on a busy machine or badly fitted, these constants are worth less: ")
    assert f"{spread:.0%}" in noise.text
    assert f"load average {load:.2f} on 2 cores" in noise.text


@pytest.mark.parametrize(("spread", "delay"), [(0.6, 0.0), (0.05, 0.34)])
def test_what_would_mislead_is_refused_unless_it_is_asked_for(spread: float, delay: float) -> None:
    assert f"collectives: {'repeats spread by 60%' if delay == 0 else '34% of the time'}" in _refused(
        _timings(spread, delay)
    )


def test_one_spoilt_part_among_quiet_ones_is_enough() -> None:
    mixed = _timings(0.05, 0.0, count=50) | _timings(0.9, 0.0, "whole steps", 3)
    assert "whole steps: repeats spread by 90%" in _refused(mixed)


def test_a_fit_that_is_far_off_is_refused() -> None:
    assert not judge_noise(_timings(0.05, 0.0), 0.3, 2, fit_errors={"lookup": 0.14, "step": 0.1}).busy
    said = _refused(_timings(0.05, 0.0), fit_errors={"lookup": 0.4, "input": 0.6, "step": 0.35})
    assert said.splitlines()[1:] == ["  fit of input: 60% off", "  fit of step: 35% off"]
    warned = judge_noise(_timings(0.05, 0.0), 0.3, 2, fit_errors={"lookup": 0.4, "step": 0.2})
    assert warned.warnings == ("fit of lookup: 40% off", "fit of step: 20% off")


def _type(value: float, low: float, high: float) -> TypeEvidence:
    return TypeEvidence(kind="row_wise", value_ms=value, low_ms=low, high_ms=high, typical_step_ms=40.0)


@pytest.mark.parametrize(
    ("constant", "words"),
    [
        (_type(77.0, 60.0, 90.0), "row_wise: 77 ms for being in use, where the typical step of models with it"),
        (
            _type(8.1, 0.0, 11.0),
            "row_wise: 8.1 ms for being in use isn't borne out by the steps: with other models it is",
        ),
        (_type(20.0, 12.0, 25.0), "with other models it is 12 to 25 ms of a step of 40 ms"),
    ],
)
def test_a_types_constant_that_the_steps_dont_bear_out_is_refused(constant: TypeEvidence, words: str) -> None:
    assert words in _refused(_timings(0.05, 0.0), types=[constant])


def test_constants_that_are_small_or_well_told_are_taken() -> None:
    types = [_type(0.0, 0.0, 1.0), _type(2.0, 0.0, 5.0), _type(9.0, 7.0, 12.0)]
    assert not judge_noise(_timings(0.05, 0.0), 0.3, 2, types=types).busy


@pytest.mark.parametrize("constant", [_type(4.1, 0.0, 5.0), _type(9.0, 5.0, 12.0)])
def test_constants_that_are_half_as_doubtful_are_taken_with_a_warning(constant: TypeEvidence) -> None:
    noise = judge_noise(_timings(0.05, 0.0), 0.3, 2, types=[constant])
    assert "isn't borne out by the steps" in noise.reason
    assert not noise.faults


def test_few_models_cant_tell_constants_but_what_is_absurd_they_do() -> None:
    noise = judge_noise(_timings(0.05, 0.0), 0.3, 2, types=[_type(8.0, 0.0, 30.0)], rough=True)
    assert "with other models it is 0 to 30 ms" in noise.reason
    assert "77 ms" in _refused(_timings(0.05, 0.0), types=[_type(77.0, 0.0, 90.0)], rough=True)


def test_processor_time_only_warns_of_programs_that_take_the_caches() -> None:
    assert not judge_noise(_timings(0.05, 0.1), 9.0, 2, clock="processor").busy
    noise = judge_noise(_timings(0.05, 0.4), 9.0, 2, clock="processor")
    assert (noise.warnings, noise.faults) == (("40% of the time spent waiting for a core",), ())
    with pytest.raises(TrainingError):
        judge_noise(_timings(0.6, 0.0), 0.0, 2, clock="processor")


def test_faults_come_before_warnings_in_the_reason() -> None:
    noise = Noise(load_average=1, cores=2, spread=0, delay_share=0, warnings=("small",), faults=("large",))
    assert noise.reason.endswith("these constants mislead: large; small")
