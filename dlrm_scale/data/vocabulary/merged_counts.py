"""How often each id of a column occurs in all input files together, read from the files that keep their counts."""

import contextlib
import os
from collections.abc import Iterator, Sequence
from pathlib import Path

from dlrm_scale.data.recently_opened import RecentlyOpened
from dlrm_scale.data.vocabulary.count_file import CountFile
from dlrm_scale.data.vocabulary.count_runs import BYTES_PER_BUFFERED_ENTRY, CountChunk, merged_runs
from dlrm_scale.data.vocabulary.count_table import MERGE_SCRATCH_BYTES

__all__ = ["MergedCounts"]

_BUFFER_ENTRIES = (1 << 10, 1 << 20)


class MergedCounts:
    """Iterating merges the files anew: yields chunks of (ids [n] uint32, counts [n] int64), in hash order.

    Each id comes once, with the sum of its counts in all files. Of many files a bounded number is open at a time.

    Args:
        paths: what `FileIdCounts.close` left, in any order.
        column_index: 0 for C1 to 25 for C26.
        memory_bytes: how much memory to use; at least about 1 MiB, and 5 KiB a run in the files, are used.

    Raises:
        DatasetError: while iterating: a file is absent or damaged. Damage within counts is told after the last chunk.
    """

    def __init__(self, paths: Sequence[Path], column_index: int, *, memory_bytes: int) -> None:
        self._paths = tuple(paths)
        self._column = column_index
        least, most = _BUFFER_ENTRIES
        self._buffer_entries = min(most, max(least, (memory_bytes - MERGE_SCRATCH_BYTES) // BYTES_PER_BUFFERED_ENTRY))

    def __iter__(self) -> Iterator[CountChunk]:
        with contextlib.closing(RecentlyOpened(os.close)) as opened:
            files = [CountFile(path, opened) for path in self._paths]
            runs = [run for file in files for run in file.of_column(self._column)]
            yield from merged_runs(runs, self._buffer_entries)
            for run in runs:
                run.check()
