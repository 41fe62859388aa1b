"""How lookups fall on rows, by a table's figures or its popularity: what tests hold against draws and traces."""

from collections.abc import Iterable, Sequence

import numpy as np
import numpy.typing as npt
from scipy.special import pdtr

from dlrm_scale.planning.tables.popularity import Popularity
from dlrm_scale.planning.tables.table_set import TableStats

__all__ = ["share_of_rows", "total_variation", "uses", "uses_of_all"]

Float64s = npt.NDArray[np.float64]


def share_of_rows(table: TableStats, start: int, end: int) -> float:
    """Share of the lookups that hit rows `[start, end)`, even between the points that are known."""
    points = [(0, 0.0), *table.lookups_before_row, (table.rows, 1.0)]
    before = np.interp([start, end], [row for row, _ in points], [share for _, share in points])
    return float(before[1] - before[0])


def uses(popularity: Popularity, lookups: float, edges: Sequence[int]) -> tuple[Float64s, Float64s]:
    """Count rows and lookups by how often a row is looked up, in the mean.

    Args:
        popularity: of the rows.
        lookups: of the batch.
        edges: 0 and rising.

    Returns:
        `[len(edges)]` distinct rows with uses in `(edges[i], edges[i + 1]]`, the last without end; the lookups of
        these rows.
    """
    mean = lookups * popularity.share
    at_most = np.stack([*(pdtr(edge, mean) for edge in edges), np.ones_like(mean)])
    # n Poisson(n; m) = m Poisson(n - 1; m)
    before = [np.zeros_like(mean) if edge == 0 else pdtr(edge - 1, mean) for edge in edges]
    rows = np.diff(at_most, axis=0) @ popularity.rows
    return rows, np.diff([*before, np.ones_like(mean)], axis=0) @ (popularity.rows * mean)


def uses_of_all(laws: Iterable[tuple[Popularity, float]], edges: Sequence[int]) -> tuple[Float64s, Float64s]:
    """Add up tables, each with its popularity and its lookups in one batch; see `uses`."""
    rows, lookups = np.zeros(len(edges)), np.zeros(len(edges))
    for law, count in laws:
        of_rows, of_lookups = uses(law, count, edges)
        rows += of_rows
        lookups += of_lookups
    return rows, lookups


def total_variation(a: npt.ArrayLike, b: npt.ArrayLike) -> float:
    """Distance of two histograms, each taken as shares of its sum: 0 equal, 1 disjoint."""
    x, y = np.asarray(a, np.float64), np.asarray(b, np.float64)
    return float(np.abs(x / x.sum() - y / y.sum()).sum() / 2)
