"""From raw category ids (unsigned 32 bits) to table rows, one vocabulary a column.

Row 0 is a missing category and row 1 an id that the vocabulary doesn't hold, under every method:

    frequency   ids seen at least `threshold` times in training rows get a row of their own: 2 + their rank in hash
                order. Any other id gets row 1. (In order of frequency, a row-wise shard 0 of 4 would take 91 % of the
                lookups; in hash order it takes 29 %.)
    hash        2 + mix(id, salt of the column) mod (rows - 2); row 1 stays unused
    modulo      2 + id mod (rows - 2); row 1 stays unused

`mix` is the finalizer of splitmix64 (Steele, Lea and Flood, 2014): a bijection of 64 bits, so ids never tie.
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.parquet as pq
from numba import njit

from dlrm_scale.data.durable import fsync_file
from dlrm_scale.data.tsv import FIRST_CATEGORY_BIT
from dlrm_scale.errors import DatasetError
from dlrm_scale.schema import CATEGORY_COLUMNS, MISSING_ROW, OUT_OF_VOCABULARY_ROW

__all__ = [
    "FIRST_ID_ROW",
    "VOCABULARY_RULE",
    "Method",
    "Vocabulary",
    "frequency_vocabulary",
    "hashed_vocabulary",
    "load_vocabularies",
    "load_vocabulary",
    "mapping_fingerprint",
    "save_vocabulary",
    "vocabulary_file",
]

Method = Literal["frequency", "hash", "modulo"]

FIRST_ID_ROW = OUT_OF_VOCABULARY_ROW + 1
"""First table row that belongs to ids."""

VOCABULARY_RULE: dict[str, object] = {
    "missing_row": MISSING_ROW,
    "out_of_vocabulary_row": OUT_OF_VOCABULARY_ROW,
    "mix": "splitmix64",
}
"""What the manifest says about all columns."""

_METADATA_KEY = b"dlrm_scale"
_FORMAT_VERSION = 1


@dataclass(frozen=True, kw_only=True, eq=False)
class Vocabulary:
    """The mapping of one column.

    Attributes:
        column: C1 to C26.
        method: how ids become rows.
        table_rows: rows of the table; every mapped id is in `[0, table_rows)`.
        ids: [k] uint32, frequency only: the kept ids in hash order; `ids[i]` has row `2 + i`.
        counts: [k] int64, frequency only: occurrences of `ids` in the training rows that it was made from.
        salt: mixed into ids under hash.
    """

    column: str
    method: Method
    table_rows: int
    ids: npt.NDArray[np.uint32]
    counts: npt.NDArray[np.int64]
    salt: int
    # [2^bits + 1] int32: kept ids whose hash starts with the bits b stand at [directory[b], directory[b + 1]) of `ids`.
    # About 2 ids share a bucket, so a lookup costs two cache misses and 8 bytes an id, with no keys stored twice.
    _directory: npt.NDArray[np.int32]

    def map(self, ids: npt.NDArray[np.uint32], missing: npt.NDArray[np.uint64], rows: npt.NDArray[np.int32]) -> None:
        """Write the table row of each id.

        Args:
            ids: [n] uint32 raw ids of this column.
            missing: [n] uint64 as in `RawBlock`.
            rows: [n] int32, written.
        """
        bit = FIRST_CATEGORY_BIT + CATEGORY_COLUMNS.index(self.column)
        if self.method == "frequency":
            _map_frequency(ids, missing, bit, self.ids, self._directory, rows)
        else:
            _map_modulo(ids, missing, bit, self.method == "hash", np.uint64(self.salt), self.table_rows, rows)


@njit(cache=True, nogil=True)
def _mix(value: Any) -> Any:  # pragma: no cover - compiled
    value = np.uint64(value) + np.uint64(0x9E3779B97F4A7C15)
    value = (value ^ (value >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    value = (value ^ (value >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return value ^ (value >> np.uint64(31))


@njit(cache=True, nogil=True)
def _mix_all(ids: Any, hashes: Any) -> None:  # pragma: no cover - compiled
    for i in range(ids.shape[0]):
        hashes[i] = _mix(ids[i])


@njit(cache=True, nogil=True)
def _map_frequency(
    ids: Any, missing: Any, bit: int, kept: Any, directory: Any, rows: Any
) -> None:  # pragma: no cover - compiled
    selected = np.uint64(1) << np.uint64(bit)
    buckets = directory.shape[0] - 1
    shift = np.uint64(64)
    while buckets > 1:
        shift -= np.uint64(1)
        buckets >>= 1
    for i in range(ids.shape[0]):
        if missing[i] & selected:
            rows[i] = 0
            continue
        bucket = np.int64(0)
        if shift < 64:
            bucket = np.int64(_mix(ids[i]) >> shift)
        row = 1
        for k in range(directory[bucket], directory[bucket + 1]):
            if kept[k] == ids[i]:
                row = 2 + k
                break
        rows[i] = row


@njit(cache=True, nogil=True)
def _map_modulo(
    ids: Any, missing: Any, bit: int, mixed: bool, salt: Any, table_rows: int, rows: Any
) -> None:  # pragma: no cover - compiled
    selected = np.uint64(1) << np.uint64(bit)
    room = np.uint64(table_rows - 2)
    for i in range(ids.shape[0]):
        if missing[i] & selected:
            rows[i] = 0
            continue
        value = np.uint64(ids[i])
        if mixed:
            value = _mix(value ^ salt)
        rows[i] = np.int32(2 + np.int64(value % room))


def _hashes(ids: npt.NDArray[np.uint32]) -> npt.NDArray[np.uint64]:
    hashes = np.empty(len(ids), np.uint64)
    _mix_all(ids, hashes)
    return hashes


def _directory_of(sorted_hashes: npt.NDArray[np.uint64]) -> npt.NDArray[np.int32]:
    bits = max(0, len(sorted_hashes).bit_length() - 1)
    if bits == 0:
        return np.array([0, len(sorted_hashes)], np.int32)
    sizes = np.bincount((sorted_hashes >> np.uint64(64 - bits)).astype(np.int64), minlength=1 << bits)
    return np.concatenate([[0], np.cumsum(sizes)]).astype(np.int32)


def frequency_vocabulary(
    column: str,
    ids: npt.NDArray[np.uint32],
    counts: npt.NDArray[np.int64],
    *,
    threshold: int,
    max_rows: int | None = None,
) -> Vocabulary:
    """Give a row to each id that is frequent enough.

    Args:
        column: C1 to C26.
        ids: [u] uint32 distinct ids, in any order.
        counts: [u] int64 occurrences in training rows.
        threshold: ids that occur less often share row 1.
        max_rows: rows of the table at most; the most frequent ids are kept, of equally frequent ones those that come
            first in hash order.
    """
    kept = counts >= threshold
    ids, counts = ids[kept], counts[kept]
    order = np.argsort(_hashes(ids))
    ids, counts = ids[order], counts[order]
    if max_rows is not None and len(ids) > max_rows - FIRST_ID_ROW:
        most_frequent = np.sort(np.argsort(-counts, kind="stable")[: max_rows - FIRST_ID_ROW])
        ids, counts = ids[most_frequent], counts[most_frequent]
    return _from_kept(column, ids, counts)


def _from_kept(column: str, ids: npt.NDArray[np.uint32], counts: npt.NDArray[np.int64]) -> Vocabulary:
    return Vocabulary(
        column=column,
        method="frequency",
        table_rows=FIRST_ID_ROW + len(ids),
        ids=ids,
        counts=counts,
        salt=0,
        _directory=_directory_of(_hashes(ids)),
    )


def hashed_vocabulary(column: str, method: Literal["hash", "modulo"], *, rows: int) -> Vocabulary:
    """Map ids to a fixed number of rows without having seen any.

    Args:
        column: C1 to C26; it salts the hash, so that ids that collide in one column don't in the next.
        method: mix the id first, or take it as it is.
        rows: rows of the table, rows 0 and 1 included; at least 3.
    """
    salt = int(_hashes(np.array([CATEGORY_COLUMNS.index(column) + 1], np.uint32))[0]) if method == "hash" else 0
    return Vocabulary(
        column=column,
        method=method,
        table_rows=rows,
        ids=np.empty(0, np.uint32),
        counts=np.empty(0, np.int64),
        salt=salt,
        _directory=np.zeros(2, np.int32),
    )


def mapping_fingerprint(vocabularies: Sequence[Vocabulary]) -> str:
    """Hash of what all columns' ids become; equal for datasets whose rows mean the same to a model.

    Equal table rows don't tell that: another vocabulary of the same size gives the rows to other ids.
    """
    digest = hashlib.blake2b(digest_size=16)
    for vocabulary in vocabularies:
        about = (
            f"{vocabulary.column} {vocabulary.method} {vocabulary.table_rows} {vocabulary.salt} {len(vocabulary.ids)}"
        )
        digest.update(about.encode() + b"\n")
        digest.update(vocabulary.ids.astype("<u4").tobytes())
    return digest.hexdigest()


def vocabulary_file(column: str) -> str:
    """Name of a column's vocabulary in a dataset's folder."""
    return f"vocabulary-{column}.parquet"


def load_vocabularies(folder: Path, transforms: Mapping[str, object]) -> list[Vocabulary]:
    """Read every column's vocabulary and compare them with what the dataset was made with.

    Args:
        folder: of the dataset.
        transforms: of its manifest.

    Raises:
        DatasetError: a vocabulary is absent or damaged, or they are not the dataset's.
    """
    loaded = [load_vocabulary(folder, column) for column in CATEGORY_COLUMNS]
    categories = transforms.get("categories")
    expected = categories.get("mapping_fingerprint") if isinstance(categories, Mapping) else None
    if mapping_fingerprint(loaded) != expected:
        raise DatasetError(
            f"{folder}: the vocabularies are not those that the dataset was made with",
            remedy="put the vocabulary files back, or preprocess the rows again",
        )
    return loaded


def save_vocabulary(folder: Path, vocabulary: Vocabulary) -> None:
    """Write `vocabulary-C1.parquet` durably: id uint32, row int32, count int64; the method is in its metadata."""
    about = {
        "format_version": _FORMAT_VERSION,
        "column": vocabulary.column,
        "method": vocabulary.method,
        "table_rows": vocabulary.table_rows,
        "salt": vocabulary.salt,
    }
    rows = np.arange(FIRST_ID_ROW, FIRST_ID_ROW + len(vocabulary.ids), dtype=np.int32)
    table = pa.table({"id": vocabulary.ids, "row": rows, "count": vocabulary.counts})
    table = table.replace_schema_metadata({_METADATA_KEY: json.dumps(about)})
    file = folder / vocabulary_file(vocabulary.column)
    try:
        pq.write_table(table, file)
        fsync_file(file)
    except OSError as error:
        raise DatasetError(f"{file} can't be written: {error}", remedy="free space or choose another folder") from error


def load_vocabulary(folder: Path, column: str) -> Vocabulary:
    """Read what `save_vocabulary` wrote.

    Raises:
        DatasetError: the file is absent, damaged or of a newer format.
    """
    file = folder / vocabulary_file(column)
    try:
        table = pq.read_table(file)
        about = json.loads((table.schema.metadata or {})[_METADATA_KEY])
        version, named, method = about["format_version"], about["column"], about["method"]
        table_rows, salt = int(about["table_rows"]), int(about["salt"])
        ids = table["id"].to_numpy().astype(np.uint32, casting="same_kind", copy=True)
        rows = table["row"].to_numpy()
        counts = table["count"].to_numpy().astype(np.int64, casting="same_kind", copy=True)
    except FileNotFoundError as error:
        raise DatasetError(f"{file} is absent", remedy="name a dataset that `dlrm-scale preprocess` wrote") from error
    except (OSError, KeyError, ValueError, TypeError, pa.ArrowException) as error:
        raise DatasetError(f"{file} can't be read: {error!r}", remedy="restore the file") from error
    if version != _FORMAT_VERSION:
        raise DatasetError(f"{file} has format version {version}, this dlrm-scale reads {_FORMAT_VERSION}")
    if named != column or method not in ("frequency", "hash", "modulo"):
        raise DatasetError(f"{file} says column {named}, method {method}", remedy="restore the file")
    if method != "frequency":
        return hashed_vocabulary(column, method, rows=table_rows)
    hashes = _hashes(ids)
    if (
        len(ids) != table_rows - FIRST_ID_ROW
        or not np.array_equal(rows, np.arange(FIRST_ID_ROW, table_rows))
        or np.any(hashes[1:] <= hashes[:-1])
    ):
        raise DatasetError(f"{file}: ids aren't in hash order on rows 2 to {table_rows - 1}", remedy="restore it")
    assert salt == 0
    return _from_kept(column, ids, counts)
