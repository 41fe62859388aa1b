"""Metrics are global: the same as one process gets from all scores, however rows lie on ranks."""

import signal
from collections.abc import Iterable, Iterator

import numpy as np
import pytest
import torch
from sklearn.metrics import log_loss, roc_auc_score

from dlrm_scale.batch import Batch, make_batch
from dlrm_scale.sharding.ranks import close_ranks, init_ranks
from dlrm_scale.train.evaluate import evaluate_batches
from dlrm_scale.train.metrics.metrics import ClickMetrics
from dlrm_scale.train.stop import StopRequest
from tests.support.rank_runner import run_ranks

_ROWS = 997


def _scores(constant: bool) -> tuple[np.ndarray, np.ndarray]:
    generator = np.random.default_rng(3)
    # rank 0 of 2 gets 90 % negatives, rank 1 90 % positives, and scores have many ties
    labels = np.concatenate([generator.random(500) < 0.1, generator.random(497) < 0.9]).astype(np.uint8)
    logits = np.round(generator.normal(labels, 2.0), 1).astype(np.float32)
    return (np.zeros_like(logits) if constant else logits), labels


def _evaluate(constant: bool, batch_size: int, rows: int) -> ClickMetrics | None:
    logits, labels = (values[:rows] for values in _scores(constant))
    ranks = init_ranks("cpu", 60)
    first, last = rows * ranks.rank // ranks.ranks, rows * (ranks.rank + 1) // ranks.ranks
    steps = -(-rows // (batch_size * ranks.ranks))

    def batches() -> Iterator[Batch]:
        for step in range(steps):
            here = slice(first + step * batch_size, min(first + (step + 1) * batch_size, last))
            true = max(0, here.stop - here.start)
            dense = torch.zeros(batch_size, 13)
            padded = torch.zeros(batch_size)
            padded[:true] = torch.from_numpy(labels[here].astype(np.float32))
            dense[:true, 0] = torch.from_numpy(logits[here])
            dense[true:, 0] = 1e9  # a padding row that counted would be seen at once
            ids = torch.zeros(26, true, dtype=torch.int64)
            yield make_batch(dense_features=dense, ids=ids, labels=padded, rows_global=rows, ranks=ranks.ranks)

    def score(given: Iterable[Batch]) -> Iterator[tuple[Batch, torch.Tensor, torch.Tensor]]:
        for batch in given:
            yield batch, torch.zeros(()), batch.dense_features[:, 0]

    try:
        return evaluate_batches(score, batches(), ranks)
    finally:
        close_ranks()


@pytest.mark.parametrize("constant", [False, True])
def test_auc_and_logloss_equal_scikit_learns_on_any_ranks_and_batches(constant: bool) -> None:
    logits, labels = _scores(constant)
    probabilities = 1 / (1 + np.exp(-logits.astype(np.float64)))
    for ranks in (1, 2, 3):
        for batch_size in (1, 64, _ROWS) if ranks == 2 else (100,):
            results = run_ranks(ranks, _evaluate, constant, batch_size, _ROWS)
            assert all(result == results[0] for result in results)
            assert results[0].rows == _ROWS
            assert results[0].auc == pytest.approx(roc_auc_score(labels, probabilities), abs=1e-6)
            assert results[0].logloss == pytest.approx(log_loss(labels, probabilities), abs=1e-6)


def _stopped(rank_told: int) -> ClickMetrics | None:
    ranks = init_ranks("cpu", 60)
    stop = StopRequest()
    seen = 0

    def score(given: Iterable[Batch]) -> Iterator[tuple[Batch, torch.Tensor, torch.Tensor]]:
        nonlocal seen
        for seen, batch in enumerate(given, start=1):
            if seen == 5 and ranks.rank == rank_told:
                stop.handle(signal.SIGTERM)
            yield batch, torch.zeros(()), batch.dense_features[:, 0]

    ids = torch.zeros(26, 1, dtype=torch.int64)
    one = make_batch(dense_features=torch.zeros(1, 13), ids=ids, labels=torch.zeros(1))
    try:
        result = evaluate_batches(score, [one] * 100, ranks, stop)
        assert seen < 100
        return result
    finally:
        close_ranks()


def test_a_signal_to_one_rank_ends_the_evaluation_on_all() -> None:
    assert run_ranks(2, _stopped, 1) == [None, None]


def test_fewer_rows_than_ranks_are_all_counted() -> None:
    for rows in (0, 1, 2):
        results = run_ranks(3, _evaluate, False, 4, rows)
        assert [result.rows for result in results] == [rows] * 3
