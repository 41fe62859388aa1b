"""Sums of per-row losses that parts of an evaluation add up to, in any order, with the same result."""

from dataclasses import dataclass, fields

import numpy as np
from numpy.typing import NDArray

__all__ = ["ClickSums"]

_UNITS = 2**40
"""A fraction is kept as a whole number of 2^-40, rounded once a row: a mean is off by less than 5e-13."""
_ROWS_AT_ONCE = 1 << 20
_LARGE_LOSS = 2.0**40
"""Sums of smaller losses over `_ROWS_AT_ONCE` rows fit 64 bits."""


@dataclass(kw_only=True)
class ClickSums:
    """What logloss and calibration are made of.

    Sums are whole numbers, so that rows may be added in any order, batches and ranks: equal logits give equal sums to
    the last bit.

    Attributes:
        rows: rows added.
        positives: of them with label 1.
        nonfinite: of them with a logit that isn't finite; the sums leave these out.
        loss_units: sum of the binary cross-entropies (nats) in units of 2^-40.
        prediction_units: sum of the predicted probabilities in units of 2^-40.
        squared_prediction_units: sum of their squares in units of 2^-40.
    """

    rows: int = 0
    positives: int = 0
    nonfinite: int = 0
    loss_units: int = 0
    prediction_units: int = 0
    squared_prediction_units: int = 0

    def add(self, logits: NDArray[np.float32], labels: NDArray[np.uint8]) -> None:
        """Add rows.

        Args:
            logits: `[N]` float32.
            labels: `[N]` uint8, 0 or 1.
        """
        for start in range(0, len(labels), _ROWS_AT_ONCE):
            self._add(logits[start : start + _ROWS_AT_ONCE], labels[start : start + _ROWS_AT_ONCE])

    def merge(self, other: "ClickSums") -> None:
        """Add the rows of another."""
        for part in fields(self):
            setattr(self, part.name, getattr(self, part.name) + getattr(other, part.name))

    @property
    def mean_loss(self) -> float:
        """Mean binary cross-entropy (nats); there must be rows."""
        return self.loss_units / (_UNITS * self.rows)

    @property
    def mean_prediction(self) -> float:
        """Mean predicted probability; there must be rows."""
        return self.prediction_units / (_UNITS * self.rows)

    @property
    def prediction_deviation(self) -> float:
        """Standard deviation of the predicted probabilities; below 1e-6 it may be 0. There must be rows."""
        variance = self.squared_prediction_units / (_UNITS * self.rows) - self.mean_prediction**2
        return float(max(0.0, variance) ** 0.5)

    def _add(self, logits: NDArray[np.float32], labels: NDArray[np.uint8]) -> None:
        self.rows += len(labels)
        self.positives += int(np.count_nonzero(labels))
        finite = np.isfinite(logits)
        if not finite.all():
            self.nonfinite += int(np.count_nonzero(~finite))
            logits, labels = logits[finite], labels[finite]
        z = logits.astype(np.float64)
        # softplus(z) - y z, stable for large |z|
        decay = np.exp(-np.abs(z))
        losses = np.maximum(z, 0) - np.where(labels != 0, z, 0.0) + np.log1p(decay)
        self.loss_units += _in_units(losses)
        predictions = np.where(z >= 0, 1.0, decay) / (1 + decay)
        self.prediction_units += _in_units(predictions)
        self.squared_prediction_units += _in_units(predictions * predictions)


def _in_units(values: NDArray[np.float64]) -> int:
    """Sum non-negative numbers, each rounded to a whole number of units."""
    large = values >= _LARGE_LOSS
    total = 0
    if large.any():
        total = _UNITS * sum(int(value) for value in values[large])
        values = values[~large]
    whole = np.floor(values)
    fractions = np.rint((values - whole) * _UNITS)
    return total + _UNITS * int(whole.astype(np.int64).sum()) + int(fractions.astype(np.int64).sum())
