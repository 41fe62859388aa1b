"""Which rows of a table are hot: the rows of a popularity, dealt out to the parts of the table by their lookups."""

from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import numpy.typing as npt

from dlrm_scale.planning.tables.popularity import Popularity
from dlrm_scale.planning.tables.table_set import TableStats

__all__ = ["PlacedRows", "place_rows"]

Float64s = npt.NDArray[np.float64]
Int64s = npt.NDArray[np.int64]

_SINGLE_RANKS = 256
"""The hottest rows are placed one by one, others in blocks that grow with their rank."""
_GROWTH = 1.03
_TURNS = 8
"""Parts that a block is cut into at most, or one for each segment that is filled by it."""
_NEARLY = 0.02


@dataclass(frozen=True, kw_only=True)
class PlacedRows:
    """Blocks of equally popular rows, B of them, in S segments of the table.

    Attributes:
        share_ends: `[B]`, share of the lookups that hit the blocks up to each; ends with 1.
        rows: `[B]`, of each block.
        segment: `[B]`, where it lies.
        first_rank: `[B]`, rows of its segment that are hotter.
        segment_starts: `[S]`, first row.
        segment_rows: `[S]`.
    """

    share_ends: Float64s
    rows: Int64s
    segment: Int64s
    first_rank: Int64s
    segment_starts: Int64s
    segment_rows: Int64s


def place_rows(table: TableStats, popularity: Popularity) -> PlacedRows:
    """Give the rows of a popularity, the hottest first, to the segment whose free rows must be hottest in the mean.

    Segments lie between the points of `lookups_before_row`. Those with more lookups than rows get hot rows, and equal
    ones take turns.

    Args:
        table: the table.
        popularity: of its rows.
    """
    places = [(0, 0.0), *table.lookups_before_row, (table.rows, 1.0)]
    segments = [(a[0], b[0] - a[0], b[1] - a[1]) for a, b in pairwise(places) if b[0] > a[0]]
    blocks: list[tuple[float, int, int, int]] = []
    sizes = np.array([rows for _, rows, _ in segments], np.float64)
    free, left = sizes.copy(), np.array([share for _, _, share in segments])
    ends = _block_ends(table.rows)
    ranks = np.concatenate([[0.0], np.cumsum(popularity.rows)])
    shares = np.interp(ends / table.rows, ranks / ranks[-1], popularity.cumulative_share)
    for (start, end), (before, after) in zip(pairwise(ends.tolist()), pairwise(shares.tolist()), strict=True):
        rows, a_row = end - start, (after - before) / (end - start)
        while rows:
            number, taken = _choose(free, left, rows, a_row)
            blocks.append((taken * a_row, taken, number, int(sizes[number] - free[number])))
            free[number] -= taken
            left[number] -= taken * a_row
            rows -= taken
    kept = [block for block in blocks if block[0] > 0]
    sums = np.cumsum([share for share, _, _, _ in kept])
    return PlacedRows(
        share_ends=sums / sums[-1],
        rows=np.array([rows for _, rows, _, _ in kept], np.int64),
        segment=np.array([number for _, _, number, _ in kept], np.int64),
        first_rank=np.array([first for _, _, _, first in kept], np.int64),
        segment_starts=np.array([start for start, _, _ in segments], np.int64),
        segment_rows=np.array([rows for _, rows, _ in segments], np.int64),
    )


def _choose(free: Float64s, left: Float64s, rows: int, a_row: float) -> tuple[int, int]:
    """Choose the segment for the next rows, and how many of them.

    Args:
        free: `[S]`, rows of each segment that aren't placed.
        left: `[S]`, share of the lookups that it lacks.
        rows: at most as many.
        a_row: share of the lookups that hit each of them.
    """
    if len(free) == 1:
        return 0, rows
    open_ = free > 0
    need = np.where(open_, left / np.maximum(free, 1), -np.inf)
    # A row that is hotter than all that a segment lacks would be in the wrong place there.
    fits = open_ & (left >= a_row * (1 - _NEARLY))
    number = int(np.argmax(np.where(fits, need, -np.inf)) if fits.any() else np.argmax(np.where(open_, left, -np.inf)))
    taken = min(rows, int(free[number]))
    others = np.delete(need, number).max()
    if a_row > max(0.0, others) and others > -np.inf:
        # As many as bring it down to the next one's need; not row by row where segments take turns.
        even = int((left[number] - others * free[number]) / (a_row - others)) + 1
        taken = min(taken, max(1, even, rows // _TURNS), max(1, int(left[number] / a_row)))
    return number, taken


def _block_ends(rows: int) -> Int64s:
    growing = _SINGLE_RANKS * _GROWTH ** np.arange(np.ceil(np.log(max(rows / _SINGLE_RANKS, 1)) / np.log(_GROWTH)))
    ends = np.unique(np.concatenate([np.arange(min(rows, _SINGLE_RANKS) + 1), growing.astype(np.int64), [rows]]))
    return ends[ends <= rows]
