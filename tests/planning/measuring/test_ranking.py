import numpy as np
import pytest

from dlrm_scale.planning.measuring.ranking import agreement, measured, noise_floor, ordered_pairs


def test_the_median_lies_in_its_interval_and_overlapping_intervals_tie() -> None:
    generator = np.random.default_rng(1)
    times = {
        "a": 10 + generator.normal(0, 0.5, 40),
        "b": 10.05 + generator.normal(0, 0.5, 40),
        "c": 14 + generator.normal(0, 0.5, 40),
    }
    found = measured({name: list(values) for name, values in times.items()})
    for name, plan in found.items():
        assert plan.median_ms == np.median(times[name])
        assert plan.low_ms <= plan.median_ms <= plan.high_ms
        assert 0.1 < plan.high_ms - plan.low_ms < 1.0  # 2 * 1.96 * 1.25 * 0.5 / sqrt(40) = 0.39
        assert plan.rounds == 40
    assert [found[name].ties_with_best for name in "abc"] == [True, True, False]


def test_nothing_measured_is_an_error() -> None:
    with pytest.raises(ValueError, match="nothing was measured"):
        measured({"a": []})


def test_pairs_closer_than_a_tenth_are_not_counted() -> None:
    assert ordered_pairs([1, 2, 3], [10.0, 10.9, 20.0]) == (2, 2)
    assert ordered_pairs([3, 2, 1], [10.0, 10.9, 20.0]) == (0, 2)
    assert ordered_pairs([2, 1, 3], [10.0, 10.9, 20.0]) == (2, 2)


def test_a_perfect_prediction_agrees_and_a_reversed_one_does_not() -> None:
    truth = {"a": 10.0, "b": 20.0, "c": 40.0, "d": 80.0}
    right = agreement(truth, truth, anchor="a")
    assert right is not None
    assert (right.tau, right.pairs_right, right.pairs) == (1.0, 1.0, 6)
    assert (right.error, right.anchored_error, right.regret, right.top3_regret) == (0.0, 0.0, 0.0, 0.0)
    wrong = agreement({name: 100 - value for name, value in truth.items()}, truth)
    assert wrong is not None
    assert (wrong.tau, wrong.pairs_right, wrong.anchored_error) == (-1.0, 0.0, None)
    assert wrong.regret == 7.0  # d, 80, was to be the best; it is a, 10
    assert wrong.top3_regret == 1.0  # the best of d, c and b


def test_an_anchor_takes_out_a_factor_common_to_all() -> None:
    truth = {"a": 10.0, "b": 20.0, "c": 40.0}
    found = agreement({"a": 3.0, "b": 6.0, "c": 13.2, "unmeasured": 1.0}, truth, anchor="a")
    assert found is not None
    assert found.error == pytest.approx((0.7 + 0.7 + 0.67) / 3)
    assert found.anchored_error == pytest.approx(0.05)


def test_the_noise_floor_is_high_for_plans_far_apart_and_low_for_equal_ones() -> None:
    generator = np.random.default_rng(2)
    apart = {str(i): list(10.0 * 1.3**i * generator.normal(1, 0.02, 30)) for i in range(8)}
    equal = {str(i): list(10.0 * generator.normal(1, 0.02, 30)) for i in range(8)}
    clear, blurred = noise_floor(apart), noise_floor(equal)
    assert clear is not None
    assert blurred is not None
    assert clear.tau == pytest.approx(1.0)
    assert clear.pairs_right == 1.0
    assert blurred.tau < 0.5
    assert blurred.pairs_right is None
    assert 0.001 < clear.difference < 0.02
    assert noise_floor({"a": [1.0] * 30}) is None
    assert noise_floor({"a": [1.0] * 3, "b": [1.0] * 3}) is None
