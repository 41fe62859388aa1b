"""Rows as they were read, before ids become table rows: what every reader of an input format makes.

Arrays are column-major: `integers[k]` and `categories[k]` are the contiguous values of one column.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt

from dlrm_scale.data.source.bad_rows import BadRow
from dlrm_scale.schema import INTEGER_COLUMNS

__all__ = ["FIRST_CATEGORY_BIT", "FIRST_INTEGER_BIT", "Bags", "RawBlock"]

FIRST_INTEGER_BIT = 1
"""Bit of I1 in `RawBlock.missing`; bit k belongs to raw column k."""
FIRST_CATEGORY_BIT = FIRST_INTEGER_BIT + len(INTEGER_COLUMNS)
"""Bit of C1 in `RawBlock.missing`."""


@dataclass(frozen=True, slots=True)
class Bags:
    """The ids of a multi-hot column: row i has `values[offsets[i]:offsets[i + 1]]`.

    Attributes:
        values: [total] ids of all rows, uint32 where raw and int32 where table rows.
        offsets: [n + 1] int32, ascending from 0 to total.
    """

    values: npt.NDArray[Any]
    offsets: npt.NDArray[np.int32]


@dataclass(slots=True, kw_only=True)
class RawBlock:
    """Consecutive rows of one file.

    Attributes:
        first_line: number of the block's first line (or row, where a format has no lines), from 1.
        labels: [n] uint8, 0 or 1; zeros where the input has no labels.
        integers: [13, n] int32, 0 where missing; [13, 0] where `features` is given.
        categories: [26, n] uint32, 0 where missing (and for the real id 00000000); unset for columns in `bags`.
        missing: [n] uint64; bit k is set where raw column k is empty.
        bags: ids of multi-hot columns, by index of the category column; an empty bag is a missing field.
        features: [13, n] float32 dense features that the input gives ready-made, or None.
        padded_rows: how many of the rows were short and padded.
        bad_rows: the rows that were left out, in order.
    """

    first_line: int
    labels: npt.NDArray[np.uint8]
    integers: npt.NDArray[np.int32]
    categories: npt.NDArray[np.uint32]
    missing: npt.NDArray[np.uint64]
    bags: Mapping[int, Bags] = field(default_factory=dict)
    features: npt.NDArray[np.float32] | None = None
    padded_rows: int = 0
    bad_rows: Sequence[BadRow] = ()

    @property
    def rows(self) -> int:
        """Number of rows."""
        return len(self.labels)

    def training_rows(self, training_lines: int | None) -> int:
        """How many rows, from the block's start, stand on the file's first `training_lines` lines (None: all)."""
        if training_lines is None:
            return self.rows
        bad = sum(row.line <= training_lines for row in self.bad_rows)
        return max(0, min(self.rows, training_lines - self.first_line + 1 - bad))
