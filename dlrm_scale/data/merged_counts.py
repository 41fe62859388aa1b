"""How often each id of a column occurs in all input files together, read from the files that keep their counts."""

import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path

from dlrm_scale.data.count_file import CountFile
from dlrm_scale.data.count_runs import BYTES_PER_BUFFERED_ENTRY, CountChunk, Run, merged_runs
from dlrm_scale.data.count_table import MERGE_SCRATCH_BYTES
from dlrm_scale.errors import DatasetError

__all__ = ["MergedCounts"]

_BUFFER_ENTRIES = (1 << 10, 1 << 20)


class MergedCounts:
    """Iterating merges the files anew: yields chunks of (ids [n] uint32, counts [n] int64), in hash order.

    Each id comes once, with the sum of its counts in all files.

    Args:
        paths: what `FileIdCounts.close` left, in any order.
        column_index: 0 for C1 to 25 for C26.
        memory_bytes: how much memory to use; at least about 1 MiB, and 5 KiB a run in the files, are used.

    Raises:
        DatasetError: while iterating: a file is absent or damaged.
    """

    def __init__(self, paths: Sequence[Path], column_index: int, *, memory_bytes: int) -> None:
        self._paths = tuple(paths)
        self._column = column_index
        least, most = _BUFFER_ENTRIES
        self._buffer_entries = min(most, max(least, (memory_bytes - MERGE_SCRATCH_BYTES) // BYTES_PER_BUFFERED_ENTRY))

    def __iter__(self) -> Iterator[CountChunk]:
        with contextlib.ExitStack() as stack:
            runs: list[Run] = []
            occurrences = 0
            for path in self._paths:
                file = stack.enter_context(CountFile(path))
                runs += file.of_column(self._column)
                occurrences += sum(run.occurrences for run in file.runs if run.column == self._column)
            found = 0
            for ids, counts in merged_runs(runs, self._buffer_entries):
                found += int(counts.sum())
                yield ids, counts
        if found != occurrences:
            raise DatasetError(
                f"the counts of {', '.join(map(str, self._paths))} are damaged: they add up to {found:,}, "
                f"not to {occurrences:,}",
                remedy="remove them and count the ids again",
            )
