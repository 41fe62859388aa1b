"""One safetensors file with everything, written where each block belongs: the header says where that is."""

import json
import os
import struct
from pathlib import Path

import torch

from dlrm_scale.checkpoint.export.contents import Contents
from dlrm_scale.checkpoint.export.new_output import new_file
from dlrm_scale.checkpoint.files.manifest import ITEM_BYTES

__all__ = ["export_safetensors"]


def export_safetensors(contents: Contents, path: Path) -> int:
    """Write the file; memory is that of a `TableStream`.

    Args:
        contents: what to write.
        path: of the new file.

    Returns:
        Its size in bytes.

    Raises:
        ConfigError: the file exists.
        CheckpointError: a checkpoint's file is damaged, or this one can't be written.
    """
    header, begins = _header(contents)
    row_bytes = {t.name: t.size_bytes // max(t.shape[0] if t.shape else 1, 1) for t in contents.tensors}
    size = len(header) + contents.size_bytes
    with new_file(path, size) as descriptor:
        os.truncate(descriptor, size)
        _write_at(descriptor, memoryview(header), 0)
        for name, start, tensor in contents.pieces():
            values = tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data
            _write_at(descriptor, values, len(header) + begins[name] + start * row_bytes[name])
    return size


def _header(contents: Contents) -> tuple[bytes, dict[str, int]]:
    """The file's beginning, and where each tensor begins after it."""
    header: dict[str, object] = {"__metadata__": contents.metadata}
    begins: dict[str, int] = {}
    position = 0
    # Wide types first, so that every tensor is aligned to its own type.
    for tensor in sorted(contents.tensors, key=lambda tensor: -ITEM_BYTES[tensor.dtype]):
        begins[tensor.name] = position
        end = position + tensor.size_bytes
        header[tensor.name] = {
            "dtype": tensor.dtype,
            "shape": list(tensor.shape),
            "data_offsets": [position, end],
        }
        position = end
    text = json.dumps(header).encode()
    text += b" " * (-len(text) % 8)
    return struct.pack("<Q", len(text)) + text, begins


def _write_at(descriptor: int, data: memoryview, offset_bytes: int) -> None:
    while len(data):
        count = os.pwrite(descriptor, data, offset_bytes)
        data, offset_bytes = data[count:], offset_bytes + count
