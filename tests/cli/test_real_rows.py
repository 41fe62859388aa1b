"""Real Criteo rows go all the way: raw file, dataset, trained run, evaluation."""

from pathlib import Path

import numpy as np
import pytest
from sklearn.metrics import log_loss

from tests.support.command_line import run_command, run_json

_TRAIN = ("--set", "checkpoint.every_steps=0", "--set", "train.threads_per_rank=1", "--set", "train.device=cpu")


def _train(capsys: pytest.CaptureFixture[str], dataset: Path, run: Path, *settings: str) -> dict[str, object]:
    overrides = [part for setting in settings for part in ("--set", setting)]
    return run_json(
        capsys, "train", "sample", "--set", f"data.path={dataset}", "--set", f"run.path={run}", *_TRAIN, *overrides
    )


def test_a_small_dlrm_on_kaggle_rows_is_as_good_as_logistic_regression(
    shared_data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    dataset, run = tmp_path / "dataset", tmp_path / "run"
    raw = shared_data / "kaggle" / "kaggle_union.tsv"
    run_json(capsys, "preprocess", raw, "--out", dataset, "--validation", "0.2")
    rates = ("sparse_optimizer.learning_rate=0.02", "dense_optimizer.learning_rate=0.004")
    trained = _train(capsys, dataset, run, "data.batch_size=32", "train.log_every_steps=50", *rates)
    evaluated = run_json(capsys, "evaluate", run, "--data", dataset)
    assert evaluated["rows"] == 1275
    # hashed logistic regression reaches 0.710 and 0.5075 on this fifth; measured here 0.719 and 0.503
    assert evaluated["auc"] > 0.710
    assert evaluated["logloss"] < 0.5075
    validation = trained["validation"]
    assert isinstance(validation, dict)
    assert {name: evaluated[name] for name in validation} == validation
    assert evaluated["base_rate_logloss"] == pytest.approx(_entropy(raw, 6379 - 1275), rel=1e-9)


def _entropy(raw: Path, skip: int) -> float:
    labels = np.array([int(line[:1]) for line in raw.read_bytes().splitlines()[skip:]])
    return float(log_loss(labels, np.full(len(labels), labels.mean())))


def test_gzip_day_files_train_on_the_first_days_and_validate_on_the_last(
    shared_data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    dataset, run = tmp_path / "dataset", tmp_path / "run"
    days = sorted((shared_data / "kaggle" / "gz_days").glob("day_*.gz"), reverse=True)
    run_json(capsys, "preprocess", *days, "--out", dataset)
    trained = _train(capsys, dataset, run, "data.batch_size=32", "train.log_every_steps=1")
    assert trained["rows"] == 200
    assert run_json(capsys, "evaluate", run)["rows"] == 50


def test_terabyte_rows_train_and_evaluate(
    shared_data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    dataset, run = tmp_path / "dataset", tmp_path / "run"
    run_json(capsys, "preprocess", shared_data / "terabyte" / "day_0_head_10000.tsv", "--out", dataset)
    trained = _train(capsys, dataset, run, "data.batch_size=256")
    evaluated = run_json(capsys, "evaluate", run)
    assert trained["rows"] + evaluated["rows"] == 10_000
    assert evaluated["logloss"] < 0.2
    assert 0 < evaluated["positives"] < 100


def test_another_vocabulary_is_refused_in_evaluation(
    shared_data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = (shared_data / "kaggle" / "kaggle_union.tsv").read_bytes().splitlines(keepends=True)
    (tmp_path / "first.tsv").write_bytes(b"".join(rows[:3000]))
    (tmp_path / "later.tsv").write_bytes(b"".join(rows[3000:]))
    hashed = ("--vocabulary", "hash", "--max-rows-per-table", "64")
    run_json(capsys, "preprocess", tmp_path / "first.tsv", "--out", tmp_path / "first", *hashed)
    _train(capsys, tmp_path / "first", tmp_path / "run", "data.batch_size=256")
    # tables of the same size, other rows for the same ids
    modulo = ("--vocabulary", "modulo", "--max-rows-per-table", "64")
    run_json(capsys, "preprocess", tmp_path / "later.tsv", "--out", tmp_path / "wrong", *modulo)
    assert run_command("evaluate", tmp_path / "run", "--data", tmp_path / "wrong") == 1
    assert "category vocabularies differ" in capsys.readouterr().err
    same = ("--vocabulary-from", tmp_path / "first", "--validation", "0.5")
    run_json(capsys, "preprocess", tmp_path / "later.tsv", "--out", tmp_path / "right", *same)
    assert run_json(capsys, "evaluate", tmp_path / "run", "--data", tmp_path / "right")["rows"] > 1000
    unlabeled = shared_data / "kaggle" / "kaggle_test_nolabel_1999.tsv"
    flags = ("--unlabeled", "--vocabulary-from", tmp_path / "first")
    run_json(capsys, "preprocess", unlabeled, "--out", tmp_path / "unlabeled", *flags)
    assert run_command("evaluate", tmp_path / "run", "--data", tmp_path / "unlabeled", "--split", "test") == 1
    assert "its rows have no labels (--unlabeled)" in capsys.readouterr().err
