"""Counts how often each raw id occurs, in memory that grows with the distinct ids and not with the rows.

A hash table that fits the L2 cache absorbs the frequent ids. When it is full it becomes a sorted run of (id, count);
runs of similar size are merged, so each distinct id is merged O(log) times. The sums don't depend on the order in
which blocks or threads come.
"""

import threading
from typing import Any

import numpy as np
import numpy.typing as npt
from numba import njit

__all__ = ["IdCounter"]

_TABLE_BITS = 16
_TABLE_LIMIT = (1 << _TABLE_BITS) * 5 // 8

Run = tuple[npt.NDArray[np.uint32], npt.NDArray[np.int64]]


@njit(cache=True, nogil=True)
def _count(
    ids: Any, missing: Any, bit: int, start: int, keys: Any, counts: Any, used: int, limit: int, shift: int
) -> tuple[int, int]:  # pragma: no cover - compiled
    """Count ids from `start` on until they end or the table is full; return (next position, used slots)."""
    mask = keys.shape[0] - 1
    selected = np.uint64(1) << np.uint64(bit)
    for i in range(start, ids.shape[0]):
        if missing[i] & selected:
            continue
        key = ids[i]
        slot = np.int64(np.uint32(key * np.uint32(0x9E3779B1)) >> np.uint32(shift))
        while counts[slot] != 0 and keys[slot] != key:
            slot = (slot + 1) & mask
        if counts[slot] == 0:
            if used == limit:
                return i, used
            keys[slot] = key
            used += 1
        counts[slot] += 1
    return ids.shape[0], used


@njit(cache=True, nogil=True)
def _merge(
    left_ids: Any, left_counts: Any, right_ids: Any, right_counts: Any, ids: Any, counts: Any
) -> int:  # pragma: no cover - compiled
    """Merge two runs into `ids` and `counts`; return the length."""
    i = j = n = 0
    while i < left_ids.shape[0] or j < right_ids.shape[0]:
        if j == right_ids.shape[0] or (i < left_ids.shape[0] and left_ids[i] < right_ids[j]):
            ids[n] = left_ids[i]
            counts[n] = left_counts[i]
            i += 1
        elif i == left_ids.shape[0] or right_ids[j] < left_ids[i]:
            ids[n] = right_ids[j]
            counts[n] = right_counts[j]
            j += 1
        else:
            ids[n] = left_ids[i]
            counts[n] = left_counts[i] + right_counts[j]
            i += 1
            j += 1
        n += 1
    return n


def _merged(left: Run, right: Run) -> Run:
    ids = np.empty(len(left[0]) + len(right[0]), np.uint32)
    counts = np.empty(len(ids), np.int64)
    n = _merge(*left, *right, ids, counts)
    return ids[:n].copy(), counts[:n].copy()


class IdCounter:
    """Counts the ids of one column; threads may share it."""

    def __init__(self) -> None:
        self._keys = np.zeros(1 << _TABLE_BITS, np.uint32)
        self._counts = np.zeros(1 << _TABLE_BITS, np.int64)
        self._used = 0
        self._runs: list[Run] = []
        self._lock = threading.Lock()

    def add(self, ids: npt.NDArray[np.uint32], missing: npt.NDArray[np.uint64], bit: int) -> None:
        """Count the ids of a block, missing ones left out.

        Args:
            ids: [n] uint32.
            missing: [n] uint64 as in `RawBlock`.
            bit: which bit of `missing` belongs to this column.
        """
        position = 0
        with self._lock:
            while True:
                position, self._used = _count(
                    ids, missing, bit, position, self._keys, self._counts, self._used, _TABLE_LIMIT, 32 - _TABLE_BITS
                )
                if position == len(ids):
                    return
                self._flush()

    def result(self) -> Run:
        """Return the distinct ids, ascending, [u] uint32, and how often each occurred, [u] int64."""
        with self._lock:
            self._flush()
            while len(self._runs) > 1:
                self._runs.append(_merged(self._runs.pop(), self._runs.pop()))
            return self._runs[0]

    def _flush(self) -> None:
        taken = np.flatnonzero(self._counts)
        ids, counts = self._keys[taken], self._counts[taken]
        order = np.argsort(ids)
        self._runs.append((ids[order], counts[order]))
        self._counts[:] = 0
        self._used = 0
        while len(self._runs) > 1 and len(self._runs[-2][0]) <= 2 * len(self._runs[-1][0]):
            self._runs.append(_merged(self._runs.pop(), self._runs.pop()))
