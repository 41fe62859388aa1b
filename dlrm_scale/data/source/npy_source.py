"""Rows that torchrec's or MLPerf's scripts have preprocessed: dense features, ids and labels in three NumPy files.

    NAME_dense.npy     [n, 13] float32 or float16, features as the model takes them; no transform is applied again
    NAME_labels.npy    [n] or [n, 1], 0 or 1
    NAME_sparse.npy    [n, 26] int32, int64 or uint32; or NAME_sparse_multi_hot.npz, see `multi_hot_npz`

The ids are either rows of tables (after contiguous_preproc_criteo, or modulo the tables' sizes) or raw ids of 32 bits
(npy_preproc_criteo alone; older ones stored them as int32, so that ids from 2^31 on are negative). The files don't say
which; `ids` does. Missing categories and the raw id 00000000 are both 0 in these files: nothing is marked as missing.

Ids that went through torchrec's `shuffle` were kept in float32 and aren't exact beyond 16,777,216. The files don't show
it.
"""

from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from dlrm_scale.data.source.bad_rows import BadRow
from dlrm_scale.data.source.columnar_source import ColumnarSource
from dlrm_scale.data.source.inputs import InputFile
from dlrm_scale.data.source.integer_ids import IdMeaning, outside_32_bits, raw_ids, refuse_raw_as_given
from dlrm_scale.data.source.multi_hot_npz import MultiHotNpz
from dlrm_scale.data.source.npy_file import NpyFile, NpyHeader
from dlrm_scale.data.source.raw_block import Bags, RawBlock
from dlrm_scale.errors import DataError
from dlrm_scale.schema import CATEGORY_COLUMNS, INTEGER_COLUMNS, LABEL_COLUMN

__all__ = ["NpyPiece", "NpySource"]

_PIECE_ROWS = 8192
# Columns of very long bags: fewer rows a piece.
_PIECE_BYTES_MAX = 64 * 1024 * 1024
_INTEGERS = len(INTEGER_COLUMNS)
_CATEGORIES = len(CATEGORY_COLUMNS)


@dataclass(frozen=True, slots=True)
class NpyPiece:
    """Consecutive rows as stored.

    Attributes:
        first_row: number of the first, from 1.
        labels: [n].
        dense: [n, 13].
        columns: 26 arrays [n, pooling]; of a .npy file they are views of one [n, 26].
    """

    first_row: int
    labels: npt.NDArray[Any]
    dense: npt.NDArray[Any]
    columns: Sequence[npt.NDArray[Any]]


class _IdArrays(Protocol):
    """The file of ids; arrays have one entry for each category column."""

    @property
    def path(self) -> Path: ...

    @property
    def rows(self) -> int: ...

    @property
    def poolings(self) -> Sequence[int]: ...

    @property
    def dtypes(self) -> Sequence[np.dtype[Any]]: ...

    def read_rows(self, start: int, rows: int) -> Sequence[npt.NDArray[Any]]: ...

    def close(self) -> None: ...


class _OneHotNpy:
    """Ids in one array, [rows, 26]."""

    poolings = (1,) * _CATEGORIES

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = NpyFile(path)
        header = self._file.header
        if len(header.shape) != 2 or header.shape[1] != _CATEGORIES:
            self.close()
            raise _wrong(path, f"ids of shape [rows, {_CATEGORIES}]", header)
        self.rows = header.shape[0]
        self.dtypes = (header.dtype,) * _CATEGORIES

    def read_rows(self, start: int, rows: int) -> Sequence[npt.NDArray[Any]]:
        ids = self._file.read_rows(start, rows)
        return [ids[:, column : column + 1] for column in range(_CATEGORIES)]

    def close(self) -> None:
        self._file.close()


class NpySource(ColumnarSource):
    """One trio of files; see `RowSource`.

    Args:
        input_file: of format "npy", with members dense, sparse, labels.
        ids: whether they are rows of tables or raw.

    Attributes:
        path: the dense file.
        rows: number of rows.
        multi_hot: names of the columns with several ids a row.
        gives_features: True.

    Raises:
        DataError: a file can't be opened, is cut off, holds an array of another shape or type, or the files differ in
            their rows.
    """

    gives_features = True

    def __init__(self, input_file: InputFile, *, ids: IdMeaning = "given") -> None:
        super().__init__(input_file)
        self._meaning = ids
        dense, sparse, labels = input_file.members
        with ExitStack() as opened:
            self._dense = NpyFile(dense)
            opened.callback(self._dense.close)
            self._labels = NpyFile(labels)
            opened.callback(self._labels.close)
            self._ids: _IdArrays = MultiHotNpz(sparse) if sparse.suffix.lower() == ".npz" else _OneHotNpy(sparse)
            opened.callback(self._ids.close)
            self._check()
            self._opened = opened.pop_all()
        self.rows = self._ids.rows
        poolings = self._ids.poolings
        self.multi_hot = tuple(name for name, pooling in zip(CATEGORY_COLUMNS, poolings, strict=True) if pooling > 1)
        row_bytes = sum(pooling * dtype.itemsize for pooling, dtype in zip(poolings, self._ids.dtypes, strict=True))
        self._piece_rows = max(1, min(_PIECE_ROWS, _PIECE_BYTES_MAX // row_bytes))

    def close(self) -> None:
        """Close the files; harmless when repeated."""
        self._opened.close()

    def _check(self) -> None:
        dense, labels = self._dense.header, self._labels.header
        if len(dense.shape) != 2 or dense.shape[1] != _INTEGERS:
            raise _wrong(self._dense.path, f"dense features of shape [rows, {_INTEGERS}]", dense)
        if dense.dtype.kind != "f" or dense.dtype.itemsize not in (2, 4):
            raise _wrong(
                self._dense.path, "dense features of float32 or float16", dense, "save array.astype(np.float32)"
            )
        if not (len(labels.shape) == 1 or (len(labels.shape) == 2 and labels.shape[1] == 1)):
            raise _wrong(self._labels.path, "labels of shape [rows] or [rows, 1]", labels)
        if labels.dtype.kind not in "biuf":
            raise _wrong(self._labels.path, "labels of an integer or floating-point type", labels)
        for name, dtype in zip(CATEGORY_COLUMNS, self._ids.dtypes, strict=True):
            if (dtype.kind, dtype.itemsize) not in {("i", 4), ("i", 8), ("u", 4)}:
                raise DataError(
                    f"{self._ids.path}, column {name}: expected ids of int32, int64 or uint32, found {dtype}",
                    remedy="make the file again with integer ids: in float32 they aren't exact beyond 16,777,216"
                    if dtype.kind == "f"
                    else "save the ids as int64",
                )
        rows = {
            self._dense.path: dense.shape[0],
            self._ids.path: self._ids.rows,
            self._labels.path: labels.shape[0],
        }
        if len(set(rows.values())) > 1:
            shown = ", ".join(f"{path} has {count:,}" for path, count in rows.items())
            raise DataError(
                f"the files of one day differ in their rows: {shown}", remedy="give files that were made together"
            )

    def pieces(self) -> Iterator[NpyPiece]:
        """Yield about 8,192 rows at a time, as stored.

        Raises:
            DataError: a file is cut off or damaged.
        """
        for start in range(0, self.rows, self._piece_rows):
            rows = min(self._piece_rows, self.rows - start)
            columns = self._ids.read_rows(start, rows)
            labels = self._labels.read_rows(start, rows).reshape(rows)
            piece = NpyPiece(start + 1, labels, self._dense.read_rows(start, rows), columns)
            self._rows_read = start + rows
            yield piece

    def parse(self, piece: NpyPiece) -> RawBlock:
        """Turn a piece into columns.

        Raises:
            DataError: the ids were to be rows of tables and one can't be.
        """
        rows = len(piece.labels)
        labels = (piece.labels == 1).astype(np.uint8)
        features = np.ascontiguousarray(piece.dense.T, np.float32)
        good: npt.NDArray[np.bool_] = np.isin(piece.labels, (0, 1))
        np.logical_and(good, np.isfinite(features).all(axis=0), out=good)
        categories: npt.NDArray[np.uint32] = np.zeros((_CATEGORIES, rows), np.uint32)
        bags: dict[int, npt.NDArray[np.uint32]] = {}
        outside: dict[int, npt.NDArray[np.bool_]] = {}
        for column, values in enumerate(piece.columns):
            if self._meaning == "given":
                refuse_raw_as_given(values, self._ids.path, CATEGORY_COLUMNS[column], piece.first_row)
            elif (wrong := outside_32_bits(values)) is not None:
                outside[column] = wrong
                good[np.nonzero(wrong)[0]] = False
                values = np.where(wrong, 0, values)
            if values.shape[1] == 1:
                categories[column] = raw_ids(values[:, 0])
            else:
                bags[column] = raw_ids(values)
        bad_rows: list[BadRow] = []
        if not good.all():
            bad_rows = [self._bad_row(piece, int(row), outside) for row in np.flatnonzero(~good)]
            labels, features, categories = labels[good], features[:, good], categories[:, good]
            bags = {column: values[good] for column, values in bags.items()}
        rows = len(labels)
        return RawBlock(
            first_line=piece.first_row,
            labels=labels,
            integers=np.zeros((_INTEGERS, 0), np.int32),
            categories=np.ascontiguousarray(categories),
            missing=np.zeros(rows, np.uint64),
            bags={column: _bags(values) for column, values in bags.items()},
            features=np.ascontiguousarray(features),
            bad_rows=bad_rows,
        )

    def _bad_row(self, piece: NpyPiece, row: int, outside: dict[int, npt.NDArray[np.bool_]]) -> BadRow:
        label, dense = piece.labels[row], piece.dense[row]
        ids = [values[row] for values in piece.columns]
        infinite = np.flatnonzero(~np.isfinite(dense.astype(np.float32)))
        if label not in (0, 1):
            path, column, expected, found = self._labels.path, LABEL_COLUMN, "0 or 1", str(label)
        elif infinite.size:
            which = int(infinite[0])
            path, column, expected, found = (
                self._dense.path,
                INTEGER_COLUMNS[which],
                "a finite number",
                str(dense[which]),
            )
        else:
            which = next(column for column, wrong in outside.items() if wrong[row].any())
            path, column = self._ids.path, CATEGORY_COLUMNS[which]
            expected = "an id from 0 to 4294967295"
            found = str(next(int(value) for value in ids[which] if not 0 <= value < 2**32))
        shown = [str(label), *(str(value) for value in dense), *(",".join(map(str, bag)) for bag in ids)]
        return BadRow(
            path=path,
            line=piece.first_row + row,
            column=column,
            expected=expected,
            found=found,
            row="\t".join(shown).encode()[:2048],
            unit="row",
        )


def _bags(values: npt.NDArray[np.uint32]) -> Bags:
    rows, pooling = values.shape
    return Bags(
        values=np.ascontiguousarray(values).reshape(-1),
        offsets=np.arange(0, rows * pooling + 1, pooling, dtype=np.int32),
    )


def _wrong(path: Path, expected: str, found: NpyHeader, remedy: str | None = None) -> DataError:
    return DataError(f"{path}: expected {expected}, found {found.describe()}", remedy=remedy)
