"""Finds the table row of a kept id, in one of two layouts by the number of ids.

    table       up to 2^20 ids: open addressing, a slot holds id and row, at most half of the slots are taken.
                One cache miss a lookup, 20 to 36 bytes an id.
    directory   more: where in the ids, which are in hash order, those stand whose hash starts with some bits; about 2
                share a bucket. Two cache misses a lookup, 6 to 8 bytes an id, no id stored twice.

On the rows of synthetic Kaggle and 1TB sets the table takes half of the directory's time.
"""

from typing import Any

import numpy as np
import numpy.typing as npt
from numba import njit

from dlrm_scale.data.vocabulary.id_hash import mix

__all__ = ["IdIndex", "find_rows", "id_index", "in_hash_order", "predicted_index_bytes"]

IdIndex = npt.NDArray[Any]
"""[2^bits] uint64 slots `row << 32 | id`, 0 where free; or [2^bits + 1] int32 bounds of buckets."""

_TABLE_IDS_MAX = 1 << 20
_FIRST_ROW = 2


def id_index(ids: npt.NDArray[np.uint32]) -> IdIndex:
    """Index ids of which the i-th has row 2 + i.

    Args:
        ids: [k] uint32 in hash order.
    """
    if len(ids) <= _TABLE_IDS_MAX:
        table = np.zeros(1 << _table_bits(len(ids)), np.uint64)
        _fill_table(ids, _table_bits(len(ids)), table)
        return table
    directory = np.empty((1 << _directory_bits(len(ids))) + 1, np.int32)
    _fill_directory(ids, _directory_bits(len(ids)), directory)
    return directory


def predicted_index_bytes(ids: int) -> int:
    """Return the bytes of the index of so many ids."""
    return 8 << _table_bits(ids) if ids <= _TABLE_IDS_MAX else 4 * ((1 << _directory_bits(ids)) + 1)


def find_rows(
    index: IdIndex, kept: npt.NDArray[np.uint32], ids: npt.NDArray[np.uint32], rows: npt.NDArray[np.int32]
) -> None:
    """Write the row of each id, 1 where it isn't kept.

    Args:
        index: of `kept`.
        kept: [k] uint32.
        ids: [n] uint32.
        rows: [n] int32, written.
    """
    if index.dtype == np.uint64:
        _find_in_table(ids, _table_bits(len(kept)), index, rows)
    else:
        _find_in_directory(ids, kept, _directory_bits(len(kept)), index, rows)


@njit(cache=True, nogil=True)
def in_hash_order(ids: Any) -> bool:  # pragma: no cover - compiled
    """Whether ids, [k] uint32, are distinct and in hash order."""
    for i in range(1, ids.shape[0]):
        if mix(ids[i]) <= mix(ids[i - 1]):
            return False
    return True


def _table_bits(ids: int) -> int:
    return max(1, (2 * ids - 1).bit_length()) if ids else 1


def _directory_bits(ids: int) -> int:
    # A shift by all 64 bits isn't defined.
    return max(1, ids.bit_length() - 1)


@njit(cache=True, nogil=True)
def _slot(id: Any, shift: Any) -> Any:  # pragma: no cover - compiled
    # Fibonacci hashing (Knuth, The Art of Computer Programming, 6.4) on 32 bits: a third of splitmix64's time.
    return np.int64(np.uint32(id * np.uint32(0x9E3779B1)) >> shift)


@njit(cache=True, nogil=True)
def _fill_table(ids: Any, bits: int, table: Any) -> None:  # pragma: no cover - compiled
    shift, mask = np.uint32(32 - bits), (1 << bits) - 1
    for i in range(ids.shape[0]):
        slot = _slot(ids[i], shift)
        while table[slot] != 0:
            slot = (slot + 1) & mask
        table[slot] = (np.uint64(_FIRST_ROW + i) << np.uint64(32)) | np.uint64(ids[i])


@njit(cache=True, nogil=True)
def _find_in_table(ids: Any, bits: int, table: Any, rows: Any) -> None:  # pragma: no cover - compiled
    shift, mask = np.uint32(32 - bits), (1 << bits) - 1
    for i in range(ids.shape[0]):
        slot = _slot(ids[i], shift)
        entry = table[slot]
        while entry != 0 and np.uint32(entry) != ids[i]:
            slot = (slot + 1) & mask
            entry = table[slot]
        rows[i] = 1 if entry == 0 else np.int32(entry >> np.uint64(32))


@njit(cache=True, nogil=True)
def _fill_directory(ids: Any, bits: int, directory: Any) -> None:  # pragma: no cover - compiled
    shift = np.uint64(64 - bits)
    filled = 0
    for i in range(ids.shape[0]):
        bucket = np.int64(mix(ids[i]) >> shift)
        while filled <= bucket:
            directory[filled] = i
            filled += 1
    while filled < directory.shape[0]:
        directory[filled] = ids.shape[0]
        filled += 1


@njit(cache=True, nogil=True)
def _find_in_directory(
    ids: Any, kept: Any, bits: int, directory: Any, rows: Any
) -> None:  # pragma: no cover - compiled
    shift = np.uint64(64 - bits)
    for i in range(ids.shape[0]):
        bucket = np.int64(mix(ids[i]) >> shift)
        row = 1
        for k in range(directory[bucket], directory[bucket + 1]):
            if kept[k] == ids[i]:
                row = _FIRST_ROW + k
                break
        rows[i] = row
