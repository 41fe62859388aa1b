"""What a save writes of this rank's tables, frozen in host memory: the only part of a save that stalls training.

A snapshot larger than the staging memory is not copied. It is written straight from the live tensors, block by block,
before training goes on: a longer stall instead of a second copy of the tables.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import torch

from dlrm_scale.checkpoint.files.finite_values import finite_blocks
from dlrm_scale.checkpoint.files.format import BLOCK_BYTES, TensorSource, WrittenFile
from dlrm_scale.checkpoint.files.manifest import EntryRecord
from dlrm_scale.checkpoint.files.quantize import encoded_source, lossy_rows
from dlrm_scale.checkpoint.saving.staging import HostStaging, padded_bytes
from dlrm_scale.layout import LocalShard, ShardLayout

__all__ = [
    "DENSE_TOUCH_SHARE",
    "ShardSnapshot",
    "choose_rows",
    "staging_bytes",
]

DENSE_TOUCH_SHARE = 0.9
"""A shard touched in more than this share of its rows is written whole, without ids."""

_MAP_BLOCK_ROWS = 1 << 20
"""Rows of a map that are turned into ids at a time; 2**18 takes a third longer, 2**22 a fifth less (20 M rows, CPU)."""


@dataclass(frozen=True, kw_only=True)
class ShardSnapshot:
    """The rows of one local shard that a save writes.

    Attributes:
        shard: the live shard.
        ids_local: sorted CPU ids in the shard, int32 where they fit, else int64; None for all rows.
        table_rows: rows of the whole table.
        tensors: host copies by name (weight and optimizer state); None while the live tensors are meant.
        places: `[rows]` int32 or int64, which of the copied rows are meant; None for all of them.
        codecs: how tensors are stored, by name; those that aren't named are stored as they are.
    """

    shard: LocalShard
    ids_local: torch.Tensor | None
    table_rows: int
    tensors: Mapping[str, torch.Tensor] | None = None
    places: torch.Tensor | None = None
    codecs: Mapping[str, str] = field(default_factory=dict)

    @property
    def rows(self) -> int:
        """Rows to be written."""
        return self.shard.region.rows if self.ids_local is None else len(self.ids_local)

    @property
    def block_rows(self) -> int:
        """Rows in a block of about `BLOCK_BYTES` of weights."""
        return max(1, BLOCK_BYTES // (self.shard.region.columns * self.shard.weight.element_size()))

    @property
    def staging_bytes(self) -> int:
        """What `copy_to` takes of the staging memory."""
        live_tensors = _live_tensors(self.shard).values()
        return sum(padded_bytes((self.rows, *live.shape[1:]), live.dtype) for live in live_tensors)

    def copy_to(self, staging: HostStaging) -> "ShardSnapshot":
        """Copy the rows and their state to host memory; once `staging.settle` returns training may change them."""
        copies = {}
        for name, live in _live_tensors(self.shard).items():
            target = staging.take((self.rows, *live.shape[1:]), live.dtype)
            if self.ids_local is None:
                staging.fill(target, live)
            else:
                _gather(live, self.ids_local, target, self.block_rows, staging)
            copies[name] = target
        return ShardSnapshot(shard=self.shard, ids_local=self.ids_local, table_rows=self.table_rows, tensors=copies)

    def encoded(self, rows_codec: str, state_codec: str, progress: Callable[[], None]) -> list["ShardSnapshot"]:
        """Have the rows stored encoded, and those that would lose too much apart from them, as they are.

        Reads all rows once and calls `progress` after each block; what will be written is this snapshot's memory still.
        """
        live = _live_tensors(self.shard)
        codecs = {name: rows_codec if name == "weight" else state_codec for name in live}
        codecs = {n: codec for n, codec in codecs.items() if codec != "none" and live[n].dtype == torch.float32}
        exact = torch.zeros(self.rows, dtype=torch.bool)
        for name, codec in codecs.items():
            start = 0
            for block in self._blocks(name):
                exact[start : start + len(block)] |= lossy_rows(codec, block)
                start += len(block)
                progress()
        if not exact.any():
            return [replace(self, codecs=codecs)]
        return [replace(self._part(~exact), codecs=codecs), self._part(exact)]

    def _part(self, chosen: torch.Tensor) -> "ShardSnapshot":
        places = _ids_of(chosen, int(torch.count_nonzero(chosen)))
        ids = places if self.ids_local is None else self.ids_local.index_select(0, places)
        return replace(self, ids_local=ids, places=places if self.tensors is not None else None)

    def sources(self) -> list[TensorSource]:
        """The tensors to be written, ids included."""
        found = []
        for name, live in _live_tensors(self.shard).items():
            source = TensorSource(
                name=self._tensor_name(name),
                dtype=live.dtype,
                shape=(self.rows, *live.shape[1:]),
                blocks=partial(self._checked_blocks, name),
            )
            codec = self.codecs.get(name, "none")
            found.append(source if codec == "none" else encoded_source(source, codec))
        if self.ids_local is not None:
            dtype = torch.int32 if self.table_rows < 2**31 else torch.int64
            name = self._tensor_name("ids")
            found.append(
                TensorSource(name=name, dtype=dtype, shape=(self.rows,), blocks=partial(self._id_blocks, dtype))
            )
        return found

    def record(self, written: WrittenFile) -> EntryRecord:
        """Describe the rows in the written file."""
        region = self.shard.region
        names = [*_live_tensors(self.shard), *(["ids"] if self.ids_local is not None else [])]
        return EntryRecord(
            table=region.table,
            row_start=region.row_start,
            row_end=region.row_end,
            column_start=region.column_start,
            column_end=region.column_end,
            rows=self.rows,
            has_ids=self.ids_local is not None,
            block_rows=self.block_rows,
            tensors={name: written.tensors[self._tensor_name(name)] for name in names},
        )

    def _tensor_name(self, name: str) -> str:
        r = self.shard.region
        encoded = "encoded." if self.codecs else ""
        return f"{r.table}[{r.row_start}:{r.row_end},{r.column_start}:{r.column_end}].{encoded}{name}"

    def _id_blocks(self, dtype: torch.dtype) -> Iterator[torch.Tensor]:
        if self.ids_local is not None:
            for ids in torch.split(self.ids_local, self.block_rows):
                yield ids.to(dtype) + self.shard.region.row_start

    def _checked_blocks(self, name: str) -> Iterator[torch.Tensor]:
        return finite_blocks(self._blocks(name), partial(self._place, name))

    def _place(self, name: str, row: int, column: int) -> str:
        region = self.shard.region
        row_global = region.row_start + (row if self.ids_local is None else int(self.ids_local[row]))
        if _live_tensors(self.shard)[name].dim() == 1:
            return f"table {region.table}: {name} of row {row_global}"
        return f"table {region.table}: {name} of row {row_global}, column {region.column_start + column},"

    def _blocks(self, name: str) -> Iterator[torch.Tensor]:
        size = self.block_rows
        if self.tensors is not None and self.places is not None:
            for places in torch.split(self.places, size):
                yield self.tensors[name].index_select(0, places)
            return
        if self.tensors is not None:
            yield from torch.split(self.tensors[name], size)
            return
        live = _live_tensors(self.shard)[name]
        for start in range(0, self.rows, size):
            if self.ids_local is None:
                block = live[start : start + size]
            else:
                block = live.index_select(0, self.ids_local[start : start + size].to(live.device))
            yield block.cpu().contiguous()


def choose_rows(
    layout: ShardLayout, shards: Sequence[LocalShard], touched: Sequence[torch.Tensor] | None, rank: int
) -> list[ShardSnapshot]:
    """Decide what this rank writes: its non-empty shards, and the replicated tables on rank 0.

    Args:
        layout: all tables.
        shards: the rank's shards.
        touched: `[rows]` uint8 map of each shard, as `TouchedRows.freeze` returns them, or None for a baseline.
        rank: this rank.
    """
    rows = {table.spec.name: table.spec.rows for table in layout.tables}
    chosen = []
    for index, shard in enumerate(shards):
        if not (shard.region.rows and shard.region.columns) or (shard.replicated and rank != 0):
            continue
        ids = None
        if touched is not None:
            count = int(torch.count_nonzero(touched[index]))
            if count <= DENSE_TOUCH_SHARE * shard.region.rows:
                ids = _ids_of(touched[index], count)
        chosen.append(ShardSnapshot(shard=shard, ids_local=ids, table_rows=rows[shard.region.table]))
    return chosen


def staging_bytes(chosen: Sequence[ShardSnapshot]) -> int:
    """Staging memory that copies of these rows and their state take; their ids are held besides."""
    return sum(snapshot.staging_bytes for snapshot in chosen)


def _ids_of(touched: torch.Tensor, count: int) -> torch.Tensor:
    """The sorted places of the `count` marks of a map, on CPU; `nonzero` of a whole map takes 8 bytes a mark more."""
    ids = torch.empty(count, dtype=torch.int32 if touched.numel() < 2**31 else torch.int64)
    done = 0
    for start in range(0, touched.numel(), _MAP_BLOCK_ROWS):
        found = touched[start : start + _MAP_BLOCK_ROWS].nonzero().squeeze(1).add_(start)
        ids[done : done + len(found)].copy_(found)
        done += len(found)
    return ids


def _live_tensors(shard: LocalShard) -> dict[str, torch.Tensor]:
    return {"weight": shard.weight.detach(), **{name: state.detach() for name, state in shard.state.items()}}


def _gather(live: torch.Tensor, ids: torch.Tensor, target: torch.Tensor, block_rows: int, staging: HostStaging) -> None:
    if live.device.type == "cpu":
        torch.index_select(live, 0, ids, out=target)
        return
    for start in range(0, len(ids), block_rows):
        part = ids[start : start + block_rows].to(live.device)
        staging.fill(target[start : start + block_rows], live.index_select(0, part))
