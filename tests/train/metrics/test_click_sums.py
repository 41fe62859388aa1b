"""Sums over rows are the same to the last bit in any order and in any parts."""

import math

import numpy as np
import pytest

from dlrm_scale.train.metrics.click_sums import ClickSums


def _rows(count: int) -> tuple[np.ndarray, np.ndarray]:
    generator = np.random.default_rng(5)
    logits = (generator.normal(-2, 3, size=count) * 10.0 ** generator.integers(-3, 3, size=count)).astype(np.float32)
    return logits, (generator.random(count) < 0.2).astype(np.uint8)


def _sums(logits: np.ndarray, labels: np.ndarray, parts: int) -> ClickSums:
    total = ClickSums()
    for some in np.array_split(np.arange(len(labels)), parts):
        part = ClickSums()
        part.add(logits[some], labels[some])
        total.merge(part)
    return total


def test_order_and_parts_do_not_change_a_bit() -> None:
    logits, labels = _rows(10_000)
    expected = _sums(logits, labels, 1)
    mixed = np.random.default_rng(1).permutation(len(labels))
    for parts in (2, 3, 997):
        assert _sums(logits[mixed], labels[mixed], parts) == expected


def test_means_are_within_the_stated_error_of_exact_sums() -> None:
    logits, labels = _rows(20_000)
    z = logits.astype(np.float64)
    losses = np.maximum(z, 0) - z * labels + np.log1p(np.exp(-np.abs(z)))
    sums = _sums(logits, labels, 7)
    assert sums.mean_loss == pytest.approx(math.fsum(losses) / len(z), abs=5e-13, rel=1e-15)
    predictions = np.where(z >= 0, 1.0, np.exp(-np.abs(z))) / (1 + np.exp(-np.abs(z)))
    assert sums.mean_prediction == pytest.approx(math.fsum(predictions) / len(z), abs=5e-13)


def test_the_largest_logits_keep_the_sum_exact() -> None:
    largest = float(np.finfo(np.float32).max)
    sums = ClickSums()
    sums.add(np.array([largest, -largest, largest], np.float32), np.array([0, 1, 1], np.uint8))
    assert sums.mean_loss == pytest.approx(2 * largest / 3, rel=1e-15)
    assert sums.mean_prediction == pytest.approx(2 / 3)
    assert (sums.rows, sums.positives, sums.nonfinite) == (3, 2, 0)


def test_rows_that_are_not_finite_are_counted_apart() -> None:
    sums = ClickSums()
    sums.add(np.array([0, np.nan, np.inf, -np.inf], np.float32), np.array([1, 1, 0, 0], np.uint8))
    assert (sums.rows, sums.positives, sums.nonfinite) == (4, 2, 3)
    assert sums.loss_units == pytest.approx(math.log(2) * 2**40, abs=1)
