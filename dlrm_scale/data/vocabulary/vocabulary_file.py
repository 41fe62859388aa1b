"""A column's vocabulary as a Parquet file beside the dataset, written and read in row groups.

Columns id uint32, row int32, count int64 (occurrences in the training rows that it was made from), in hash order; the
method is in the file's metadata. The counts are of no use for mapping, so they are never held as a whole.
"""

import json
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq

from dlrm_scale.data.durable import fsync_file
from dlrm_scale.data.vocabulary.count_runs import CountChunk
from dlrm_scale.data.vocabulary.vocabulary import (
    FIRST_ID_ROW,
    Method,
    Vocabulary,
    given_vocabulary,
    hashed_vocabulary,
    mapping_fingerprint,
    predicted_memory_bytes,
    vocabulary_of_kept,
)
from dlrm_scale.errors import DatasetError
from dlrm_scale.schema import CATEGORY_COLUMNS, OUT_OF_VOCABULARY_ROW

__all__ = [
    "check_mapping",
    "load_vocabularies",
    "load_vocabulary",
    "read_counts",
    "save_vocabulary",
    "stored_vocabulary_bytes",
    "vocabulary_file",
]

_METADATA_KEY = b"dlrm_scale"
_FORMAT_VERSION = 1
_ROWS_PER_ROW_GROUP = 1 << 19


def vocabulary_file(column: str) -> str:
    """Name of a column's vocabulary in a dataset's folder."""
    return f"vocabulary-{column}.parquet"


def save_vocabulary(folder: Path, vocabulary: Vocabulary, counts: Iterable[CountChunk] = ()) -> None:
    """Write `vocabulary-C1.parquet` durably; the bytes depend on the ids and counts alone, not on the chunks.

    Args:
        folder: of the dataset.
        vocabulary: what to write.
        counts: frequency: chunks of (ids [n] uint32, counts [n] int64) in hash order that hold all kept ids, others
            are left out: what the vocabulary was made from, or `read_counts` of another dataset.

    Raises:
        DatasetError: the file can't be written.
    """
    about = {
        "format_version": _FORMAT_VERSION,
        "column": vocabulary.column,
        "method": vocabulary.method,
        "table_rows": vocabulary.table_rows,
        "salt": vocabulary.salt,
    }
    schema = pa.schema(
        [("id", pa.uint32()), ("row", pa.int32()), ("count", pa.int64())], metadata={_METADATA_KEY: json.dumps(about)}
    )
    file = folder / vocabulary_file(vocabulary.column)
    try:
        # Neither ids nor rows repeat; only counts are worth a dictionary.
        with pq.ParquetWriter(file, schema, use_dictionary=["count"]) as writer:
            start = 0
            for group in _in_row_groups(_counts_of_kept(vocabulary, counts)):
                stop = start + len(group)
                rows = np.arange(FIRST_ID_ROW + start, FIRST_ID_ROW + stop, dtype=np.int32)
                writer.write_table(pa.table([vocabulary.ids[start:stop], rows, group], schema=schema))
                start = stop
        fsync_file(file)
    except OSError as error:
        raise DatasetError(f"{file} can't be written: {error}", remedy="free space or choose another folder") from error
    assert start == len(vocabulary.ids), "counts of kept ids are absent"


def _counts_of_kept(vocabulary: Vocabulary, counts: Iterable[CountChunk]) -> Iterator[npt.NDArray[np.int64]]:
    if vocabulary.method != "frequency":
        return
    for ids, occurrences in counts:
        rows = np.empty(len(ids), np.int32)
        vocabulary.map_ids(ids, rows)
        yield occurrences[rows != OUT_OF_VOCABULARY_ROW]


def _in_row_groups(pieces: Iterable[npt.NDArray[np.int64]]) -> Iterator[npt.NDArray[np.int64]]:
    waiting: list[npt.NDArray[np.int64]] = []
    held = 0
    for piece in pieces:
        waiting.append(piece)
        held += len(piece)
        if held >= _ROWS_PER_ROW_GROUP:
            joined = np.concatenate(waiting)
            full = held - held % _ROWS_PER_ROW_GROUP
            for start in range(0, full, _ROWS_PER_ROW_GROUP):
                yield joined[start : start + _ROWS_PER_ROW_GROUP]
            waiting, held = [joined[full:].copy()], held - full
    if held:
        yield np.concatenate(waiting)


def load_vocabulary(folder: Path, column: str) -> Vocabulary:
    """Read what `save_vocabulary` wrote.

    Raises:
        DatasetError: the file is absent, damaged or of a newer format.
    """
    file = folder / vocabulary_file(column)
    with _opened(file) as parquet:
        method, table_rows = _about(file, column, parquet)
        if method == "given":
            return given_vocabulary(column, table_rows)
        if method != "frequency":
            return hashed_vocabulary(column, method, rows=table_rows)
        ids = np.empty(parquet.metadata.num_rows, np.uint32)
        filled = 0
        in_order = len(ids) == table_rows - FIRST_ID_ROW
        for some, rows in _columns(file, parquet, ("id", np.uint32), ("row", np.int32)):
            ids[filled : filled + len(some)] = some
            first = FIRST_ID_ROW + filled
            filled += len(some)
            in_order = in_order and np.array_equal(rows, np.arange(first, first + len(some)))
    vocabulary = vocabulary_of_kept(column, ids) if in_order else None
    if vocabulary is None:
        raise DatasetError(f"{file}: ids aren't in hash order on rows 2 to {table_rows - 1}", remedy="restore it")
    return vocabulary


def load_vocabularies(folder: Path, transforms: Mapping[str, object]) -> list[Vocabulary]:
    """Read every column's vocabulary and compare them with what the dataset was made with.

    Args:
        folder: of the dataset.
        transforms: of its manifest.

    Raises:
        DatasetError: a vocabulary is absent or damaged, or they are not the dataset's.
    """
    loaded = [load_vocabulary(folder, column) for column in CATEGORY_COLUMNS]
    check_mapping(folder, transforms, loaded)
    return loaded


def check_mapping(folder: Path, transforms: Mapping[str, object], loaded: Iterable[Vocabulary]) -> None:
    """Compare vocabularies with what a dataset was made with.

    Args:
        folder: of the dataset.
        transforms: of its manifest.
        loaded: C1 to C26; iterated once.

    Raises:
        DatasetError: they are not the dataset's.
    """
    categories = transforms.get("categories")
    expected = categories.get("mapping_fingerprint") if isinstance(categories, Mapping) else None
    if mapping_fingerprint(loaded) != expected:
        raise DatasetError(
            f"{folder}: the vocabularies are not those that the dataset was made with",
            remedy="put the vocabulary files back, or preprocess the rows again",
        )


def read_counts(folder: Path, column: str) -> Iterator[CountChunk]:
    """Yield the kept ids of a saved vocabulary and their counts, in chunks; nothing unless it is by frequency.

    Raises:
        DatasetError: as `load_vocabulary`.
    """
    file = folder / vocabulary_file(column)
    with _opened(file) as parquet:
        _about(file, column, parquet)
        for chunk in _columns(file, parquet, ("id", np.uint32), ("count", np.int64)):
            yield chunk[0], chunk[1]


def stored_vocabulary_bytes(folder: Path, column: str) -> tuple[int, int]:
    """Return the table rows of a saved vocabulary, and how many bytes it will take in memory, without loading it.

    Raises:
        DatasetError: as `load_vocabulary`.
    """
    file = folder / vocabulary_file(column)
    with _opened(file) as parquet:
        _, table_rows = _about(file, column, parquet)
        return table_rows, predicted_memory_bytes(parquet.metadata.num_rows)


def _opened(file: Path) -> pq.ParquetFile:
    try:
        return pq.ParquetFile(file, memory_map=False)
    except FileNotFoundError as error:
        raise DatasetError(f"{file} is absent", remedy="name a dataset that `dlrm-scale preprocess` wrote") from error
    except (OSError, ValueError, pa.ArrowException) as error:
        raise _unreadable(file, error) from error


def _unreadable(file: Path, error: Exception) -> DatasetError:
    return DatasetError(f"{file} can't be read: {error!r}", remedy="restore the file")


def _about(file: Path, column: str, parquet: pq.ParquetFile) -> tuple[Method, int]:
    """Return method and table rows."""
    try:
        about = json.loads((parquet.schema_arrow.metadata or {})[_METADATA_KEY])
        version, named, method = about["format_version"], about["column"], about["method"]
        table_rows = int(about["table_rows"])
    except (KeyError, ValueError, TypeError) as error:
        raise _unreadable(file, error) from error
    if version != _FORMAT_VERSION:
        raise DatasetError(f"{file} has format version {version}, this dlrm-scale reads {_FORMAT_VERSION}")
    if named != column or method not in ("frequency", "hash", "modulo", "given"):
        raise DatasetError(f"{file} says column {named}, method {method}", remedy="restore the file")
    return method, table_rows


def _columns(
    file: Path, parquet: pq.ParquetFile, *columns: tuple[str, type[np.generic]]
) -> Iterator[tuple[npt.NDArray[Any], ...]]:
    try:
        names = [name for name, _ in columns]
        for batch in parquet.iter_batches(_ROWS_PER_ROW_GROUP, columns=names, use_threads=False):
            yield tuple(
                batch.column(name).to_numpy(zero_copy_only=False).astype(kind, casting="same_kind", copy=True)
                for name, kind in columns
            )
    except (OSError, KeyError, ValueError, TypeError, pa.ArrowException) as error:
        raise _unreadable(file, error) from error
