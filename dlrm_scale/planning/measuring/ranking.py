"""Measured step times of plans, and how well predictions order them.

Plans are measured in turns, in rounds whose order is shuffled, so that whatever else the machine does meets all of them
alike. A round's number for a plan is its slowest rank's. What the machine's own noise allows is told by the same
figures between two halves of the rounds: no prediction can agree with a measurement better than it does with itself.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from scipy.stats import kendalltau

__all__ = [
    "Agreement",
    "Measured",
    "NoiseFloor",
    "agreement",
    "kendall_tau",
    "measured",
    "noise_floor",
    "ordered_pairs",
]

_BOOTSTRAP_DRAWS = 2000
_HALVINGS = 60
_APART = 0.10
"""Pairs of plans closer than this are left out of `pairs_right`: which is faster matters little there."""


@dataclass(frozen=True, kw_only=True)
class Measured:
    """A plan's step time over all rounds.

    Attributes:
        median_ms: over rounds.
        low_ms: of the 95 % bootstrap interval of the median.
        high_ms: of it.
        rounds: how many.
        ties_with_best: the interval overlaps that of the fastest plan.
    """

    median_ms: float
    low_ms: float
    high_ms: float
    rounds: int
    ties_with_best: bool


@dataclass(frozen=True, kw_only=True)
class NoiseFloor:
    """What two random halves of the rounds agree on, in the mean over many halvings.

    Attributes:
        tau: Kendall's tau-b between the halves' medians.
        pairs_right: share of pairs over 10 % apart in one half that the other orders alike; None without such a pair.
        difference: mean relative difference of a plan's two medians.
    """

    tau: float
    pairs_right: float | None
    difference: float


@dataclass(frozen=True, kw_only=True)
class Agreement:
    """Predictions against measurements of the same plans.

    Attributes:
        tau: Kendall's tau-b.
        pairs_right: share of pairs over 10 % apart that are ordered right; None without such a pair.
        pairs: how many of them there are.
        error: mean relative error.
        anchored_error: the same, after all predictions were scaled so that the anchor's is exact; without the anchor.
        regret: how much slower than the best the plan is that is predicted to be best.
        top3_regret: how much slower the best of the three that are predicted to be best is.
    """

    tau: float
    pairs_right: float | None
    pairs: int
    error: float
    anchored_error: float | None
    regret: float
    top3_regret: float


def measured(rounds_ms: Mapping[str, Sequence[float]], *, seed: int = 0) -> dict[str, Measured]:
    """Medians of plans with intervals.

    Args:
        rounds_ms: each plan's time by round.
        seed: of the bootstrap.

    Raises:
        ValueError: no plan, or one without a round.
    """
    if not rounds_ms or not all(len(times) for times in rounds_ms.values()):
        raise ValueError("nothing was measured")
    generator = np.random.default_rng(seed)
    rows = {}
    for name, times in rounds_ms.items():
        values = np.asarray(times, dtype=float)
        draws = np.median(values[generator.integers(0, len(values), (_BOOTSTRAP_DRAWS, len(values)))], axis=1)
        low, high = np.quantile(draws, (0.025, 0.975))
        rows[name] = (float(np.median(values)), float(low), float(high), len(values))
    best_high = min(rows.values())[2]
    return {
        name: Measured(median_ms=median, low_ms=low, high_ms=high, rounds=count, ties_with_best=low <= best_high)
        for name, (median, low, high, count) in rows.items()
    }


def kendall_tau(left: Sequence[float], right: Sequence[float]) -> float:
    """Kendall's tau-b; nan where one side has no order."""
    return float(kendalltau(left, right).statistic)


def ordered_pairs(predicted: Sequence[float], truth: Sequence[float]) -> tuple[int, int]:
    """Count the pairs whose truths lie over 10 % apart: those predicted in the right order, and all of them."""
    guess, true = np.asarray(predicted, dtype=float), np.asarray(truth, dtype=float)
    first, second = np.triu_indices(len(true), k=1)
    gap = true[first] - true[second]
    counted = np.abs(gap) > _APART * np.minimum(true[first], true[second])
    right = (guess[first] - guess[second]) * gap > 0
    return int(np.sum(right & counted)), int(np.sum(counted))


def noise_floor(rounds_ms: Mapping[str, Sequence[float]], *, seed: int = 0) -> NoiseFloor | None:
    """Compare two random halves of the rounds, many times.

    Args:
        rounds_ms: each plan's time by round; all plans have as many.
        seed: of the halvings.

    Returns:
        None with fewer than two plans or four rounds.
    """
    table = np.array([list(times) for times in rounds_ms.values()], dtype=float)
    if table.ndim != 2 or table.shape[0] < 2 or table.shape[1] < 4:
        return None
    generator = np.random.default_rng(seed)
    half = table.shape[1] // 2
    taus, right, counted, differences = [], 0, 0, []
    for _ in range(_HALVINGS):
        order = generator.permutation(table.shape[1])
        one = np.median(table[:, order[:half]], axis=1)
        other = np.median(table[:, order[half:]], axis=1)
        taus.append(kendall_tau(one.tolist(), other.tolist()))
        ordered, pairs = ordered_pairs(one.tolist(), other.tolist())
        right, counted = right + ordered, counted + pairs
        differences.append(float(np.mean(np.abs(one - other) / other)))
    return NoiseFloor(
        tau=float(np.mean(taus)),
        pairs_right=right / counted if counted else None,
        difference=float(np.mean(differences)),
    )


def agreement(
    predicted_ms: Mapping[str, float], measured_ms: Mapping[str, float], *, anchor: str | None = None
) -> Agreement | None:
    """How well predictions agree with measurements.

    Args:
        predicted_ms: by plan; plans that weren't measured are left out.
        measured_ms: medians, by plan.
        anchor: the plan by whose measurement all predictions are scaled; None for no scaled error.

    Returns:
        None with fewer than two plans that have both.
    """
    names = [name for name in measured_ms if name in predicted_ms]
    if len(names) < 2:
        return None
    guess = np.array([predicted_ms[name] for name in names])
    truth = np.array([measured_ms[name] for name in names])
    right, pairs = ordered_pairs(guess.tolist(), truth.tolist())
    by_guess = np.argsort(guess, kind="stable")
    anchored = None
    if anchor in names:
        at = names.index(anchor)
        scaled = guess * truth[at] / guess[at]
        anchored = float(np.mean(np.delete(np.abs(scaled - truth) / truth, at)))
    return Agreement(
        tau=kendall_tau(guess.tolist(), truth.tolist()),
        pairs_right=right / pairs if pairs else None,
        pairs=pairs,
        error=float(np.mean(np.abs(guess - truth) / truth)),
        anchored_error=anchored,
        regret=float(truth[by_guess[0]] / truth.min() - 1),
        top3_regret=float(truth[by_guess[:3]].min() / truth.min() - 1),
    )
