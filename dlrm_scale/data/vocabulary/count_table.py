"""Compiled code that counts ids and merges counts, through small hash tables that are read out in hash order.

The slot of an id is the top bits of its hash, and a slot that is taken passes the id on to the next one. There is no
wrapping: behind the last slot stand as many spare ones as the table may hold ids. Reading the slots in order thus gives
the ids nearly in hash order, and an insertion sort that moves each by a place or two makes a sorted run of them; no run
is ever sorted from scratch.

An entry of a run is a uint64: the id in the high half, its count in the low half.
"""

from typing import Any

import numpy as np
import numpy.typing as npt
from numba import njit

from dlrm_scale.data.vocabulary.id_hash import mix

__all__ = ["MERGE_SCRATCH_BYTES", "CountTable", "MergeTable", "ends_within"]

_FIRST_BITS = 10
_MERGE_LIMIT = 1 << 14
_MERGE_SLOTS = 3 * _MERGE_LIMIT + 1
MERGE_SCRATCH_BYTES = 12 * _MERGE_SLOTS + 20 * _MERGE_LIMIT
"""Memory of a `MergeTable`."""

_NOTHING_MISSING = np.zeros(0, np.uint64)


class CountTable:
    """Counts ids until it is full; not for several threads at a time.

    Args:
        bits: the table may have 2^bits slots of 8 bytes. 16 fit the L2 cache, which is what makes counting fast. It
            begins with fewer, so that the tables of columns of few ids fit it together.
    """

    def __init__(self, bits: int) -> None:
        self._most_bits = bits
        self.limit = _limit(bits)
        self.used = 0
        self._resize(min(bits, _FIRST_BITS))

    def add(
        self, ids: npt.NDArray[np.uint32], missing: npt.NDArray[np.uint64] | None, bit: int, start: int
    ) -> tuple[int, int]:
        """Count the ids from `start` on until they end or a further one doesn't fit.

        Args:
            ids: [n] uint32.
            missing: [n] uint64 as in `RawBlock`, or None where nothing is.
            bit: which bit of `missing` belongs to the ids.
            start: where to begin.

        Returns:
            Where the next call begins (n: all are counted), and how many occurrences were counted.
        """
        flags = _NOTHING_MISSING if missing is None else missing
        total = 0
        while True:
            start, self.used, occurrences = _count(
                ids, flags, bit, start, self._table, self._bits, self.used, _limit(self._bits)
            )
            total += occurrences
            if start == len(ids) or self._bits == self._most_bits:
                return start, total
            entries = self.take()
            self._resize(min(self._most_bits, self._bits + 2))
            _insert(entries, self._table, self._bits)
            self.used = len(entries)

    def take(self) -> npt.NDArray[np.uint64]:
        """Return the entries as a run in hash order, [used] uint64, and empty the table."""
        run = np.empty(self.used + 1, np.uint64)
        _take(self._table, self._bits, run, np.empty(self.used, np.uint64))
        run.resize(self.used, refcheck=False)
        self.used = 0
        return run

    def _resize(self, bits: int) -> None:
        self._bits = bits
        # Spare slots are zeros that are hardly ever touched, so they take no memory.
        self._table = np.zeros((1 << bits) + _limit(bits) + 1, np.uint64)


def _limit(bits: int) -> int:
    return (1 << bits) * 5 // 8


class MergeTable:
    """Adds up the counts of sorted pieces of runs; not for several threads at a time."""

    def __init__(self) -> None:
        self._keys = np.empty(_MERGE_SLOTS + 1, np.uint32)
        self._sums = np.zeros(len(self._keys), np.int64)
        self._ids = np.empty(_MERGE_LIMIT + 1, np.uint32)
        self._counts = np.empty(_MERGE_LIMIT + 1, np.int64)
        self._hashes = np.empty(_MERGE_LIMIT, np.uint64)

    def merge(
        self,
        entries: npt.NDArray[np.uint64],
        begins: npt.NDArray[np.int64],
        ends: npt.NDArray[np.int64],
        ids: npt.NDArray[np.uint32],
        counts: npt.NDArray[np.int64],
    ) -> int:
        """Merge pieces of runs.

        Args:
            entries: [m] uint64 that hold the pieces.
            begins: [k] int64, piece i is `entries[begins[i]:ends[i]]`, sorted by hash.
            ends: [k] int64.
            ids: uint32 with room for all entries, written: distinct ids in hash order.
            counts: int64, written: their sums.

        Returns:
            The number of distinct ids.
        """
        n = _merge(
            entries, begins.copy(), ends, ids, counts,
            self._keys, self._sums, self._ids, self._counts, self._hashes, _MERGE_LIMIT,
        )  # fmt: skip
        return int(n)


@njit(cache=True, nogil=True)
def _count(
    ids: Any, missing: Any, bit: int, start: int, table: Any, bits: int, used: int, limit: int
) -> tuple[int, int, int]:  # pragma: no cover - compiled
    shift = np.uint64(64 - bits)
    half = np.uint64(32)
    one = np.uint64(1)
    selected = one << np.uint64(bit)
    all_present = missing.shape[0] == 0
    occurrences = 0
    for i in range(start, ids.shape[0]):
        if not all_present and missing[i] & selected:
            continue
        key = np.uint64(ids[i])
        # An unsigned slot: a signed one costs a test for indices that count from the end.
        slot = mix(key) >> shift
        entry = table[slot]
        while entry != np.uint64(0) and entry >> half != key:
            slot += one
            entry = table[slot]
        if entry == np.uint64(0):
            if used == limit:
                return i, used, occurrences
            used += 1
            entry = key << half
        table[slot] = entry + one
        occurrences += 1
    return ids.shape[0], used, occurrences


@njit(cache=True, nogil=True)
def _insert(entries: Any, table: Any, bits: int) -> None:  # pragma: no cover - compiled
    for i in range(entries.shape[0]):
        slot = np.int64(mix(entries[i] >> np.uint64(32)) >> np.uint64(64 - bits))
        while table[slot] != 0:
            slot += 1
        table[slot] = entries[i]


@njit(cache=True, nogil=True)
def _take(table: Any, bits: int, run: Any, hashes: Any) -> None:  # pragma: no cover - compiled
    slots = 1 << bits
    n = 0
    # Whether a slot is taken can't be predicted: no branch on it makes this several times faster.
    for slot in range(slots):
        entry = table[slot]
        run[n] = entry
        n += int(entry != 0)
        table[slot] = 0
    # Spare slots are taken one after another, so the first free one is the end.
    slot = slots
    while table[slot] != 0:
        run[n] = table[slot]
        n += 1
        table[slot] = 0
        slot += 1
    for i in range(n):
        entry = run[i]
        hashed = mix(entry >> np.uint64(32))
        j = i
        while j > 0 and hashes[j - 1] > hashed:
            hashes[j] = hashes[j - 1]
            run[j] = run[j - 1]
            j -= 1
        hashes[j] = hashed
        run[j] = entry


@njit(cache=True, nogil=True)
def _end_within(entries: Any, begin: int, end: int, last: Any) -> int:  # pragma: no cover - compiled
    """Return where the entries with a hash of at most `last` end; quick where that is near `begin`."""
    step = 1
    low = begin
    while low + step <= end and mix(entries[low + step - 1] >> np.uint64(32)) <= last:
        low += step
        step *= 2
    high = min(low + step - 1, end)
    while low < high:
        middle = (low + high) // 2
        if mix(entries[middle] >> np.uint64(32)) <= last:
            low = middle + 1
        else:
            high = middle
    return low


@njit(cache=True, nogil=True)
def ends_within(entries: Any, begins: Any, ends: Any, last: Any, result: Any) -> int:  # pragma: no cover - compiled
    """Write for each sorted piece where its entries with a hash of at most `last` end; return how many those are."""
    total = 0
    for k in range(begins.shape[0]):
        result[k] = _end_within(entries, begins[k], ends[k], last)
        total += result[k] - begins[k]
    return total


@njit(cache=True, nogil=True)
def _merge(
    entries: Any,
    begins: Any,
    ends: Any,
    ids: Any,
    counts: Any,
    keys: Any,
    sums: Any,
    range_ids: Any,
    range_counts: Any,
    hashes: Any,
    limit: int,
) -> int:  # pragma: no cover - compiled
    """Merge range by range of hashes, each of at most `limit` entries, spread evenly over twice as many slots."""
    half = np.uint64(32)
    one = np.uint64(1)
    all_ones = np.uint64(0xFFFFFFFFFFFFFFFF)
    stops = np.empty_like(begins)
    total = 0
    for k in range(begins.shape[0]):
        total += ends[k] - begins[k]
    width = np.uint64(0)
    n = 0
    while total > 0:
        low = all_ones
        high = np.uint64(0)
        for k in range(begins.shape[0]):
            if begins[k] < ends[k]:
                low = min(low, mix(entries[begins[k]] >> half))
                high = max(high, mix(entries[ends[k] - 1] >> half))
        if total <= limit:
            width = high - low
        elif width == 0:
            width = (high - low) // np.uint64(total // (limit // 2))
        while True:
            found = ends_within(entries, begins, ends, low + min(width, all_ones - low), stops)
            # Without width it is one id, at most once in each piece.
            if found <= limit or width == 0:
                break
            width >>= one
        span = np.uint64(0)
        for k in range(begins.shape[0]):
            if begins[k] < stops[k]:
                span = max(span, mix(entries[stops[k] - 1] >> half) - low)
        slots = 2 * min(found, limit)
        scale = slots / (np.float64(span >> one) + 1.0)
        for k in range(begins.shape[0]):
            for i in range(begins[k], stops[k]):
                key = np.uint32(entries[i] >> half)
                # The bit less makes it a signed number, which is converted several times faster.
                slot = int(np.float64(np.int64((mix(key) - low) >> one)) * scale)
                while sums[slot] != 0 and keys[slot] != key:
                    slot += 1
                keys[slot] = key
                sums[slot] += np.int64(entries[i] & np.uint64(0xFFFFFFFF))
            begins[k] = stops[k]
        total -= found
        m = 0
        for slot in range(slots):
            range_ids[m] = keys[slot]
            range_counts[m] = sums[slot]
            m += int(sums[slot] != 0)
            sums[slot] = 0
        slot = slots
        while sums[slot] != 0:
            range_ids[m] = keys[slot]
            range_counts[m] = sums[slot]
            m += 1
            sums[slot] = 0
            slot += 1
        for i in range(m):
            hashed = mix(range_ids[i])
            j = i
            while j > 0 and hashes[j - 1] > hashed:
                hashes[j] = hashes[j - 1]
                ids[n + j] = ids[n + j - 1]
                counts[n + j] = counts[n + j - 1]
                j -= 1
            hashes[j] = hashed
            ids[n + j] = range_ids[i]
            counts[n + j] = range_counts[i]
        n += m
        if found < limit // 4:
            width += min(width, all_ones - width)
    return n
