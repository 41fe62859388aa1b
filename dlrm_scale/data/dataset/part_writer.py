"""Writes one Arrow file of a dataset: checksummed on the way, visible under its name only when complete."""

import os
from collections.abc import Collection, Mapping
from pathlib import Path
from types import TracebackType
from typing import IO

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import xxhash

from dlrm_scale.data.dataset.manifest import Part
from dlrm_scale.data.durable import fsync_folder
from dlrm_scale.data.source.raw_block import Bags
from dlrm_scale.errors import DatasetError
from dlrm_scale.schema import CATEGORY_COLUMNS, INTEGER_COLUMNS, LABEL_COLUMN

__all__ = ["ROWS_PER_RECORD_BATCH", "PartWriter", "arrow_schema"]

ROWS_PER_RECORD_BATCH = 8192

_NO_BAGS: Mapping[str, Bags] = {}


def arrow_schema(multi_hot: Collection[str] = ()) -> pa.Schema:
    """Return the columns of a part: label, 13 dense features, 26 columns of ids (lists of ids for `multi_hot` ones)."""
    bag = pa.list_(pa.field("item", pa.int32(), nullable=False))
    return pa.schema(
        [
            pa.field(LABEL_COLUMN, pa.uint8(), nullable=False),
            *(pa.field(name, pa.float32(), nullable=False) for name in INTEGER_COLUMNS),
            *(pa.field(name, bag if name in multi_hot else pa.int32(), nullable=False) for name in CATEGORY_COLUMNS),
        ]
    )


class PartWriter:
    """Rows in blocks of any size become record batches of `ROWS_PER_RECORD_BATCH` rows (the last may be shorter).

    The bytes depend on the rows alone, not on how they are cut into blocks. As a context manager it removes its
    temporary file when the block ends without `close()`.

    Args:
        path: the final name, as in `dataset/part-00000.arrow`.
        source: the raw file that the rows come from; kept in the manifest.
        multi_hot: the category columns whose rows have bags of ids.
    """

    def __init__(self, path: Path, *, source: str = "", multi_hot: Collection[str] = ()) -> None:
        assert set(multi_hot) <= set(CATEGORY_COLUMNS)
        self.path = path
        self.rows = 0
        self._source = source
        self._schema = arrow_schema(multi_hot)
        # Ids and lengths of the bags of the rows that wait, in the pieces that they came in.
        self._bags: dict[str, list[tuple[npt.NDArray[np.int32], npt.NDArray[np.int32]]]] = {
            name: [] for name in CATEGORY_COLUMNS if name in multi_hot
        }
        self._temporary = path.with_name(f"{path.name}.tmp")
        self._filled = 0
        self._labels = np.empty(ROWS_PER_RECORD_BATCH, np.uint8)
        self._dense = np.empty((len(INTEGER_COLUMNS), ROWS_PER_RECORD_BATCH), np.float32)
        self._ids = np.empty((len(CATEGORY_COLUMNS), ROWS_PER_RECORD_BATCH), np.int32)
        try:
            self._sink = _HashingFile(self._temporary.open("wb", buffering=0))
        except OSError as error:
            raise self._failed(error) from error
        try:
            self._writer = pa.ipc.new_file(pa.PythonFile(self._sink, "w"), self._schema)
        except OSError as error:
            self.abort()
            raise self._failed(error) from error

    def write(
        self,
        labels: npt.NDArray[np.uint8],
        dense: npt.NDArray[np.float32],
        ids: npt.NDArray[np.int32],
        bags: Mapping[str, Bags] = _NO_BAGS,
    ) -> None:
        """Append rows.

        Args:
            labels: `[n]` uint8, 0 or 1.
            dense: `[13, n]` float32.
            ids: `[26, n]` int32; rows of multi-hot columns are ignored.
            bags: of each multi-hot column, with int32 ids; bags may be empty.

        Raises:
            DatasetError: the file can't be written.
        """
        n = len(labels)
        assert labels.dtype == np.uint8
        assert dense.dtype == np.float32
        assert ids.dtype == np.int32
        assert dense.shape == (len(INTEGER_COLUMNS), n)
        assert ids.shape == (len(CATEGORY_COLUMNS), n)
        assert set(bags) == set(self._bags)
        for bag in bags.values():
            assert bag.values.dtype == np.int32
            assert len(bag.offsets) == n + 1
            assert bag.offsets[0] == 0
            assert bag.offsets[-1] == len(bag.values)
        done = 0
        while done < n:
            take = min(n - done, ROWS_PER_RECORD_BATCH - self._filled)
            target = slice(self._filled, self._filled + take)
            self._labels[target] = labels[done : done + take]
            self._dense[:, target] = dense[:, done : done + take]
            self._ids[:, target] = ids[:, done : done + take]
            for name, waiting in self._bags.items():
                offsets = bags[name].offsets[done : done + take + 1]
                # A copy: the caller may use its arrays again.
                values = bags[name].values[offsets[0] : offsets[-1]].copy()
                waiting.append((values, np.diff(offsets).astype(np.int32, copy=False)))
            self._filled += take
            done += take
            if self._filled == ROWS_PER_RECORD_BATCH:
                self._flush()
        self.rows += n

    def close(self) -> Part:
        """Finish the file, make it durable and give it its name.

        Raises:
            DatasetError: the file can't be written; nothing is left under its name.
        """
        self._flush()
        try:
            self._writer.close()
            self._sink.file.flush()
            os.fsync(self._sink.file.fileno())
            self._sink.file.close()
            os.replace(self._temporary, self.path)
            fsync_folder(self.path.parent)
        except OSError as error:
            self.abort()
            raise self._failed(error) from error
        return Part(
            file=self.path.name,
            rows=self.rows,
            size_bytes=self._sink.size_bytes,
            xxh3_128=self._sink.hash.hexdigest(),
            source=self._source,
        )

    def abort(self) -> None:
        """Remove the temporary file; does nothing after `close()`."""
        self._sink.file.close()
        self._temporary.unlink(missing_ok=True)

    def __enter__(self) -> "PartWriter":
        """Return the writer."""
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Remove the temporary file unless `close()` was called."""
        self.abort()

    def _flush(self) -> None:
        n, self._filled = self._filled, 0
        if n == 0:
            return
        columns = [pa.array(c) for c in (self._labels[:n], *self._dense[:, :n], *self._ids[:, :n])]
        for name, waiting in self._bags.items():
            offsets = np.zeros(n + 1, np.int32)
            np.cumsum(np.concatenate([lengths for _, lengths in waiting]), out=offsets[1:])
            index = self._schema.get_field_index(name)
            columns[index] = pa.ListArray.from_arrays(
                pa.array(offsets), pa.array(np.concatenate([ids for ids, _ in waiting])), type=self._schema[index].type
            )
            waiting.clear()
        try:
            self._writer.write_batch(pa.record_batch(columns, schema=self._schema))
        except OSError as error:
            self.abort()
            raise self._failed(error) from error

    def _failed(self, error: OSError) -> DatasetError:
        return DatasetError(f"{self.path} can't be written: {error}", remedy="free space or choose another folder")


class _HashingFile:
    """An output file that knows the checksum and number of the bytes it was given."""

    closed = False

    def __init__(self, file: IO[bytes]) -> None:
        self.file = file
        self.hash = xxhash.xxh3_128()
        self.size_bytes = 0

    def write(self, data: bytes) -> int:
        view = memoryview(data)
        self.hash.update(view)
        self.size_bytes += len(view)
        rest = view
        while len(rest):
            rest = rest[self.file.write(rest) :]
        return len(view)

    def tell(self) -> int:
        return self.size_bytes

    def flush(self) -> None:
        self.file.flush()

    def close(self) -> None:
        """The writer closes the file itself, after fsync."""
