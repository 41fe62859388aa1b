"""Puts a chain's rows into the shards of any layout.

Row ids are global. Every stored entry is read in blocks, intersected with each local shard's rows and columns, and
copied; the baseline first, then each delta. A rank reads only blocks that it needs (and all ids before them), holds a
few blocks at a time, and checks the hash of each.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch

from dlrm_scale.checkpoint.chain.chain import Chain
from dlrm_scale.checkpoint.chain.schema_match import SchemaChanges, check_row_state, check_schema
from dlrm_scale.checkpoint.files.entry_reader import EntryReader
from dlrm_scale.checkpoint.files.format import BlockReader, unreadable
from dlrm_scale.checkpoint.files.live_tables import check_regions
from dlrm_scale.checkpoint.files.manifest import EntryRecord, FileRecord, Manifest
from dlrm_scale.checkpoint.storage.storage import ReadableFile, Storage
from dlrm_scale.layout import LocalShard, ShardLayout

__all__ = ["Restored", "restore"]


@dataclass(frozen=True, kw_only=True)
class Restored:
    """What a checkpoint holds besides the tables' rows, which are in the shards now.

    Attributes:
        step: steps done.
        rows_consumed: training rows used, if the trainer said.
        cursor: position in the data.
        dense: dense tensors by name, on CPU.
        rank_state: this rank's own tensors; None on another number of ranks.
        extra: the trainer's JSON.
        changes: tables and rows that the checkpoint has no values for; they are left as they were.
        bytes_read: by this rank.
    """

    step: int
    rows_consumed: int | None
    cursor: dict[str, Any]
    dense: dict[str, torch.Tensor]
    rank_state: dict[str, torch.Tensor] | None
    extra: dict[str, Any]
    changes: SchemaChanges
    bytes_read: int


def restore(
    chain: Chain,
    *,
    layout: ShardLayout,
    shards: Sequence[LocalShard],
    rank: int,
    ranks: int,
    optimizer: str,
    allow_split_row_state: bool = False,
    allow_new_tables: bool = False,
    allow_resized_tables: bool = False,
) -> Restored:
    """Fill this rank's shards, weights and optimizer state, from a chain written under any layout.

    Needs no other rank. After an error the shards hold a mixture: don't train on, restore another chain into them.

    Args:
        chain: from `find_chain` or `open_chain`.
        layout: today's layout.
        shards: this rank's live shards.
        rank: this rank.
        ranks: how many there are.
        optimizer: name of the tables' optimizer.
        allow_split_row_state: where the column split has changed, give a shard the mean of the row-wise state of
            the old shards, weighted by common columns. That isn't the state another split would have had.
        allow_new_tables: leave tables alone that the checkpoint hasn't.
        allow_resized_tables: of a table with more rows now leave the last ones alone, of one with fewer drop the last.

    Raises:
        CheckpointError: tables or optimizer state don't match (all are listed), or row-wise state can't be carried
            over; nothing is written then. Or the storage doesn't answer.
        DamagedFileError: a file is damaged; it is named.
        ValueError: the shards aren't those of the layout.
    """
    check_regions(layout, shards, rank)
    changes = check_schema(
        chain.tip,
        layout,
        shards,
        optimizer,
        allow_new_tables=allow_new_tables,
        allow_resized_tables=allow_resized_tables,
    )
    resplit = check_row_state(chain.manifests, layout, allowed=allow_split_row_state)
    targets: dict[str, list[_Target]] = {}
    for shard in shards:
        if shard.region.rows and shard.region.columns:
            table = shard.region.table
            targets.setdefault(table, []).append(_Target(shard, resplit=table in resplit))
    reader = _Restorer(chain.storage, targets)
    for manifest in chain.manifests:
        for file in manifest.files:
            reader.apply(file)
    for target in (t for found in targets.values() for t in found):
        target.finish()
    dense_file = next(file for file in chain.tip.files if file.role == "dense")
    dense = reader.read_tensors(dense_file)
    rank_state = None
    if chain.tip.ranks == ranks:
        rank_state = reader.read_tensors(_rank_file(chain.tip, rank))
    return Restored(
        step=chain.tip.step,
        rows_consumed=chain.tip.rows_consumed,
        cursor=chain.tip.cursor,
        dense=dense,
        rank_state=rank_state,
        extra=chain.tip.extra,
        changes=changes,
        bytes_read=reader.bytes_read,
    )


@dataclass
class _Target:
    """A local shard to be filled.

    With `resplit`, one value a row that belongs to other column ranges is collected for each of them and combined
    at the end.
    """

    shard: LocalShard
    resplit: bool
    collected: dict[tuple[str, int, int], torch.Tensor] = field(default_factory=dict)

    def meets(self, entry: EntryRecord) -> bool:
        region = self.shard.region
        rows = max(region.row_start, entry.row_start) < min(region.row_end, entry.row_end)
        columns = max(region.column_start, entry.column_start) < min(region.column_end, entry.column_end)
        return rows and columns

    def put(self, name: str, entry: EntryRecord, place: "_Place", block: torch.Tensor) -> None:
        region = self.shard.region
        live = (self.shard.weight if name == "weight" else self.shard.state[name]).detach()
        if block.dim() == 2:
            low = max(region.column_start, entry.column_start)
            high = min(region.column_end, entry.column_end)
            block = block[:, low - entry.column_start : high - entry.column_start]
            live = live[:, low - region.column_start : high - region.column_start]
        elif self.resplit:
            key = (name, entry.column_start, entry.column_end)
            if key not in self.collected:
                self.collected[key] = torch.zeros(region.rows, dtype=block.dtype)
            live = self.collected[key]
        place.copy(block, live)

    def direct(self, name: str, entry: EntryRecord, place: "_Place", rows: int) -> torch.Tensor | None:
        """The live rows that a block may be read into without a copy: the same columns, in one piece, on CPU."""
        region = self.shard.region
        same_columns = (region.column_start, region.column_end) == (entry.column_start, entry.column_end)
        live = (self.shard.weight if name == "weight" else self.shard.state[name]).detach()
        collected = self.resplit and live.dim() == 1
        if not same_columns or collected or place.ids_local is not None or place.block_end - place.block_start != rows:
            return None
        part = live[place.shard_start : place.shard_start + rows]
        return part if part.is_contiguous() and part.device.type == "cpu" else None

    def finish(self) -> None:
        region = self.shard.region
        for name, state in self.shard.state.items():
            parts = {key: values for key, values in self.collected.items() if key[0] == name}
            if not parts:
                continue
            total = torch.zeros(region.rows, dtype=state.dtype)
            for (_, start, end), values in parts.items():
                common = min(end, region.column_end) - max(start, region.column_start)
                total += values * (common / region.columns)
            state.detach().copy_(total)


@dataclass(frozen=True)
class _Place:
    """Which rows of a block go where in a shard: a contiguous run, or rows by id."""

    block_start: int
    block_end: int
    shard_start: int
    ids_local: torch.Tensor | None

    def copy(self, block: torch.Tensor, live: torch.Tensor) -> None:
        part = block[self.block_start : self.block_end]
        if self.ids_local is None:
            live[self.shard_start : self.shard_start + len(part)].copy_(part)
        else:
            live.index_copy_(0, self.ids_local.to(live.device), part.to(live.device))


class _CountedFile:
    """A `ReadableFile` that counts what is read."""

    def __init__(self, file: ReadableFile) -> None:
        self._file = file
        self.name = file.name
        self.bytes_read = 0

    def read_into(self, buffer: memoryview, offset_bytes: int) -> None:
        self._file.read_into(buffer, offset_bytes)
        self.bytes_read += len(buffer)


class _Restorer:
    def __init__(self, storage: Storage, targets: dict[str, list[_Target]]) -> None:
        self._storage = storage
        self._targets = targets
        self.bytes_read = 0

    def apply(self, record: FileRecord) -> None:
        """Copy what a file holds for the targets."""
        wanted = []
        for entry in record.entries:
            met = [target for target in self._targets.get(entry.table, ()) if target.meets(entry)]
            if met and entry.rows:
                wanted.append((entry, met))
        if not wanted:
            return
        with self._opened(record.name) as file:
            for entry, met in wanted:
                self._apply_entry(file, entry, met)

    def read_tensors(self, record: FileRecord) -> dict[str, torch.Tensor]:
        """Read a file's named tensors."""
        with self._opened(record.name) as file:
            return {name: BlockReader(file, tensor).read() for name, tensor in record.tensors.items()}

    @contextmanager
    def _opened(self, name: str) -> Iterator["_CountedFile"]:
        try:
            with self._storage.open(name) as file:
                counted = _CountedFile(file)
                yield counted
                self.bytes_read += counted.bytes_read
        except OSError as error:
            raise unreadable(f"can't open {name}: {error}", error, name) from error

    def _apply_entry(self, file: ReadableFile, entry: EntryRecord, targets: Sequence[_Target]) -> None:
        reader = EntryReader(file, entry)
        for index in range(reader.blocks):
            start, rows = reader.place(index)
            ids = reader.ids(index)
            places = [(t, _place(t, entry.row_start + start, rows, ids)) for t in targets]
            places = [(t, place) for t, place in places if place.block_end > place.block_start]
            if not places:
                continue
            for name in reader.names:
                if len(places) == 1:
                    live = places[0][0].direct(name, entry, places[0][1], rows)
                    if live is not None:
                        reader.decoded(name, index, into=live)
                        continue
                block = reader.decoded(name, index)
                for target, place in places:
                    target.put(name, entry, place, block)


def _place(target: _Target, first_row: int, rows: int, ids: torch.Tensor | None) -> _Place:
    region = target.shard.region
    if ids is None:
        low = max(region.row_start, first_row)
        high = max(low, min(region.row_end, first_row + rows))
        return _Place(low - first_row, high - first_row, low - region.row_start, None)
    bounds = torch.tensor([region.row_start, region.row_end])
    low, high = torch.searchsorted(ids, bounds).tolist()
    return _Place(low, high, 0, ids[low:high] - region.row_start)


def _rank_file(manifest: Manifest, rank: int) -> FileRecord:
    return next(file for file in manifest.files if file.role == "rank" and file.rank == rank)
