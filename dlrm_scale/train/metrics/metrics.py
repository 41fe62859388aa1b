"""Quality of click predictions over a whole set of rows; undefined values are None, never 0 or 1."""

from dataclasses import asdict, dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.stats import rankdata

from dlrm_scale.train.metrics.click_sums import ClickSums
from dlrm_scale.train.metrics.score_ranking import AucValue

__all__ = ["ClickMetrics", "click_metrics", "global_auc", "metrics_of"]


@dataclass(frozen=True, kw_only=True)
class ClickMetrics:
    """What an evaluation reports.

    Attributes:
        rows: rows scored.
        positives: rows with label 1.
        logloss: mean binary cross-entropy (nats); None without rows.
        auc: area under the ROC curve; None when only one class is there.
        auc_error_bound: the exact AUC is at most so far away: 0 for an exact one; None without AUC.
        normalized_entropy: logloss over the entropy of the base rate (He et al., ADKDD'14); None with one class.
        calibration: mean prediction over mean label; None without positives.
        base_rate_logloss: logloss of always predicting the mean label; None without rows.
        prediction_deviation: standard deviation of the predictions; None without rows.
        note: why a value is None, or "".
    """

    rows: int
    positives: int
    logloss: float | None
    auc: float | None
    auc_error_bound: float | None
    normalized_entropy: float | None
    calibration: float | None
    base_rate_logloss: float | None
    prediction_deviation: float | None
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
    """Compute every metric over all rows at once.

    Args:
        logits: `[N]` float32.
        labels: `[N]` uint8, 0 or 1.
    """
    sums = ClickSums()
    sums.add(logits, labels)
    auc = None if sums.nonfinite else global_auc(logits, labels)
    return metrics_of(sums, AucValue(value=auc, error_bound=None if auc is None else 0.0))


def metrics_of(sums: ClickSums, auc: AucValue) -> ClickMetrics:
    """Make metrics of what was summed up over rows.

    Args:
        sums: over all rows.
        auc: over the same rows.
    """
    rows, positives = sums.rows, sums.positives
    if not rows or sums.nonfinite:
        return ClickMetrics(
            rows=rows,
            positives=positives,
            logloss=None,
            auc=None,
            auc_error_bound=None,
            normalized_entropy=None,
            calibration=None,
            base_rate_logloss=None,
            prediction_deviation=None,
            note=f"{sums.nonfinite} predictions are not finite" if rows else "no rows",
        )
    rate = positives / rows
    one_class = positives in (0, rows)
    entropy = 0.0 if one_class else float(-(rate * np.log(rate) + (1 - rate) * np.log1p(-rate)))
    return ClickMetrics(
        rows=rows,
        positives=positives,
        logloss=sums.mean_loss,
        auc=auc.value,
        auc_error_bound=auc.error_bound,
        normalized_entropy=None if one_class else sums.mean_loss / entropy,
        calibration=sums.mean_prediction / rate if positives else None,
        base_rate_logloss=entropy,
        prediction_deviation=sums.prediction_deviation,
        note=f"only label {int(positives > 0)} occurs: AUC and normalized entropy are undefined" if one_class else "",
    )
