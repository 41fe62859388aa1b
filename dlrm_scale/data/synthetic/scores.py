"""What the best possible predictor would score on drawn rows, in memory that doesn't grow with them."""

import numpy as np
import numpy.typing as npt

__all__ = ["TruthScores"]

Float64 = npt.NDArray[np.float64]

_BINS = 1 << 16
_LIMIT = 16.0
"""Logits are counted in 65,536 bins of width 0.0005 over [-16, 16]; the AUC errs by less than 1e-5 for it."""


class TruthScores:
    """Sums over rows whose true log-odds are known.

    Scores add up, so that days make a whole. A value is None where it isn't defined: no rows, or only one label.
    """

    def __init__(self) -> None:
        self.rows = 0
        self._by_label = np.zeros((2, _BINS), np.int64)
        self._logloss_sum = 0.0

    def add(self, logits: Float64, labels: npt.NDArray[np.uint8]) -> None:
        """Count a chunk: float64 [n] log-odds and uint8 [n] labels."""
        bins = np.clip((logits + _LIMIT) * (_BINS / (2 * _LIMIT)), 0, _BINS - 1).astype(np.int64)
        for label in (0, 1):
            self._by_label[label] += np.bincount(bins[labels == label], minlength=_BINS)
        signed = np.where(labels == 1, -logits, logits)
        self._logloss_sum += float(np.logaddexp(0.0, signed).sum())
        self.rows += len(labels)

    def __iadd__(self, other: "TruthScores") -> "TruthScores":
        """Add the rows of another part."""
        self.rows += other.rows
        self._by_label += other._by_label
        self._logloss_sum += other._logloss_sum
        return self

    @property
    def clicks(self) -> int:
        """Rows with label 1."""
        return int(self._by_label[1].sum())

    @property
    def auc(self) -> float | None:
        """Share of (label 1, label 0) pairs in the right order, ties counted half."""
        negatives, positives = self._by_label.astype(np.float64)
        pairs = positives.sum() * negatives.sum()
        if pairs == 0:
            return None
        below = np.cumsum(negatives) - negatives
        return float((positives * (below + 0.5 * negatives)).sum() / pairs)

    @property
    def logloss(self) -> float | None:
        """Mean binary cross-entropy, natural logarithm."""
        return self._logloss_sum / self.rows if self.rows else None

    @property
    def base_rate_logloss(self) -> float | None:
        """Logloss of always predicting these rows' click rate; the divisor of normalized entropy (He et al. 2014)."""
        if not 0 < self.clicks < self.rows:
            return None
        rate = self.clicks / self.rows
        return float(-(rate * np.log(rate) + (1 - rate) * np.log1p(-rate)))

    @property
    def normalized_entropy(self) -> float | None:
        """Logloss over base-rate logloss."""
        if self.logloss is None or self.base_rate_logloss is None:
            return None
        return self.logloss / self.base_rate_logloss

    def summary(self) -> dict[str, float | None]:
        """Return AUC, logloss and normalized entropy for JSON."""
        return {"auc": self.auc, "logloss": self.logloss, "normalized_entropy": self.normalized_entropy}
