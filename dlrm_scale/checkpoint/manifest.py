"""The manifest: one JSON file whose existence under its final name is the commit of a checkpoint.

    {"sha256": <of the canonical JSON of "manifest">, "manifest": {...}}

It lists every data file with its size and hash, and every tensor in it with place, shape and hash, so that a restore
needs nothing from the data files but bytes. `parse_manifest` checks all that can be checked without the data files:
hash, version, shapes, places, that names stay inside `data/`, and that the row ranges partition each table.
"""

import hashlib
import json
import math
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from dlrm_scale.checkpoint.codec import CODECS, stored_form
from dlrm_scale.checkpoint.file_names import (
    DATA_PATTERN,
    MANIFEST_PATTERN,
    manifest_name,
    merged_name,
    parse_data_name,
    parse_manifest_name,
    parse_temporary_name,
)
from dlrm_scale.checkpoint.tiling import Rectangle, tiling_fault
from dlrm_scale.errors import CheckpointError

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
    "check_manifest",
    "manifest_name",
    "parse_data_name",
    "parse_manifest",
    "parse_manifest_name",
    "parse_temporary_name",
    "serialize_manifest",
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


def serialize_manifest(manifest: Manifest) -> tuple[bytes, str]:
    """The file's content and the sha256 that children name their parent by."""
    body = _canonical(manifest.model_dump(mode="json"))
    digest = hashlib.sha256(body).hexdigest()
    return b'{"manifest":' + body + b',"sha256":"' + digest.encode() + b'"}\n', digest


def parse_manifest(data: bytes, name: str) -> tuple[Manifest, str]:
    """Read and check a manifest.

    Args:
        data: content of the file.
        name: its name, for messages and against the numbers inside.

    Returns:
        The manifest and its sha256.

    Raises:
        CheckpointError: damaged, of a newer major version, or inconsistent; the message names the file.
    """
    try:
        outer = json.loads(data)
        inner, digest = outer["manifest"], outer["sha256"]
        body = _canonical(inner)
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise CheckpointError(f"{name} is not a manifest: {error!r}") from error
    if hashlib.sha256(body).hexdigest() != digest:
        raise CheckpointError(f"{name} is damaged: its sha256 doesn't match its content")
    major = inner.get("major") if isinstance(inner, dict) else None
    if isinstance(major, int) and major > FORMAT_MAJOR:
        raise CheckpointError(
            f"{name} has format version {major}, this program reads up to {FORMAT_MAJOR}",
            remedy="use the version of dlrm-scale that wrote it, or a newer one",
        )
    try:
        manifest = Manifest.model_validate_json(body)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(str(part) for part in first["loc"])
        raise CheckpointError(f"{name} breaks the format at {place}: {first['msg']}") from error
    if name != manifest.name:
        raise CheckpointError(f"{name} holds the manifest {manifest.name}")
    check_manifest(manifest)
    return manifest, digest


def check_manifest(manifest: Manifest) -> None:
    """Check that a manifest describes a whole, consistent checkpoint; done before each commit and on each read.

    Raises:
        CheckpointError: naming the manifest and what is wrong.
    """
    fault = _fault(manifest)
    if fault is not None:
        raise CheckpointError(f"{manifest.name} is inconsistent: {fault}")


def _fault(manifest: Manifest) -> str | None:
    encoded = [t for f in manifest.files for t in _tensors(f) if t.codec != "none"]
    for tensor in encoded:
        if tensor.codec not in CODECS:
            return (
                f"tensor {tensor.name} has the codec {tensor.codec}, which format {FORMAT_MAJOR}.{FORMAT_MINOR} hasn't "
                f"(the checkpoint is {manifest.major}.{manifest.minor}): read it with a newer dlrm-scale"
            )
    if encoded and (manifest.kind == "baseline" or not manifest.lossy):
        return f"encoded tensors in a {'lossless ' if not manifest.lossy else ''}{manifest.kind}"
    if (manifest.kind == "merged" and manifest.merge is None) or (manifest.kind == "delta" and manifest.merge):
        return f"a {manifest.kind} {'without' if manifest.merge is None else 'with'} a record of a merge"
    if manifest.merge is not None and manifest.merge.equal_to.name != manifest_name(manifest.seq, manifest.start):
        return f"equal to {manifest.merge.equal_to.name}"
    if manifest.kind != "baseline" and manifest.parent is None:
        return f"a {manifest.kind} without parent"
    if manifest.covers[0] > manifest.covers[1] or manifest.covers[1] != manifest.seq:
        return f"covers {manifest.covers} with sequence number {manifest.seq}"
    parent = parse_manifest_name(manifest.parent.name) if manifest.parent else None
    if parent is not None and parent[0] >= manifest.seq:
        return f"its parent has sequence number {parent[0]}"
    tables = manifest.table_schema()
    if len(tables) != len(manifest.tables):
        return "a table is listed twice"
    ranks = sorted(file.rank for file in manifest.files if file.role == "rank")
    if ranks != list(range(manifest.ranks)):
        return f"files of ranks {ranks} instead of 0 to {manifest.ranks - 1}"
    if sum(file.role == "dense" for file in manifest.files) != 1:
        return "not exactly one dense file"
    if len({file.name for file in manifest.files}) != len(manifest.files):
        return "a file is listed twice"
    rectangles: dict[str, list[Rectangle]] = {name: [] for name in tables}
    for file in manifest.files:
        if any(tensor.codec != "none" for tensor in file.tensors.values()):
            return f"{file.name} has an encoded tensor outside the tables"
        parts: dict[tuple[str, Rectangle], list[EntryRecord]] = {}
        for entry in file.entries:
            if entry.table not in tables:
                return f"{file.name} has rows of the unknown table {entry.table}"
            fault = _entry_fault(entry, tables[entry.table])
            if entry.has_ids and manifest.kind == "baseline":
                fault = "rows by ids in a baseline, which has all"
            if fault is not None:
                return f"{file.name}, table {entry.table}: {fault}"
            rectangle = (entry.row_start, entry.row_end, entry.column_start, entry.column_end)
            if not _is_beside(entry, parts.setdefault((entry.table, rectangle), [])):
                rectangles[entry.table].append(rectangle)
            parts[entry.table, rectangle].append(entry)
        for tensor in _tensors(file):
            size = math.prod(tensor.shape) * ITEM_BYTES[tensor.dtype]
            if tensor.size_bytes != size or tensor.offset_bytes + size > file.size_bytes:
                return f"{file.name}: tensor {tensor.name} has a wrong size or place"
    for name, table in tables.items():
        fault = tiling_fault(rectangles[name], table.rows, table.dim)
        if fault is not None:
            return f"table {name}: {fault}"
    return None


def _tensors(file: FileRecord) -> list[TensorRecord]:
    return [t for e in file.entries for t in e.tensors.values()] + list(file.tensors.values())


def _is_beside(entry: EntryRecord, others: list[EntryRecord]) -> bool:
    """Whether an entry holds more rows of the bounds of others: by ids, and each encoded in another way."""
    parts = (entry, *others)
    codecs = [{name: tensor.codec for name, tensor in part.tensors.items()} for part in parts]
    fits = sum(part.rows for part in parts) <= entry.row_end - entry.row_start
    return bool(others) and fits and all(part.has_ids for part in parts) and codecs[0] not in codecs[1:]


def _entry_fault(entry: EntryRecord, table: TableRecord) -> str | None:
    columns = entry.column_end - entry.column_start
    span = entry.row_end - entry.row_start
    if entry.rows > span or (not entry.has_ids and entry.rows != span):
        return f"{entry.rows} rows in the range {entry.row_start} to {entry.row_end}"
    shapes: dict[str, tuple[int, ...]] = {"weight": (entry.rows, columns)}
    dtypes: dict[str, tuple[str, ...]] = {"weight": ("F32",)}
    if entry.has_ids:
        shapes["ids"], dtypes["ids"] = (entry.rows,), ("I32", "I64")
    for name, state in table.state.items():
        shapes[name] = (entry.rows,) if state.per == "row" else (entry.rows, columns)
        dtypes[name] = (state.dtype,)
    if shapes.keys() != entry.tensors.keys():
        return f"tensors {sorted(entry.tensors)} instead of {sorted(shapes)}"
    blocks = -(-entry.rows // entry.block_rows)
    for name, tensor in entry.tensors.items():
        if (tensor.dtype, tensor.shape) not in [stored_form(tensor.codec, d, shapes[name]) for d in dtypes[name]]:
            return f"{name} is {tensor.dtype} {tensor.shape}"
        if len(tensor.blocks) != (blocks if blocks > 1 else 0):
            return f"{name} has {len(tensor.blocks)} block hashes instead of {blocks}"
    return None


def _canonical(value: object) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()
