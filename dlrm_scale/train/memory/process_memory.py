"""Memory that this process takes, as the system counts it."""

from pathlib import Path

import torch

from dlrm_scale.units import KIB

__all__ = ["peak_device_bytes", "peak_resident_bytes", "resident_bytes"]


def resident_bytes() -> int:
    """Main memory that is resident now, libraries included."""
    return _status("VmRSS")


def peak_resident_bytes() -> int:
    """The most main memory that was resident at once.

    Not `ru_maxrss`: a process that another one starts inherits that from its parent.
    """
    return _status("VmHWM")


def peak_device_bytes(device: torch.device) -> int:
    """The most GPU memory that torch held for this process, caches included; 0 on CPU."""
    return torch.cuda.max_memory_reserved(device) if device.type == "cuda" else 0


def _status(name: str) -> int:
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(name + ":"):
            return int(line.split()[1]) * KIB
    raise RuntimeError(f"/proc/self/status has no {name}")
