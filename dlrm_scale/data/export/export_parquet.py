"""A dataset's rows as Parquet: a file a part, columns and types as in the dataset.

Row groups of 131,072 rows (fewer where bags are long), zstd, and a checksum on every page, so that other tools find a
flipped bit too.
What the rows mean stands in the file's metadata under `dlrm_scale`, as JSON.
"""

import json
import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from dlrm_scale.data.dataset.dataset import Dataset, Rows
from dlrm_scale.data.dataset.part_writer import arrow_schema
from dlrm_scale.data.export.export_rows import ExportedPart, read_rows
from dlrm_scale.schema import CATEGORY_COLUMNS, LABEL_COLUMN
from dlrm_scale.units import MIB

__all__ = ["PARQUET_METADATA_KEY", "parquet_file", "write_parquet"]

PARQUET_METADATA_KEY = b"dlrm_scale"
_ROW_GROUP_ROWS = 131_072
_ROW_GROUP_BYTES = 64 * MIB
"""Of values in memory, whichever limit is reached first; one row group is what an export holds."""


def parquet_file(part: ExportedPart) -> str:
    """Name of a part's file."""
    return f"part-{part.index:05d}.parquet"


def write_parquet(
    folder: Path, dataset: Dataset, part: ExportedPart, facts: Mapping[str, Any], on_rows: Callable[[int], None]
) -> list[str]:
    """Write one part, durably.

    Args:
        folder: exists; the file in it is new.
        dataset: what to read.
        part: which rows.
        facts: JSON-ready, for the file's metadata.
        on_rows: called with the number of rows just written.

    Returns:
        The file's name.

    Raises:
        DatasetError: the dataset can't be read.
        OSError: the file can't be written.
    """
    metadata = {PARQUET_METADATA_KEY: json.dumps({**facts, "source": part.source, "rows": part.rows}).encode()}
    schema = arrow_schema(dataset.multi_hot)
    if dataset.manifest.statistics.get("labeled") is False:
        # Their zeros are no labels.
        schema = schema.remove(schema.get_field_index(LABEL_COLUMN))
    schema = schema.with_metadata(metadata)
    name = parquet_file(part)
    with (folder / name).open("wb") as file:
        with pq.ParquetWriter(file, schema, compression="zstd", write_page_checksum=True) as writer:
            for group in _row_groups(read_rows(dataset, part), schema):
                writer.write_table(group, row_group_size=group.num_rows)
                on_rows(group.num_rows)
        file.flush()
        os.fsync(file.fileno())
    return [name]


def _row_groups(pieces: Iterable[Rows], schema: pa.Schema) -> Iterable[pa.Table]:
    batches: list[pa.RecordBatch] = []
    rows = size_bytes = 0
    for piece in pieces:
        batch = _record_batch(piece, schema)
        if batches and (rows + batch.num_rows > _ROW_GROUP_ROWS or size_bytes + batch.nbytes > _ROW_GROUP_BYTES):
            yield pa.Table.from_batches(batches)
            batches, rows, size_bytes = [], 0, 0
        batches.append(batch)
        rows += batch.num_rows
        size_bytes += batch.nbytes
    if batches:
        yield pa.Table.from_batches(batches)


def _record_batch(rows: Rows, schema: pa.Schema) -> pa.RecordBatch:
    columns = [pa.array(rows.labels)] if schema.get_field_index(LABEL_COLUMN) >= 0 else []
    columns += map(pa.array, rows.dense)
    for name, ids in zip(CATEGORY_COLUMNS, rows.ids, strict=True):
        bag = rows.bags.get(name)
        if bag is None:
            columns.append(pa.array(ids))
        else:
            kind = schema.field(name).type
            columns.append(pa.ListArray.from_arrays(pa.array(bag.offsets), pa.array(bag.values), type=kind))
    return pa.record_batch(columns, schema=schema)
