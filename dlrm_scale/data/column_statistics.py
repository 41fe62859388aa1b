"""Facts about columns, gathered while rows are written, for the manifest and the summary."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
from numba import njit

from dlrm_scale.data.tsv import FIRST_CATEGORY_BIT, FIRST_INTEGER_BIT, RawBlock
from dlrm_scale.schema import CATEGORY_COLUMNS, INTEGER_COLUMNS, OUT_OF_VOCABULARY_ROW, RAW_COLUMNS

__all__ = ["HOT_SHARES", "FileStatistics", "category_statistics", "hot_row_curve", "integer_statistics"]

HOT_SHARES = (0.001, 0.01, 0.1, 0.5)
"""The hot-row curve gives the share of lookups that go to the hottest of these shares of a table's rows."""

_CATEGORIES = len(CATEGORY_COLUMNS)
_INTEGERS = len(INTEGER_COLUMNS)


@njit(cache=True, nogil=True)
def _count_missing(missing: Any, start: int, end: int, counts: Any) -> None:  # pragma: no cover - compiled
    for i in range(start, end):
        word = missing[i]
        bit = 0
        while word != 0:
            if word & np.uint64(1):
                counts[bit] += 1
            word >>= np.uint64(1)
            bit += 1


@njit(cache=True, nogil=True)
def _integer_ranges(
    integers: Any, missing: Any, low: Any, high: Any, negative: Any
) -> None:  # pragma: no cover - compiled
    for k in range(integers.shape[0]):
        selected = np.uint64(1) << np.uint64(k + 1)
        for i in range(integers.shape[1]):
            if missing[i] & selected:
                continue
            x = np.int64(integers[k, i])
            if x < low[k]:
                low[k] = x
            if x > high[k]:
                high[k] = x
            if x < 0:
                negative[k] += 1


@dataclass(slots=True)
class FileStatistics:
    """Sums over the rows of one file; index 0 of pairs is training rows, 1 the held-out rows.

    Attributes:
        rows: [2] rows.
        positives: [2] rows with label 1.
        missing: [2, 40] rows in which a raw column is empty.
        out_of_vocabulary: [2, 26] rows with table row 1.
        low: [13] least integer, int64's largest where none was seen.
        high: [13] greatest integer, int64's least where none was seen.
        negative: [13] negative integers.
        padded_rows: short rows that were padded.
        bad_rows: rows left out.
    """

    rows: npt.NDArray[np.int64] = field(default_factory=lambda: np.zeros(2, np.int64))
    positives: npt.NDArray[np.int64] = field(default_factory=lambda: np.zeros(2, np.int64))
    missing: npt.NDArray[np.int64] = field(default_factory=lambda: np.zeros((2, len(RAW_COLUMNS)), np.int64))
    out_of_vocabulary: npt.NDArray[np.int64] = field(default_factory=lambda: np.zeros((2, _CATEGORIES), np.int64))
    low: npt.NDArray[np.int64] = field(default_factory=lambda: np.full(_INTEGERS, np.iinfo(np.int64).max))
    high: npt.NDArray[np.int64] = field(default_factory=lambda: np.full(_INTEGERS, np.iinfo(np.int64).min))
    negative: npt.NDArray[np.int64] = field(default_factory=lambda: np.zeros(_INTEGERS, np.int64))
    padded_rows: int = 0
    bad_rows: int = 0

    def add(self, block: RawBlock, ids: npt.NDArray[np.int32], training_rows: int) -> None:
        """Add a block whose first `training_rows` rows train.

        Args:
            block: raw rows.
            ids: [26, n] their table rows.
            training_rows: between 0 and n.
        """
        for part, start, end in ((0, 0, training_rows), (1, training_rows, block.rows)):
            if start == end:
                continue
            self.rows[part] += end - start
            self.positives[part] += int(block.labels[start:end].sum())
            _count_missing(block.missing, start, end, self.missing[part])
            self.out_of_vocabulary[part] += np.count_nonzero(ids[:, start:end] == OUT_OF_VOCABULARY_ROW, axis=1)
        _integer_ranges(block.integers, block.missing, self.low, self.high, self.negative)
        self.padded_rows += block.padded_rows

    def to_json(self) -> dict[str, Any]:
        """Return it JSON-ready."""
        arrays = ("rows", "positives", "missing", "out_of_vocabulary", "low", "high", "negative")
        return {
            **{name: getattr(self, name).tolist() for name in arrays},
            "padded_rows": self.padded_rows,
            "bad_rows": self.bad_rows,
        }

    @staticmethod
    def from_json(content: Mapping[str, Any]) -> "FileStatistics":
        """Read what `to_json` returned."""
        result = FileStatistics()
        for name, value in content.items():
            setattr(result, name, np.array(value, np.int64) if isinstance(value, list) else int(value))
        return result

    @staticmethod
    def total(files: Sequence["FileStatistics"]) -> "FileStatistics":
        """Add up files."""
        result = FileStatistics()
        for file in files:
            for name in ("rows", "positives", "missing", "out_of_vocabulary", "negative"):
                getattr(result, name)[...] += getattr(file, name)
            np.minimum(result.low, file.low, out=result.low)
            np.maximum(result.high, file.high, out=result.high)
            result.padded_rows += file.padded_rows
            result.bad_rows += file.bad_rows
        return result


def _rate(part: float, whole: float) -> float | None:
    return float(part) / float(whole) if whole else None


def hot_row_curve(lookups: npt.NDArray[np.int64]) -> dict[str, float | None]:
    """Share of lookups that go to the hottest rows.

    Args:
        lookups: [table_rows] lookups of each row of a table.

    Returns:
        For each of `HOT_SHARES`, as text, the share of lookups of the hottest ceil(share x rows) rows.
    """
    hottest = np.sort(lookups)[::-1]
    sums = np.cumsum(hottest)
    return {str(share): _rate(sums[math.ceil(share * len(lookups)) - 1], sums[-1]) for share in HOT_SHARES}


def category_statistics(
    column: int, total: FileStatistics, lookups: npt.NDArray[np.int64], *, unique_ids: int | None
) -> dict[str, object]:
    """Return the manifest's facts about a category column.

    Args:
        column: 0 to 25.
        total: sums over all files.
        lookups: [table_rows] lookups of each table row by training rows.
        unique_ids: distinct raw ids of the training rows, None where they weren't counted.
    """
    missing = total.missing[:, FIRST_CATEGORY_BIT + column]
    present = total.rows - missing
    unknown = total.out_of_vocabulary[:, column]
    return {
        "rows": int(total.rows[0]),
        "missing_rate": _rate(missing[0], total.rows[0]),
        "unique_ids": unique_ids,
        "kept_ids": len(lookups) - 2,
        "rows_looked_up": int(np.count_nonzero(lookups)),
        "coverage": _rate(present[0] - unknown[0], present[0]),
        "held_out_missing_rate": _rate(missing[1], total.rows[1]),
        "held_out_out_of_vocabulary_rate": _rate(unknown[1], present[1]),
        "hot_row_curve": hot_row_curve(lookups),
        "pooling": 1.0,
    }


def integer_statistics(total: FileStatistics) -> dict[str, object]:
    """Return the manifest's facts about the integer columns, over all rows."""
    rows = int(total.rows.sum())
    result: dict[str, object] = {}
    for k, name in enumerate(INTEGER_COLUMNS):
        missing = int(total.missing[:, FIRST_INTEGER_BIT + k].sum())
        seen = missing < rows
        result[name] = {
            "missing_rate": _rate(missing, rows),
            "negative_rate": _rate(int(total.negative[k]), rows - missing),
            "min": int(total.low[k]) if seen else None,
            "max": int(total.high[k]) if seen else None,
        }
    return result
