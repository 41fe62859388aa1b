"""Facts about the distinct ids of a column and the table rows that they become."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
from numba import njit

from dlrm_scale.data.vocabulary.count_histogram import CountHistogram
from dlrm_scale.data.vocabulary.count_runs import CountChunk
from dlrm_scale.data.vocabulary.vocabulary import FIRST_ID_ROW, Vocabulary

__all__ = ["IdFacts", "id_facts"]

_BYTES_PER_ROW = 9


@dataclass(frozen=True, kw_only=True, slots=True)
class IdFacts:
    """What counted ids tell.

    Attributes:
        unique_ids: distinct ids; None where the counts are of kept ids only.
        colliding_ids: distinct ids that share their row with another one; None where each id has its own.
        lookups: of the rows of the table that belong to ids; rows that nothing looks up may be left out.
    """

    unique_ids: int | None
    colliding_ids: int | None
    lookups: CountHistogram


def id_facts(
    vocabulary: Vocabulary, counts: Iterable[CountChunk], *, memory_bytes: int, only_kept: bool = False
) -> IdFacts:
    """Gather them.

    Args:
        vocabulary: of the column.
        counts: chunks of (ids [n] uint32, counts [n] int64) of training rows, distinct over all chunks; iterated
            several times under hash or modulo where a table is large.
        memory_bytes: how much memory to use for the rows of a hashed table; at least 1 MiB is used.
        only_kept: ids that the vocabulary doesn't hold are absent from `counts` (`read_counts`).
    """
    if vocabulary.method in ("hash", "modulo"):
        return _of_hashed(vocabulary, counts, max(memory_bytes, 1 << 20))
    lookups = CountHistogram()
    unique_ids = 0
    for ids, occurrences in counts:
        unique_ids += len(ids)
        lookups.add(
            occurrences[_rows(vocabulary, ids) >= FIRST_ID_ROW] if vocabulary.method != "given" else occurrences
        )
    return IdFacts(unique_ids=None if only_kept else unique_ids, colliding_ids=None, lookups=lookups)


def _of_hashed(vocabulary: Vocabulary, counts: Iterable[CountChunk], memory_bytes: int) -> IdFacts:
    lookups = CountHistogram()
    unique_ids = alone = 0
    step = memory_bytes // _BYTES_PER_ROW
    for first in range(FIRST_ID_ROW, vocabulary.table_rows, step):
        size = min(step, vocabulary.table_rows - first)
        sums, ids_of_row = np.zeros(size, np.int64), np.zeros(size, np.uint8)
        unique_ids = 0
        for ids, occurrences in counts:
            unique_ids += len(ids)
            _add_to_rows(_rows(vocabulary, ids), occurrences, first, sums, ids_of_row)
        alone += int(np.count_nonzero(ids_of_row == 1))
        for start in range(0, size, 1 << 20):
            lookups.add(sums[start : start + (1 << 20)])
    return IdFacts(unique_ids=unique_ids, colliding_ids=unique_ids - alone, lookups=lookups)


def _rows(vocabulary: Vocabulary, ids: npt.NDArray[np.uint32]) -> npt.NDArray[np.int32]:
    rows = np.empty(len(ids), np.int32)
    vocabulary.map_ids(ids, rows)
    return rows


@njit(cache=True, nogil=True)
def _add_to_rows(
    rows: Any, occurrences: Any, first: int, sums: Any, ids_of_row: Any
) -> None:  # pragma: no cover - compiled
    for i in range(rows.shape[0]):
        place = np.int64(rows[i]) - first
        if 0 <= place < sums.shape[0]:
            sums[place] += occurrences[i]
            if ids_of_row[place] < 2:
                ids_of_row[place] += 1
