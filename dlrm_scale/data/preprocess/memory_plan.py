"""How much memory each part of preprocessing may take, so that the whole process stays under its limit."""

import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from dlrm_scale.data.preprocess.passes import files_at_a_time, pieces_in_flight
from dlrm_scale.errors import ConfigError, DatasetError
from dlrm_scale.host_memory import host_memory
from dlrm_scale.units import GIB, MIB, format_bytes

__all__ = ["MemoryPlan", "plan_memory"]

# Measured on one-hot rows: 2 MiB of text, 1.4 MB of raw and 1.3 MB of mapped values, and what the allocator keeps.
_PIECE_BYTES = 12 * MIB
# Arrow's buffers, decompression, compiled kernels and the summary, over what the process has at the start.
_FIXED_BYTES = 130 * MIB
# Read and write buffers of a file; the tables in which its ids are counted first belong to its counts.
_FILE_BYTES = 16 * MIB
# Below this the tables in which ids are counted first no longer have their full size.
_LEAST_COUNT_BYTES = 64 * MIB
_DEFAULT_COUNT_BYTES = 2 * GIB
# Less would spill counts every few thousand rows.
_LEAST_COUNT_BYTES_BESIDE_VOCABULARIES = 4 * MIB


@dataclass(frozen=True, kw_only=True, slots=True)
class MemoryPlan:
    """Shares of the memory.

    Attributes:
        count_bytes: for the id counts of each file that is read at a time.
        merge_bytes: for merging the counts of one column.
        vocabulary_bytes: for all vocabularies together; None: not limited.
        counted_files: how many files are counted at a time.
    """

    count_bytes: int
    merge_bytes: int
    vocabulary_bytes: int | None
    counted_files: int = 1

    def beside_vocabularies(self, size_bytes: int) -> "MemoryPlan":
        """Return the shares of counts that are kept while vocabularies are in memory too.

        Args:
            size_bytes: of all vocabularies; they fit `vocabulary_bytes`.

        Raises:
            DatasetError: too little is left.
        """
        if self.vocabulary_bytes is None:
            return self
        left = self.vocabulary_bytes - size_bytes
        count_bytes = min(self.count_bytes, left // self.counted_files)
        if count_bytes < min(self.count_bytes, _LEAST_COUNT_BYTES_BESIDE_VOCABULARIES):
            raise DatasetError(
                f"the vocabularies need {format_bytes(size_bytes)}, --memory-limit leaves {format_bytes(max(0, left))} "
                f"beside them to count the ids of {self.counted_files} files at a time",
                remedy="raise --memory-limit" + (" or lower --jobs" if self.counted_files > 1 else ""),
            )
        return replace(self, count_bytes=count_bytes, merge_bytes=min(self.merge_bytes, left))

    def check_vocabularies(self, sizes: Sequence[tuple[str, int, int]]) -> None:
        """Refuse vocabularies that don't fit, before they are loaded.

        Args:
            sizes: column, rows and bytes of each.

        Raises:
            DatasetError: names the largest.
        """
        total = sum(size for _, _, size in sizes)
        if self.vocabulary_bytes is None or total <= self.vocabulary_bytes:
            return
        largest = sorted(sizes, key=lambda item: -item[2])[:3]
        shown = ", ".join(f"{name} {format_bytes(size)} for {rows:,} rows" for name, rows, size in largest)
        raise DatasetError(
            f"the vocabularies need {format_bytes(total)} (largest: {shown}), --memory-limit leaves "
            f"{format_bytes(self.vocabulary_bytes)} for them",
            remedy="keep fewer ids with a higher --threshold or with --max-rows-per-table, or raise --memory-limit",
        )


def plan_memory(limit_bytes: int | None, *, jobs: int, files: int) -> MemoryPlan:
    """Divide the memory.

    Args:
        limit_bytes: what the process may use, as `--memory-limit`; None: no limit.
        jobs: threads that compute at a time.
        files: input files.

    Raises:
        ConfigError: the limit is too small for these jobs.
    """
    files = files_at_a_time(jobs, files)
    if limit_bytes is None:
        count_bytes = min(_DEFAULT_COUNT_BYTES, host_memory().free_bytes // 2)
        return MemoryPlan(
            count_bytes=max(_LEAST_COUNT_BYTES, count_bytes // files),
            merge_bytes=max(_LEAST_COUNT_BYTES, count_bytes),
            vocabulary_bytes=None,
            counted_files=files,
        )
    used = _resident_bytes() + _FIXED_BYTES + files * _FILE_BYTES + pieces_in_flight(jobs, files) * _PIECE_BYTES
    left = limit_bytes - used
    least = files * _LEAST_COUNT_BYTES
    if left < least:
        raise ConfigError(
            f"--memory-limit {format_bytes(limit_bytes)} is too little for --jobs {jobs}: it takes at least "
            f"{format_bytes(used + least)}",
            remedy="raise the limit or lower --jobs" if jobs > 1 else "raise the limit",
        )
    # The allocator keeps some of what was freed: a tenth and more stays free.
    return MemoryPlan(
        count_bytes=left * 8 // 10 // files,
        merge_bytes=left * 6 // 10,
        vocabulary_bytes=left * 9 // 10,
        counted_files=files,
    )


def _resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
