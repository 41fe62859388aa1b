"""The learning-rate multiplier by step."""

import pytest

from dlrm_scale.config import ScheduleConfig
from dlrm_scale.train.schedule import multiplier


def test_without_settings_the_rate_is_constant() -> None:
    assert [multiplier(ScheduleConfig(), step, 100) for step in (0, 1, 10**6)] == [1.0, 1.0, 1.0]


def test_warm_up_rises_linearly_to_one() -> None:
    schedule = ScheduleConfig(warmup_steps=4)
    assert [multiplier(schedule, step, 100) for step in range(6)] == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]


def test_decay_falls_polynomially_to_the_final_multiplier_and_stays() -> None:
    schedule = ScheduleConfig(decay_start_step=10, decay_steps=10, decay_power=2.0, final_multiplier=0.2)
    assert multiplier(schedule, 9, 100) == 1.0
    assert multiplier(schedule, 10, 100) == 1.0
    assert multiplier(schedule, 15, 100) == pytest.approx(0.2 + 0.8 * 0.25)
    assert multiplier(schedule, 20, 100) == 0.2
    assert multiplier(schedule, 1000, 100) == 0.2


def test_decay_to_end_reaches_its_final_value_with_the_last_step() -> None:
    schedule = ScheduleConfig(decay_to_end=True, decay_start_step=2, decay_power=1.0)
    assert [multiplier(schedule, step, 6) for step in range(7)] == [1.0, 1.0, 1.0, 0.75, 0.5, 0.25, 0.0]


def test_a_decay_waits_for_the_end_of_the_warm_up() -> None:
    schedule = ScheduleConfig(warmup_steps=4, decay_steps=4, decay_power=1.0)
    assert [multiplier(schedule, step, 100) for step in range(9)] == [0.25, 0.5, 0.75, 1.0, 1.0, 0.75, 0.5, 0.25, 0.0]
