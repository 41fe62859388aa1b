"""AUC equals scikit-learn's on any ranks; a binned one is within the error that it states."""

from fractions import Fraction

import numpy as np
import pytest
from sklearn.metrics import roc_auc_score

from dlrm_scale.sharding.ranks import close_ranks, init_ranks
from dlrm_scale.train.metrics.score_ranking import (
    AucValue,
    BinnedRanking,
    ExactRanking,
    Ranking,
    auc_kind,
    order_numbers,
)
from tests.support.rank_runner import run_ranks


def _rows(kind: str, rows: int = 4000) -> tuple[np.ndarray, np.ndarray]:
    generator = np.random.default_rng(rows)
    labels = (generator.random(rows) < 0.2).astype(np.uint8)
    logits = generator.normal(labels, 1.5, size=rows).astype(np.float32)
    if kind == "ties":
        logits = np.round(logits)
    elif kind == "constant":
        logits = np.full(rows, -3.25, np.float32)
    elif kind == "apart":
        logits = np.where(labels, 5, -5).astype(np.float32) + logits / 100
    elif kind == "narrow":
        # all in one range of the upper 16 bits
        logits = np.float32(1) + (np.arange(rows) % 300).astype(np.float32) * np.float32(2.0**-22)
    elif kind == "extreme":
        logits = (logits * 10.0 ** generator.integers(-44, 38, size=rows)).astype(np.float32)
        logits[:2] = [0.0, -0.0]
    return logits, labels


KINDS = ("plain", "ties", "constant", "apart", "narrow", "extreme")


def _filled(ranking: Ranking, kind: str, rank: int, ranks: int) -> Ranking:
    logits, labels = _rows(kind)
    for some in np.array_split(np.arange(len(labels))[rank::ranks], 5):
        ranking.add(logits[some], labels[some])
    return ranking


def _auc_on_ranks(kind: str, group_rows: int, bits: int) -> tuple[AucValue, AucValue]:
    ranks = init_ranks("cpu", 60)
    try:
        exact = _filled(ExactRanking(group_rows=group_rows), kind, ranks.rank, ranks.ranks).auc(ranks)
        return exact, _filled(BinnedRanking(bits=bits), kind, ranks.rank, ranks.ranks).auc(ranks)
    finally:
        close_ranks()


@pytest.mark.parametrize("kind", KINDS)
def test_exact_auc_is_scikit_learns_and_binned_auc_within_its_bound(kind: str) -> None:
    logits, labels = _rows(kind)
    expected = roc_auc_score(labels, logits.astype(np.float64))
    exact = _filled(ExactRanking(), kind, 0, 1).auc(None)
    assert exact.value == pytest.approx(expected, abs=1e-12)
    assert exact.error_bound == 0
    for bits in (10, 16, 22):
        binned = _filled(BinnedRanking(bits=bits), kind, 0, 1).auc(None)
        assert binned.value is not None
        assert binned.error_bound is not None
        assert abs(binned.value - exact.value) <= binned.error_bound
        if bits == 22:
            assert binned.error_bound < 1e-3 or kind == "narrow"
        if kind == "constant":
            assert (binned.value, binned.error_bound) == (0.5, 0.0)


@pytest.mark.parametrize("kind", KINDS)
def test_any_number_of_ranks_and_any_groups_give_the_same_auc(kind: str) -> None:
    exact = _filled(ExactRanking(), kind, 0, 1).auc(None)
    binned = _filled(BinnedRanking(bits=12), kind, 0, 1).auc(None)
    for ranks, group_rows in ((2, 50), (3, 700), (3, 1 << 20)):
        assert run_ranks(ranks, _auc_on_ranks, kind, group_rows, 12) == [(exact, binned)] * ranks


def test_the_stated_error_is_that_of_the_worst_order_inside_the_bins() -> None:
    logits, labels = _rows("plain", 300)
    numbers = order_numbers(logits) >> np.uint32(22)
    binned = BinnedRanking(bits=10)
    binned.add(logits, labels)
    found = binned.auc(None)
    positives, negatives = numbers[labels == 1], numbers[labels == 0]
    pairs = len(positives) * len(negatives)
    together = sum(int((negatives == p).sum()) for p in positives)
    below = sum(int((negatives < p).sum()) for p in positives)
    assert found.error_bound == float(Fraction(together, 2 * pairs))
    # all unknown pairs in order, or all of them out of order
    assert found.value is not None
    assert found.value + found.error_bound == pytest.approx((below + together) / pairs, abs=1e-12)
    assert found.value - found.error_bound == pytest.approx(below / pairs, abs=1e-12)


@pytest.mark.parametrize("label", [0, 1])
def test_one_class_or_no_row_has_no_auc(label: int) -> None:
    for ranking in (ExactRanking(), BinnedRanking(bits=10)):
        ranking.add(np.ones(3, np.float32), np.full(3, label, np.uint8))
        assert ranking.auc(None) == AucValue(value=None, error_bound=None)
    for ranking in (ExactRanking(), BinnedRanking(bits=10)):
        assert ranking.auc(None) == AucValue(value=None, error_bound=None)


def test_numbers_have_the_order_of_the_logits() -> None:
    logits = np.array([-np.inf, -3e38, -1, -1e-44, -0.0, 0.0, 1e-44, 1, np.inf], np.float32)
    numbers = order_numbers(logits).tolist()
    assert numbers[4] == numbers[5]
    assert sorted(set(numbers)) == [n for i, n in enumerate(numbers) if i != 4]


def test_auto_is_exact_up_to_a_fixed_number_of_rows() -> None:
    assert auc_kind("auto", 1 << 28) == "exact"
    assert auc_kind("auto", (1 << 28) + 1) == "binned"
    assert auc_kind("binned", 1) == "binned"
    assert auc_kind("exact", 1 << 40) == "exact"
