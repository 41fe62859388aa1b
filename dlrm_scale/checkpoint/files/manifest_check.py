"""Whether a manifest describes a whole, consistent checkpoint, as far as that shows without the data files."""

import math

from dlrm_scale.checkpoint.files.codec import CODECS, stored_form
from dlrm_scale.checkpoint.files.file_names import manifest_name, parse_manifest_name
from dlrm_scale.checkpoint.files.manifest import (
    FORMAT_MAJOR,
    FORMAT_MINOR,
    ITEM_BYTES,
    EntryRecord,
    FileRecord,
    Manifest,
    TableRecord,
    TensorRecord,
)
from dlrm_scale.checkpoint.files.tiling import Rectangle, tiling_fault
from dlrm_scale.errors import CheckpointError

__all__ = ["check_manifest"]


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
