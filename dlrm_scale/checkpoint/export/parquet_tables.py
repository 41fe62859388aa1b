"""One Parquet file a table: `id`, `weight` as a list of fixed length, and a column for each tensor of optimizer state.

Rows are in the order of ids, in row groups of about 64 MiB. Dense parameters are no rows of a table and are left out.
"""

from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch

from dlrm_scale.checkpoint.export.contents import Contents, ExportedTensor
from dlrm_scale.checkpoint.export.new_output import new_folder
from dlrm_scale.checkpoint.files.manifest import TableRecord
from dlrm_scale.errors import CheckpointError

__all__ = ["export_parquet"]

_TYPES = {
    "F64": pa.float64(),
    "F32": pa.float32(),
    "F16": pa.float16(),
    "I64": pa.int64(),
    "I32": pa.int32(),
    "I16": pa.int16(),
    "I8": pa.int8(),
    "U8": pa.uint8(),
}


def export_parquet(contents: Contents, folder: Path) -> int:
    """Write `<table>.parquet` for each table; memory is that of a `TableStream` and one row group.

    Args:
        contents: what to write.
        folder: a new one.

    Returns:
        Bytes of all files.

    Raises:
        ConfigError: the folder exists.
        CheckpointError: a checkpoint's file is damaged, the folder can't be written, or a table or type has no
            counterpart in Parquet files.
    """
    for table in contents.tables:
        if "/" in table.name or table.name.startswith("."):
            raise CheckpointError(f"table {table.name} can't name a file", remedy="export it --to safetensors")
    size = sum(tensor.size_bytes for table in contents.tables for tensor in contents.table_tensors(table))
    with new_folder(folder, size) as made:
        for table in contents.tables:
            _write_table(contents, table, made / f"{table.name}.parquet")
        return sum(file.stat().st_size for file in made.iterdir())


def _write_table(contents: Contents, table: TableRecord, path: Path) -> None:
    tensors = contents.table_tensors(table)
    fields = {tensor.name: _field(table, tensor) for tensor in tensors}
    schema = pa.schema([pa.field("id", pa.int64(), nullable=False), *fields.values()], metadata=contents.metadata)
    # Floats of weights neither repeat nor shrink: no dictionary, no codec, no statistics.
    with pq.ParquetWriter(path, schema, compression="none", use_dictionary=False, write_statistics=["id"]) as writer:
        for start, values in contents.table_blocks(table):
            rows = len(next(iter(values.values())))
            columns = [pa.array(np.arange(start, start + rows))]
            columns += [_column(values[name], field.type) for name, field in fields.items()]
            writer.write_table(pa.Table.from_arrays(columns, schema=schema), row_group_size=rows)


def _field(table: TableRecord, tensor: ExportedTensor) -> pa.Field:
    kind = _TYPES.get(tensor.dtype)
    if kind is None:
        raise CheckpointError(
            f"{tensor.name} is {tensor.dtype}, which Parquet hasn't", remedy="export it --to safetensors"
        )
    name = tensor.name.removeprefix(f"{table.name}.")
    return pa.field(name, pa.list_(kind, table.dim) if len(tensor.shape) == 2 else kind, nullable=False)


def _column(values: torch.Tensor, kind: pa.DataType) -> pa.Array:
    flat = values.contiguous().reshape(-1).numpy()
    if not pa.types.is_fixed_size_list(kind):
        return pa.array(flat, kind)
    return pa.FixedSizeListArray.from_arrays(pa.array(flat, kind.value_type), type=kind)
