"""From raw rows to table rows and dense features: what a worker does with a block before it is written."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from numba import njit

from dlrm_scale.data.preprocess.column_statistics import FileStatistics
from dlrm_scale.data.preprocess.transforms import dense_features
from dlrm_scale.data.source.bad_rows import BadRow
from dlrm_scale.data.source.raw_block import Bags, RawBlock
from dlrm_scale.data.vocabulary.vocabulary import Vocabulary
from dlrm_scale.schema import CATEGORY_COLUMNS, MISSING_ROW

__all__ = ["MappedBlock", "map_block"]


@dataclass(frozen=True, kw_only=True, slots=True)
class MappedBlock:
    """Rows as they are written.

    Attributes:
        labels: [n] uint8.
        dense: [13, n] float32.
        ids: [26, n] int32 table rows; unset for columns in `bags`.
        bags: table rows of multi-hot columns, by name.
        statistics: sums over the rows.
        bad_rows: rows that were left out.
    """

    labels: npt.NDArray[np.uint8]
    dense: npt.NDArray[np.float32]
    ids: npt.NDArray[np.int32]
    bags: Mapping[str, Bags]
    statistics: FileStatistics
    bad_rows: Sequence[BadRow]


def map_block(block: RawBlock, vocabularies: Sequence[Vocabulary], training_lines: int | None) -> MappedBlock:
    """Map ids and transform integers.

    Args:
        block: raw rows.
        vocabularies: C1 to C26.
        training_lines: lines at the start of the file that train; None for all.
    """
    ids: npt.NDArray[np.int32] = np.empty((len(CATEGORY_COLUMNS), block.rows), np.int32)
    bags: dict[int, Bags] = {}
    for column, vocabulary in enumerate(vocabularies):
        raw = block.bags.get(column)
        if raw is None:
            vocabulary.map(block.categories[column], block.missing, ids[column])
        else:
            rows = np.empty(len(raw.values), np.int32)
            vocabulary.map_ids(raw.values, rows)
            # Ids that are given as table rows come with the meaning that another tool gave to empty bags.
            bags[column] = Bags(rows, raw.offsets) if vocabulary.method == "given" else _without_empty_bags(rows, raw)
    return MappedBlock(
        labels=block.labels,
        dense=dense_features(block.integers) if block.features is None else block.features,
        ids=ids,
        bags={CATEGORY_COLUMNS[column]: mapped for column, mapped in bags.items()},
        statistics=FileStatistics.of(block, ids, bags, block.training_rows(training_lines)),
        bad_rows=block.bad_rows,
    )


def _without_empty_bags(rows: npt.NDArray[np.int32], raw: Bags) -> Bags:
    """Put the row of missing categories into empty bags, as in one-hot columns."""
    empty = int(np.count_nonzero(raw.offsets[1:] == raw.offsets[:-1]))
    if empty == 0:
        return Bags(rows, raw.offsets)
    offsets = np.empty_like(raw.offsets)
    values = np.empty(len(rows) + empty, np.int32)
    _fill_empty(rows, raw.offsets, MISSING_ROW, values, offsets)
    return Bags(values, offsets)


@njit(cache=True, nogil=True)
def _fill_empty(rows: Any, offsets: Any, fill: int, values: Any, filled: Any) -> None:  # pragma: no cover - compiled
    place = 0
    filled[0] = 0
    for i in range(offsets.shape[0] - 1):
        for k in range(offsets[i], offsets[i + 1]):
            values[place] = rows[k]
            place += 1
        if offsets[i] == offsets[i + 1]:
            values[place] = fill
            place += 1
        filled[i + 1] = place
