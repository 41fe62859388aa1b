"""Facts about columns: sums that are gathered while rows are written, and what the manifest says about them."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np
import numpy.typing as npt
from numba import njit

from dlrm_scale.data.source.raw_block import FIRST_CATEGORY_BIT, FIRST_INTEGER_BIT, Bags, RawBlock
from dlrm_scale.data.vocabulary.count_histogram import CountHistogram
from dlrm_scale.data.vocabulary.id_facts import IdFacts
from dlrm_scale.data.vocabulary.vocabulary import FIRST_ID_ROW, Vocabulary
from dlrm_scale.schema import CATEGORY_COLUMNS, INTEGER_COLUMNS, OUT_OF_VOCABULARY_ROW, RAW_COLUMNS

__all__ = ["HOT_SHARES", "FileStatistics", "category_statistics", "hot_row_curve", "integer_statistics"]

HOT_SHARES = (0.001, 0.01, 0.1, 0.5)
"""The hot-row curve gives the share of lookups that go to the hottest of these shares of a table's rows."""

_CATEGORIES = len(CATEGORY_COLUMNS)
_INTEGERS = len(INTEGER_COLUMNS)
_NOT_SUMS = {"low", "high", "largest_id"}


@njit(cache=True, nogil=True)
def _count_missing(missing: Any, start: int, end: int, counts: Any) -> None:  # pragma: no cover - compiled
    # Bit by bit over all rows: such loops become vector instructions.
    for bit in range(counts.shape[0]):
        count = np.uint64(0)
        for i in range(start, end):
            count += (missing[i] >> np.uint64(bit)) & np.uint64(1)
        counts[bit] += count


@njit(cache=True, nogil=True)
def _integer_ranges(
    integers: Any, missing: Any, low: Any, high: Any, negative: Any
) -> None:  # pragma: no cover - compiled
    for k in range(integers.shape[0]):
        bit = np.uint64(k + 1)
        least, most, below = np.int32(2147483647), np.int32(-2147483648), 0
        present = False
        for i in range(integers.shape[1]):
            absent = np.int32((missing[i] >> bit) & np.uint64(1))
            x = integers[k, i]
            least = min(least, np.int32(2147483647) if absent else x)
            most = max(most, np.int32(-2147483648) if absent else x)
            # Missing integers are 0.
            below += x < 0
            present |= absent == 0
        if present:
            low[k] = min(low[k], least)
            high[k] = max(high[k], most)
            negative[k] += below


def _pairs() -> npt.NDArray[np.int64]:
    return np.zeros((2, _CATEGORIES), np.int64)


@dataclass(slots=True)
class FileStatistics:
    """Sums over rows of one file; index 0 of pairs is training rows, 1 the held-out rows.

    The sums of blocks are added up by `merge`; the result doesn't depend on how rows are cut into blocks.

    Attributes:
        rows: [2] rows.
        positives: [2] rows with label 1.
        missing: [2, 40] rows in which a raw column is empty.
        present_ids: [2, 26] raw ids: rows with one, or all ids of all bags.
        stored_ids: [2, 26] table rows that are looked up, those of missing categories included.
        out_of_vocabulary: [2, 26] lookups of table row 1.
        largest_id: [26] greatest raw id, -1 where none was seen.
        low: [13] least integer, int64's largest where none was seen.
        high: [13] greatest integer, int64's least where none was seen.
        negative: [13] negative integers.
        ready_rows: rows whose dense features came ready-made, so that their integers aren't known.
        padded_rows: short rows that were padded.
        bad_rows: rows left out.
    """

    rows: npt.NDArray[np.int64] = field(default_factory=lambda: np.zeros(2, np.int64))
    positives: npt.NDArray[np.int64] = field(default_factory=lambda: np.zeros(2, np.int64))
    missing: npt.NDArray[np.int64] = field(default_factory=lambda: np.zeros((2, len(RAW_COLUMNS)), np.int64))
    present_ids: npt.NDArray[np.int64] = field(default_factory=_pairs)
    stored_ids: npt.NDArray[np.int64] = field(default_factory=_pairs)
    out_of_vocabulary: npt.NDArray[np.int64] = field(default_factory=_pairs)
    largest_id: npt.NDArray[np.int64] = field(default_factory=lambda: np.full(_CATEGORIES, -1))
    low: npt.NDArray[np.int64] = field(default_factory=lambda: np.full(_INTEGERS, np.iinfo(np.int64).max))
    high: npt.NDArray[np.int64] = field(default_factory=lambda: np.full(_INTEGERS, np.iinfo(np.int64).min))
    negative: npt.NDArray[np.int64] = field(default_factory=lambda: np.zeros(_INTEGERS, np.int64))
    ready_rows: int = 0
    padded_rows: int = 0
    bad_rows: int = 0

    @staticmethod
    def of(
        block: RawBlock, ids: npt.NDArray[np.int32], bags: Mapping[int, Bags], training_rows: int
    ) -> "FileStatistics":
        """Return the sums over a block whose first `training_rows` rows train.

        Args:
            block: raw rows.
            ids: [26, n] their table rows; unset for columns in `bags`.
            bags: table rows of multi-hot columns, as they are written, by index of the category column.
            training_rows: between 0 and n.
        """
        result = FileStatistics(padded_rows=block.padded_rows, bad_rows=len(block.bad_rows))
        for part, start, end in ((0, 0, training_rows), (1, training_rows, block.rows)):
            if start == end:
                continue
            rows = end - start
            result.rows[part] = rows
            result.positives[part] = int(block.labels[start:end].sum())
            _count_missing(block.missing, start, end, result.missing[part])
            result.out_of_vocabulary[part] = np.count_nonzero(ids[:, start:end] == OUT_OF_VOCABULARY_ROW, axis=1)
            result.present_ids[part] = rows - result.missing[part, FIRST_CATEGORY_BIT:]
            result.stored_ids[part] = rows
            for column, mapped in bags.items():
                result._set_bags(part, column, block.bags[column], mapped, start, end)
        if block.rows:
            result._set_largest(block)
        if block.features is None:
            _integer_ranges(block.integers, block.missing, result.low, result.high, result.negative)
        else:
            result.ready_rows = block.rows
        return result

    def _set_bags(self, part: int, column: int, raw: Bags, mapped: Bags, start: int, end: int) -> None:
        empty = raw.offsets[start + 1 : end + 1] == raw.offsets[start:end]
        values = mapped.values[mapped.offsets[start] : mapped.offsets[end]]
        self.missing[part, FIRST_CATEGORY_BIT + column] = np.count_nonzero(empty)
        self.present_ids[part, column] = raw.offsets[end] - raw.offsets[start]
        self.stored_ids[part, column] = len(values)
        self.out_of_vocabulary[part, column] = np.count_nonzero(values == OUT_OF_VOCABULARY_ROW)

    def _set_largest(self, block: RawBlock) -> None:
        for column in range(_CATEGORIES):
            if not self.present_ids[:, column].any():
                continue
            bags = block.bags.get(column)
            # Missing ids are 0 and change nothing.
            self.largest_id[column] = (block.categories[column] if bags is None else bags.values).max()

    def merge(self, other: "FileStatistics") -> None:
        """Add the sums of further rows."""
        for item in fields(self):
            if item.name not in _NOT_SUMS:
                setattr(self, item.name, getattr(self, item.name) + getattr(other, item.name))
        self.largest_id = np.maximum(self.largest_id, other.largest_id)
        self.low = np.minimum(self.low, other.low)
        self.high = np.maximum(self.high, other.high)

    def all_training(self) -> "FileStatistics":
        """Return the same sums with the held-out rows taken for training rows."""
        result = FileStatistics.total([self])
        for item in fields(self):
            sums = getattr(result, item.name)
            if isinstance(sums, np.ndarray) and len(sums) == 2:
                setattr(result, item.name, np.stack([sums.sum(axis=0), np.zeros_like(sums[0])]))
        return result

    def to_json(self) -> dict[str, Any]:
        """Return it JSON-ready."""
        values = {item.name: getattr(self, item.name) for item in fields(self)}
        return {name: value.tolist() if isinstance(value, np.ndarray) else value for name, value in values.items()}

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
            result.merge(file)
        return result


def _rate(part: float, whole: float) -> float | None:
    return float(part) / float(whole) if whole else None


def hot_row_curve(lookups: CountHistogram, table_rows: int) -> dict[str, float | None]:
    """Share of lookups that go to the hottest rows.

    Args:
        lookups: of the rows of a table; those that aren't looked up may be left out.
        table_rows: rows of the table.

    Returns:
        For each of `HOT_SHARES`, as text, the share of lookups of the hottest ceil(share x rows) rows.
    """
    return {
        str(share): _rate(lookups.of_most_frequent(math.ceil(share * table_rows)), lookups.occurrences)
        for share in HOT_SHARES
    }


def category_statistics(total: FileStatistics, vocabulary: Vocabulary, facts: IdFacts) -> dict[str, object]:
    """Return the manifest's facts about a category column.

    Args:
        total: sums over all files.
        vocabulary: of the column.
        facts: about its ids in training rows.
    """
    column = CATEGORY_COLUMNS.index(vocabulary.column)
    missing = total.missing[:, FIRST_CATEGORY_BIT + column]
    present = total.present_ids[:, column]
    given = vocabulary.method == "given"
    unknown = np.zeros(2, np.int64) if given else total.out_of_vocabulary[:, column]
    lookups = facts.lookups.copy()
    if not given:
        # The rows of missing categories and of ids out of the vocabulary.
        lookups.add(np.array([total.stored_ids[0, column] - present[0], unknown[0]]))
    return {
        "rows": int(total.rows[0]),
        "missing_rate": _rate(missing[0], total.rows[0]),
        "unique_ids": facts.unique_ids,
        "kept_ids": vocabulary.table_rows - FIRST_ID_ROW if vocabulary.method == "frequency" else None,
        "rows_looked_up": lookups.at_least(1),
        "coverage": _rate(present[0] - unknown[0], present[0]),
        "colliding_ids": facts.colliding_ids,
        "collision_rate": None if facts.colliding_ids is None else _rate(facts.colliding_ids, facts.unique_ids or 0),
        "held_out_missing_rate": _rate(missing[1], total.rows[1]),
        "held_out_out_of_vocabulary_rate": _rate(unknown[1], present[1]),
        "hot_row_curve": hot_row_curve(lookups, vocabulary.table_rows),
        "largest_id": int(total.largest_id[column]) if total.largest_id[column] >= 0 else None,
        "pooling": _rate(total.stored_ids[:, column].sum(), total.rows.sum()),
    }


def integer_statistics(total: FileStatistics) -> dict[str, object]:
    """Return the manifest's facts about the integer columns, over all rows that have integers."""
    rows = int(total.rows.sum()) - total.ready_rows
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
