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
from scipy.special import pdtr

from dlrm_scale.planning.tables.table_set import TableStats

__all__ = ["Popularity", "Segment", "fit_popularity", "rounded", "segments_of"]

Float64s = npt.NDArray[np.float64]

_EVEN_ROWS = 16
"""Segments up to this long are single hot rows and what lies between: their rows count as equal."""
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

    def uses(self, lookups: float, edges: Sequence[int]) -> tuple[Float64s, Float64s]:
        """Count rows and lookups by how often a row is looked up, in the mean.

        Args:
            lookups: of the batch.
            edges: 0 and rising.

        Returns:
            `[len(edges)]` distinct rows with uses in `(edges[i], edges[i + 1]]`, the last without end; the lookups of
            these rows.
        """
        mean = lookups * self.share
        at_most = np.stack([*(pdtr(edge, mean) for edge in edges), np.ones_like(mean)])
        # n Poisson(n; m) = m Poisson(n - 1; m)
        before = [np.zeros_like(mean) if edge == 0 else pdtr(edge - 1, mean) for edge in edges]
        return np.diff(at_most, axis=0) @ self.rows, np.diff([*before, np.ones_like(mean)], axis=0) @ (self.rows * mean)


@dataclass(frozen=True, kw_only=True, slots=True)
class Segment:
    """Rows `[start, start + rows)` of a table, and the share of the lookups that hit them."""

    start: int
    rows: int
    share: float

    @property
    def is_even(self) -> bool:
        """Too short for a popularity of its own: its rows count as equal."""
        return self.rows <= _EVEN_ROWS


def segments_of(table: TableStats) -> tuple[Segment, ...]:
    """Cut a table where its lookups are known to change with the row's number; short tables stay whole."""
    points = [(0, 0.0), *table.lookups_before_row]
    if points[-1][0] < table.rows:
        points.append((table.rows, 1.0))
    return tuple(Segment(start=a[0], rows=b[0] - a[0], share=b[1] - a[1]) for a, b in pairwise(points))


def fit_popularity(table: TableStats) -> Popularity:
    """Find a popularity that agrees with what is known of a table's lookups.

    The rows of the table's even segments (`segments_of`) are left out: it is that of the others. Within each band of
    the hot-row curve rows may have any popularity between those of the neighbours; non-negative least squares finds
    how many have which, so that bands keep rows and lookups and batches have the distinct rows of `unique_rows`.
    """
    segments = segments_of(table)
    even, long = [s for s in segments if s.is_even], [s for s in segments if not s.is_even]
    rows, share = float(sum(s.rows for s in long)), math.fsum(s.share for s in long)
    if not long or share <= 0:
        return Popularity(rows=np.array([float(table.rows)]), share=np.array([1.0 / table.rows]))
    bands = _bands(table, even, rows, share)
    if not table.unique_rows:
        known = [band for band in bands if band[1] > 0]
        return Popularity(rows=np.array([b[0] for b in known]), share=np.array([b[1] / b[0] for b in known]))
    band_of, popularity = _choices(bands)
    # What the long segments hold, row for row: their own share of rows, and how dense their lookups are.
    weights = np.array([s.rows / rows for s in long])
    density = np.array([s.share / share * rows / s.rows for s in long])
    equations, targets = [], []
    for number, (band_rows, band_share) in enumerate(bands):
        mine = band_of == number
        equations.append(_HARD * mine / band_rows)
        targets.append(_HARD)
        if band_share > 0:
            equations.append(_HARD * mine * popularity / band_share)
            targets.append(_HARD)
    for samples, unique in table.unique_rows:
        lookups = samples * table.lookups_per_sample
        rest = unique + sum(s.rows * math.expm1(-lookups * s.share / s.rows) for s in even)
        if rest > 0:
            seen = -np.expm1(-lookups * share * np.outer(density, popularity))
            equations.append(weights @ seen / rest)
            targets.append(1.0)
    found, _ = nnls(np.array(equations), np.array(targets))
    kept = found > 0
    order = np.argsort(-popularity[kept], kind="stable")
    return Popularity(rows=found[kept][order], share=popularity[kept][order])


def _bands(table: TableStats, even: Sequence[Segment], rows: float, share: float) -> list[tuple[float, float]]:
    """Rows and share of the lookups of each band of the hot-row curve, without the rows of even segments."""
    points = [(0, 0.0), *table.hot_rows]
    if points[-1][0] < table.rows:
        points.append((table.rows, 1.0))
    bands = [[float(b[0] - a[0]), b[1] - a[1]] for a, b in pairwise(points)]
    for segment in even:
        one = segment.share / segment.rows
        for _ in range(segment.rows):
            # The first band that isn't hotter; bands that are used up are passed over.
            left = [band for band in bands if band[0] >= 1]
            band = next((b for b in left if b[1] / b[0] <= one * (1 + 1e-3)), left[-1])
            band[0], band[1] = band[0] - 1, max(0.0, band[1] - one)
    bands = [band for band in bands if band[0] > 0]
    total_rows, total_share = sum(b[0] for b in bands), math.fsum(b[1] for b in bands)
    if total_share <= 0:
        return [(rows, 1.0)]
    return [(b[0] * rows / total_rows, b[1] / total_share) for b in bands]


def _choices(bands: Sequence[tuple[float, float]]) -> tuple[npt.NDArray[np.int64], Float64s]:
    """Popularities that rows may have, and the band of each."""
    means = [share / rows for rows, share in bands]
    least = 1e-6 / sum(rows for rows, _ in bands)
    band_of: list[int] = []
    popularity: list[float] = []
    for number, (rows, share) in enumerate(bands):
        mean = means[number]
        # In the first band one row may have all of the lookups, in the last some rows none.
        high = means[number - 1] if number else min(1.0, share if rows > 1 else mean)
        low = max(least, means[number + 1]) if number + 1 < len(bands) else min(mean, least)
        choices = {max(mean, least)}
        if high > low > 0:
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
