"""How many ids of a global batch hit a range of a table's rows, and how many distinct rows they are."""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dlrm_scale.planning.tables.table_set import TableStats

__all__ = ["RowHits", "row_hits"]

Rows = NDArray[np.int64]
Numbers = NDArray[np.float64]


@dataclass(frozen=True, kw_only=True)
class RowHits:
    """Sums over the rows before a row, straight between the points.

    Attributes:
        rows: `[points]`, rising, from 0 to the table's rows.
        lookups: `[points]`, ids that hit the rows before.
        unique_rows: `[points]`, distinct rows among them.
    """

    rows: Numbers
    lookups: Numbers
    unique_rows: Numbers

    def between(self, starts: Rows, ends: Rows) -> tuple[Numbers, Numbers]:
        """Return ids and distinct rows of each range `[start, end)`; an empty one has none."""
        lookups = np.interp(ends, self.rows, self.lookups) - np.interp(starts, self.rows, self.lookups)
        unique = np.interp(ends, self.rows, self.unique_rows) - np.interp(starts, self.rows, self.unique_rows)
        return np.maximum(0.0, lookups), np.maximum(0.0, unique)


def row_hits(table: TableStats, samples: int) -> RowHits:
    """Spread a batch's ids over a table's rows.

    `lookups_before_row` says where ids fall. Within each of its ranges they count as drawn evenly, which gives the
    distinct rows of the range. Hot rows within a range, wherever they lie, make them fewer: where the table has a curve
    of its distinct rows, all ranges together are brought to it.

    Args:
        table: with its curves.
        samples: of the global batch, or of a rank's own for a data-parallel table.
    """
    points = [(0, 0.0), *table.lookups_before_row]
    if points[-1][0] < table.rows:
        points.append((table.rows, 1.0))
    rows, shares = (np.array(column, dtype=np.float64) for column in zip(*points, strict=True))
    lookups = samples * table.lookups_per_sample * shares
    widths, hits = np.diff(rows), np.diff(lookups)
    even = np.minimum(widths * -np.expm1(-hits / widths), hits)
    unique = even
    if table.unique_rows and even.sum() > 0:
        unique = np.minimum(even * (table.unique_rows_of(samples) / even.sum()), np.minimum(widths, hits))
    return RowHits(rows=rows, lookups=lookups, unique_rows=np.concatenate(([0.0], np.cumsum(unique))))
