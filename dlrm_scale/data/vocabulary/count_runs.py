"""Runs of counts, in memory or in a file, and how any number of them become one in bounded memory."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
from numba import njit

from dlrm_scale.data.vocabulary.count_table import MergeTable, ends_within
from dlrm_scale.data.vocabulary.id_hash import mix

__all__ = ["BYTES_PER_BUFFERED_ENTRY", "CountChunk", "MemoryRun", "Run", "merged_runs", "packed_entries"]

CountChunk = tuple[npt.NDArray[np.uint32], npt.NDArray[np.int64]]
"""Distinct ids in hash order, [n] uint32, and how often each occurred, [n] int64."""

BYTES_PER_BUFFERED_ENTRY = 32
"""8 to hold it, 12 for what it is merged into, and 12 for the copy that is yielded."""

_LEAST_BLOCK = 256


class Run(Protocol):
    """Entries (see `count_table`) in hash order; each id stands once."""

    @property
    def entries(self) -> int:
        """How many."""

    def read(self, start: int, out: npt.NDArray[np.uint64]) -> None:
        """Fill `out`, [n] uint64, with the n entries from `start` on."""


@dataclass(frozen=True, slots=True)
class MemoryRun:
    """A run that is held in memory.

    Attributes:
        array: [n] uint64.
    """

    array: npt.NDArray[np.uint64]

    @property
    def entries(self) -> int:
        """How many."""
        return len(self.array)

    def read(self, start: int, out: npt.NDArray[np.uint64]) -> None:
        """Fill `out` with the entries from `start` on."""
        out[:] = self.array[start : start + len(out)]


@njit(cache=True, nogil=True)
def _pack(ids: Any, counts: Any, entries: Any) -> None:  # pragma: no cover - compiled
    for i in range(ids.shape[0]):
        entries[i] = (np.uint64(ids[i]) << np.uint64(32)) | np.uint64(counts[i])


def packed_entries(ids: npt.NDArray[np.uint32], counts: npt.NDArray[np.int64]) -> npt.NDArray[np.uint64]:
    """Return the entries of ids and counts below 2^32."""
    entries = np.empty(len(ids), np.uint64)
    _pack(ids, counts, entries)
    return entries


@njit(cache=True, nogil=True)
def _unpack(entries: Any, ids: Any, counts: Any) -> None:  # pragma: no cover - compiled
    for i in range(entries.shape[0]):
        ids[i] = np.uint32(entries[i] >> np.uint64(32))
        counts[i] = np.int64(entries[i] & np.uint64(0xFFFFFFFF))


def _one_run(run: Run, buffer_entries: int) -> Iterator[CountChunk]:
    for start in range(0, run.entries, buffer_entries):
        entries = np.empty(min(buffer_entries, run.entries - start), np.uint64)
        run.read(start, entries)
        ids, counts = np.empty(len(entries), np.uint32), np.empty(len(entries), np.int64)
        _unpack(entries, ids, counts)
        yield ids, counts


@njit(cache=True, nogil=True)
def _least_last(entries: Any, ends: Any, partial: Any) -> Any:  # pragma: no cover - compiled
    """Return up to which hash all entries are buffered."""
    least = np.uint64(0xFFFFFFFFFFFFFFFF)
    for k in range(ends.shape[0]):
        if partial[k]:
            least = min(least, mix(entries[ends[k] - 1] >> np.uint64(32)))
    return least


def merged_runs(runs: Sequence[Run], buffer_entries: int) -> Iterator[CountChunk]:
    """Merge runs: yield each distinct id once, in hash order over all chunks, with the sum of its counts.

    Args:
        runs: any number.
        buffer_entries: how many entries are held at a time; `BYTES_PER_BUFFERED_ENTRY` of memory each, besides
            `MERGE_SCRATCH_BYTES`. At least 256 a run are.
    """
    lengths = np.array([run.entries for run in runs], np.int64)
    total = int(lengths.sum())
    if total == 0:
        return
    if len(runs) == 1:
        yield from _one_run(runs[0], buffer_entries)
        return
    # In proportion to their lengths, so that all buffers end at about the same hash and are used up together.
    shares = (buffer_entries * (lengths / total)).astype(np.int64)
    sizes = np.minimum(lengths, np.maximum(shares, _LEAST_BLOCK))
    starts = np.concatenate([[0], np.cumsum(sizes)])
    entries = np.empty(starts[-1], np.uint64)
    ids, counts = np.empty(len(entries), np.uint32), np.empty(len(entries), np.int64)
    begins, ends = starts[:-1].copy(), starts[:-1].copy()
    stops = np.empty_like(begins)
    positions = np.zeros(len(runs), np.int64)
    table = MergeTable()
    while True:
        for k, run in enumerate(runs):
            if begins[k] == starts[k] and ends[k] == starts[k + 1]:
                continue
            left = int(ends[k] - begins[k])
            room = min(int(sizes[k]) - left, int(lengths[k] - positions[k]))
            if room == 0:
                continue
            entries[starts[k] : starts[k] + left] = entries[begins[k] : ends[k]]
            begins[k], ends[k] = starts[k], starts[k] + left + room
            run.read(int(positions[k]), entries[starts[k] + left : ends[k]])
            positions[k] += room
        last = np.uint64(_least_last(entries, ends, positions < lengths))
        if ends_within(entries, begins, ends, last, stops) == 0:
            return
        n = table.merge(entries, begins, stops, ids, counts)
        begins[:] = stops
        yield ids[:n].copy(), counts[:n].copy()
