"""What a synthetic set is a function of."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np
import xxhash

from dlrm_scale.data.synthetic.bags import check_mean_ids
from dlrm_scale.data.synthetic.columns import PRESETS, scaled
from dlrm_scale.errors import ConfigError
from dlrm_scale.schema import CATEGORY_COLUMNS

__all__ = ["CALIBRATION_SEED", "SyntheticParameters", "day_rows"]

CALIBRATION_SEED = (1 << 63) - 1
"""Seed of the rows on which the intercept is found; users can't choose it."""

_LARGEST_TO_SMALLEST_DAY = 1.35
"""The 1TB set's days have 152 to 205 million rows."""
_LOWEST_SCALE = 0.001


@dataclass(frozen=True, kw_only=True)
class SyntheticParameters:
    """What a synthetic set is a function of.

    Attributes:
        preset: `kaggle` or `terabyte`.
        rows: rows of all days together.
        days: number of files, at most `rows`; the last one is the validation day.
        seed: selects the sample; cardinalities, ids and the planted model don't depend on it.
        scale: cardinalities over the published ones for columns of more than 1,000 ids; None takes rows over the
            published rows, from 0.001 up to 1.
        gzip: compress the files.
        multi_hot: category column to the mean number of ids in its bags; the other columns hold one id a row.
    """

    preset: str = "kaggle"
    rows: int
    days: int
    seed: int = 0
    scale: float | None = None
    gzip: bool = False
    multi_hot: Mapping[str, int] = field(default_factory=dict)

    def resolved(self) -> "SyntheticParameters":
        """Check everything and fill in the scale.

        Raises:
            ConfigError: a value is out of range.
        """
        if self.preset not in PRESETS:
            raise ConfigError(f"there is no preset {self.preset!r}", remedy=f"use one of: {', '.join(PRESETS)}")
        if self.days < 1:
            raise ConfigError(f"days is {self.days}; at least 1 day is needed", remedy="give --days 1 or more")
        if self.rows < self.days:
            raise ConfigError(
                f"{self.rows} rows can't fill {self.days} days, each day needs at least 1 row",
                remedy=f"give --rows {self.days} or more, or fewer --days",
            )
        if not 0 <= self.seed < CALIBRATION_SEED:
            raise ConfigError(f"seed is {self.seed}; it must be from 0 to 2**63 - 2", remedy="give --seed 0 or more")
        preset = PRESETS[self.preset]
        scale = min(1.0, max(_LOWEST_SCALE, self.rows / preset.rows)) if self.scale is None else self.scale
        for column, law in enumerate(scaled(preset, scale).categories, start=1):
            values = law.ids + self.days * law.fresh_ids
            if values > 1 << 32:
                raise ConfigError(
                    f"C{column} would need {values:,} distinct ids, 32 bits hold {1 << 32:,}",
                    remedy="give a smaller --scale or fewer --days",
                )
        check_mean_ids(self.multi_hot)
        in_order = {name: self.multi_hot[name] for name in CATEGORY_COLUMNS if name in self.multi_hot}
        return replace(self, scale=scale, multi_hot=in_order)

    def to_json(self) -> dict[str, Any]:
        """Return it JSON-ready; `multi_hot` only where there is such a column, so that other sets stay as they were."""
        content = asdict(self)
        if not self.multi_hot:
            del content["multi_hot"]
        return content


def day_rows(rows: int, days: int, seed: int) -> list[int]:
    """Cut `rows` into `days` uneven counts of at least 1: the largest is about 1.35 times the smallest."""
    order = sorted(range(days), key=lambda day: xxhash.xxh3_64_intdigest(f"{seed}/{day}".encode()))
    weights = np.empty(days)
    weights[order] = np.linspace(1.0, _LARGEST_TO_SMALLEST_DAY, days)
    ends = np.floor(np.cumsum(weights / weights.sum()) * (rows - days)).astype(np.int64)
    ends[-1] = rows - days
    return [int(count) + 1 for count in np.diff(ends, prepend=0)]
