"""Merges the rows of one rectangle of one table out of many manifests, in bounded memory.

    oldest   o o o o o o o o o o o o      a baseline: all rows
             . x . . x x . . . . x .      deltas: sorted ids
             . . . y y . . . y . . .
    merged   o x o y y x o o y o x o      the newest wins, weights and optimizer state together

Rows are made window by window: as many rows as a block has, from the rows of all entries in a range of ids. An entry
is read once from front to back for each of its tensors, a block at a time, and every block is checked against its hash;
its ids are read once more to count. So memory holds one block of each entry and the one that is made.

A merged baseline has decoded values. A merged delta has stored ones, copied as they are: rows that are encoded in
another way than their neighbours go into an entry of their own.

Shapes: n rows of a block, C columns of the rectangle.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field

import torch

from dlrm_scale.checkpoint.files.codec import SCALE_BIAS_BYTES, stored_form
from dlrm_scale.checkpoint.files.entry_reader import EntryReader
from dlrm_scale.checkpoint.files.format import BLOCK_BYTES, DTYPES, TensorSource, WrittenFile, unreadable
from dlrm_scale.checkpoint.files.manifest import (
    ITEM_BYTES,
    EntryRecord,
    ErrorRecord,
    FileRecord,
    TableRecord,
)
from dlrm_scale.checkpoint.storage.storage import Storage

__all__ = ["Rows", "RowsMerge"]

_WINDOW_ROWS = 1 << 20
"""Range of ids of a window at most, two bytes each."""


_Form = tuple[tuple[str, str], ...]
"""Codec of each tensor by name."""


@dataclass(frozen=True, kw_only=True)
class Rows:
    """A rectangle of a table."""

    table: TableRecord
    row_start: int
    row_end: int
    column_start: int
    column_end: int

    @property
    def block_rows(self) -> int:
        """Rows in a block of about `BLOCK_BYTES` of weights."""
        return max(1, BLOCK_BYTES // (4 * (self.column_end - self.column_start)))

    @property
    def row_bytes(self) -> int:
        """Bytes of the weight and state of one row, not encoded."""
        columns = self.column_end - self.column_start
        state = [ITEM_BYTES[s.dtype] * (1 if s.per == "row" else columns) for s in self.table.state.values()]
        return 4 * columns + sum(state)

    @property
    def size_bytes(self) -> int:
        """Bytes of all its rows."""
        return (self.row_end - self.row_start) * self.row_bytes

    def meets(self, entry: EntryRecord) -> bool:
        """Whether an entry has rows of it. Column ranges are cut so that it then has all of its columns."""
        rows = max(self.row_start, entry.row_start) < min(self.row_end, entry.row_end)
        columns = entry.column_start <= self.column_start and self.column_end <= entry.column_end
        return entry.table == self.table.name and rows and columns and entry.rows > 0


@dataclass
class _Output:
    """Rows of one form: an entry of the merged manifest."""

    form: _Form
    rows: int = 0
    has_ids: bool = True


@dataclass(frozen=True)
class _Piece:
    """Rows of a block of one entry that lie in a window."""

    cursor: "_Cursor"
    index: int
    start: int
    end: int
    ids: torch.Tensor


@dataclass(kw_only=True)
class RowsMerge:
    """One rectangle to be merged. `count` first, then `sources`, then `records`.

    Args:
        storage: where the data is.
        rows: the rectangle.
        found: entries that have rows of it and their files, oldest manifest first.
        decodes: they start with a baseline, so the result has all rows, decoded.
    """

    storage: Storage
    rows: Rows
    found: Sequence[tuple[FileRecord, EntryRecord]]
    decodes: bool
    _outputs: list[_Output] = field(default_factory=list, init=False)
    _windows: list[int] = field(default_factory=list, init=False)

    def count(self, progress: Callable[[], None]) -> None:
        """Read the ids and find how many rows the result has, and where its blocks begin.

        Raises:
            DamagedFileError: a file is damaged; it is named.
            StorageError: the storage doesn't answer.
        """
        rows = self.rows
        if self.decodes:
            self._outputs = [_Output(self._form(None), rows.row_end - rows.row_start, has_ids=False)]
            self._windows = [*range(rows.row_start, rows.row_end, rows.block_rows), rows.row_end]
            return
        forms = list(dict.fromkeys(self._form(entry) for _, entry in self.found)) or [self._form(None)]
        counts = torch.zeros(len(forms), dtype=torch.int64)
        with self._cursors() as cursors:
            for low in range(rows.row_start, rows.row_end, _WINDOW_ROWS):
                high = min(low + _WINDOW_ROWS, rows.row_end)
                newest = torch.zeros(high - low, dtype=torch.int16)
                for cursor in cursors:
                    for piece in cursor.pieces(low, high):
                        newest[piece.ids - low] = 1 + forms.index(cursor.form)
                counts += torch.bincount(newest, minlength=len(forms) + 1)[1:]
                begins = newest.nonzero().squeeze(1)[rows.block_rows :: rows.block_rows]
                self._windows += [low, *(low + begins).tolist()]
                progress()
        self._windows.append(rows.row_end)
        whole = int(counts.max()) == rows.row_end - rows.row_start
        outputs = [_Output(f, int(n), has_ids=not whole) for f, n in zip(forms, counts, strict=True) if int(n)]
        self._outputs = outputs or [_Output(forms[0])]

    def sources(self) -> list[TensorSource]:
        """The tensors of the merged rows, to be written into one file."""
        found = []
        for number, output in enumerate(self._outputs):
            for name, codec in output.form:
                dtype, shape = self._stored(output, name, codec)
                source = TensorSource(
                    name=self._tensor_name(number, name),
                    dtype=DTYPES[dtype],
                    shape=shape,
                    blocks=lambda o=output, n=name: self._blocks(o, n),  # type: ignore[misc]
                    codec=codec,
                    measured=None if codec == "none" else lambda o=output, n=name: self._error(o, n),  # type: ignore[misc]
                )
                found.append(source)
            if output.has_ids:
                dtype_ids = torch.int32 if self.rows.table.rows < 2**31 else torch.int64
                source = TensorSource(
                    name=self._tensor_name(number, "ids"),
                    dtype=dtype_ids,
                    shape=(output.rows,),
                    blocks=lambda o=output, d=dtype_ids: (ids.to(d) for ids in self._blocks(o, "ids")),  # type: ignore[misc]
                )
                found.append(source)
        return found

    def records(self, written: WrittenFile) -> list[EntryRecord]:
        """Describe the rows in the written file."""
        rows = self.rows
        return [
            EntryRecord(
                table=rows.table.name,
                row_start=rows.row_start,
                row_end=rows.row_end,
                column_start=rows.column_start,
                column_end=rows.column_end,
                rows=output.rows,
                has_ids=output.has_ids,
                block_rows=rows.block_rows,
                tensors={
                    name: written.tensors[self._tensor_name(number, name)]
                    for name in [*(name for name, _ in output.form), *(["ids"] if output.has_ids else [])]
                },
            )
            for number, output in enumerate(self._outputs)
        ]

    def _form(self, entry: EntryRecord | None) -> _Form:
        names = ["weight", *self.rows.table.state]
        if entry is None or self.decodes:
            return tuple((name, "none") for name in names)
        return tuple((name, entry.tensors[name].codec) for name in names)

    def _stored(self, output: _Output, name: str, codec: str) -> tuple[str, tuple[int, ...]]:
        columns = self.rows.column_end - self.rows.column_start
        state = self.rows.table.state.get(name)
        shape = (output.rows,) if state is not None and state.per == "row" else (output.rows, columns)
        form = stored_form(codec, "F32" if state is None else state.dtype, shape)
        assert form is not None, (codec, name)
        return form

    def _error(self, output: _Output, name: str) -> ErrorRecord:
        """No value has lost more than the worst of those copied."""
        errors = [e.tensors[name].error for _, e in self.found if self._form(e) == output.form]
        known = [error for error in errors if error is not None]
        return ErrorRecord(
            max_absolute=max((error.max_absolute for error in known), default=0.0),
            mean_absolute=max((error.mean_absolute for error in known), default=0.0),
        )

    def _tensor_name(self, number: int, name: str) -> str:
        r = self.rows
        part = f"part{number}." if number else ""
        return f"{r.table.name}[{r.row_start}:{r.row_end},{r.column_start}:{r.column_end}].{part}{name}"

    def _blocks(self, output: _Output, name: str) -> Iterator[torch.Tensor]:
        """Blocks of `block_rows` rows of a tensor; of the ids for the name `ids`."""
        size, held = self.rows.block_rows, 0
        parts: list[torch.Tensor] = []
        for part in self._parts(output, name):
            if len(part) == size and not held:
                yield part
                continue
            parts.append(part)
            held += len(part)
            if held >= size:
                joined = torch.cat(parts)
                yield joined[:size]
                parts, held = [joined[size:].clone()], held - size
        if held:
            yield torch.cat(parts)

    def _parts(self, output: _Output, name: str) -> Iterator[torch.Tensor]:
        with self._cursors(None if name == "ids" else name) as cursors:
            for low, high in zip(self._windows, self._windows[1:], strict=False):
                block = self._window(cursors, output, name, low, high)
                if len(block):
                    yield block

    def _window(self, cursors: list["_Cursor"], output: _Output, name: str, low: int, high: int) -> torch.Tensor:
        pieces = [piece for cursor in cursors for piece in cursor.pieces(low, high)]
        ids = torch.empty(0, dtype=torch.int64)
        if output.has_ids:
            newest = torch.zeros(high - low, dtype=torch.bool)
            for piece in pieces:
                newest[piece.ids - low] = piece.cursor.form == output.form
            ids = newest.nonzero().squeeze(1) + low
        if name == "ids":
            return ids
        rows = len(ids) if output.has_ids else high - low
        made: torch.Tensor | None = None
        for piece in pieces:
            if piece.cursor.form != output.form:
                continue
            values = piece.cursor.values(piece)
            if made is None:
                made = torch.empty((rows, *values.shape[1:]), dtype=values.dtype)
            if not output.has_ids:
                first = int(piece.ids[0]) - low
                if int(piece.ids[-1]) - low - first + 1 == len(values):
                    made[first : first + len(values)].copy_(values)
                else:
                    made.index_copy_(0, piece.ids - low, values)
                continue
            places = torch.searchsorted(ids, piece.ids).clamp_(max=max(0, len(ids) - 1))
            there = ids[places] == piece.ids if len(ids) else torch.zeros(len(piece.ids), dtype=torch.bool)
            made.index_copy_(0, places[there], values[there])
        return made if made is not None else torch.empty(0)

    @contextmanager
    def _cursors(self, name: str | None = None) -> Iterator[list["_Cursor"]]:
        cursors = [
            _Cursor(self.storage, record.name, entry, self.rows, self._form(entry), name, self.decodes)
            for record, entry in self.found
        ]
        try:
            yield cursors
        finally:
            for cursor in cursors:
                cursor.close()


class _Cursor:
    """Goes through the rows of an entry that lie in the rectangle, from front to back.

    Its file is open, and it holds memory, from its first row to the window after its last.
    """

    def __init__(
        self, storage: Storage, file: str, entry: EntryRecord, rows: Rows, form: _Form, name: str | None, decodes: bool
    ) -> None:
        self.form = form
        self._storage = storage
        self._file = file
        self._entry = entry
        self._name = name
        self._decodes = decodes
        self._columns = (rows.column_start - entry.column_start, rows.column_end - entry.column_start)
        self._all_columns = self._columns == (0, entry.column_end - entry.column_start)
        self._index = 0
        if not entry.has_ids:
            self._index = max(0, rows.row_start - entry.row_start) // entry.block_rows
        self._stack = ExitStack()
        self._reader: EntryReader | None = None
        self._ids: torch.Tensor | None = None
        self._values: tuple[int, torch.Tensor] | None = None

    def close(self) -> None:
        """Close the file and give the memory back."""
        self._stack.close()
        self._reader = self._ids = self._values = None

    def _open(self) -> EntryReader:
        if self._reader is None:
            try:
                file = self._stack.enter_context(self._storage.open(self._file))
            except OSError as error:
                raise unreadable(f"can't open {self._file}: {error}", error, self._file) from error
            self._reader = EntryReader(file, self._entry)
        return self._reader

    def pieces(self, low: int, high: int) -> Iterator[_Piece]:
        """Rows with ids in `[low, high)`; windows are asked for in order."""
        entry = self._entry
        blocks = -(-entry.rows // entry.block_rows)
        if self._index >= blocks:
            self.close()
        if high <= entry.row_start:
            return
        while self._index < blocks:
            if self._ids is None:
                ids = self._open().ids(self._index)
                # A copy: the reader's memory holds the next block's ids before this window is done.
                self._ids = self._range() if ids is None else ids.clone()
            start, end = torch.searchsorted(self._ids, torch.tensor([low, high])).tolist()
            if start < end:
                yield _Piece(self, self._index, start, end, self._ids[start:end])
            if end < len(self._ids):
                return
            self._index, self._ids = self._index + 1, None

    def _range(self) -> torch.Tensor:
        start, rows = self._open().place(self._index)
        first = self._entry.row_start + start
        return torch.arange(first, first + rows)

    def values(self, piece: _Piece) -> torch.Tensor:
        """The tensor's values in a piece, decoded or as stored; `[n]` or `[n, columns]`, valid until the next call."""
        assert self._name is not None
        if self._values is None or self._values[0] != piece.index:
            reader = self._open()
            read = reader.decoded if self._decodes else reader.encoded
            self._values = (piece.index, read(self._name, piece.index))
        values = self._values[1][piece.start : piece.end]
        if self._all_columns or values.dim() == 1:
            return values
        low, high = self._columns
        if not self._decodes and dict(self.form)[self._name] == "int8_rows":
            return torch.cat([values[:, low:high], values[:, -SCALE_BIAS_BYTES:]], dim=1)
        return values[:, low:high]
