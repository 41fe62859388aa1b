"""Host memory for snapshots, allocated once: fresh pages cost more than the copy into them.

A copy of 1.5 M rows of 64 columns and their state takes 72 ms of CPU into it, and 183 ms into fresh memory (one thread,
medians of 9 in turn, busy machine).

Page-locked where the tables are on a GPU: then copies run at the speed of the bus, and follow one another without a
wait for each.
"""

import math
from collections.abc import Mapping, Sequence

import torch

__all__ = ["HostCopies", "HostStaging", "padded_bytes"]

_ALIGNMENT_BYTES = 64


class HostStaging:
    """One block of host memory that every snapshot uses again.

    Args:
        size_bytes: how much; its pages are touched, so that the first snapshot is as fast as the others.
        pinned: page-locked.

    Raises:
        RuntimeError: the memory can't be had.
    """

    def __init__(self, size_bytes: int, *, pinned: bool = False) -> None:
        self._memory = torch.empty(size_bytes, dtype=torch.uint8, pin_memory=pinned).zero_()
        self._pinned = pinned
        self._used = 0

    @property
    def size_bytes(self) -> int:
        """A larger snapshot doesn't fit."""
        return self._memory.numel()

    def begin(self) -> None:
        """Start over; views that were taken become invalid."""
        self._used = 0

    def take(self, shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
        """A contiguous tensor in the memory; its values are whatever lay there."""
        size = padded_bytes(shape, dtype)
        view = self._memory[self._used : self._used + size]
        self._used += size
        return view.view(dtype)[: math.prod(shape)].reshape(list(shape))

    def fill(self, target: torch.Tensor, values: torch.Tensor) -> None:
        """Copy into a tensor that was taken; done only once `settle` returns."""
        target.copy_(values, non_blocking=self._pinned)

    def settle(self) -> None:
        """Wait for all copies."""
        if self._pinned:
            torch.cuda.current_stream().synchronize()


class HostCopies:
    """Copies of tensors that have the same shapes each time, in memory that is used again."""

    def __init__(self) -> None:
        self._buffers: dict[str, torch.Tensor] = {}

    def of(self, tensors: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Copy to host memory; what the call before returned is overwritten."""
        copies = {}
        for name, tensor in tensors.items():
            buffer = self._buffers.get(name)
            if buffer is None or buffer.shape != tensor.shape or buffer.dtype != tensor.dtype:
                buffer = torch.empty(tensor.shape, dtype=tensor.dtype)
            copies[name] = buffer.copy_(tensor.detach())
        self._buffers = copies
        return dict(copies)


def padded_bytes(shape: Sequence[int], dtype: torch.dtype) -> int:
    """Bytes of a tensor, rounded up so that the next one is aligned."""
    return -(-math.prod(shape) * dtype.itemsize // _ALIGNMENT_BYTES) * _ALIGNMENT_BYTES
