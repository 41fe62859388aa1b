"""Rows of an array in a .npy file, read slice by slice; the header is believed only where the file agrees with it.

Read with `pread`, not through a mapping: a file that is cut off under a mapping kills the process.
"""

import os
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Any

import numpy as np
import numpy.typing as npt

from dlrm_scale.errors import DataError

__all__ = ["NpyFile", "NpyHeader", "native", "read_npy_header"]

_FETCH_AGAIN = "fetch or make the file again"


@dataclass(frozen=True, kw_only=True, slots=True)
class NpyHeader:
    """What stands before the values.

    Attributes:
        shape: of the array.
        dtype: of the values; never one that holds Python objects.
        columns_first: whether the values of a column follow one another (Fortran order).
        header_bytes: where the values start.
    """

    shape: tuple[int, ...]
    dtype: np.dtype[Any]
    columns_first: bool
    header_bytes: int

    @property
    def size_bytes(self) -> int:
        """Size that the file must have."""
        values = 1
        for length in self.shape:
            values *= length
        return self.header_bytes + values * self.dtype.itemsize

    def describe(self) -> str:
        """Shape and type, as messages show them."""
        return f"[{', '.join(f'{length:,}' for length in self.shape)}] of {self.dtype}"


def read_npy_header(file: IO[bytes], name: str, size_bytes: int) -> NpyHeader:
    """Read the header at the start of a file or stream.

    Args:
        file: positioned at its start; afterwards at the first value.
        name: the file, for messages.
        size_bytes: its size.

    Raises:
        DataError: it's no .npy file, holds pickled objects, or has another size than the header says.
    """
    try:
        version = np.lib.format.read_magic(file)
        read = {(1, 0): np.lib.format.read_array_header_1_0, (2, 0): np.lib.format.read_array_header_2_0}.get(version)
        if read is None:
            raise ValueError(f"format version {version[0]}.{version[1]}")
        shape, columns_first, dtype = read(file)
    except ValueError as error:
        raise DataError(f"{name}: no readable .npy array ({error})", remedy=_FETCH_AGAIN) from error
    if dtype.hasobject:
        raise DataError(
            f"{name}: holds Python objects (pickled), which could run any code when they are read",
            remedy="save the array with a number type",
        )
    header = NpyHeader(shape=shape, dtype=dtype, columns_first=columns_first, header_bytes=file.tell())
    if size_bytes != header.size_bytes:
        what = "is cut off" if size_bytes < header.size_bytes else "has bytes after its last value"
        raise DataError(
            f"{name}: {what}: {size_bytes:,} bytes, but its header ({header.describe()}) says {header.size_bytes:,}",
            remedy=_FETCH_AGAIN,
        )
    return header


def native(values: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Return values in this machine's byte order."""
    return values.astype(values.dtype.newbyteorder("="), copy=False)


class NpyFile:
    """An open .npy file.

    Attributes:
        path: the file.
        header: its header.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            self._file = open(path, "rb")
        except OSError as error:
            raise DataError(f"{path}: {error.strerror}") from error
        try:
            self.header = read_npy_header(self._file, str(path), os.fstat(self._file.fileno()).st_size)
        except BaseException:
            self._file.close()
            raise

    def close(self) -> None:
        """Close the file; harmless when repeated."""
        self._file.close()

    def read_rows(self, start: int, rows: int) -> npt.NDArray[Any]:
        """Read consecutive rows.

        Args:
            start: the first one, from 0.
            rows: how many.

        Returns:
            [rows, columns] of the file's own type in this machine's byte order, or [rows] of an array of one dimension.

        Raises:
            DataError: the file ends before them.
        """
        header = self.header
        total, columns = header.shape[0], header.shape[1] if len(header.shape) == 2 else 1
        if header.columns_first and columns > 1:
            values = np.empty((columns, rows), header.dtype)
            for column in range(columns):
                self._fill(values[column], column * total + start)
            return native(values).T
        values = np.empty((rows, *header.shape[1:]), header.dtype)
        self._fill(values, start * columns)
        return native(values)

    def _fill(self, values: npt.NDArray[Any], first_value: int) -> None:
        view = values.reshape(-1).view(np.uint8).data
        offset = self.header.header_bytes + first_value * self.header.dtype.itemsize
        while len(view):
            try:
                count = os.preadv(self._file.fileno(), [view], offset)
            except OSError as error:
                raise DataError(f"{self.path}: {error.strerror}, after {offset:,} bytes") from error
            if count == 0:
                raise DataError(
                    f"{self.path}: was cut off while it was read, after {offset:,} of {self.header.size_bytes:,} bytes",
                    remedy="run preprocess again when the file is complete",
                )
            view, offset = view[count:], offset + count
