"""How often training rows look up each table row, read back from the parts of a dataset that days are added to.

The raw ids of its old days are gone, so that only the rows can be counted. One column is read at a time: a part's other
columns aren't touched, and memory is one table's counts.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
from numba import njit

from dlrm_scale.data.vocabulary.count_histogram import CountHistogram
from dlrm_scale.data.vocabulary.id_facts import IdFacts
from dlrm_scale.data.vocabulary.vocabulary import FIRST_ID_ROW, Vocabulary
from dlrm_scale.schema import CATEGORY_COLUMNS, INTEGER_COLUMNS

__all__ = ["read_lookups"]


@njit(cache=True, nogil=True)
def _add_lookups(rows: Any, lookups: Any) -> None:  # pragma: no cover - compiled
    for i in range(rows.shape[0]):
        lookups[rows[i]] += 1


def read_lookups(vocabulary: Vocabulary, parts: Sequence[tuple[Path, int]]) -> IdFacts:
    """Count a column's lookups.

    Args:
        vocabulary: of the column.
        parts: Arrow files, each with the number of its first rows that train.

    Returns:
        Facts without the number of distinct ids, which isn't known.
    """
    lookups = np.zeros(vocabulary.table_rows, np.int64)
    field = 1 + len(INTEGER_COLUMNS) + CATEGORY_COLUMNS.index(vocabulary.column)
    options = pa.ipc.IpcReadOptions(included_fields=[field])
    for path, training_rows in parts:
        with pa.OSFile(str(path), "rb") as file:
            reader = pa.ipc.open_file(file, options=options)
            left = training_rows
            for index in range(reader.num_record_batches):
                if left <= 0:
                    break
                batch = reader.get_batch(index)
                ids = batch.column(0).slice(0, min(left, batch.num_rows))
                _add_lookups((ids.flatten() if pa.types.is_list(ids.type) else ids).to_numpy(), lookups)
                left -= batch.num_rows
    histogram = CountHistogram()
    first = 0 if vocabulary.method == "given" else FIRST_ID_ROW
    for start in range(first, len(lookups), 1 << 20):
        histogram.add(lookups[start : start + (1 << 20)])
    return IdFacts(unique_ids=None, colliding_ids=None, lookups=histogram)
