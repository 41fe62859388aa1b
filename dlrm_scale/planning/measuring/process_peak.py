"""The most memory that a piece of work takes, beyond what was there before it."""

import ctypes
import gc
import sys
from pathlib import Path

import torch

from dlrm_scale.units import KIB

__all__ = ["PeakMemory"]


class PeakMemory:
    """Measures from its making on.

    On CPU it is the system's high-water mark of resident memory, which is reset here; memory that was freed before is
    given back to the system first, or it would be used again unseen. On CUDA it is what torch's allocator gave out.

    Args:
        device: where the work is done.
    """

    def __init__(self, device: torch.device) -> None:
        """Note what is there."""
        self._device = device
        gc.collect()
        if device.type == "cuda":
            torch.cuda.synchronize(device)
            torch.cuda.empty_cache()
            torch.cuda.reset_peak_memory_stats(device)
            self._before = torch.cuda.memory_allocated(device)
            return
        _give_back()
        self._known = _reset_high_water_mark()
        self._before = _status_bytes("VmRSS")

    def bytes_taken(self) -> int | None:
        """Most bytes since then, less what was there before; None where the system doesn't tell."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
            return torch.cuda.max_memory_allocated(self._device) - self._before
        return max(0, _status_bytes("VmHWM") - self._before) if self._known else None


def _give_back() -> None:
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if sys.platform.startswith("linux") else None
    if trim is not None:
        trim(0)


def _reset_high_water_mark() -> bool:
    try:
        Path("/proc/self/clear_refs").write_text("5")
    except OSError:
        return False
    return True


def _status_bytes(name: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(name + ":"):
            return int(line.split()[1]) * KIB
    raise RuntimeError(f"/proc/self/status has no {name}")
