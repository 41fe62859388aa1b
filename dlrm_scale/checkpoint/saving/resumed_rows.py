"""Which rows changed since the baseline of a chain that was resumed from: the ids in its deltas say it exactly.

Row ids are global, so the chain may come from any layout. Only ids are read, 4 bytes a row; a restore has read the same
files just before and checked all of them.
"""

from collections.abc import Sequence

import torch

from dlrm_scale.checkpoint.chain.chain import Chain
from dlrm_scale.checkpoint.files.entry_reader import EntryReader
from dlrm_scale.checkpoint.files.format import unreadable
from dlrm_scale.checkpoint.files.manifest import EntryRecord
from dlrm_scale.checkpoint.storage.storage import ReadableFile
from dlrm_scale.layout import LocalShard

__all__ = ["mark_rows_of_deltas"]


def mark_rows_of_deltas(chain: Chain, shards: Sequence[LocalShard], maps: Sequence[torch.Tensor]) -> None:
    """Set 1 for each row that a delta of the chain holds.

    Args:
        chain: the baseline's rows aren't marked.
        shards: of this rank.
        maps: `[rows]` uint8 of each shard, in their order.

    Raises:
        DamagedFileError: a file is damaged; it is named.
        StorageError: the storage doesn't answer.
    """
    for manifest in chain.manifests[1:]:
        for record in manifest.files:
            wanted = [(entry, met) for entry in record.entries if entry.rows and (met := _met(entry, shards))]
            if not wanted:
                continue
            try:
                with chain.storage.open(record.name) as file:
                    for entry, met in wanted:
                        _mark(file, entry, [(shards[index], maps[index]) for index in met])
            except OSError as error:
                raise unreadable(f"can't open {record.name}: {error}", error, record.name) from error


def _met(entry: EntryRecord, shards: Sequence[LocalShard]) -> list[int]:
    """Indices of the shards that share cells with an entry."""
    regions = [(index, shard.region) for index, shard in enumerate(shards) if shard.region.table == entry.table]
    return [
        index
        for index, r in regions
        if max(r.row_start, entry.row_start) < min(r.row_end, entry.row_end)
        and max(r.column_start, entry.column_start) < min(r.column_end, entry.column_end)
    ]


def _mark(file: ReadableFile, entry: EntryRecord, targets: Sequence[tuple[LocalShard, torch.Tensor]]) -> None:
    if not entry.has_ids:
        for shard, marks in targets:
            low = max(shard.region.row_start, entry.row_start) - shard.region.row_start
            high = min(shard.region.row_end, entry.row_end) - shard.region.row_start
            marks[low:high] = 1
        return
    reader = EntryReader(file, entry)
    for index in range(reader.blocks):
        ids = reader.ids(index)
        assert ids is not None
        for shard, marks in targets:
            held = ids[(ids >= shard.region.row_start) & (ids < shard.region.row_end)] - shard.region.row_start
            marks.index_fill_(0, held.to(marks.device), 1)
