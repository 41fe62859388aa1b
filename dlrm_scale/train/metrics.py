"""Quality of click predictions over a whole set of rows; undefined values are None, never 0 or 1."""

from dataclasses import asdict, dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.stats import rankdata

__all__ = ["ClickMetrics", "click_metrics", "global_auc"]


@dataclass(frozen=True, kw_only=True)
class ClickMetrics:
    """What an evaluation reports.

    Attributes:
        rows: rows scored.
        positives: rows with label 1.
        logloss: mean binary cross-entropy (nats); None without rows.
        auc: area under the ROC curve; None when only one class is there.
        normalized_entropy: logloss over the entropy of the base rate (He et al., ADKDD'14); None with one class.
        calibration: mean prediction over mean label; None without positives.
        base_rate_logloss: logloss of always predicting the mean label; None without rows.
        note: why a value is None, or "".
    """

    rows: int
    positives: int
    logloss: float | None
    auc: float | None
    normalized_entropy: float | None
    calibration: float | None
    base_rate_logloss: float | None
    note: str = ""

    def as_dict(self) -> dict[str, object]:
        """JSON-ready values by name."""
        return asdict(self)


def global_auc(scores: NDArray[np.float32], labels: NDArray[np.uint8]) -> float | None:
    """Exact AUC by rank sums (Mann-Whitney), ties counted half; None when a class is absent.

    Args:
        scores: `[N]`, any monotone score.
        labels: `[N]`, 0 or 1.
    """
    positives = int(labels.sum())
    negatives = len(labels) - positives
    if not positives or not negatives:
        return None
    rank_sum = float(rankdata(scores)[labels == 1].sum())
    return (rank_sum - positives * (positives + 1) / 2) / (positives * negatives)


def click_metrics(logits: NDArray[np.float32], labels: NDArray[np.uint8]) -> ClickMetrics:
    """Compute every metric over all rows at once, in float64.

    Args:
        logits: `[N]` float32.
        labels: `[N]` uint8, 0 or 1.
    """
    rows, positives = len(labels), int(labels.sum())
    if not rows:
        return ClickMetrics(
            rows=0,
            positives=0,
            logloss=None,
            auc=None,
            normalized_entropy=None,
            calibration=None,
            base_rate_logloss=None,
            note="no rows",
        )
    if not np.isfinite(logits).all():
        return ClickMetrics(
            rows=rows,
            positives=positives,
            logloss=None,
            auc=None,
            normalized_entropy=None,
            calibration=None,
            base_rate_logloss=None,
            note=f"{int((~np.isfinite(logits)).sum())} predictions are not finite",
        )
    z = logits.astype(np.float64)
    y = labels.astype(np.float64)
    # softplus(z) - y z, stable for large |z|
    logloss = float(np.mean(np.maximum(z, 0) - y * z + np.log1p(np.exp(-np.abs(z)))))
    rate = positives / rows
    one_class = positives in (0, rows)
    entropy = 0.0 if one_class else -(rate * np.log(rate) + (1 - rate) * np.log1p(-rate))
    mean_prediction = float(np.mean(1 / (1 + np.exp(-z.clip(-700, 700)))))
    return ClickMetrics(
        rows=rows,
        positives=positives,
        logloss=logloss,
        auc=global_auc(logits, labels),
        normalized_entropy=None if one_class else logloss / float(entropy),
        calibration=mean_prediction / rate if positives else None,
        base_rate_logloss=float(entropy),
        note=f"only label {int(positives > 0)} occurs: AUC and normalized entropy are undefined" if one_class else "",
    )
