"""How a table's lookups spread over its rows, as classes of equally popular rows.

Lookups count as independent draws, so that a row of popularity p is in L lookups Poisson(L p) times. That is enough to
give the distinct rows of a batch of any size, and to draw ids that behave alike (draw.py).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt
from scipy.optimize import nnls

from dlrm_scale.planning.tables.table_set import TableStats

__all__ = ["Curve", "Popularity", "concave", "fit_popularity", "rounded"]

Float64s = npt.NDArray[np.float64]
Curve = tuple[tuple[int, float], ...]

_STEPS_A_DOUBLING = 2
_MOST_STEPS = 64
"""Popularities that the rows of one band of the hot-row curve may have."""
_HARD = 1e3
"""Weight of rows and lookups of the bands, which must come out right, against distinct rows."""


@dataclass(frozen=True, kw_only=True)
class Popularity:
    """Classes of rows, the hottest first.

    Attributes:
        rows: `[J]`, of each class; needn't be whole.
        share: `[J]`, of the lookups that hit one row of the class.
    """

    rows: Float64s
    share: Float64s

    def unique_rows(self, lookups: float) -> float:
        """Distinct rows in as many lookups, in the mean."""
        return float(self.rows @ -np.expm1(-lookups * self.share))

    def share_of_hottest(self, rows: float) -> float:
        """Share of the lookups that hit the `rows` hottest rows."""
        ends = np.concatenate([[0.0], np.cumsum(self.rows)])
        return float(np.interp(rows, ends, self.cumulative_share))

    @property
    def cumulative_share(self) -> Float64s:
        """`[J + 1]`: share of the lookups that hit the classes before each, and 1 at the end."""
        sums: Float64s = np.concatenate([[0.0], np.cumsum(self.rows * self.share)])
        sums /= sums[-1]
        return sums


def fit_popularity(table: TableStats) -> Popularity:
    """Find a popularity that agrees with what is known of a table's lookups.

    Within each band of the hot-row curve rows may have any popularity between those of the neighbours; non-negative
    least squares finds how many have which, so that bands keep rows and lookups and batches have the distinct rows of
    `unique_rows`.
    """
    bands = _bands(table)
    if not table.unique_rows:
        known = [band for band in bands if band[1] > 0]
        return Popularity(rows=np.array([b[0] for b in known]), share=np.array([b[1] / b[0] for b in known]))
    band_of, popularity = _choices(bands, ordered=bool(table.hot_rows))
    equations, targets = [], []
    for number, (band_rows, band_share) in enumerate(bands):
        mine = band_of == number
        equations.append(_HARD * mine / band_rows)
        targets.append(_HARD)
        if band_share > 0:
            equations.append(_HARD * mine * popularity / band_share)
            targets.append(_HARD)
    for samples, unique in table.unique_rows:
        if unique > 0:
            equations.append(-np.expm1(-samples * table.lookups_per_sample * popularity) / unique)
            targets.append(1.0)
    found, _ = nnls(np.array(equations), np.array(targets))
    kept = found > 0
    order = np.argsort(-popularity[kept], kind="stable")
    return Popularity(rows=found[kept][order], share=popularity[kept][order])


def concave(points: Curve, rows: int) -> Curve:
    """Leave out points of a hot-row curve that lie below others' connecting lines, as points of two sources may.

    Args:
        points: (rows, share).
        rows: of the table, which have all lookups.
    """
    best: dict[int, float] = {0: 0.0, rows: 1.0}
    for row, share in points:
        if 0 < row < rows:
            best[row] = max(best.get(row, 0.0), share)
    hull: list[tuple[int, float]] = []
    for row, share in sorted(best.items()):
        while len(hull) >= 2 and _below(hull[-2], hull[-1], (row, share)):
            hull.pop()
        hull.append((row, share))
    return tuple((row, min(1.0, round(share, 9))) for row, share in hull[1:-1])


def _below(a: tuple[int, float], b: tuple[int, float], c: tuple[int, float]) -> bool:
    return (b[1] - a[1]) * (c[0] - a[0]) <= (c[1] - a[1]) * (b[0] - a[0])


def _bands(table: TableStats) -> list[tuple[float, float]]:
    """Rows and share of the lookups of each band of the hot-row curve.

    Rows that are known to be hot by their place are as hot as that, whatever the curve says.
    """
    by_place: list[tuple[int, float]] = []
    places = [(0, 0.0), *table.lookups_before_row, (table.rows, 1.0)]
    parts = [(b[0] - a[0], b[1] - a[1]) for a, b in pairwise(places) if b[0] > a[0]]
    rows, share = 0, 0.0
    for part_rows, part_share in sorted(parts, key=lambda part: -part[1] / part[0]):
        rows, share = rows + part_rows, share + part_share
        by_place.append((rows, share))
    curve = [(0, 0.0), *concave((*table.hot_rows, *by_place), table.rows), (table.rows, 1.0)]
    return [(float(b[0] - a[0]), b[1] - a[1]) for a, b in pairwise(curve)]


def _choices(bands: Sequence[tuple[float, float]], *, ordered: bool) -> tuple[npt.NDArray[np.int64], Float64s]:
    """Popularities that rows may have, and the band of each."""
    means = [share / rows for rows, share in bands]
    least = 1e-6 / sum(rows for rows, _ in bands)
    band_of: list[int] = []
    popularity: list[float] = []
    for number, (rows, share) in enumerate(bands):
        mean = means[number]
        # In the first band one row may have all of the lookups, in the last some rows none; bands that are known by
        # place alone hold hot and cold rows.
        high = means[number - 1] if number and ordered else min(1.0, share if rows > 1 else mean)
        low = max(least, means[number + 1]) if number + 1 < len(bands) and ordered else min(mean, least)
        choices = {max(mean, least)}
        # A band of one row has one popularity.
        if high > low > 0 and rows > 1:
            steps = min(_MOST_STEPS, 2 + math.ceil(_STEPS_A_DOUBLING * math.log2(high / low)))
            choices |= {*np.geomspace(low, high, steps).tolist()}
        if number + 1 == len(bands):
            choices.add(0.0)
        band_of += [number] * len(choices)
        popularity += sorted(choices)
    return np.array(band_of), np.array(popularity)


def rounded(value: float) -> float:
    """Six digits: what files hold."""
    return float(f"{value:.6g}")
