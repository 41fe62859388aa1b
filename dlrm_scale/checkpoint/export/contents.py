"""What an export holds.

    C1.weight        [rows, dim]           a table's rows
    C1.momentum1     [rows]                its optimizer state; [rows, dim] where each element has a value
    C1.momentum1[0:32], ...                one for each column range of a column-wise sharded table
    dense.<name>     any shape             dense parameters, buffers and their optimizer's state

Random states of ranks and the position in the data mean nothing outside a run and are left out.
"""

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property

import torch

from dlrm_scale.checkpoint.chain.chain import Chain
from dlrm_scale.checkpoint.chain.table_stream import TableStream, state_columns
from dlrm_scale.checkpoint.files.format import BlockReader, unreadable
from dlrm_scale.checkpoint.files.manifest import ITEM_BYTES, FileRecord, TableRecord
from dlrm_scale.errors import CheckpointError

__all__ = ["Contents", "ExportedTensor"]


@dataclass(frozen=True, kw_only=True)
class ExportedTensor:
    """One whole tensor.

    Attributes:
        name: in the export.
        dtype: safetensors' name of its type.
        shape: whole.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def size_bytes(self) -> int:
        """Bytes of the values."""
        size = ITEM_BYTES[self.dtype]
        for extent in self.shape:
            size *= extent
        return size


@dataclass(frozen=True)
class Contents:
    """A checkpoint to be exported.

    Attributes:
        chain: what is read.
        progress: told the bytes read since the last call.
    """

    chain: Chain
    progress: Callable[[int], None] = lambda size_bytes: None

    @property
    def tables(self) -> tuple[TableRecord, ...]:
        """Schemas of the tables."""
        return self.chain.tip.tables

    @cached_property
    def tensors(self) -> list[ExportedTensor]:
        """All tensors, in the order in which `blocks` yields them first.

        Raises:
            CheckpointError: two would have one name, or row-wise state has no whole (see `state_columns`).
        """
        found = [tensor for table in self.tables for tensor in self.table_tensors(table)]
        found += [
            ExportedTensor(name=f"dense.{name}", dtype=record.dtype, shape=record.shape)
            for name, record in self._dense.tensors.items()
        ]
        twice = sorted(name for name, times in Counter(tensor.name for tensor in found).items() if times > 1)
        if twice:
            raise CheckpointError(f"two tensors of {self.chain.name} would be exported as {', '.join(twice)}")
        return found

    @property
    def size_bytes(self) -> int:
        """Of all values."""
        return sum(tensor.size_bytes for tensor in self.tensors)

    @property
    def metadata(self) -> dict[str, str]:
        """Where the export comes from."""
        tip = self.chain.tip
        return {
            "checkpoint": self.chain.name,
            "step": str(tip.step),
            "optimizer": tip.optimizer,
            "writer": f"dlrm_scale {tip.versions.get('dlrm_scale', '?')}",
        }

    def table_tensors(self, table: TableRecord) -> list[ExportedTensor]:
        """Those of one table, its weight first."""
        whole = (table.rows, table.dim)
        found = [ExportedTensor(name=f"{table.name}.weight", dtype="F32", shape=whole)]
        for column in state_columns(self.chain, table):
            shape = whole if column.per == "element" else (table.rows,)
            found.append(ExportedTensor(name=f"{table.name}.{column.name}", dtype=column.dtype, shape=shape))
        return found

    def table_blocks(self, table: TableRecord) -> Iterator[tuple[int, dict[str, torch.Tensor]]]:
        """Go through a table's rows: (first row, values by name in the export). A block may be overwritten by the next.

        Raises:
            CheckpointError: a file is damaged, or rows are in no file.
        """
        stream = TableStream(self.chain, table)
        seen = 0
        for block in stream:
            values = {"weight": block.weight, **block.state}
            yield block.row_start, {f"{table.name}.{name}": tensor for name, tensor in values.items()}
            self.progress(stream.bytes_read - seen)
            seen = stream.bytes_read

    def dense(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Go through the dense tensors, by name in the export."""
        file = self._dense
        try:
            with self.chain.storage.open(file.name) as opened:
                for name, record in file.tensors.items():
                    yield f"dense.{name}", BlockReader(opened, record).read()
                    self.progress(record.size_bytes)
        except OSError as error:
            raise unreadable(f"can't read {file.name}: {error}", error, file.name) from error

    def pieces(self) -> Iterator[tuple[str, int, torch.Tensor]]:
        """Go through everything: (name, first row, values)."""
        for table in self.tables:
            for start, values in self.table_blocks(table):
                for name, tensor in values.items():
                    yield name, start, tensor
        for name, tensor in self.dense():
            yield name, 0, tensor

    @property
    def _dense(self) -> FileRecord:
        return next(file for file in self.chain.tip.files if file.role == "dense")
