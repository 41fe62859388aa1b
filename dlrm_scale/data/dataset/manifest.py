"""`dataset.json`: what a preprocessed dataset holds, how it was made and what identifies it."""

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

from dlrm_scale.data.durable import fsync_folder
from dlrm_scale.errors import DatasetError
from dlrm_scale.schema import CATEGORY_COLUMNS

__all__ = [
    "MANIFEST_FILE",
    "SCHEMA_VERSION",
    "SPLITS",
    "ColumnInfo",
    "DatasetManifest",
    "Part",
    "RowRange",
    "fingerprint_of",
    "read_manifest",
    "write_manifest",
]

MANIFEST_FILE = "dataset.json"
SCHEMA_VERSION = 2
"""2 added multi-hot columns."""
SPLITS = ("train", "validation", "test")
_PREPROCESS_AGAIN = "write the dataset again with `dlrm-scale preprocess --force`"


@dataclass(frozen=True, kw_only=True)
class Part:
    """One Arrow file.

    Attributes:
        file: its name inside the dataset's folder.
        rows: rows in it; 0 is allowed.
        size_bytes: its size.
        xxh3_128: checksum of all its bytes, 32 hex digits.
        source: the raw file that it was made from.
    """

    file: str
    rows: int
    size_bytes: int
    xxh3_128: str
    source: str


@dataclass(frozen=True, kw_only=True)
class ColumnInfo:
    """One category column: its table and how raw ids became table rows.

    Attributes:
        name: `C1` to `C26`.
        table_rows: rows of its table; every id is in `[0, table_rows)`.
        method: `frequency`, `hash`, `modulo` or `given`.
        statistics: JSON-ready facts about the column.
        multi_hot: a row has a bag of any number of ids, not one id.
    """

    name: str
    table_rows: int
    method: str
    statistics: dict[str, object]
    multi_hot: bool = False


@dataclass(frozen=True, kw_only=True)
class RowRange:
    """Rows `[start, end)`, numbered through the whole dataset, parts in order."""

    start: int
    end: int


@dataclass(frozen=True, kw_only=True)
class DatasetManifest:
    """Everything about a dataset that isn't a row.

    Attributes:
        schema_version: version of the files' and this manifest's format.
        parts: the Arrow files; their order numbers the rows.
        columns: the category columns, C1 to C26.
        transforms: JSON-ready rules that made features of raw values.
        split: `train`, `validation` and `test` as ascending ranges that don't overlap.
        statistics: JSON-ready facts about the whole dataset.
        fingerprint: hash of all the rest, checksums of the parts included; `write_manifest` fills it in.
    """

    schema_version: int = SCHEMA_VERSION
    parts: tuple[Part, ...]
    columns: tuple[ColumnInfo, ...]
    transforms: dict[str, object]
    split: dict[str, tuple[RowRange, ...]]
    statistics: dict[str, object]
    fingerprint: str = ""

    @property
    def rows(self) -> int:
        """Rows of all parts."""
        return sum(part.rows for part in self.parts)


def write_manifest(folder: Path, manifest: DatasetManifest) -> DatasetManifest:
    """Write `dataset.json` last, atomically and durably, and return the manifest with its fingerprint.

    Raises:
        DatasetError: the manifest contradicts itself or the file can't be written.
    """
    file = folder / MANIFEST_FILE
    _check(manifest, file)
    manifest = replace(manifest, fingerprint=fingerprint_of(manifest))
    temporary = folder / f"{MANIFEST_FILE}.tmp"
    try:
        with temporary.open("w", encoding="utf-8") as out:
            json.dump(asdict(manifest), out, indent=1, allow_nan=False)
            out.flush()
            os.fsync(out.fileno())
        os.replace(temporary, file)
        fsync_folder(folder)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise DatasetError(f"{file} can't be written: {error}", remedy="free space or choose another folder") from error
    return manifest


def read_manifest(folder: Path) -> DatasetManifest:
    """Read and check `dataset.json`; the parts are not opened.

    Raises:
        DatasetError: it is absent, damaged, contradicts itself or has another schema.
    """
    file = folder / MANIFEST_FILE
    if not folder.is_dir():
        raise DatasetError(f"{folder} is not a dataset: no such folder", remedy="check the path")
    try:
        raw = json.loads(file.read_bytes())
    except FileNotFoundError:
        raise DatasetError(
            f"{folder} is not a finished dataset: it has no {MANIFEST_FILE}, which is written last",
            remedy="run `dlrm-scale preprocess` (again: it continues where it stopped), or check the path",
        ) from None
    except (OSError, ValueError) as error:
        raise DatasetError(f"{file} can't be read: {error}", remedy=_PREPROCESS_AGAIN) from error
    version = raw.get("schema_version") if isinstance(raw, dict) else None
    if isinstance(version, int) and version > SCHEMA_VERSION:
        raise DatasetError(
            f"{file} has schema version {version}; this dlrm-scale reads up to {SCHEMA_VERSION}",
            remedy="install a newer dlrm-scale",
        )
    if isinstance(version, int) and version < SCHEMA_VERSION:
        raise DatasetError(
            f"{file} has schema version {version}; this dlrm-scale reads version {SCHEMA_VERSION}",
            remedy="preprocess the raw files again with `dlrm-scale preprocess --force`",
        )
    try:
        manifest = _from_json(raw)
    except (KeyError, TypeError, AttributeError) as error:
        raise DatasetError(f"{file} is damaged: {error!r}", remedy=_PREPROCESS_AGAIN) from error
    _check(manifest, file)
    if manifest.fingerprint != fingerprint_of(manifest):
        raise DatasetError(f"{file} was changed: its fingerprint doesn't match its content", remedy=_PREPROCESS_AGAIN)
    return manifest


def _from_json(raw: Mapping[str, Any]) -> DatasetManifest:
    known = {**raw}
    known["parts"] = tuple(Part(**part) for part in raw["parts"])
    known["columns"] = tuple(ColumnInfo(**column) for column in raw["columns"])
    known["split"] = {name: tuple(RowRange(**r) for r in ranges) for name, ranges in raw["split"].items()}
    return DatasetManifest(**known)


def fingerprint_of(manifest: DatasetManifest) -> str:
    """Return the hash of a manifest's content, whatever fingerprint it carries."""
    content = asdict(manifest)
    del content["fingerprint"]
    try:
        text = json.dumps(content, sort_keys=True, separators=(",", ":"), allow_nan=False)
    except (TypeError, ValueError) as error:
        raise DatasetError(f"the manifest can't be written as JSON: {error}") from error
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def _check(manifest: DatasetManifest, file: Path) -> None:
    def fail(reason: str) -> None:
        raise DatasetError(f"{file}: {reason}", remedy=_PREPROCESS_AGAIN)

    names = [part.file for part in manifest.parts]
    if len(set(names)) != len(names) or any(Path(name).name != name for name in names):
        fail(f"part names must be distinct and plain file names, found {names}")
    if any(part.rows < 0 for part in manifest.parts):
        fail("a part has a negative number of rows")
    if tuple(column.name for column in manifest.columns) != CATEGORY_COLUMNS:
        fail(f"columns must be {CATEGORY_COLUMNS[0]} to {CATEGORY_COLUMNS[-1]} in order")
    for column in manifest.columns:
        if column.table_rows < 1:
            fail(f"column {column.name} has {column.table_rows} table rows; at least 1 is needed")
    if set(manifest.split) != set(SPLITS):
        fail(f"split must name {', '.join(SPLITS)}, found {', '.join(manifest.split)}")
    for name, ranges in manifest.split.items():
        if any(b.start < a.end for a, b in pairwise(ranges)):
            fail(f"the ranges of split {name} must ascend")
    ordered = sorted(
        (r.start, r.end, name) for name, ranges in manifest.split.items() for r in ranges if r.start < r.end
    )
    for name, ranges in manifest.split.items():
        for r in ranges:
            if not 0 <= r.start <= r.end <= manifest.rows:
                fail(f"split {name} has rows {r.start} to {r.end}, the dataset has {manifest.rows}")
    for a, b in pairwise(ordered):
        if b[0] < a[1]:
            fail(f"rows {b[0]} to {min(a[1], b[1])} are in {a[2]} and in {b[2]}")
