"""The manifest: one JSON file whose existence under its final name is the commit of a checkpoint.

    {"sha256": <of the canonical JSON of "manifest">, "manifest": {...}}

It lists every data file with its size and hash, and every tensor in it with place, shape and hash, so that a restore
needs nothing from the data files but bytes. `parse_manifest` checks all that can be checked without the data files:
hash, version, shapes, places, that names stay inside `data/`, and that the row ranges partition each table.
"""

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from dlrm_scale.checkpoint.files.file_names import (
    DATA_PATTERN,
    MANIFEST_PATTERN,
    manifest_name,
    merged_name,
)

__all__ = [
    "FORMAT_MAJOR",
    "FORMAT_MINOR",
    "FORMAT_NAME",
    "ITEM_BYTES",
    "EntryRecord",
    "ErrorRecord",
    "FileRecord",
    "Manifest",
    "MergeRecord",
    "ParentRecord",
    "StateRecord",
    "TableRecord",
    "TensorRecord",
    "temporary_name",
]

FORMAT_NAME: Literal["dlrm_scale.checkpoint"] = "dlrm_scale.checkpoint"
FORMAT_MAJOR = 1
FORMAT_MINOR = 1
"""1 brought encoded values and merges. A program of 1.0 doesn't see merges, reads what isn't encoded, and refuses an
encoded tensor by its name."""

ITEM_BYTES = {"F64": 8, "I64": 8, "F32": 4, "I32": 4, "F16": 2, "BF16": 2, "I16": 2, "U8": 1, "I8": 1, "BOOL": 1}
"""Bytes of one element by safetensors' name of its type."""

_Count = Annotated[int, Field(ge=0, lt=2**62)]
_Hash = Annotated[str, Field(pattern=r"^[0-9a-f]{32}$")]
_Sha256 = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
_DataName = Annotated[str, Field(pattern=f"^{DATA_PATTERN}$")]
_ManifestName = Annotated[str, Field(pattern=f"^{MANIFEST_PATTERN}$")]
_DType = Literal["F64", "I64", "F32", "I32", "F16", "BF16", "I16", "U8", "I8", "BOOL"]


class _Record(BaseModel):
    # A newer minor version may add keys; they are ignored here and still covered by the hash.
    model_config = ConfigDict(frozen=True, extra="ignore", strict=True, use_attribute_docstrings=True)


class ErrorRecord(_Record):
    """How far the decoded values of a tensor are from those that were saved; measured on all of them."""

    max_absolute: Annotated[float, Field(ge=0)]
    mean_absolute: Annotated[float, Field(ge=0)]


class TensorRecord(_Record):
    """One tensor of a data file, as it is stored."""

    name: str
    """Name in the safetensors header."""
    dtype: _DType
    shape: tuple[_Count, ...]
    offset_bytes: _Count
    """From the start of the file."""
    size_bytes: _Count
    xxh3_128: _Hash
    """Of the tensor's bytes."""
    blocks: tuple[_Hash, ...] = ()
    """xxh3-128 of each block of the entry's `block_rows` rows; empty where there is only one block."""
    codec: str = "none"
    """How values are encoded; see `codec`."""
    error: ErrorRecord | None = None
    """What encoding has lost; None for values that are stored themselves."""


class EntryRecord(_Record):
    """Rows of one table within one rectangle of it.

    Without ids the rows are all of `[row_start, row_end)`; with ids they are the sorted global ids in tensor `ids`.
    Where a delta is encoded, rows that would lose too much are in an entry of their own with the same bounds.
    """

    table: str
    row_start: _Count
    row_end: _Count
    column_start: _Count
    column_end: _Count
    rows: _Count
    """Rows stored."""
    has_ids: bool
    block_rows: Annotated[int, Field(ge=1)]
    """Rows in each hashed block, of every tensor of the entry."""
    tensors: dict[str, TensorRecord]
    """`weight` [rows, columns], `ids` [rows], and the optimizer's state by name."""


class FileRecord(_Record):
    """One data file."""

    name: _DataName
    rank: _Count
    role: Literal["rank", "dense"]
    size_bytes: _Count
    xxh3_128: _Hash
    """Of the whole file."""
    entries: tuple[EntryRecord, ...] = ()
    tensors: dict[str, TensorRecord] = {}
    """Dense tensors, or the rank's own state, by the caller's names."""


class StateRecord(_Record):
    """One tensor of optimizer state of a table."""

    per: Literal["row", "element"]
    """One value a row, or one for each element of the weight."""
    dtype: _DType


class TableRecord(_Record):
    """Schema of one table, without any sharding."""

    name: str
    rows: Annotated[int, Field(ge=1)]
    dim: Annotated[int, Field(ge=1)]
    pooling: str
    state: dict[str, StateRecord]


class ParentRecord(_Record):
    """The checkpoint before, by name and hash."""

    name: _ManifestName
    sha256: _Sha256


class MergeRecord(_Record):
    """What a manifest was merged from. It stands for a checkpoint of the trainer, whose manifest may be gone."""

    number: _Count
    """Of the merge: random, so that it has no other's file names."""
    equal_to: ParentRecord
    """The checkpoint with the same rows, state and position in the data: deltas on it can be applied to the merge."""
    manifests: tuple[str, ...]
    """What was read, oldest first."""


class Manifest(_Record):
    """A committed checkpoint."""

    format: Literal["dlrm_scale.checkpoint"]
    major: int
    minor: int
    seq: _Count
    """Grows with every save of a run; failed ones leave gaps."""
    start: Annotated[int, Field(ge=1)]
    """Which start of the trainer wrote it."""
    attempt: _Count
    kind: Literal["baseline", "delta", "merged"]
    parent: ParentRecord | None
    """What a delta is applied to; of a baseline, only where it came from."""
    covers: tuple[_Count, _Count]
    """First and last sequence number whose changes it holds."""
    since_baseline: bool = False
    """A delta with all rows since its parent, on which the deltas after it are based too."""
    earlier_deltas: _Count = 0
    """Of a delta with all rows since its baseline: the deltas on the same baseline before it, which it supersedes and
    which may be gone. With their bytes they are the history that Check-N-Run's rule needs after a resume."""
    earlier_delta_bytes: _Count = 0
    """Bytes of their data files."""
    step: _Count
    rows_consumed: _Count | None
    created_unix_seconds: float
    ranks: Annotated[int, Field(ge=1)]
    optimizer: str
    tables: tuple[TableRecord, ...]
    files: tuple[FileRecord, ...]
    layout_fingerprint: str
    plan: Any
    """How the tables were sharded; information only."""
    cursor: dict[str, Any]
    extra: dict[str, Any]
    versions: dict[str, str]
    merge: MergeRecord | None = None
    """None of what a trainer wrote."""
    lossy: bool = False
    """Some rows or state in it aren't exactly those that were trained: encoded here, or decoded by a merge."""
    lossy_restores: _Count = 0
    """How often, up to this checkpoint, training went on from values that had lost something."""

    @property
    def name(self) -> str:
        """Name of its file."""
        if self.merge is not None:
            return merged_name(self.seq, self.start, self.merge.number)
        return manifest_name(self.seq, self.start)

    @property
    def size_bytes(self) -> int:
        """Bytes of the data files."""
        return sum(file.size_bytes for file in self.files)

    @property
    def table_rows_written(self) -> int:
        """Rows in all entries; a row cut into columns counts once."""
        dims = {table.name: table.dim for table in self.tables}
        cells = [e.rows * (e.column_end - e.column_start) / dims[e.table] for f in self.files for e in f.entries]
        return round(sum(cells))

    def table_schema(self) -> dict[str, TableRecord]:
        """Tables by name."""
        return {table.name: table for table in self.tables}

    def column_splits(self, table: str) -> tuple[tuple[int, int], ...]:
        """The distinct column ranges of a table's entries, in order."""
        entries = (e for f in self.files for e in f.entries if e.table == table)
        return tuple(sorted({(e.column_start, e.column_end) for e in entries}))

    def all_column_splits(self) -> dict[str, tuple[tuple[int, int], ...]]:
        """Those of all tables, by name: one look at the entries instead of one for each table."""
        found: dict[str, set[tuple[int, int]]] = {table.name: set() for table in self.tables}
        for entry in (e for f in self.files for e in f.entries):
            found[entry.table].add((entry.column_start, entry.column_end))
        return {name: tuple(sorted(ranges)) for name, ranges in found.items()}


def temporary_name(manifest: Manifest) -> str:
    """Name under which a manifest is written before the commit."""
    writer = f"a{manifest.attempt}" if manifest.merge is None else f"m{manifest.merge.number}"
    return f"manifests/.{manifest.seq:08d}-s{manifest.start}{writer}.tmp"
