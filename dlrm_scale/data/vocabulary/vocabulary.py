"""From raw category ids (unsigned 32 bits) to table rows, one vocabulary a column.

    frequency   ids seen at least `threshold` times in training rows get a row of their own: 2 + their rank in hash
                order. Any other id gets row 1. (In order of frequency, a row-wise shard 0 of 4 would take 91 % of the
                lookups; in hash order it takes 29 %.)
    hash        2 + mix(id, salt of the column) mod (rows - 2); row 1 stays unused
    modulo      2 + id mod (rows - 2); row 1 stays unused
    given       the id is the row: for ids that others have mapped already; rows 0 and 1 are rows like others

Under all but `given`, row 0 is a missing category and row 1 an id that the vocabulary doesn't hold. `mix` is the hash
of `id_hash`.
"""

import hashlib
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
from numba import njit

from dlrm_scale.data.source.raw_block import FIRST_CATEGORY_BIT
from dlrm_scale.data.vocabulary.count_histogram import CountHistogram
from dlrm_scale.data.vocabulary.count_runs import CountChunk
from dlrm_scale.data.vocabulary.id_hash import id_hashes, mix
from dlrm_scale.data.vocabulary.id_index import IdIndex, find_rows, id_index, in_hash_order, predicted_index_bytes
from dlrm_scale.errors import DataError
from dlrm_scale.schema import CATEGORY_COLUMNS, MISSING_ROW, OUT_OF_VOCABULARY_ROW

__all__ = [
    "FIRST_ID_ROW",
    "VOCABULARY_RULE",
    "Method",
    "Vocabulary",
    "frequency_vocabulary",
    "given_vocabulary",
    "hashed_vocabulary",
    "mapping_fingerprint",
    "predicted_memory_bytes",
    "vocabulary_of_kept",
]

Method = Literal["frequency", "hash", "modulo", "given"]

FIRST_ID_ROW = OUT_OF_VOCABULARY_ROW + 1
"""First table row that belongs to ids."""

VOCABULARY_RULE: dict[str, object] = {
    "missing_row": MISSING_ROW,
    "out_of_vocabulary_row": OUT_OF_VOCABULARY_ROW,
    "mix": "splitmix64",
}
"""What the manifest says about all columns."""

_MOST_KEPT = 2**31 - 1 - FIRST_ID_ROW
_NOTHING_MISSING = np.zeros(0, np.uint64)


@dataclass(frozen=True, kw_only=True, eq=False)
class Vocabulary:
    """The mapping of one column.

    Attributes:
        column: C1 to C26.
        method: how ids become rows.
        table_rows: rows of the table; every mapped id is in `[0, table_rows)`.
        ids: [k] uint32, frequency only: the kept ids in hash order; `ids[i]` has row `2 + i`.
        salt: mixed into ids under hash.
    """

    column: str
    method: Method
    table_rows: int
    ids: npt.NDArray[np.uint32]
    salt: int
    _index: IdIndex

    @property
    def memory_bytes(self) -> int:
        """What it takes in memory."""
        return self.ids.nbytes + self._index.nbytes

    def map(self, ids: npt.NDArray[np.uint32], missing: npt.NDArray[np.uint64], rows: npt.NDArray[np.int32]) -> None:
        """Write the table row of each id.

        Args:
            ids: [n] uint32 raw ids of this column.
            missing: [n] uint64 as in `RawBlock`.
            rows: [n] int32, written.

        Raises:
            DataError: a given id isn't a row of the table.
        """
        self._map(ids, missing, rows)

    def map_ids(self, ids: npt.NDArray[np.uint32], rows: npt.NDArray[np.int32]) -> None:
        """Write the table row of each id, where none is missing.

        Args:
            ids: [n] uint32 raw ids of this column.
            rows: [n] int32, written.

        Raises:
            DataError: a given id isn't a row of the table.
        """
        self._map(ids, _NOTHING_MISSING, rows)

    def _map(self, ids: npt.NDArray[np.uint32], missing: npt.NDArray[np.uint64], rows: npt.NDArray[np.int32]) -> None:
        bit = FIRST_CATEGORY_BIT + CATEGORY_COLUMNS.index(self.column)
        if self.method == "frequency":
            find_rows(self._index, self.ids, ids, rows)
            _set_missing(missing, bit, rows)
        elif self.method == "given":
            wrong = _map_given(ids, missing, bit, self.table_rows, rows)
            if wrong >= 0:
                raise DataError(
                    f"column {self.column}: id {ids[wrong]} isn't a row of its table of {self.table_rows:,} rows",
                    remedy="state the table's true number of rows, or map the ids by hash or frequency",
                )
        else:
            _map_modulo(ids, missing, bit, self.method == "hash", np.uint64(self.salt), self.table_rows, rows)


@njit(cache=True, nogil=True)
def _set_missing(missing: Any, bit: int, rows: Any) -> None:  # pragma: no cover - compiled
    # In a loop of its own, without a branch: among the lookups it would cost a third more.
    shift = np.uint64(bit)
    for i in range(missing.shape[0]):
        rows[i] = 0 if (missing[i] >> shift) & np.uint64(1) else rows[i]


@njit(cache=True, nogil=True)
def _map_modulo(
    ids: Any, missing: Any, bit: int, mixed: bool, salt: Any, table_rows: int, rows: Any
) -> None:  # pragma: no cover - compiled
    selected = np.uint64(1) << np.uint64(bit)
    all_present = missing.shape[0] == 0
    room = np.uint64(table_rows - 2)
    for i in range(ids.shape[0]):
        if not all_present and missing[i] & selected:
            rows[i] = 0
            continue
        value = np.uint64(ids[i])
        if mixed:
            value = mix(value ^ salt)
        rows[i] = np.int32(2 + np.int64(value % room))


@njit(cache=True, nogil=True)
def _map_given(ids: Any, missing: Any, bit: int, table_rows: int, rows: Any) -> int:  # pragma: no cover - compiled
    """Return the place of the first id that isn't a row, or -1."""
    selected = np.uint64(1) << np.uint64(bit)
    all_present = missing.shape[0] == 0
    for i in range(ids.shape[0]):
        if not all_present and missing[i] & selected:
            rows[i] = 0
        elif np.int64(ids[i]) >= table_rows:
            return i
        else:
            rows[i] = np.int32(ids[i])
    return -1


def predicted_memory_bytes(kept_ids: int) -> int:
    """`Vocabulary.memory_bytes` of a frequency vocabulary that keeps so many ids."""
    return 4 * kept_ids + predicted_index_bytes(kept_ids)


def frequency_vocabulary(
    column: str,
    counts: Iterable[CountChunk],
    *,
    threshold: int,
    max_rows: int | None = None,
    on_counted: Callable[[int, int], None] | None = None,
) -> Vocabulary:
    """Give a row to each id that is frequent enough.

    Args:
        column: C1 to C26.
        counts: chunks of (ids [n] uint32, counts [n] int64 in training rows), distinct and in hash order over all
            chunks, as `MergedCounts`; iterated twice.
        threshold: ids that occur less often share row 1.
        max_rows: rows of the table at most; the most frequent ids are kept, of equally frequent ones those that come
            first in hash order.
        on_counted: called with the number of distinct ids and of kept ones, before memory is taken for these.

    Raises:
        DataError: more ids would be kept than a table can have rows.
    """
    histogram = CountHistogram()
    for _, occurrences in counts:
        histogram.add(occurrences)
    kept = histogram.at_least(threshold)
    cut, at_cut = 0, 0
    if max_rows is not None and kept > max_rows - FIRST_ID_ROW:
        kept = max_rows - FIRST_ID_ROW
        cut, at_cut = histogram.cut_off(kept)
    if kept > _MOST_KEPT:
        raise DataError(
            f"column {column} has {kept:,} ids that occur at least {threshold} times, and a table {2**31 - 1:,} rows",
            remedy="raise --threshold or give --max-rows-per-table",
        )
    if on_counted is not None:
        on_counted(histogram.total, kept)
    ids = np.empty(kept, np.uint32)
    filled = 0
    for some, occurrences in counts:
        chosen = occurrences >= max(threshold, cut + 1)
        # Ids come in hash order, so the first ones of the cut-off's count are kept.
        if at_cut:
            ties = np.flatnonzero(occurrences == cut)[:at_cut]
            at_cut -= len(ties)
            chosen[ties] = True
        found = some[chosen]
        ids[filled : filled + len(found)] = found
        filled += len(found)
    assert filled == kept
    vocabulary = vocabulary_of_kept(column, ids)
    assert vocabulary is not None, "the counts aren't in hash order"
    return vocabulary


def vocabulary_of_kept(column: str, ids: npt.NDArray[np.uint32]) -> Vocabulary | None:
    """Return the frequency vocabulary that keeps these ids, None if they aren't distinct and in hash order."""
    if not in_hash_order(ids):
        return None
    return Vocabulary(
        column=column,
        method="frequency",
        table_rows=FIRST_ID_ROW + len(ids),
        ids=ids,
        salt=0,
        _index=id_index(ids),
    )


def hashed_vocabulary(column: str, method: Literal["hash", "modulo"], *, rows: int) -> Vocabulary:
    """Map ids to a fixed number of rows without having seen any.

    Args:
        column: C1 to C26; it salts the hash, so that ids that collide in one column don't in the next.
        method: mix the id first, or take it as it is.
        rows: rows of the table, rows 0 and 1 included; at least 3.
    """
    salt = int(id_hashes(np.array([CATEGORY_COLUMNS.index(column) + 1], np.uint32))[0]) if method == "hash" else 0
    return _without_ids(column, method, rows, salt)


def given_vocabulary(column: str, rows: int) -> Vocabulary:
    """Take ids as rows.

    Args:
        column: C1 to C26.
        rows: rows of the table; a greater id is an error when it is mapped.
    """
    return _without_ids(column, "given", rows, 0)


def _without_ids(column: str, method: Method, rows: int, salt: int) -> Vocabulary:
    return Vocabulary(
        column=column,
        method=method,
        table_rows=rows,
        ids=np.empty(0, np.uint32),
        salt=salt,
        _index=id_index(np.empty(0, np.uint32)),
    )


def mapping_fingerprint(vocabularies: Iterable[Vocabulary]) -> str:
    """Hash of what all columns' ids become; equal for datasets whose rows mean the same to a model.

    Equal table rows don't tell that: another vocabulary of the same size gives the rows to other ids.
    """
    digest = hashlib.blake2b(digest_size=16)
    for vocabulary in vocabularies:
        about = (
            f"{vocabulary.column} {vocabulary.method} {vocabulary.table_rows} {vocabulary.salt} {len(vocabulary.ids)}"
        )
        digest.update(about.encode() + b"\n")
        digest.update(vocabulary.ids.astype("<u4", copy=False).data)
    return digest.hexdigest()
