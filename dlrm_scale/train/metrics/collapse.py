"""Telling a model that has learned nothing, or has lost what it learned, from one that works.

Three signs, each only where chance can't explain it: predictions that are all but equal, an AUC of 0.5, and a logloss
above that of always predicting the base rate. A learning rate taken from another batch size is the usual cause.
"""

import math
from collections.abc import Mapping

__all__ = ["collapse_warning"]

_CONSTANT = 1e-3
"""Standard deviation of predictions, as a share of that of the labels. Models that work are above 0.1."""
_CHANCE = 0.01
"""An AUC less far above 0.5 than this, or than three standard errors, is taken for chance."""
_LARGEST_STANDARD_ERROR = 0.01
"""Of an AUC by chance. With fewer rows (some 10,000 at a click rate of 3 %) nothing is said of the AUC."""
_UNTRAINED = 0.02
"""A logloss this near to ln 2, that of predicting one half: the sample model begins at 0.685."""
_FEWEST_OF_A_CLASS = 100
"""Rows of either label below which logloss and base rate aren't compared."""


def collapse_warning(metrics: Mapping[str, object]) -> str | None:
    """Say in a sentence what speaks for a collapsed model and what to try; None if nothing does.

    Args:
        metrics: `ClickMetrics.as_dict()`; undefined values are passed over.
    """
    signs = [sign for sign in (_constant(metrics), _by_chance(metrics)) if sign]
    worse = _worse_than_base(metrics)
    if not signs and worse is None:
        return None
    findings = "; ".join([*signs, *([worse] if worse else [])])
    if signs and _untrained(metrics):
        return (
            f"the model has hardly learned: {findings}; its predictions are still about one half, so train for more "
            "steps, or with larger learning rates (dense_optimizer.learning_rate, sparse_optimizer.learning_rate)"
        )
    what = "the model may have collapsed" if signs else "the model does worse than none"
    return (
        f"{what}: {findings}; try a tenth of both learning rates "
        "(dense_optimizer.learning_rate, sparse_optimizer.learning_rate) or a warm-up (schedule.warmup_steps)"
    )


def _untrained(metrics: Mapping[str, object]) -> bool:
    """Whether predictions are where initial weights put them, near one half, on rows whose base rate is elsewhere."""
    logloss, base = metrics.get("logloss"), metrics.get("base_rate_logloss")
    if not isinstance(logloss, float) or not isinstance(base, float):
        return False
    return abs(logloss - math.log(2)) < _UNTRAINED and base < math.log(2) - 2 * _UNTRAINED


def _constant(metrics: Mapping[str, object]) -> str | None:
    deviation, (positives, negatives) = metrics.get("prediction_deviation"), _classes(metrics)
    if not isinstance(deviation, float) or positives + negatives < _FEWEST_OF_A_CLASS:
        return None
    rate = positives / (positives + negatives)
    # a set of one class has no spread of its own; 1e-3 is that of labels with a click rate of a millionth
    if deviation >= _CONSTANT * max(1e-3, math.sqrt(rate * (1 - rate))):
        return None
    return f"its predictions are all but equal (standard deviation {deviation:.1e})"


def _by_chance(metrics: Mapping[str, object]) -> str | None:
    auc, (positives, negatives) = metrics.get("auc"), _classes(metrics)
    if not isinstance(auc, float) or not positives or not negatives:
        return None
    # of the Mann-Whitney statistic when scores and labels have nothing to do with each other
    error = math.sqrt((positives + negatives + 1) / (12 * positives * negatives))
    if error > _LARGEST_STANDARD_ERROR or auc >= 0.5 + max(_CHANCE, 3 * error):
        return None
    if auc <= 0.5 - max(_CHANCE, 3 * error):
        return f"its AUC of {auc:.4f} is worse than chance"
    return f"its AUC of {auc:.4f} is that of chance (0.5, standard error {error:.4f})"


def _worse_than_base(metrics: Mapping[str, object]) -> str | None:
    logloss, base = metrics.get("logloss"), metrics.get("base_rate_logloss")
    deviation, (positives, negatives) = metrics.get("prediction_deviation"), _classes(metrics)
    if not isinstance(logloss, float) or not isinstance(base, float) or not isinstance(deviation, float):
        return None
    if min(positives, negatives) < _FEWEST_OF_A_CLASS:
        return None
    # Near the base rate r a prediction that is off by d changes a row's loss by d / sqrt(r (1 - r)) in the mean square.
    rows = positives + negatives
    error = deviation / math.sqrt(positives / rows * negatives / rows) / math.sqrt(rows)
    if logloss <= base + 3 * error:
        return None
    return f"its logloss of {logloss:.4f} is above the {base:.4f} of always predicting the base rate"


def _classes(metrics: Mapping[str, object]) -> tuple[int, int]:
    rows, positives = int(str(metrics["rows"])), int(str(metrics["positives"]))
    return positives, rows - positives
