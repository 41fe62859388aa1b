"""Counts how often each raw id of an input file occurs, in bounded memory.

A hash table that fits the L2 cache absorbs the frequent ids. When it is full it becomes a sorted run; runs of similar
size are merged, eight at a time, so that each id is merged O(log) times. When the runs of all columns outgrow the
memory that is granted, those of the column that takes most become one run in the file. What is counted depends neither
on the order of blocks nor on threads or memory.
"""

import threading
from pathlib import Path
from types import TracebackType

import numpy as np
import numpy.typing as npt

from dlrm_scale.data.source.raw_block import FIRST_CATEGORY_BIT
from dlrm_scale.data.vocabulary.count_file import CountFileWriter
from dlrm_scale.data.vocabulary.count_runs import BYTES_PER_BUFFERED_ENTRY, MemoryRun, merged_runs, packed_entries
from dlrm_scale.data.vocabulary.count_table import MERGE_SCRATCH_BYTES, CountTable
from dlrm_scale.schema import CATEGORY_COLUMNS

__all__ = ["FileIdCounts"]

_TABLE_BITS = (8, 16)
_FAN_IN_BITS = 3
_BUFFER_ENTRIES = (1 << 10, 1 << 17)

_MOST_OCCURRENCES = 2**32 - 1
"""Of a run, so that each count fits the 32 bits that an entry has for it."""


class FileIdCounts:
    """Counters of the 26 category columns of one input file; threads may share it.

    As a context manager it removes what it has written when the block ends without `close()`.

    Args:
        path: the file that keeps the counts; it gets this name in `close()`. `MergedCounts` reads it.
        memory_bytes: how much memory to use. At least about 1 MiB is used, and 64 MiB or more make it fast.

    Raises:
        DatasetError: the file can't be made.
    """

    def __init__(self, path: Path, *, memory_bytes: int) -> None:
        columns = len(CATEGORY_COLUMNS)
        least, most = _TABLE_BITS
        bits = min(most, max(least, (memory_bytes // (4 * 8 * columns)).bit_length() - 1))
        self._buffer_entries = min(
            _BUFFER_ENTRIES[1], max(_BUFFER_ENTRIES[0], memory_bytes // 8 // BYTES_PER_BUFFERED_ENTRY)
        )
        self._merge_bytes = self._buffer_entries * BYTES_PER_BUFFERED_ENTRY + MERGE_SCRATCH_BYTES
        # An eighth stays free for what the allocator keeps: with four threads 3 to 14 % more than the arrays take.
        self._limit_bytes = max(0, memory_bytes * 7 // 8 - columns * (8 << bits) - self._merge_bytes)
        self._columns = [_Column(bits) for _ in range(columns)]
        self._held_bytes = 0
        self._held = threading.Lock()
        self._spilling = threading.Lock()
        self._file = CountFileWriter(path)

    def add(self, column_index: int, ids: npt.NDArray[np.uint32], missing: npt.NDArray[np.uint64]) -> None:
        """Count the ids of a block, missing ones left out.

        Args:
            column_index: 0 for C1 to 25 for C26.
            ids: [n] uint32.
            missing: [n] uint64 as in `RawBlock`.

        Raises:
            DatasetError: counts can't be spilled to the file; the counts are of no use then.
        """
        self._add(column_index, ids, missing)

    def add_ids(self, column_index: int, ids: npt.NDArray[np.uint32]) -> None:
        """Count ids of which none is missing.

        Args:
            column_index: 0 for C1 to 25 for C26.
            ids: [n] uint32.

        Raises:
            DatasetError: as `add`.
        """
        self._add(column_index, ids, None)

    def close(self) -> None:
        """Write what is left, durably; then the path alone holds the counts.

        Raises:
            DatasetError: the file can't be written; nothing is left of it.
        """
        for index, column in enumerate(self._columns):
            with column.lock:
                self._spill(index, column)
        self._file.close()

    def abort(self) -> None:
        """Remove what was written; does nothing after `close()`."""
        self._file.abort()

    def __enter__(self) -> "FileIdCounts":
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.abort()

    def _add(self, index: int, ids: npt.NDArray[np.uint32], missing: npt.NDArray[np.uint64] | None) -> None:
        column = self._columns[index]
        start = 0
        while start < len(ids):
            with column.lock:
                room = _MOST_OCCURRENCES - column.occurrences
                block = slice(0, start + room)
                start, occurrences = column.table.add(
                    ids[block], None if missing is None else missing[block], FIRST_CATEGORY_BIT + index, start
                )
                column.occurrences += occurrences
                full = column.occurrences == _MOST_OCCURRENCES
                if full or start < len(ids):
                    self._flush(column)
            if full or self._held_bytes > self._limit_bytes:
                self._relieve(index if full else None)

    def _hold(self, more_bytes: int, *, only_within_limit: bool = False) -> bool:
        with self._held:
            if only_within_limit and self._held_bytes + more_bytes > self._limit_bytes:
                return False
            self._held_bytes += more_bytes
            return True

    def _flush(self, column: "_Column") -> None:
        """Turn a column's table into a run, and merge where there are many; the caller holds the column's lock."""
        if column.table.used == 0:
            return
        run = column.table.take()
        self._hold(run.nbytes)
        level = column.push(run)
        while len(column.levels[level]) >> _FAN_IN_BITS:
            merging = column.levels[level]
            before_bytes = sum(run.nbytes for run in merging)
            if not self._hold(before_bytes + self._merge_bytes, only_within_limit=True):
                return
            column.levels[level] = []
            merged = _joined(merging, self._buffer_entries)
            del merging
            level = column.push(merged)
            self._hold(merged.nbytes - 2 * before_bytes - self._merge_bytes)

    def _relieve(self, full: int | None) -> None:
        """Spill columns until the rest is within the limit, a full one in any case."""
        with self._spilling:
            if full is not None:
                with self._columns[full].lock:
                    self._spill(full, self._columns[full])
            while self._held_bytes > self._limit_bytes:
                index = max(range(len(self._columns)), key=lambda i: self._columns[i].run_bytes)
                with self._columns[index].lock:
                    self._spill(index, self._columns[index])

    def _spill(self, index: int, column: "_Column") -> None:
        """Write all that a column holds as one run; the caller holds the column's lock."""
        held_bytes = column.run_bytes
        runs = [MemoryRun(run) for run in (*column.runs(), column.table.take()) if len(run)]
        self._file.append(index, merged_runs(runs, self._buffer_entries))
        column.clear()
        self._hold(-held_bytes)


class _Column:
    """What one column holds in memory."""

    def __init__(self, bits: int) -> None:
        self.lock = threading.Lock()
        self.table = CountTable(bits)
        self.clear()

    def clear(self) -> None:
        # Occurrences in the table and the runs. Runs of one level are of similar size.
        self.occurrences = 0
        self.levels: list[list[npt.NDArray[np.uint64]]] = []

    def runs(self) -> list[npt.NDArray[np.uint64]]:
        return [run for level in self.levels for run in level]

    @property
    def run_bytes(self) -> int:
        return sum(run.nbytes for run in self.runs())

    def push(self, run: npt.NDArray[np.uint64]) -> int:
        """Add a run; return its level."""
        level = (len(run) // self.table.limit).bit_length() // _FAN_IN_BITS
        while len(self.levels) <= level:
            self.levels.append([])
        self.levels[level].append(run)
        return level


def _joined(runs: list[npt.NDArray[np.uint64]], buffer_entries: int) -> npt.NDArray[np.uint64]:
    joined = np.empty(sum(len(run) for run in runs), np.uint64)
    n = 0
    for ids, counts in merged_runs([MemoryRun(run) for run in runs], buffer_entries):
        joined[n : n + len(ids)] = packed_entries(ids, counts)
        n += len(ids)
    # Gives the rest back without a copy.
    joined.resize(n, refcheck=False)
    return joined
