"""Constants from timings: non-negative least squares on relative error, and multipliers drawn toward 1.

Relative error counts a table of 0.2 ms as much as one of 20 ms, and no cost can be negative. Micro-benchmarks see each
part of a step alone; whole steps of small models say how much of each part is left when all run together. There are few
such steps, so a multiplier leaves 1 only as far as they insist (a ridge worth `PRIOR_STEPS` of them).
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

__all__ = ["MULTIPLIER_LIMITS", "PRIOR_STEPS", "Fit", "fit_intervals", "fit_multipliers", "fit_times", "rising"]

Numbers = NDArray[np.float64]

MULTIPLIER_LIMITS = (0.4, 2.5)
"""What is left of a part when all run together is no less and no more, whatever noisy steps say. Set by hand: without
limits, on a busy machine, two calibrations by processor time had 0.44 to 1.32, but one of them 0.02 for data-parallel
tables; one of eight models by elapsed time had 0 for lookups."""

PRIOR_STEPS = 2.0
"""How many typical steps the belief in a multiplier of 1 is worth."""
_FREE_STEPS = 0.02
"""The same of a constant's belief in 0: just enough to tell apart what always occurs together."""
_LEAST_SHARE = 0.02
"""Of a step; what is smaller couldn't be told from noise, and keeps its multiplier."""


@dataclass(frozen=True, kw_only=True)
class Fit:
    """Fitted numbers.

    Attributes:
        values: `[features]`.
        error: mean relative error over the timings.
    """

    values: tuple[float, ...]
    error: float


def fit_times(features: Sequence[Sequence[float]], milliseconds: Sequence[float], base: Sequence[float] = ()) -> Fit:
    """Fit `milliseconds = base + features @ values` with values of at least 0.

    Args:
        features: `[timings, features]`.
        milliseconds: `[timings]`, above 0.
        base: `[timings]`, what is known already; nothing by default.
    """
    x, t = np.array(features, dtype=np.float64), np.array(milliseconds, dtype=np.float64)
    known = np.array(base, dtype=np.float64) if len(base) else np.zeros(len(t))
    values = _non_negative(x / t[:, None], 1 - known / t)
    return Fit(values=tuple(values.tolist()), error=_error(known + x @ values, t))


def fit_multipliers(parts: Numbers, constants: Numbers, milliseconds: Numbers) -> Fit:
    """Fit `milliseconds = parts @ multipliers + constants @ values`.

    Multipliers stay near 1 and within `MULTIPLIER_LIMITS`, values near 0 and not below.

    Args:
        parts: `[steps, parts]`, milliseconds that micro-benchmarks predict.
        constants: `[steps, constants]`, how often each constant is paid.
        milliseconds: `[steps]`, measured.

    Returns:
        Multipliers, then values.
    """
    from scipy.optimize import lsq_linear

    features = np.concatenate([parts, constants], axis=1) / milliseconds[:, None]
    typical = np.sqrt(np.mean(features**2, axis=0)) + 1e-9
    count = parts.shape[1]
    weights = np.concatenate(
        [np.sqrt(PRIOR_STEPS) * np.maximum(typical[:count], _LEAST_SHARE), np.sqrt(_FREE_STEPS) * typical[count:]]
    )
    wanted = np.concatenate([weights[:count], np.zeros(constants.shape[1])])
    x = np.concatenate([features, np.diag(weights)])
    lowest, highest = MULTIPLIER_LIMITS
    limits = (
        np.concatenate([np.full(count, lowest), np.zeros(constants.shape[1])]),
        np.concatenate([np.full(count, highest), np.full(constants.shape[1], np.inf)]),
    )
    values: Numbers = lsq_linear(x, np.concatenate([np.ones(len(milliseconds)), wanted]), limits, method="bvls").x
    predicted = np.concatenate([parts, constants], axis=1) @ values
    return Fit(values=tuple(values.tolist()), error=_error(predicted, milliseconds))


def fit_intervals(parts: Numbers, constants: Numbers, milliseconds: Numbers, *, draws: int = 200) -> Numbers:
    """Say how far `fit_multipliers` can be trusted: fit steps drawn again with replacement (bootstrap).

    Args:
        parts: as there, as the next two.
        constants: likewise.
        milliseconds: likewise.
        draws: fits; the same ones every time.

    Returns:
        `[2, multipliers + values]` float64: the 5th and 95th percentiles.
    """
    random = np.random.default_rng(0)
    found = []
    for _ in range(draws):
        drawn = random.integers(0, len(milliseconds), len(milliseconds))
        found.append(fit_multipliers(parts[drawn], constants[drawn], milliseconds[drawn]).values)
    low, high = np.percentile(np.array(found), [5, 95], axis=0)
    return np.stack([low, high])


def rising(milliseconds: Sequence[float]) -> list[float]:
    """Bring timings of rising sizes to the nearest that never fall (isotonic regression)."""
    from scipy.optimize import isotonic_regression

    return [float(ms) for ms in isotonic_regression(np.array(milliseconds)).x]


def _non_negative(x: Numbers, y: Numbers) -> Numbers:
    from scipy.optimize import nnls

    scale = np.sqrt(np.mean(x**2, axis=0))
    scale[scale == 0] = 1.0
    values: Numbers = nnls(x / scale, y)[0] / scale
    return values


def _error(predicted: Numbers, measured: Numbers) -> float:
    return float(np.mean(np.abs(predicted - measured) / measured))
