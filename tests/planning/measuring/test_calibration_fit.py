"""Fits find the constants that timings were made of."""

import numpy as np
import pytest

from dlrm_scale.planning.measuring.calibration_fit import MULTIPLIER_LIMITS, fit_multipliers, fit_times, rising


@pytest.mark.parametrize("seed", range(5))
def test_known_constants_are_recovered_from_noisy_timings(seed: int) -> None:
    random = np.random.default_rng(seed)
    constants = np.array([0.4, 2.0, 0.05])
    features = np.column_stack([np.ones(60), random.uniform(0, 3, 60), random.exponential(40, 60)])
    noise = 1 + 0.05 * random.standard_normal(60)
    fit = fit_times(features.tolist(), (features @ constants * noise).tolist())
    assert fit.values == pytest.approx(constants, rel=0.15)
    assert 0.02 < fit.error < 0.06


def test_what_is_known_already_is_taken_off() -> None:
    features = [[1.0, x] for x in (1.0, 2.0, 5.0)]
    base = [3.0, 1.0, 2.0]
    times = [b + 0.5 + 0.25 * x for b, (_, x) in zip(base, features, strict=True)]
    fit = fit_times(features, times, base)
    assert fit.values == pytest.approx([0.5, 0.25])
    assert fit.error == pytest.approx(0, abs=1e-9)


def test_no_cost_is_negative() -> None:
    features = [[1.0, x] for x in (1.0, 2.0, 3.0, 4.0)]
    fit = fit_times(features, [4.0, 3.0, 2.0, 1.0])
    assert fit.values[1] == 0.0
    assert fit.values[0] > 0


def test_a_short_timing_counts_as_much_as_a_long_one() -> None:
    # by absolute error the constant of the short ones would drown
    features = [[1.0, 0.0]] * 3 + [[0.0, 1.0]] * 3
    fit = fit_times(features, [0.01, 0.011, 0.012, 1000.0, 1100.0, 1200.0])
    assert fit.values[0] == pytest.approx(fit.values[1] / 1e5)


@pytest.mark.parametrize("seed", range(5))
def test_multipliers_and_constants_are_recovered_from_noisy_steps(seed: int) -> None:
    random = np.random.default_rng(seed)
    parts = random.exponential([8.0, 5.0, 3.0], (60, 3))
    constants = np.column_stack([np.ones(60), random.random((60, 2)) < 0.5]).astype(float)
    truth, paid = np.array([1.4, 0.8, 1.0]), np.array([2.0, 3.0, 1.0])
    steps = (parts @ truth + constants @ paid) * (1 + 0.03 * random.standard_normal(60))
    fit = fit_multipliers(parts, constants, steps)
    assert fit.values[:3] == pytest.approx(truth, rel=0.15)
    assert fit.values[3:] == pytest.approx(paid, abs=0.8)
    assert fit.error < 0.05


def test_a_part_that_no_step_has_keeps_its_multiplier() -> None:
    random = np.random.default_rng(0)
    parts = np.column_stack([random.exponential(8.0, 20), np.zeros(20)])
    fit = fit_multipliers(parts, np.ones((20, 1)), 1.5 * parts[:, 0] + 1)
    assert fit.values[1] == pytest.approx(1.0)
    assert fit.values[0] == pytest.approx(1.5, rel=0.1)


def test_few_noisy_steps_move_multipliers_less_than_many() -> None:
    random = np.random.default_rng(3)
    parts = random.exponential(8.0, (200, 1)) + 1
    steps = 2 * parts[:, 0]
    few, many = (fit_multipliers(parts[:n], np.zeros((n, 1)), steps[:n]).values[0] for n in (2, 200))
    assert 1 < few < many
    assert many == pytest.approx(2, rel=0.02)


def test_no_noise_makes_a_part_free_or_endless() -> None:
    parts = np.random.default_rng(0).exponential(8.0, (100, 2)) + 1
    fit = fit_multipliers(parts, np.zeros((100, 1)), 9 * parts[:, 1])
    assert fit.values[0] >= MULTIPLIER_LIMITS[0]
    assert fit.values[1] == pytest.approx(MULTIPLIER_LIMITS[1])


def test_timings_of_rising_sizes_are_made_to_rise() -> None:
    assert rising([1.0, 3.0, 2.0, 4.0]) == pytest.approx([1.0, 2.5, 2.5, 4.0])
    assert rising([1.0, 2.0]) == [1.0, 2.0]
