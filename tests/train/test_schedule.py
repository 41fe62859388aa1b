"""The learning-rate multiplier by step."""

import pytest

from dlrm_scale.config import ScheduleConfig
from dlrm_scale.train.schedule import multiplier


def test_without_settings_the_rate_is_constant() -> None:
    assert [multiplier(ScheduleConfig(), step) for step in (0, 1, 10**6)] == [1.0, 1.0, 1.0]


def test_warm_up_rises_linearly_to_one() -> None:
    schedule = ScheduleConfig(warmup_steps=4)
    assert [multiplier(schedule, step) for step in range(6)] == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]


def test_decay_falls_polynomially_to_the_final_multiplier_and_stays() -> None:
    schedule = ScheduleConfig(decay_start_step=10, decay_steps=10, decay_power=2.0, final_multiplier=0.2)
    assert multiplier(schedule, 9) == 1.0
    assert multiplier(schedule, 10) == 1.0
    assert multiplier(schedule, 15) == pytest.approx(0.2 + 0.8 * 0.25)
    assert multiplier(schedule, 20) == 0.2
    assert multiplier(schedule, 1000) == 0.2
