"""How much memory a merge of some manifests takes, and how many of them fit."""

from collections.abc import Sequence

from dlrm_scale.checkpoint.files.manifest import EntryRecord, Manifest
from dlrm_scale.checkpoint.upkeep.merge_rows import Rows

__all__ = ["MOST_MANIFESTS", "fitting", "merge_memory_bytes"]

MOST_MANIFESTS = 200
"""Merged at a time. Each has up to four files open at once: two neighbours of a table, each with exact rows beside
encoded ones; a process may have 1,024."""


def merge_memory_bytes(manifests: Sequence[Manifest]) -> int:
    """What a merge holds at a time, at most: of each manifest the blocks at the border of two entries, and its own.

    Tables are merged one after another, so the one that needs most counts.
    """
    most = 0
    for table in manifests[-1].tables:
        whole = Rows(table=table, row_start=0, row_end=table.rows, column_start=0, column_end=table.dim)
        blocks = sum(
            2 * max((_block_bytes(e) for f in m.files for e in f.entries if e.table == table.name), default=0)
            for m in manifests
        )
        most = max(most, blocks + min(table.rows, whole.block_rows) * (3 * whole.row_bytes + 24))
    dense = max((t.size_bytes for f in manifests[-1].files for t in f.tensors.values()), default=0)
    return max(most, dense)


def fitting(manifests: Sequence[Manifest], memory_limit_bytes: int) -> int:
    """How many of the manifests, from the first on, can be merged at a time."""
    count = min(len(manifests), MOST_MANIFESTS)
    if merge_memory_bytes(manifests[:count]) <= memory_limit_bytes:
        return count
    low = 0
    while low < count:
        middle = (low + count + 1) // 2
        if merge_memory_bytes(manifests[:middle]) <= memory_limit_bytes:
            low = middle
        else:
            count = middle - 1
    return low


def _block_bytes(entry: EntryRecord) -> int:
    """Of a tensor's block as read, decoded, and its ids."""
    rows = min(entry.rows, entry.block_rows)
    tensors = [tensor for name, tensor in entry.tensors.items() if name != "ids"]
    widest = max((tensor.size_bytes // max(1, entry.rows) for tensor in tensors), default=0)
    decoded = 4 * (entry.column_end - entry.column_start) if any(t.codec != "none" for t in tensors) else 0
    return rows * (widest + decoded + (20 if entry.has_ids else 8))
