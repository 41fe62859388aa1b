"""A dataset's rows as NumPy files in the layout that torchrec's `datasets.criteo` and MLPerf's DLRM-DCNv2 read.

    day_N_dense.npy             float32 [n, 13]
    day_N_labels.npy            int32 [n, 1]
    day_N_sparse.npy            int32 [n, 26], where every column holds one id a row
    day_N_sparse_multi_hot.npz  else: int32 [n, ids a row] under "0" to "25" (C1 to C26), stored as `numpy.savez` does

N is the number of the dataset's part. Ids are table rows. Arrays are rectangular, so a column whose bags differ in size
has no place here; a missing field of a multi-hot column is a bag of one, so it counts too.
torchrec's stages `val` and `test` cut the first file that they are given into halves themselves: read files of an
exported split with stage `train`.
"""

import os
import shutil
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa

from dlrm_scale.data.dataset.dataset import Dataset, Rows
from dlrm_scale.data.export.export_rows import ExportedPart, read_rows, record_batch_slices
from dlrm_scale.errors import DatasetError
from dlrm_scale.schema import CATEGORY_COLUMNS, INTEGER_COLUMNS
from dlrm_scale.units import format_bytes

__all__ = ["check_rectangular", "check_space", "npy_bytes", "write_npy"]

_USE_PARQUET = "export with --to parquet, which holds bags of any size"


def check_rectangular(dataset: Dataset) -> None:
    """Refuse early what the statistics show to be impossible; `write_npy` checks each row.

    Raises:
        DatasetError: the mean number of ids of a column isn't whole.
    """
    for column in dataset.manifest.columns:
        pooling = column.statistics.get("pooling")
        if column.multi_hot and isinstance(pooling, float) and pooling != round(pooling):
            raise DatasetError(
                f"{dataset.path}: column {column.name} has bags of different sizes ({pooling:.2f} ids on average); "
                ".npy arrays hold the same number of ids in each row",
                remedy=_USE_PARQUET,
            )


def npy_bytes(rows: int, poolings: npt.NDArray[np.int64] | None = None) -> int:
    """Size of the values of so many rows with these ids a row, one each by default."""
    ids = len(CATEGORY_COLUMNS) if poolings is None else int(poolings.sum())
    return rows * 4 * (len(INTEGER_COLUMNS) + 1 + ids)


def write_npy(folder: Path, dataset: Dataset, part: ExportedPart, on_rows: Callable[[int], None]) -> list[str]:
    """Write one part, durably.

    Memory holds one record batch. With multi-hot columns the part is read twice: once whole, then column by column,
    because a zip file takes one array after another.

    Args:
        folder: exists; the files in it are new.
        dataset: what to read.
        part: which rows.
        on_rows: called with the number of rows just read in the first reading, and with 0 before each column of the
            second.

    Returns:
        The files' names.

    Raises:
        DatasetError: the dataset can't be read, or a column's rows differ in their number of ids.
        OSError: a file can't be written.
    """
    multi_hot = bool(dataset.multi_hot)
    names = [f"day_{part.index}_dense.npy", f"day_{part.index}_labels.npy"]
    names += [] if multi_hot else [f"day_{part.index}_sparse.npy"]
    widths = [len(INTEGER_COLUMNS), 1, len(CATEGORY_COLUMNS)]
    poolings = np.ones(len(CATEGORY_COLUMNS), np.int64)
    files = [(folder / name).open("wb") for name in names]
    try:
        for file, width, kind in zip(files, widths, ("<f4", "<i4", "<i4"), strict=False):
            _write_header(file, kind, (part.rows, width))
        done = 0
        for rows in read_rows(dataset, part):
            if multi_hot:
                _check_bags(dataset, part, rows, poolings, first=done == 0)
            arrays = (rows.dense.T, rows.labels.astype("<i4"), rows.ids.T)
            for file, array in zip(files, arrays, strict=False):
                file.write(np.ascontiguousarray(array).data)
            done += len(rows.labels)
            on_rows(len(rows.labels))
        for file in files:
            file.flush()
            os.fsync(file.fileno())
    finally:
        for file in files:
            file.close()
    if multi_hot:
        names.append(f"day_{part.index}_sparse_multi_hot.npz")
        _write_npz(folder / names[-1], dataset, part, poolings, on_rows)
    return names


def check_space(folder: Path, needed_bytes: int) -> None:
    """Refuse to start what can't end.

    Raises:
        DatasetError: fewer bytes are free.
    """
    free_bytes = shutil.disk_usage(folder).free
    if needed_bytes > free_bytes:
        raise DatasetError(
            f"{folder}: the arrays need {format_bytes(needed_bytes)}, {format_bytes(free_bytes)} are free",
            remedy="free space, export one --split, or name a folder on a larger disk",
        )


def _write_header(file: IO[bytes], kind: str, shape: tuple[int, ...]) -> None:
    # Version 1.0, the only one that torchrec reads.
    np.lib.format.write_array_header_1_0(file, {"descr": kind, "fortran_order": False, "shape": shape})


def _check_bags(
    dataset: Dataset, part: ExportedPart, rows: Rows, poolings: npt.NDArray[np.int64], *, first: bool
) -> None:
    """Take each column's number of ids from the part's first row and compare all others with it."""
    for name, bags in rows.bags.items():
        column, sizes = CATEGORY_COLUMNS.index(name), np.diff(bags.offsets)
        if first:
            poolings[column] = sizes[0]
        other = sizes[sizes != poolings[column]]
        if len(other) or poolings[column] == 0:
            found = f"{other[0]} and {poolings[column]} ids" if len(other) else "no ids"
            raise DatasetError(
                f"{dataset.path}, {dataset.manifest.parts[part.index].file}: column {name} has rows with {found}; "
                ".npy arrays hold the same number of ids in each row, at least 1",
                remedy=_USE_PARQUET,
            )


def _write_npz(
    path: Path,
    dataset: Dataset,
    part: ExportedPart,
    poolings: npt.NDArray[np.int64],
    on_rows: Callable[[int], None],
) -> None:
    check_space(path.parent, npy_bytes(part.rows, poolings))
    with path.open("wb") as file:
        with zipfile.ZipFile(file, "w", zipfile.ZIP_STORED, allowZip64=True) as archive:
            for column, pooling in enumerate(poolings):
                on_rows(0)
                # MLPerf's reader maps members and expects headers with room for 64-bit sizes, as numpy.savez writes.
                with archive.open(f"{column}.npy", "w", force_zip64=True) as member:
                    _write_header(member, "<i4", (part.rows, int(pooling)))
                    for values in _column_values(dataset, part, CATEGORY_COLUMNS[column]):
                        member.write(np.ascontiguousarray(values).data)
        file.flush()
        os.fsync(file.fileno())
    # Refuses if the part was changed since it was opened, between the checks of its rows and this reading too.
    dataset.read(part.index, 0)


def _column_values(dataset: Dataset, part: ExportedPart, name: str) -> Iterator[npt.NDArray[Any]]:
    """Read one column alone; the bytes of the others are not touched."""
    path = dataset.path / dataset.manifest.parts[part.index].file
    try:
        with pa.OSFile(str(path), "rb") as file:
            position = pa.ipc.open_file(file).schema.get_field_index(name)
            options = pa.ipc.IpcReadOptions(included_fields=[position])
            reader = pa.ipc.open_file(file, options=options)
            for batch, start, end in record_batch_slices(part):
                column = reader.get_batch(batch).column(0)[start:end]
                yield (column.flatten() if pa.types.is_list(column.type) else column).to_numpy()
    except (OSError, pa.ArrowException) as error:
        raise DatasetError(f"{path} can't be read: {error}") from error
