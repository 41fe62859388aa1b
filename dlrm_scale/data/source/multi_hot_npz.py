"""Multi-hot ids as MLPerf's DLRM v2 stores them: a zip file of 26 arrays "0" to "25", [rows, pooling] each.

NumPy writes them one after another, stored or deflated, and a row's ids lie in 26 places. All 26 are read in step,
each as a stream of its own, so that memory holds one slice of rows whatever the file's size (MLPerf's days have
160 GB). Every value is read once and in order, so the checksums of the zip file are checked too.
"""

import zipfile
import zlib
from pathlib import Path
from typing import IO, Any, cast

import numpy as np
import numpy.typing as npt

from dlrm_scale.data.source.npy_file import NpyHeader, native, read_npy_header
from dlrm_scale.errors import DataError
from dlrm_scale.schema import CATEGORY_COLUMNS

__all__ = ["MultiHotNpz"]

_FETCH_AGAIN = "fetch or make the file again"
# What zipfile raises: a wrong checksum, damaged deflate data, a cut, an encrypted or unknown member.
_ZIP_ERRORS = (zipfile.BadZipFile, zlib.error, EOFError, OSError, NotImplementedError, RuntimeError)


class MultiHotNpz:
    """An open file.

    Attributes:
        path: the file.
        rows: of every array.
        poolings: for each category column, how many ids a row has.
        dtypes: for each category column, the type of its ids.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self._streams: list[IO[bytes]] = []
        self._position = 0
        try:
            self._zip = zipfile.ZipFile(path)
        except _ZIP_ERRORS as error:
            raise DataError(f"{path}: no .npz file, or one that is cut off ({error})", remedy=_FETCH_AGAIN) from error
        try:
            self._headers = [self._open(name, member) for name, member in self._members()]
            self._check_headers()
        except BaseException:
            self.close()
            raise
        self.rows = self._headers[0].shape[0]
        self.poolings = tuple(header.shape[1] if len(header.shape) == 2 else 1 for header in self._headers)
        self.dtypes = tuple(header.dtype for header in self._headers)

    def _members(self) -> list[tuple[str, zipfile.ZipInfo]]:
        present = {member.filename.removesuffix(".npy"): member for member in self._zip.infolist()}
        expected = [str(column) for column in range(len(CATEGORY_COLUMNS))]
        if set(present) != set(expected):
            absent = ", ".join(name for name in expected if name not in present) or "none"
            others = ", ".join(name for name in present if name not in expected) or "none"
            raise DataError(
                f"{self.path}: expected {len(expected)} arrays named 0 to {len(expected) - 1}, one for each category "
                f"column; absent: {absent}; others: {others}",
                remedy="make the file as MLPerf's materialize_synthetic_multihot_dataset.py does, or give Parquet",
            )
        return [(name, present[name]) for name in expected]

    def _open(self, name: str, member: zipfile.ZipInfo) -> NpyHeader:
        try:
            stream = self._zip.open(member)
        except _ZIP_ERRORS as error:
            raise self._damaged(name, error) from error
        self._streams.append(stream)
        try:
            header = read_npy_header(stream, f"{self.path}, array {name}", member.file_size)
        except _ZIP_ERRORS as error:
            raise self._damaged(name, error) from error
        if header.columns_first and len(header.shape) == 2 and header.shape[1] > 1:
            raise DataError(
                f"{self.path}, array {name}: is stored column by column (Fortran order) and can't be read row by row",
                remedy="save np.ascontiguousarray(array)",
            )
        return header

    def _check_headers(self) -> None:
        for column, header in enumerate(self._headers):
            name = f"{self.path}, array {column} ({CATEGORY_COLUMNS[column]})"
            if len(header.shape) not in (1, 2) or (len(header.shape) == 2 and header.shape[1] == 0):
                raise DataError(f"{name}: expected ids of shape [rows, pooling], found {header.describe()}")
            if header.shape[0] != self._headers[0].shape[0]:
                raise DataError(f"{name}: has {header.shape[0]:,} rows, array 0 has {self._headers[0].shape[0]:,}")

    def read_rows(self, start: int, rows: int) -> list[npt.NDArray[Any]]:
        """Read consecutive rows.

        Args:
            start: the first one, from 0; the one after those that were read before.
            rows: how many.

        Returns:
            For each category column [rows, pooling].

        Raises:
            DataError: the file is cut off or damaged.
        """
        assert start == self._position
        columns: list[npt.NDArray[Any]] = []
        for column, (stream, header) in enumerate(zip(self._streams, self._headers, strict=True)):
            pooling = self.poolings[column]
            count = rows * pooling * header.dtype.itemsize
            try:
                data = stream.read(count)
            except _ZIP_ERRORS as error:
                raise self._damaged(str(column), error) from error
            if len(data) < count:
                raise self._damaged(str(column), EOFError(f"{count - len(data):,} bytes are absent"))
            columns.append(native(np.frombuffer(data, header.dtype)).reshape(rows, pooling))
        self._position += rows
        return columns

    def _damaged(self, name: str, error: BaseException) -> DataError:
        return DataError(
            f"{self.path}, array {name}: the .npz file is cut off or damaged after row {self._position:,} ({error})",
            remedy=_FETCH_AGAIN,
        )

    def close(self) -> None:
        """Close the file; harmless when repeated."""
        for stream in self._streams:
            cast(zipfile.ZipExtFile, stream).close()
        self._zip.close()
