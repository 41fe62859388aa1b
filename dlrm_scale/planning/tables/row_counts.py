"""How often each row of a table is looked up, gathered chunk by chunk, and the curves of a table set that follow."""

import heapq
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from dlrm_scale.data.vocabulary.count_histogram import CountHistogram
from dlrm_scale.planning.tables.popularity import Curve, rounded

__all__ = ["RowCounts"]

Int64s = npt.NDArray[np.int64]

_CUTS = 32
"""Equal parts of a table whose lookups are told apart."""
_SINGLE_ROWS = 16
"""The hottest rows whose places are told; on fewer lookups than this share of all a row isn't told alone."""
_LEAST_SHARE = 1e-3


class RowCounts:
    """Gathers lookups by row, in memory that doesn't grow with the table.

    Args:
        rows: of the table.
    """

    def __init__(self, rows: int) -> None:
        self._rows = rows
        self._counts = CountHistogram()
        self._ends = np.unique(np.arange(1, _CUTS + 1) * rows // _CUTS)
        self._ends = self._ends[self._ends > 0]
        self._in_part = np.zeros(len(self._ends), np.int64)
        self._hottest: list[tuple[int, int]] = []

    @property
    def lookups(self) -> int:
        """All that were added."""
        return self._counts.occurrences

    def add(self, rows: Int64s, counts: Int64s) -> None:
        """Add rows that weren't added before, with their lookups, `[n]` int64 each."""
        self._counts.add(counts)
        part = np.searchsorted(self._ends, rows, side="right")
        # Sums of int64, not bincount's, which are float64.
        np.add.at(self._in_part, part, counts)
        if len(counts) > _SINGLE_ROWS:
            most = np.argpartition(-counts, _SINGLE_ROWS)[:_SINGLE_ROWS]
            rows, counts = rows[most], counts[most]
        found = zip(counts.tolist(), rows.tolist(), strict=True)
        self._hottest = heapq.nlargest(_SINGLE_ROWS, [*self._hottest, *found], key=lambda one: (one[0], -one[1]))

    def hot_rows(self, ranks: Sequence[int]) -> Curve:
        """Share of the lookups that hit the hottest rows, for as many as `ranks` say."""
        if not self.lookups:
            return ()
        return tuple((k, self._counts.of_most_frequent(k) / self.lookups) for k in ranks)

    def rows_with(self, count: int) -> int:
        """How many rows have at least `count` lookups."""
        return self._counts.at_least(count)

    def lookups_before_row(self) -> Curve:
        """Share of the lookups that hit the rows before parts of the table, and before and after single hot rows."""
        total = self.lookups
        if not total:
            return ()
        single = sorted((row, count) for count, row in self._hottest if count >= _LEAST_SHARE * total)
        points: list[tuple[int, float]] = []
        start, before = 0, 0
        for end, lookups in zip(self._ends.tolist(), self._in_part.tolist(), strict=True):
            inside = [(row, count) for row, count in single if start <= row < end]
            others = lookups - sum(count for _, count in inside)
            a_row = others / max(1, end - start - len(inside))
            passed = 0
            for number, (row, count) in enumerate(inside):
                points.append((row, before + passed + (row - start - number) * a_row))
                passed += count
                points.append((row + 1, before + passed + (row - start - number) * a_row))
            start, before = end, before + lookups
            points.append((end, float(before)))
        kept = {row: share for row, share in points if 0 < row < self._rows}
        return tuple((row, rounded(min(1.0, share / total))) for row, share in sorted(kept.items()))
