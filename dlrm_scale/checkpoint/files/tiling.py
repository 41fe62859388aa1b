"""Whether rectangles of rows and columns cover a table exactly once."""

from collections.abc import Sequence
from itertools import pairwise

__all__ = ["Rectangle", "tiling_fault"]

Rectangle = tuple[int, int, int, int]
"""Row start and end, column start and end."""


def tiling_fault(rectangles: Sequence[Rectangle], rows: int, columns: int) -> str | None:
    """Check that rectangles partition a `rows x columns` table; empty ones are ignored.

    Returns:
        None, or the first gap, overlap or overhang in words.
    """
    filled = [r for r in rectangles if r[1] > r[0] and r[3] > r[2]]
    for row_start, row_end, column_start, column_end in filled:
        if row_start < 0 or column_start < 0 or row_end > rows or column_end > columns:
            return (
                f"rows {row_start} to {row_end}, columns {column_start} to {column_end} lie outside {rows} x {columns}"
            )
    # Between two neighbouring column bounds the picture is the same in every column: check one strip for each.
    bounds = sorted({0, columns, *(r[2] for r in filled), *(r[3] for r in filled)})
    for left, right in pairwise(bounds):
        next_row = 0
        for row_start, row_end, _, _ in sorted(r for r in filled if r[2] <= left and r[3] >= right):
            if row_start != next_row:
                what = "are missing" if row_start > next_row else "are there twice"
                low, high = sorted((row_start, next_row))
                return f"rows {low} to {high} of columns {left} to {right} {what}"
            next_row = row_end
        if next_row != rows:
            return f"rows {next_row} to {rows} of columns {left} to {right} are missing"
    return None
