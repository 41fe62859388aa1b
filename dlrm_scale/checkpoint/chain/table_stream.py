"""Whole tables out of a chain, in order of rows, in bounded memory: what verify and exports read.

    window       rows [0, w)      rows [w, 2w)     ...
    baseline     its blocks that meet the window
    delta 1      its rows with ids in the window, over the baseline's
    delta 2      over both, and so on

Every entry is read from front to back, once for all windows: ids are sorted, and the block that a window ends in is
kept for the next one, as long as all kept blocks together are small enough; otherwise it is read again. Memory is a
window, the kept blocks, and the ids of one block of each entry. Hashes are checked on all that is read.
"""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field

import torch

from dlrm_scale.checkpoint.chain.chain import Chain
from dlrm_scale.checkpoint.files.entry_reader import EntryReader
from dlrm_scale.checkpoint.files.format import DTYPES, unreadable
from dlrm_scale.checkpoint.files.manifest import ITEM_BYTES, EntryRecord, TableRecord
from dlrm_scale.checkpoint.storage.storage import Storage
from dlrm_scale.errors import CheckpointError
from dlrm_scale.units import MIB

__all__ = ["KEPT_BYTES", "WINDOW_BYTES", "StateColumn", "TableBlock", "TableStream", "state_columns"]

WINDOW_BYTES = 64 * MIB
"""Of weights and state that are put together at a time."""

KEPT_BYTES = 256 * MIB
"""Of blocks that more than one window needs."""


@dataclass(frozen=True, kw_only=True)
class StateColumn:
    """One tensor of optimizer state of a whole table.

    Attributes:
        name: as in the schema; with the columns that it belongs to where a row has a value for each column range.
        state: name in the schema.
        dtype: safetensors' name of the type.
        columns: whose values it goes with; `(0, dim)` for all.
        per: `row` for `[rows]`, `element` for `[rows, dim]`.
    """

    name: str
    state: str
    dtype: str
    columns: tuple[int, int]
    per: str


@dataclass(frozen=True, kw_only=True)
class TableBlock:
    """Consecutive rows of a table, as they are at the chain's end. The next block may overwrite it.

    Attributes:
        row_start: of the first row.
        weight: `[rows, dim]` float32.
        state: by `StateColumn.name`; `[rows]` or `[rows, dim]`.
    """

    row_start: int
    weight: torch.Tensor
    state: Mapping[str, torch.Tensor]


def state_columns(chain: Chain, table: TableRecord) -> list[StateColumn]:
    """The optimizer state of a whole table, sorted by name.

    Row-wise state of a column-wise sharded table has one value for each column range.

    Raises:
        CheckpointError: the ranges differ inside the chain, so that no tensor has the state of all rows.
    """
    splits = {manifest.column_splits(table.name) for manifest in chain.manifests}
    by_row = any(state.per == "row" for state in table.state.values())
    if by_row and len(splits) > 1:
        raise CheckpointError(
            f"{chain.name}: the row-wise state of table {table.name} was kept under different column splits",
            remedy="export a checkpoint whose chain has one split, as a new baseline has",
        )
    found = []
    for name, state in table.state.items():
        ranges = sorted(next(iter(splits))) if state.per == "row" else [(0, table.dim)]
        for start, end in ranges:
            suffix = f"[{start}:{end}]" if len(ranges) > 1 else ""
            found.append(
                StateColumn(name=name + suffix, state=name, dtype=state.dtype, columns=(start, end), per=state.per)
            )
    return sorted(found, key=lambda column: column.name)


class TableStream:
    """The rows of one table at the end of a chain.

    Args:
        chain: what to read.
        table: its schema, of the chain's tip.
        window_bytes: about the size of a block.
        kept_bytes: of blocks that are kept from one window to the next.

    Raises:
        CheckpointError: as `state_columns`.
    """

    def __init__(
        self, chain: Chain, table: TableRecord, *, window_bytes: int = WINDOW_BYTES, kept_bytes: int = KEPT_BYTES
    ) -> None:
        self.table = table
        self.state = state_columns(chain, table)
        self.bytes_read = 0
        self._name = chain.name
        self._budget = _Budget(kept_bytes)
        row_bytes = 4 * table.dim + sum(
            ITEM_BYTES[column.dtype] * (table.dim if column.per == "element" else 1) for column in self.state
        )
        self.window_rows = max(1, min(table.rows, window_bytes // row_bytes))
        """Rows of each block but the last."""
        self._entries = [
            [
                _EntryCursor(_LazyFile(chain.storage, file.name, self._count), entry, self._budget)
                for file, entry in entries
            ]
            for manifest in chain.manifests
            if (entries := [(f, e) for f in manifest.files for e in f.entries if e.table == table.name and e.rows])
            or manifest is chain.manifests[0]
        ]

    def __iter__(self) -> Iterator[TableBlock]:
        """Go through all rows, once.

        Raises:
            DamagedFileError: a file is damaged; it is named.
            StorageError: the storage doesn't answer.
            CheckpointError: rows that no file has.
        """
        rows, dim = self.window_rows, self.table.dim
        weight = torch.empty(rows, dim)
        state = {
            column.name: torch.empty((rows, dim) if column.per == "element" else (rows,), dtype=DTYPES[column.dtype])
            for column in self.state
        }
        for start in range(0, self.table.rows, rows):
            count = min(rows, self.table.rows - start)
            block = TableBlock(
                row_start=start, weight=weight[:count], state={name: t[:count] for name, t in state.items()}
            )
            cells = sum(cursor.apply(block, self._targets(block, cursor.entry)) for cursor in self._entries[0])
            if cells != count * dim:
                raise CheckpointError(
                    f"{self._name}: {count * dim - cells} of {count * dim} values of table {self.table.name}, rows "
                    f"{start} to {start + count}, are in no file of its baseline"
                )
            for cursors in self._entries[1:]:
                for cursor in cursors:
                    cursor.apply(block, self._targets(block, cursor.entry))
            yield block

    def _targets(self, block: TableBlock, entry: EntryRecord) -> dict[str, torch.Tensor]:
        """Where an entry's tensors go in a block, by their names."""
        columns = slice(entry.column_start, entry.column_end)
        found = {"weight": block.weight[:, columns]}
        for column in self.state:
            values = block.state[column.name]
            if column.per == "element":
                found[column.state] = values[:, columns]
            elif column.columns == (entry.column_start, entry.column_end):
                found[column.state] = values
        return found

    def _count(self, size_bytes: int) -> None:
        self.bytes_read += size_bytes


@dataclass
class _Budget:
    left_bytes: int


@dataclass
class _LazyFile:
    """A `ReadableFile` that is open only while it is read: a long chain has more files than a process may open."""

    storage: Storage
    name: str
    count: Callable[[int], None]

    def read_into(self, buffer: memoryview, offset_bytes: int) -> None:
        try:
            with self.storage.open(self.name) as file:
                file.read_into(buffer, offset_bytes)
        except OSError as error:
            raise unreadable(f"can't read {self.name}: {error}", error, self.name) from error
        self.count(len(buffer))


@dataclass
class _Held:
    index: int
    values: dict[str, torch.Tensor] = field(default_factory=dict)
    bytes: int = 0


class _EntryCursor:
    """Reads an entry forward, as windows ask for its rows."""

    def __init__(self, file: _LazyFile, entry: EntryRecord, budget: _Budget) -> None:
        self.entry = entry
        self._file = file
        self._reader = EntryReader(file, entry)
        self._budget = budget
        self._index = 0
        self._ids: torch.Tensor | None = None
        self._held = _Held(-1)

    def apply(self, block: TableBlock, targets: Mapping[str, torch.Tensor]) -> int:
        """Copy the rows that lie in a window over what it holds; returns how many values of weights."""
        start, end = block.row_start, block.row_start + len(block.weight)
        cells = 0
        while self._index < self._reader.blocks:
            first, last = self._span()
            if first >= end:
                break
            if last >= start:
                cells += self._copy(start, end, targets, keep=last >= end)
            if last >= end:
                break
            self._release()
            self._index, self._ids = self._index + 1, None
        return cells

    def _span(self) -> tuple[int, int]:
        """First and last row of the current block."""
        first, rows = self._reader.place(self._index)
        if not self.entry.has_ids:
            return self.entry.row_start + first, self.entry.row_start + first + rows - 1
        if self._ids is None:
            ids = self._reader.ids(self._index)
            assert ids is not None
            self._ids = ids.clone()
        return int(self._ids[0]), int(self._ids[-1])

    def _copy(self, start: int, end: int, targets: Mapping[str, torch.Tensor], *, keep: bool) -> int:
        first, rows = self._reader.place(self._index)
        if self._ids is None:
            low = max(start - self.entry.row_start - first, 0)
            high = min(end - self.entry.row_start - first, rows)
            place: torch.Tensor | slice = slice(
                self.entry.row_start + first + low - start, self.entry.row_start + first + high - start
            )
        else:
            low, high = torch.searchsorted(self._ids, torch.tensor([start, end])).tolist()
            place = self._ids[low:high] - start
        if high <= low:
            return 0
        # A reader of its own: its buffers go with it.
        reader = EntryReader(self._file, self.entry)
        for name, target in targets.items():
            part = target[place] if isinstance(place, slice) else None
            if part is not None and high - low == rows and part.is_contiguous() and not self._held.values:
                reader.decoded(name, self._index, into=part)
                continue
            values = self._values(reader, name, keep)[low:high]
            if part is not None:
                part.copy_(values)
            else:
                target[place] = values
        return (high - low) * (self.entry.column_end - self.entry.column_start)

    def _values(self, reader: EntryReader, name: str, keep: bool) -> torch.Tensor:
        if self._held.index == self._index and name in self._held.values:
            return self._held.values[name]
        values = reader.decoded(name, self._index)
        size = values.numel() * values.element_size()
        if keep and size <= self._budget.left_bytes:
            if self._held.index != self._index:
                self._release()
                self._held = _Held(self._index)
            self._held.values[name] = values
            self._held.bytes += size
            self._budget.left_bytes -= size
        return values

    def _release(self) -> None:
        self._budget.left_bytes += self._held.bytes
        self._held = _Held(-1)
