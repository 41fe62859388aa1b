"""A preprocessed dataset on disk: a folder of Arrow files and `dataset.json`.

```
dataset/
  part-00000.arrow …      label uint8 · I1..I13 float32 · C1..C26 int32 (multi-hot: list<int32>),
                          record batches of 8,192 rows
  vocabulary-C1.parquet … raw id -> table row, where the method is frequency
  dataset.json            written last: sizes, checksums, tables, split, fingerprint
```
Opens in pyarrow, polars and duckdb as it is. Files are read with pread, never mapped: a file that is truncated
under a mapping kills the process with SIGBUS, a short read is an error that names the file.
"""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import xxhash

from dlrm_scale.data.dataset.idle_files import IdleFiles
from dlrm_scale.data.dataset.manifest import (
    MANIFEST_FILE,
    SCHEMA_VERSION,
    SPLITS,
    ColumnInfo,
    DatasetManifest,
    Part,
    RowRange,
    read_manifest,
    write_manifest,
)
from dlrm_scale.data.dataset.part_writer import ROWS_PER_RECORD_BATCH, PartWriter, arrow_schema
from dlrm_scale.data.source.raw_block import Bags
from dlrm_scale.errors import DatasetError
from dlrm_scale.schema import CATEGORY_COLUMNS, INTEGER_COLUMNS, LABEL_COLUMN
from dlrm_scale.units import MIB

__all__ = [
    "MANIFEST_FILE",
    "ROWS_PER_RECORD_BATCH",
    "SCHEMA_VERSION",
    "SPLITS",
    "ColumnInfo",
    "Dataset",
    "DatasetManifest",
    "Part",
    "PartWriter",
    "RowRange",
    "Rows",
    "write_manifest",
]


class Rows(NamedTuple):
    """Rows of one record batch.

    Attributes:
        labels: `[n]` uint8.
        dense: `[13, n]` float32.
        ids: `[26, n]` int32; 0 in the rows of multi-hot columns.
        bags: of each multi-hot column by name, with int32 ids; bags may be empty.
    """

    labels: npt.NDArray[np.uint8]
    dense: npt.NDArray[np.float32]
    ids: npt.NDArray[np.int32]
    bags: Mapping[str, Bags]


_ARROW_PADDING_BYTES = 64
_NO_BAGS: Mapping[str, Bags] = {}
_CHANGED = "restore the file, or write the dataset again with `dlrm-scale preprocess`"


class _Reader(NamedTuple):
    file: pa.OSFile
    batches: pa.ipc.RecordBatchFileReader


@dataclass(frozen=True)
class _OpenPart:
    """A part as it was when the dataset was opened.

    Attributes:
        identity: device, inode, size and modification time; a read after they changed is refused.
    """

    part: Part
    path: Path
    identity: tuple[int, int, int, int]


class Dataset:
    """A finished dataset; the files are immutable while it is open. Threads may share it, and read at the same time.

    The parts that were read last stay open, a bounded number of them.

    Attributes:
        path: the folder.
        manifest: `dataset.json`.
        multi_hot: the category columns whose rows have bags of ids, in order.
    """

    def __init__(self, path: Path, manifest: DatasetManifest) -> None:
        self.path = path
        self.manifest = manifest
        self._limits = np.array([[column.table_rows] for column in manifest.columns], np.int64)
        self.multi_hot = tuple(column.name for column in manifest.columns if column.multi_hot)
        self._schema = arrow_schema(self.multi_hot)
        self._parts = [self._open_part(part) for part in manifest.parts]
        self._readers: IdleFiles[_Reader] = IdleFiles(lambda reader: reader.file.close())

    @staticmethod
    def open(path: Path | str) -> "Dataset":
        """Read the manifest and check that every part is there with its size.

        Raises:
            DatasetError: the dataset is absent, unfinished, damaged or of another schema.
        """
        return Dataset(Path(path), read_manifest(Path(path)))

    @property
    def fingerprint(self) -> str:
        """Hash of the manifest, checksums of the parts included."""
        return self.manifest.fingerprint

    @property
    def rows(self) -> int:
        """Rows of all parts, whatever their split."""
        return self.manifest.rows

    @property
    def table_rows(self) -> dict[str, int]:
        """Category column to the rows of its table."""
        return {column.name: column.table_rows for column in self.manifest.columns}

    def split_rows(self, split: str) -> int:
        """Rows of `train`, `validation` or `test`."""
        return sum(r.end - r.start for r in self.split_ranges(split))

    def split_ranges(self, split: str) -> tuple[RowRange, ...]:
        """Row ranges of `train`, `validation` or `test`, ascending.

        Raises:
            DatasetError: no such split.
        """
        if split not in self.manifest.split:
            raise DatasetError(f"{self.path} has no split {split!r}", remedy=f"use one of {', '.join(SPLITS)}")
        return self.manifest.split[split]

    def read(self, part_index: int, record_batch_index: int) -> Rows:
        """Read one record batch.

        Returns:
            Labels `[n]` uint8, dense features `[13, n]` float32, ids `[26, n]` int32 and bags within their tables, each
            column contiguous. Read-only views of one buffer of the caller's own (ids are a copy if there are bags).

        Raises:
            DatasetError: the file is gone, was changed since the dataset was opened, or holds ids beyond a table.
        """
        open_part = self._parts[part_index]
        where = f"{open_part.path}, record batch {record_batch_index}"
        self._check_unchanged(open_part)
        try:
            reader = self._readers.take(part_index) or self._open_reader(open_part)
            batch = reader.batches.get_batch(record_batch_index)
            if self.multi_hot:
                batch.validate()
        except (OSError, pa.ArrowException) as error:
            raise DatasetError(f"{where} can't be read: {error}", remedy=_CHANGED) from error
        self._readers.give(part_index, reader)
        rows = min(ROWS_PER_RECORD_BATCH, open_part.part.rows - record_batch_index * ROWS_PER_RECORD_BATCH)
        if batch.num_rows != rows:
            raise DatasetError(f"{where} has {batch.num_rows} rows, expected {rows}", remedy=_CHANGED)
        labels = batch.column(0).to_numpy()
        dense = _stack(batch, INTEGER_COLUMNS, np.dtype(np.float32))
        if self.multi_hot:
            ids, bags = self._ids_and_bags(batch, where)
        else:
            ids, bags = _stack(batch, CATEGORY_COLUMNS, np.dtype(np.int32)), _NO_BAGS
        # One pass finds both faults: as unsigned numbers negative ids are beyond any table.
        if np.any(ids.view(np.uint32).max(axis=1, keepdims=True) >= self._limits):
            self._refuse_ids(ids, where)
        return Rows(labels, dense, ids, bags)

    def verify(self) -> None:
        """Read every byte and compare checksums.

        Raises:
            DatasetError: names each damaged file.
        """
        damaged = []
        for open_part in self._parts:
            self._check_unchanged(open_part)
            digest = xxhash.xxh3_128()
            with open_part.path.open("rb", buffering=0) as file:
                while block := file.read(8 * MIB):
                    digest.update(block)
            if digest.hexdigest() != open_part.part.xxh3_128:
                damaged.append(str(open_part.path))
        if damaged:
            raise DatasetError(f"wrong checksum: {', '.join(damaged)}", remedy=_CHANGED)

    def _open_part(self, part: Part) -> _OpenPart:
        path = self.path / part.file
        try:
            identity = _identity(path)
        except OSError as error:
            raise DatasetError(f"{path} can't be opened: {error.strerror}", remedy=_CHANGED) from error
        if identity[2] != part.size_bytes:
            raise DatasetError(
                f"{path} has {identity[2]:,} bytes, {MANIFEST_FILE} says {part.size_bytes:,}", remedy=_CHANGED
            )
        return _OpenPart(part=part, path=path, identity=identity)

    def _open_reader(self, open_part: _OpenPart) -> _Reader:
        file = pa.OSFile(str(open_part.path), "rb")
        reader = pa.ipc.open_file(file)
        expected = -(-open_part.part.rows // ROWS_PER_RECORD_BATCH)
        if not reader.schema.equals(self._schema):
            lists = f" (list<int32> for {', '.join(self.multi_hot)})" if self.multi_hot else ""
            raise DatasetError(
                f"{open_part.path} must hold {LABEL_COLUMN} uint8, I1 to I13 float32 and C1 to C26 int32{lists}, "
                f"found {', '.join(f'{field.name} {field.type}' for field in reader.schema)}",
                remedy=_CHANGED,
            )
        if reader.num_record_batches != expected:
            raise DatasetError(
                f"{open_part.path} has {reader.num_record_batches} record batches, expected {expected}", remedy=_CHANGED
            )
        return _Reader(file, reader)

    def _check_unchanged(self, open_part: _OpenPart) -> None:
        try:
            unchanged = _identity(open_part.path) == open_part.identity
        except OSError as error:
            raise DatasetError(f"{open_part.path} can't be read: {error.strerror}", remedy=_CHANGED) from error
        if not unchanged:
            raise DatasetError(
                f"{open_part.path} was changed or replaced while it was in use", remedy="restore the file and resume"
            )

    def _ids_and_bags(self, batch: pa.RecordBatch, where: str) -> tuple[npt.NDArray[np.int32], Mapping[str, Bags]]:
        ids, bags = np.zeros((len(CATEGORY_COLUMNS), batch.num_rows), np.int32), {}
        for index, info in enumerate(self.manifest.columns):
            column = batch.column(info.name)
            if not info.multi_hot:
                ids[index] = column.to_numpy()
                continue
            offsets, values = column.offsets.to_numpy(), column.values.to_numpy()
            # Kernels that don't check bounds rely on this.
            if offsets[0] != 0 or offsets[-1] != len(values) or np.any(np.diff(offsets) < 0):
                raise DatasetError(f"{where}: the bags of column {info.name} are damaged", remedy=_CHANGED)
            if len(values) and values.view(np.uint32).max() >= info.table_rows:
                position = int(np.flatnonzero(values.view(np.uint32) >= info.table_rows)[0])
                row = int(np.searchsorted(offsets, position, side="right")) - 1
                self._refuse_id(where, row, info, int(values[position]))
            bags[info.name] = Bags(values=values, offsets=offsets)
        return ids, bags

    def _refuse_ids(self, ids: npt.NDArray[np.int32], where: str) -> None:
        column, row = np.argwhere((ids < 0) | (ids >= self._limits))[0]
        self._refuse_id(where, int(row), self.manifest.columns[column], int(ids[column, row]))

    def _refuse_id(self, where: str, row: int, info: ColumnInfo, found: int) -> None:
        raise DatasetError(
            f"{where}, row {row}: column {info.name} has id {found}, its table has {info.table_rows} rows",
            remedy=_CHANGED,
        )


def _stack(batch: pa.RecordBatch, names: Sequence[str], dtype: np.dtype[Any]) -> npt.NDArray[Any]:
    """View columns of one type as `[len(names), n]`.

    Columns of a record batch lie at equal distances in one buffer, unless they are compressed. The view saves a copy:
    0.2 of 0.6 ms. Three columns tell: between the first and the last there is only just room for the others, in order
    (to look at all of them takes 0.1 ms).
    """
    index = batch.schema.get_field_index(names[0])
    ends = [batch.column(index + i).buffers()[1] for i in (0, 1, len(names) - 1)]
    body, first = ends[0].parent, ends[0].address
    step = ends[1].address - first
    padded_bytes = -(-batch.num_rows * dtype.itemsize // _ARROW_PADDING_BYTES) * _ARROW_PADDING_BYTES
    if body is None or step != padded_bytes or ends[2].address != first + (len(names) - 1) * step:
        return np.stack([batch.column(name).to_numpy() for name in names])
    return np.ndarray(
        (len(names), batch.num_rows), dtype, buffer=body, offset=first - body.address, strides=(step, dtype.itemsize)
    )


def _identity(path: Path) -> tuple[int, int, int, int]:
    status = os.stat(path)
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns
