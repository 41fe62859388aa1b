"""A folder that `torch.distributed.checkpoint.load` reads: torch's own writer, fed block by block.

Each block of rows is a chunk of its tensor in the folder's metadata, so that nothing but the block is in memory, and a
loader of shards reads only the chunks that it needs.
"""

import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, TensorWriteData, WriteItem, WriteItemType

from dlrm_scale.checkpoint.chain.table_stream import TableStream
from dlrm_scale.checkpoint.export.contents import Contents
from dlrm_scale.checkpoint.export.new_output import new_folder
from dlrm_scale.checkpoint.files.format import DTYPES

__all__ = ["export_dcp"]


def export_dcp(contents: Contents, folder: Path) -> int:
    """Write the folder; memory is that of a `TableStream`, and of one block of each tensor, which torch keeps.

    Args:
        contents: what to write.
        folder: a new one.

    Returns:
        Bytes of its files.

    Raises:
        ConfigError: the folder exists.
        CheckpointError: a checkpoint's file is damaged, or the folder can't be written.
    """
    with new_folder(folder, contents.size_bytes) as made:
        # No copying ahead: on a machine with a GPU torch would otherwise ask for the chunks in another order.
        writer = dcp.FileSystemWriter(made, thread_count=1, per_thread_copy_ahead=0)
        with warnings.catch_warnings():
            warnings.filterwarnings(
                "ignore", message="torch.distributed is (disabled|unavailable)", category=UserWarning
            )
            _save(writer, contents)
        return sum(file.stat().st_size for file in made.iterdir())


def _save(writer: dcp.FileSystemWriter, contents: Contents) -> None:
    try:
        dcp.save({}, storage_writer=writer, planner=_Planner(contents), no_dist=True)
    except dcp.CheckpointException as error:
        # torch collects what its ranks raise; there is one.
        for failure in error.failures.values():
            raise failure[0] from error
        raise


class _Planner(SavePlanner):
    """Tells torch of chunks whose values are read when it asks for them, in this order."""

    def __init__(self, contents: Contents) -> None:
        self._contents = contents
        self._pieces: Iterator[tuple[str, int, torch.Tensor]] = contents.pieces()

    def set_up_planner(self, state_dict: Any, storage_meta: Any = None, is_coordinator: bool = False) -> None:
        """Nothing: the values don't come from a state dict."""

    def create_local_plan(self) -> SavePlan:
        """All chunks, in the order of `Contents.pieces`."""
        items = []
        for table in self._contents.tables:
            tensors = self._contents.table_tensors(table)
            rows = TableStream(self._contents.chain, table).window_rows
            for start in range(0, table.rows, rows):
                end = min(start + rows, table.rows)
                for tensor in tensors:
                    items.append(_item(tensor.name, tensor.dtype, tensor.shape, (start, end)))
        for tensor in self._contents.tensors:
            if tensor.name.startswith("dense."):
                items.append(_item(tensor.name, tensor.dtype, tensor.shape, None))
        return SavePlan(items)

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        """The folder's metadata."""
        chunks: dict[str, list[ChunkStorageMetadata]] = {}
        for item in all_plans[0].items:
            assert item.tensor_data is not None
            chunks.setdefault(item.index.fqn, []).append(item.tensor_data.chunk)
        described: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {
            tensor.name: TensorStorageMetadata(
                properties=TensorProperties(dtype=DTYPES[tensor.dtype]),
                size=torch.Size(tensor.shape),
                chunks=chunks[tensor.name],
            )
            for tensor in self._contents.tensors
        }
        return all_plans, Metadata(state_dict_metadata=described)

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        """As it is."""
        return new_plan

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor:
        """The next chunk, which has to be the one that is asked for."""
        name, start, values = next(self._pieces)
        offset = write_item.index.offset
        if write_item.index.fqn != name or (offset[0] if offset else 0) != start:
            raise RuntimeError(f"torch asks for {write_item.index}, the next one is {name} from row {start} on")
        return values


def _item(name: str, dtype: str, shape: tuple[int, ...], rows: tuple[int, int] | None) -> WriteItem:
    start, end = rows if rows is not None else (0, shape[0] if shape else 0)
    offsets = torch.Size((start, *(0 for _ in shape[1:])) if shape else ())
    sizes = torch.Size((end - start, *shape[1:]) if shape else ())
    return WriteItem(
        index=MetadataIndex(name, offsets),
        type=WriteItemType.SHARD if rows is not None else WriteItemType.TENSOR,
        tensor_data=TensorWriteData(
            chunk=ChunkStorageMetadata(offsets=offsets, sizes=sizes),
            properties=TensorProperties(dtype=DTYPES[dtype]),
            size=torch.Size(shape),
        ),
    )
