"""Multi-hot columns of a synthetic set: which ones they are and how many ids their bags hold.

A column's mean is what is published or asked for; the sizes of its bags vary around it as

    P(k ids) proportional to ratio ** (k - 1),  k = 1 .. 4 * mean

with the ratio that gives exactly this mean. A click history ends after each item with about the same probability, which
is the geometric law: most bags are short, some are several times the mean, and the deviation is near the mean. MLPerf's
own multi-hot set gives every bag of a column the same size, so it never shows a reader or a model that bags differ.
The limit bounds buffers. The number of lookups a row is MLPerf's, less the missing fields.
"""

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from dlrm_scale.errors import ConfigError
from dlrm_scale.schema import CATEGORY_COLUMNS

__all__ = [
    "MLPERF_MEAN_IDS",
    "MOST_MEAN_IDS",
    "BagLaw",
    "bag_law",
    "check_mean_ids",
    "parse_multi_hot",
    "size_from_uniform",
]

MLPERF_MEAN_IDS: dict[str, int] = {
    name: ids
    for name, ids in zip(
        CATEGORY_COLUMNS,
        (3, 2, 1, 2, 6, 1, 1, 1, 1, 7, 3, 8, 1, 6, 9, 5, 1, 1, 1, 12, 100, 27, 10, 3, 1, 1),
        strict=True,
    )
    if ids > 1
}
"""Ids a row of MLPerf's DLRM-DCNv2 (mlcommons/training, recommendation_v2); columns of one id are left out."""

MOST_MEAN_IDS = 1000
"""Largest mean that can be asked for."""

_MOST_OVER_MEAN = 4


@dataclass(frozen=True, kw_only=True, slots=True)
class BagLaw:
    """How many ids a bag of one column holds.

    Attributes:
        mean: expected number, over rows that aren't missing.
        most: largest number.
        ratio: between the probabilities of k + 1 and k ids.
    """

    mean: int
    most: int
    ratio: float


def bag_law(mean: int) -> BagLaw:
    """Find the law of a column whose bags hold `mean` ids, 2 or more."""
    most = _MOST_OVER_MEAN * mean
    sizes = np.arange(1, most + 1)
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2
        weights = middle ** (sizes - 1)
        low, high = (middle, high) if (weights @ sizes) / weights.sum() < mean else (low, middle)
    # Rounded, so that the last bits of another machine's pow don't reach the rows.
    return BagLaw(mean=mean, most=most, ratio=round(high, 9))


def size_from_uniform(law: BagLaw) -> tuple[float, float]:
    """Return (a, b) with which `1 + floor(log(1 - u * a) * b)` has the law for a uniform u in [0, 1)."""
    return 1.0 - law.ratio**law.most, 1.0 / math.log(law.ratio)


def parse_multi_hot(text: str | None) -> dict[str, int]:
    """Read `mlperf`, or `C3=5,C20=12`, as mean ids by column; None is no column.

    Raises:
        ConfigError: it is neither, names a column twice or one that doesn't exist, or a mean is out of range.
    """
    if text is None:
        return {}
    if text.strip().lower() == "mlperf":
        return dict(MLPERF_MEAN_IDS)
    means: dict[str, int] = {}
    for item in text.split(","):
        match = re.fullmatch(r"\s*(C\d+)\s*=\s*(\d+)\s*", item)
        if match is None:
            raise ConfigError(
                f"--multi-hot {text!r}: {item.strip()!r} is no COLUMN=MEAN",
                remedy="give --multi-hot mlperf, or columns with their mean number of ids, as in C3=5,C20=12",
            )
        if match[1] in means:
            raise ConfigError(f"--multi-hot {text!r} names {match[1]} twice", remedy="name each column once")
        means[match[1]] = int(match[2])
    check_mean_ids(means)
    return means


def check_mean_ids(means: Mapping[str, int]) -> None:
    """Check columns and their means.

    Raises:
        ConfigError: a column doesn't exist, or a mean is out of range.
    """
    for name, mean in means.items():
        if name not in CATEGORY_COLUMNS:
            raise ConfigError(
                f"multi-hot column {name}: there is no such category column",
                remedy=f"name columns of {CATEGORY_COLUMNS[0]} to {CATEGORY_COLUMNS[-1]}",
            )
        if not 2 <= mean <= MOST_MEAN_IDS:
            raise ConfigError(
                f"multi-hot column {name} has a mean of {mean} ids; it must be from 2 to {MOST_MEAN_IDS}",
                remedy="leave out columns of one id a row" if mean == 1 else "give another mean",
            )
