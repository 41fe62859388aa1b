"""Memory for batches that is used again once nobody holds a tensor in it."""

import ctypes
import weakref
from collections import deque
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

__all__ = ["BufferPool"]

_ALIGNMENT_BYTES = 64
_NUMPY_TYPES = {torch.float32: np.float32, torch.int64: np.int64, torch.int32: np.int32}

Wanted = tuple[tuple[tuple[int, ...], torch.dtype], ...]


class BufferPool:
    """Hands out tensors in a buffer of its own; the buffer comes back by itself when the last of them is gone.

    A tensor keeps what its memory lies in, as does every tensor that shares the memory. So a consumer may hold batches
    for as long as it likes: it never sees them change, later batches get memory of their own.

    Against memory from malloc for each batch it gave 1 and 16 % more rows a CPU-second at 2,048 rows, 2 % at 16,384 and
    9 % at 65,536 (medians of six alternating rounds on a busy machine of two cores).

    Page-locked memory comes from torch's caching allocator instead, which is such a pool itself and also waits for
    copies to the device.

    Args:
        keep: buffers that wait to be used again, at most.
        pin_memory: page-locked memory.

    Attributes:
        made: buffers made so far; none of them is page-locked.
    """

    def __init__(self, keep: int, *, pin_memory: bool = False) -> None:
        self.made = 0
        self._pin_memory = pin_memory
        # Buffers come back in whatever thread drops the last tensor; a deque's operations are atomic.
        self._free: deque[npt.NDArray[np.uint8]] = deque(maxlen=keep)

    def tensors(self, *wanted: tuple[tuple[int, ...], torch.dtype]) -> list[torch.Tensor]:
        """Return uninitialised tensors of these shapes and types (float32, int64 or int32)."""
        if self._pin_memory:
            return [torch.empty(shape, dtype=dtype, pin_memory=True) for shape, dtype in wanted]
        places, size_bytes = _layout(wanted)
        lease = self._lease(size_bytes)
        return [
            torch.from_numpy(np.ndarray(shape, _NUMPY_TYPES[dtype], buffer=lease, offset=place))
            for (shape, dtype), place in zip(wanted, places, strict=True)
        ]

    def _lease(self, size_bytes: int) -> Any:
        """Return an object that gives access to a buffer; the buffer is free again when the object is gone."""
        try:
            buffer = self._free.pop()
        except IndexError:
            buffer = None
        if buffer is None or len(buffer) < size_bytes:
            # Some room to spare: the bags of the next batch may have a few more ids.
            buffer = np.empty(size_bytes + size_bytes // 8, np.uint8)
            self.made += 1
        # Not a memoryview or an array: numpy looks through those and would hold the buffer alone.
        lease = (ctypes.c_uint8 * len(buffer)).from_buffer(buffer.data)
        weakref.finalize(lease, self._free.append, buffer).atexit = False
        return lease


@lru_cache(maxsize=64)
def _layout(wanted: Wanted) -> tuple[list[int], int]:
    """Return where each tensor starts, and the bytes of all."""
    places, size_bytes = [], 0
    for shape, dtype in wanted:
        places.append(size_bytes)
        count_bytes = int(np.prod(shape)) * dtype.itemsize
        size_bytes += -(-count_bytes // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
    return places, max(size_bytes, _ALIGNMENT_BYTES)
