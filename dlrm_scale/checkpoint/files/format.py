"""Data files: safetensors, written and read block by block.

    8 bytes     length of the header, little endian
    header      JSON: name -> dtype, shape, data_offsets; padded with spaces to 8 bytes
    tensors     raw little-endian values, back to back

Any safetensors reader opens them. The format has no checksum, so hashes go into the manifest: of the file, of each
tensor, and of each block of rows, which lets a restore read a slice of a tensor and still check all it uses.
Nothing here holds more than one block in memory besides what the caller passes in.
"""

import json
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
import xxhash

from dlrm_scale.checkpoint.files.manifest import ITEM_BYTES, ErrorRecord, FileRecord, TensorRecord
from dlrm_scale.checkpoint.storage.storage import ReadableFile, Storage
from dlrm_scale.checkpoint.storage.store_calls import is_outage
from dlrm_scale.errors import CheckpointError, StorageError
from dlrm_scale.units import MIB

__all__ = [
    "BLOCK_BYTES",
    "DTYPES",
    "DTYPE_NAMES",
    "OUTAGE_REMEDY",
    "BlockReader",
    "DamagedFileError",
    "TensorSource",
    "WrittenFile",
    "file_fault",
    "tensors_are_intact",
    "unreadable",
    "write_file",
]

BLOCK_BYTES = 8 * MIB
"""Bytes of weights that are written, read and hashed at a time."""

DTYPE_NAMES = {
    torch.float64: "F64",
    torch.int64: "I64",
    torch.float32: "F32",
    torch.int32: "I32",
    torch.float16: "F16",
    torch.bfloat16: "BF16",
    torch.int16: "I16",
    torch.uint8: "U8",
    torch.int8: "I8",
    torch.bool: "BOOL",
}
DTYPES = {name: dtype for dtype, name in DTYPE_NAMES.items()}


@dataclass(frozen=True, kw_only=True)
class TensorSource:
    """A tensor to be written, made block by block.

    Attributes:
        name: name in the file.
        dtype: type of the values.
        shape: whole shape.
        blocks: called once; yields contiguous CPU tensors that make up the tensor in order, one for each hashed block.
            A block may be overwritten once the next one is asked for.
        codec: how the values are encoded in these blocks.
        measured: says, after all blocks, what encoding has lost; None where they are the values themselves.
    """

    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    blocks: Callable[[], Iterable[torch.Tensor]]
    codec: str = "none"
    measured: Callable[[], ErrorRecord] | None = None

    @property
    def size_bytes(self) -> int:
        """Bytes of the values."""
        size = ITEM_BYTES[DTYPE_NAMES[self.dtype]]
        for extent in self.shape:
            size *= extent
        return size

    @classmethod
    def whole(cls, name: str, tensor: torch.Tensor) -> "TensorSource":
        """A tensor that is in memory and hashed as one block."""
        return cls(name=name, dtype=tensor.dtype, shape=tuple(tensor.shape), blocks=lambda: [tensor])


@dataclass(frozen=True, kw_only=True)
class WrittenFile:
    """What was written: size and hash of the file, and the record of each tensor by name."""

    name: str
    size_bytes: int
    xxh3_128: str
    tensors: dict[str, TensorRecord]


def write_file(
    storage: Storage,
    name: str,
    sources: Sequence[TensorSource],
    metadata: Mapping[str, str],
    progress: Callable[[], None] = lambda: None,
) -> WrittenFile:
    """Create `name`, stream the tensors into it and sync it (the folder is left to the caller).

    Args:
        storage: where to.
        name: of the new file.
        sources: the tensors.
        metadata: strings for the header.
        progress: called after each block.

    Raises:
        FileExistsError: the file exists.
        OSError: no space or an I/O error; the file may be left behind incomplete.
        ValueError: two tensors have the same name.
    """
    # Wide types first, so that every tensor is aligned to its own type.
    ordered = sorted(sources, key=lambda s: -ITEM_BYTES[DTYPE_NAMES[s.dtype]])
    header, begins = _header(ordered, metadata)
    if len(begins) != len(ordered):
        raise ValueError(f"two tensors of {name} have the same name")
    records: dict[str, TensorRecord] = {}
    size = len(header) + sum(source.size_bytes for source in ordered)
    file_hash = xxhash.xxh3_128()
    with storage.create(name, size) as file:
        file_hash.update(header)
        file.write(memoryview(header))
        for source in ordered:
            tensor_hash = xxhash.xxh3_128()
            block_hashes: list[str] = []
            written = 0
            for block in source.blocks():
                view = _bytes_view(block)
                file.write(view)
                file_hash.update(view)
                tensor_hash.update(view)
                block_hashes.append(xxhash.xxh3_128_hexdigest(view))
                written += len(view)
                progress()
            if written != source.size_bytes:
                raise ValueError(f"{source.name} yielded {written} bytes instead of {source.size_bytes}")
            records[source.name] = TensorRecord(
                name=source.name,
                dtype=DTYPE_NAMES[source.dtype],  # type: ignore[arg-type]
                shape=source.shape,
                offset_bytes=len(header) + begins[source.name],
                size_bytes=source.size_bytes,
                xxh3_128=tensor_hash.hexdigest(),
                blocks=tuple(block_hashes) if len(block_hashes) > 1 else (),
                codec=source.codec,
                error=source.measured() if source.measured is not None else None,
            )
        file.sync()
    progress()
    return WrittenFile(name=name, size_bytes=size, xxh3_128=file_hash.hexdigest(), tensors=records)


class DamagedFileError(CheckpointError):
    """Bytes of a data file can't be read, or aren't those that were written.

    Attributes:
        file: its name.
    """

    def __init__(self, message: str, *, file: str = "", remedy: str | None = None) -> None:
        super().__init__(message, remedy=remedy)
        self.file = file


OUTAGE_REMEDY = "the storage doesn't answer or refuses, which is no damage: try again, or check its permissions"


def unreadable(message: str, error: Exception, file: str) -> CheckpointError:
    """What to raise for a file that can't be read: damage, which other files may stand in for, or an outage."""
    if is_outage(error):
        return StorageError(message, remedy=OUTAGE_REMEDY)
    return DamagedFileError(message, file=file)


class BlockReader:
    """Reads one tensor of an open file, a block or all of it, and checks every byte it returns.

    Args:
        file: the open data file.
        record: the tensor, from the manifest.
        block_rows: rows of each hashed block.
    """

    def __init__(self, file: ReadableFile, record: TensorRecord, block_rows: int = 0) -> None:
        self._file = file
        self._record = record
        self._rows = record.shape[0] if record.shape else 1
        self._block_rows = block_rows or max(self._rows, 1)
        self._row_bytes = record.size_bytes // self._rows if self._rows else 0
        self._buffer = torch.empty(0, dtype=torch.uint8)

    def read(self) -> torch.Tensor:
        """Read the whole tensor into new memory.

        Raises:
            DamagedFileError: the bytes aren't those that were written.
            StorageError: the storage doesn't answer.
        """
        buffer = torch.empty(self._record.size_bytes, dtype=torch.uint8)
        self._fill(buffer, 0, self._record.xxh3_128)
        return buffer.view(DTYPES[self._record.dtype]).reshape(self._record.shape)

    def read_block(self, index: int, into: torch.Tensor | None = None) -> torch.Tensor:
        """Read block `index`, rows `[index * block_rows, ...)`.

        Args:
            index: which block.
            into: a contiguous CPU tensor of the block's shape and type; without it the block lies in memory that the
                next call reuses.

        Raises:
            DamagedFileError: the bytes aren't those that were written.
        """
        start = index * self._block_rows
        rows = min(self._block_rows, self._rows - start)
        if into is not None:
            buffer = into.reshape(-1).view(torch.uint8)
        else:
            if not self._buffer.numel():
                self._buffer = torch.empty(rows * self._row_bytes, dtype=torch.uint8)
            buffer = self._buffer[: rows * self._row_bytes]
        expected = self._record.blocks[index] if self._record.blocks else self._record.xxh3_128
        self._fill(buffer, start * self._row_bytes, expected)
        return buffer.view(DTYPES[self._record.dtype]).reshape(rows, *self._record.shape[1:])

    def _fill(self, buffer: torch.Tensor, start_bytes: int, expected: str) -> None:
        view: memoryview = buffer.numpy().data
        place = f"{self._file.name}, tensor {self._record.name}, byte {self._record.offset_bytes + start_bytes}"
        try:
            self._file.read_into(view, self._record.offset_bytes + start_bytes)
        except (OSError, EOFError) as error:
            raise unreadable(f"can't read {place}: {error}", error, self._file.name) from error
        if xxhash.xxh3_128_hexdigest(view) != expected:
            raise DamagedFileError(f"{place}: damaged, the hash doesn't match the manifest's", file=self._file.name)


def file_fault(storage: Storage, record: FileRecord, *, read_all: bool) -> str | None:
    """Compare a data file with its record: presence and size, and with `read_all` every byte.

    Returns:
        None, or what is wrong in words that follow the file's name.

    Raises:
        OSError: the storage doesn't answer, so it isn't known.
    """
    try:
        size = storage.size_bytes(record.name)
        if size != record.size_bytes:
            return f"has {size} bytes instead of {record.size_bytes}"
        if read_all and _hash_file(storage, record) != record.xxh3_128:
            return "is damaged: its hash doesn't match the manifest's"
    except FileNotFoundError:
        return "is missing"
    except (OSError, EOFError) as error:
        if is_outage(error):
            raise
        return f"can't be read: {error}"
    return None


def tensors_are_intact(storage: Storage, record: FileRecord) -> bool:
    """Whether all that a restore reads of a file is what was written: every tensor, and not the header.

    Raises:
        StorageError: the storage doesn't answer.
        OSError: it doesn't even open the file.
    """
    try:
        with storage.open(record.name) as file:
            for tensor in record.tensors.values():
                BlockReader(file, tensor).read()
            for entry in record.entries:
                for tensor in entry.tensors.values():
                    reader = BlockReader(file, tensor, entry.block_rows)
                    for index in range(-(-entry.rows // entry.block_rows)):
                        reader.read_block(index)
    except DamagedFileError:
        return False
    except OSError as error:
        if is_outage(error):
            raise
        return False
    return True


def _hash_file(storage: Storage, record: FileRecord) -> str:
    digest = xxhash.xxh3_128()
    with storage.open(record.name) as file:
        for chunk in _chunks(file, record.size_bytes):
            digest.update(chunk)
    return digest.hexdigest()


def _chunks(file: ReadableFile, size_bytes: int) -> Iterator[memoryview]:
    buffer = memoryview(bytearray(min(BLOCK_BYTES, size_bytes)))
    for start in range(0, size_bytes, BLOCK_BYTES):
        view = buffer[: min(BLOCK_BYTES, size_bytes - start)]
        file.read_into(view, start)
        yield view


def _header(sources: Sequence[TensorSource], metadata: Mapping[str, str]) -> tuple[bytes, dict[str, int]]:
    header: dict[str, object] = {"__metadata__": dict(metadata)}
    begins: dict[str, int] = {}
    position = 0
    for source in sources:
        begins[source.name] = position
        end = position + source.size_bytes
        dtype = DTYPE_NAMES[source.dtype]
        header[source.name] = {"dtype": dtype, "shape": list(source.shape), "data_offsets": [position, end]}
        position = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text, begins


def _bytes_view(tensor: torch.Tensor) -> memoryview:
    if not tensor.is_contiguous():
        raise ValueError("a block isn't contiguous")
    view: memoryview = tensor.detach().reshape(-1).view(torch.uint8).numpy().data
    return view
