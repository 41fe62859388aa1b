"""Metrics equal scikit-learn's, and are undefined where they have no meaning."""

import numpy as np
import pytest
from sklearn.metrics import log_loss, roc_auc_score

from dlrm_scale.train.metrics.metrics import click_metrics, global_auc


@pytest.mark.parametrize(("rows", "levels"), [(1000, None), (1000, 7), (50_000, 3), (2, None)])
def test_auc_equals_scikit_learn_with_and_without_ties(rows: int, levels: int | None) -> None:
    generator = np.random.default_rng(rows)
    scores = generator.normal(size=rows).astype(np.float32)
    if levels:
        scores = np.round(scores * levels / 4).astype(np.float32)
    labels = (generator.random(rows) < 0.1 + 0.5 / (1 + np.exp(-scores))).astype(np.uint8)
    labels[:2] = [0, 1]
    assert global_auc(scores, labels) == pytest.approx(roc_auc_score(labels, scores), abs=1e-9)


def test_constant_scores_have_auc_one_half() -> None:
    assert global_auc(np.zeros(10, np.float32), np.array([0, 1] * 5, np.uint8)) == 0.5


def test_logloss_calibration_and_entropy_follow_their_definitions() -> None:
    generator = np.random.default_rng(1)
    logits = generator.normal(-1, 2, size=5000).astype(np.float32)
    labels = (generator.random(5000) < 0.3).astype(np.uint8)
    metrics = click_metrics(logits, labels)
    probabilities = 1 / (1 + np.exp(-logits.astype(np.float64)))
    rate = labels.mean()
    base = log_loss(labels, np.full(5000, rate))
    assert metrics.logloss == pytest.approx(log_loss(labels, probabilities), rel=1e-9)
    assert metrics.calibration == pytest.approx(probabilities.mean() / rate, rel=1e-9)
    assert metrics.base_rate_logloss == pytest.approx(base, rel=1e-9)
    assert metrics.normalized_entropy == pytest.approx(metrics.logloss / base, rel=1e-9)


def test_extreme_logits_give_a_finite_logloss() -> None:
    metrics = click_metrics(np.array([1e4, -1e4], np.float32), np.array([0, 1], np.uint8))
    assert metrics.logloss == pytest.approx(1e4)


@pytest.mark.parametrize("label", [0, 1])
def test_one_class_leaves_auc_undefined_and_logloss_given(label: int) -> None:
    metrics = click_metrics(np.array([0.0, 1.0], np.float32), np.full(2, label, np.uint8))
    assert metrics.auc is None
    assert metrics.normalized_entropy is None
    assert metrics.logloss is not None
    assert f"only label {label}" in metrics.note


def test_no_rows_leave_everything_undefined() -> None:
    metrics = click_metrics(np.empty(0, np.float32), np.empty(0, np.uint8))
    assert (metrics.rows, metrics.auc, metrics.logloss, metrics.note) == (0, None, None, "no rows")
