"""Reads an entry's rows block by block: their ids, and each tensor's block as stored or decoded. Hashes are checked."""

import torch

from dlrm_scale.checkpoint.files.codec import decode, decode_into
from dlrm_scale.checkpoint.files.format import BlockReader, DamagedFileError
from dlrm_scale.checkpoint.files.manifest import EntryRecord
from dlrm_scale.checkpoint.storage.storage import ReadableFile

__all__ = ["EntryReader"]


class EntryReader:
    """The rows of one entry.

    What it returns lies in memory that the next call for the same tensor may use again.

    Args:
        file: the open data file.
        entry: from the manifest.
    """

    def __init__(self, file: ReadableFile, entry: EntryRecord) -> None:
        self.entry = entry
        self._file = file
        self._readers = {name: BlockReader(file, t, entry.block_rows) for name, t in entry.tensors.items()}
        self._next_ids = (0, entry.row_start)

    @property
    def blocks(self) -> int:
        """How many there are."""
        return -(-self.entry.rows // self.entry.block_rows)

    @property
    def names(self) -> list[str]:
        """Tensors with values: the weight and the optimizer's state."""
        return [name for name in self.entry.tensors if name != "ids"]

    def place(self, index: int) -> tuple[int, int]:
        """First row of a block, counted in the entry, and how many rows it has."""
        start = index * self.entry.block_rows
        return start, min(self.entry.block_rows, self.entry.rows - start)

    def ids(self, index: int) -> torch.Tensor | None:
        """Global ids of a block's rows, `[rows]` int64, sorted; None if they are all rows of the entry's range.

        Blocks are asked for in order, so that the ids of the whole entry are known to be distinct.

        Raises:
            DamagedFileError: damaged, or ids that aren't sorted, distinct and inside the entry's range.
        """
        if not self.entry.has_ids:
            return None
        ids = self._readers["ids"].read_block(index).long()
        expected, lowest = self._next_ids
        if index != expected:
            raise ValueError(f"ids of block {index} before those of block {expected}")
        if int(ids[0]) < lowest or int(ids[-1]) >= self.entry.row_end or not bool((ids[1:] > ids[:-1]).all()):
            raise DamagedFileError(
                f"{self._file.name}: ids of table {self.entry.table} aren't sorted, distinct and inside their range",
                file=self._file.name,
            )
        self._next_ids = (index + 1, int(ids[-1]) + 1)
        return ids

    def encoded(self, name: str, index: int) -> torch.Tensor:
        """A tensor's block as stored, to be copied with its codec; `[rows, ...]` as in `codec.stored_form`.

        Raises:
            DamagedFileError: damaged.
        """
        return self._readers[name].read_block(index)

    def decoded(self, name: str, index: int, into: torch.Tensor | None = None) -> torch.Tensor:
        """A tensor's block as values, `[rows]` or `[rows, columns]`, float32 where they were encoded.

        Args:
            name: which tensor.
            index: which block.
            into: a contiguous CPU tensor of the values' shape and type to hold them.

        Raises:
            DamagedFileError: damaged.
        """
        codec = self.entry.tensors[name].codec
        if codec == "none":
            return self._readers[name].read_block(index, into=into)
        stored = self._readers[name].read_block(index)
        return decode(codec, stored) if into is None else decode_into(codec, stored, into)
