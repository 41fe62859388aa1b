"""A model that has collapsed is warned of, a model that works never is."""

import json
from pathlib import Path

import numpy as np
import pytest

from dlrm_scale.train.metrics.collapse import collapse_warning
from dlrm_scale.train.metrics.metrics import click_metrics
from dlrm_scale.train.summary import metric_rows
from tests.support.datasets import make_dataset
from tests.support.training import log_records, run_training


def _set(rows: int, rate: float, separation: float, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """Labels at a click rate and calibrated logits; a separation of 0 tells nothing, 1 gives an AUC of about 0.76."""
    rng = np.random.default_rng(seed)
    labels = (rng.random(rows) < rate).astype(np.uint8)
    evidence = rng.standard_normal(rows) + separation * labels
    prior = np.log(rate / (1 - rate))
    return (prior + separation * evidence - separation**2 / 2).astype(np.float32), labels


def _warning(logits: np.ndarray, labels: np.ndarray) -> str | None:
    return collapse_warning(click_metrics(logits, labels).as_dict())


@pytest.mark.parametrize("rate", [0.03, 0.25, 0.5])
@pytest.mark.parametrize("separation", [0.2, 0.5, 1.0, 2.0])
def test_models_that_work_are_never_warned_of(rate: float, separation: float) -> None:
    """An AUC of 0.55 to 0.92, on small and large sets."""
    for rows in (50, 500, 20_000, 200_000):
        for seed in range(5 if rows < 100_000 else 1):
            logits, labels = _set(rows, rate, separation, seed)
            assert _warning(logits, labels) is None, (rows, seed)


@pytest.mark.parametrize("rate", [0.03, 0.25])
def test_constant_predictions_are_told(rate: float) -> None:
    _, labels = _set(50_000, rate, 1.0)
    base = np.log(labels.mean() / (1 - labels.mean()))
    noise = np.random.default_rng(1).standard_normal(len(labels)) * 1e-5
    for logits in (np.full(len(labels), base), base + noise):
        warning = _warning(logits.astype(np.float32), labels)
        assert warning is not None
        assert "predictions are all but equal" in warning
        assert "is that of chance" in warning
        assert "dense_optimizer.learning_rate" in warning


def test_predictions_stuck_at_one_end_are_told() -> None:
    _, labels = _set(20_000, 0.25, 1.0)
    warning = _warning(np.full(len(labels), 60.0, np.float32), labels)
    assert warning is not None
    assert "all but equal (standard deviation 0.0e+00)" in warning
    assert "is above the 0.5" in warning


def test_scores_that_know_nothing_and_scores_that_are_upside_down_are_told_apart() -> None:
    logits, labels = _set(50_000, 0.25, 1.0)
    shuffled = np.random.default_rng(2).permutation(logits)
    warning = _warning(shuffled, labels)
    assert warning is not None
    assert warning.startswith("the model may have collapsed")
    assert "is that of chance" in warning
    assert "of always predicting the base rate" in warning
    warning = _warning(-logits, labels)
    assert warning is not None
    assert "is worse than chance" in warning


def test_a_model_that_was_hardly_trained_is_not_advised_to_learn_more_slowly() -> None:
    _, labels = _set(20_000, 0.25, 1.0)
    initial = np.random.default_rng(3).standard_normal(len(labels)).astype(np.float32) * 0.05
    warning = _warning(initial, labels)
    assert warning is not None
    assert warning.startswith("the model has hardly learned: its AUC of 0.")
    assert "with larger learning rates" in warning
    assert "a tenth" not in warning


def test_good_rankings_with_far_too_sure_predictions_are_not_called_collapsed() -> None:
    logits, labels = _set(20_000, 0.25, 1.0)
    warning = _warning(6 * logits, labels)
    assert warning is not None
    assert warning.startswith("the model does worse than none: its logloss of")
    assert "AUC" not in warning


def test_a_logloss_within_its_own_error_of_the_base_rate_says_nothing() -> None:
    # as after nine steps: an AUC of 0.565, a logloss 0.0006 above the base rate's
    metrics = {"rows": 2000, "positives": 600, "auc": 0.565, "logloss": 0.6136, "base_rate_logloss": 0.6130}
    assert collapse_warning({**metrics, "prediction_deviation": 0.05}) is None
    assert collapse_warning({**metrics, "logloss": 0.65, "prediction_deviation": 0.05}) is not None


def test_nothing_is_said_of_an_auc_that_few_rows_leave_open() -> None:
    for seed in range(20):
        logits, labels = _set(60, 0.25, 0.0, seed)
        logits += np.random.default_rng(seed + 100).standard_normal(60).astype(np.float32) * 0.3
        assert _warning(logits, labels) is None


def test_one_class_leaves_auc_undefined_and_no_rows_say_nothing() -> None:
    logits, labels = _set(5000, 0.25, 1.0)
    for label in (0, 1):
        metrics = click_metrics(logits, np.full(len(labels), label, np.uint8))
        assert metrics.auc is None
        assert "undefined" in metrics.note
        assert collapse_warning(metrics.as_dict()) is None
        rows = dict(metric_rows(metrics.as_dict()))
        assert rows["AUC"] == "undefined"
        assert rows["logloss"] != "undefined"
        assert "warning" not in rows
    assert _warning(logits[:0], labels[:0]) is None
    assert _warning(np.full(5, np.nan, np.float32), labels[:5]) is None


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("data") / "dataset"
    make_dataset(path, 12_000, table_rows=20, split={"train": [(0, 6000)], "validation": [(6000, 12_000)]})
    return path


SETTINGS = ["data.batch_size=128", "train.log_every_steps=20", "checkpoint.every_steps=0"]


def test_a_learning_rate_far_too_high_is_warned_of_in_the_log_and_in_the_result(dataset: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    # Adam at a rate of 10 drives every unit of the MLPs out of its range
    rates = ["dense_optimizer.learning_rate=10.0", "sparse_optimizer.learning_rate=10.0"]
    observed = run_training(2, run, dataset, [*SETTINGS, *rates, "train.validate_every_steps=20"])
    for rank in observed:
        assert len(rank.result.warnings) == 1
        assert "the model may have collapsed" in rank.result.warnings[0]
    assert json.loads((run / "result.json").read_text())["warnings"] == observed[0].result.warnings
    assert log_records(run, "end")[0]["warnings"] == observed[0].result.warnings


def test_a_model_that_learns_is_not_warned_of(dataset: Path, tmp_path: Path) -> None:
    observed = run_training(2, tmp_path / "run", dataset, [*SETTINGS, "train.epochs=3"])
    validation = observed[0].result.validation
    assert validation is not None
    assert float(str(validation["auc"])) > 0.6
    assert observed[0].result.warnings == []
