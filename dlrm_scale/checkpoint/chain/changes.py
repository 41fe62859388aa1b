"""What changed between two checkpoints of a root: rows by table, and the files that hold them.

Where the later chain continues the earlier one, the rows are those that its further deltas name: only ids are read.
Elsewhere (a new baseline, a fork, a merge in between, deltas that replace one another) both are put together, window by
window, and compared.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch

from dlrm_scale.checkpoint.chain.chain import Chain
from dlrm_scale.checkpoint.chain.table_stream import WINDOW_BYTES, TableStream
from dlrm_scale.checkpoint.files.entry_reader import EntryReader
from dlrm_scale.checkpoint.files.format import unreadable
from dlrm_scale.checkpoint.files.manifest import FileRecord, TableRecord
from dlrm_scale.errors import CheckpointError

__all__ = ["Changes", "TableChange", "find_changes"]


@dataclass(frozen=True, kw_only=True)
class TableChange:
    """What changed in one table.

    Attributes:
        name: of the table.
        rows: that it has.
        rows_changed: touched, or different, see `Changes.by`.
        bytes: of it in the files that only the later chain reads.
    """

    name: str
    rows: int
    rows_changed: int
    bytes: int


@dataclass(frozen=True, kw_only=True)
class Changes:
    """What changed between two checkpoints.

    Attributes:
        first, second: their manifests.
        first_step, second_step: their steps.
        by: `ids` counts rows that were saved again, `values` rows whose weight or state differs.
        tables: in the checkpoint's order.
        files: data files that a restore of the second reads and one of the first doesn't.
    """

    first: str
    second: str
    first_step: int
    second_step: int
    by: Literal["ids", "values"]
    tables: tuple[TableChange, ...]
    files: tuple[FileRecord, ...]


def find_changes(first: Chain, second: Chain, *, progress: Callable[[int], None] = lambda size_bytes: None) -> Changes:
    """Compare two checkpoints.

    Takes a byte a row of the largest table, or the memory of two `TableStream`s.

    Args:
        first: the earlier one.
        second: the later one.
        progress: told the bytes read since the last call.

    Raises:
        CheckpointError: their tables differ, or a file is damaged.
    """
    if first.tip.table_schema() != second.tip.table_schema():
        raise CheckpointError(f"{first.name} and {second.name} have different tables")
    known = {file.name for manifest in first.manifests for file in manifest.files}
    files = tuple(file for m in second.manifests for file in m.files if file.name not in known)
    names = [manifest.name for manifest in first.manifests]
    continues = [manifest.name for manifest in second.manifests][: len(names)] == names
    changed = []
    for table in second.tip.tables:
        count = _touched(second, files, table, progress) if continues else _different(first, second, table, progress)
        changed.append(
            TableChange(
                name=table.name,
                rows=table.rows,
                rows_changed=count,
                bytes=sum(
                    t.size_bytes for f in files for e in f.entries if e.table == table.name for t in e.tensors.values()
                ),
            )
        )
    return Changes(
        first=first.name,
        second=second.name,
        first_step=first.step,
        second_step=second.step,
        by="ids" if continues else "values",
        tables=tuple(changed),
        files=files,
    )


def _touched(chain: Chain, files: tuple[FileRecord, ...], table: TableRecord, progress: Callable[[int], None]) -> int:
    touched = torch.zeros(table.rows, dtype=torch.bool)
    for file in files:
        entries = [entry for entry in file.entries if entry.table == table.name and entry.rows]
        for entry in entries:
            if not entry.has_ids:
                touched[entry.row_start : entry.row_end] = True
        named = [entry for entry in entries if entry.has_ids]
        if not named:
            continue
        try:
            with chain.storage.open(file.name) as opened:
                for entry in named:
                    reader = EntryReader(opened, entry)
                    for index in range(reader.blocks):
                        ids = reader.ids(index)
                        assert ids is not None
                        touched[ids] = True
                    progress(entry.tensors["ids"].size_bytes)
        except OSError as error:
            raise unreadable(f"can't open {file.name}: {error}", error, file.name) from error
    return int(touched.sum())


def _different(first: Chain, second: Chain, table: TableRecord, progress: Callable[[int], None]) -> int:
    streams = [TableStream(chain, table, window_bytes=WINDOW_BYTES // 2) for chain in (first, second)]
    count, seen = 0, 0
    for a, b in zip(*streams, strict=True):
        different = (a.weight != b.weight).any(dim=1)
        for name in a.state.keys() | b.state.keys():
            if name not in a.state or name not in b.state:
                raise CheckpointError(
                    f"the row-wise state of table {table.name} has other column splits in {first.name} than in "
                    f"{second.name}"
                )
            unequal = a.state[name] != b.state[name]
            different |= unequal if unequal.dim() == 1 else unequal.any(dim=1)
        count += int(different.sum())
        read = sum(stream.bytes_read for stream in streams)
        progress(read - seen)
        seen = read
    return count
