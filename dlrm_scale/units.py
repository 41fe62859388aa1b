"""Bytes, counts and durations as people read and write them."""

import re

from dlrm_scale.errors import ConfigError

__all__ = ["GIB", "KIB", "MIB", "format_bytes", "format_count", "format_seconds", "parse_bytes"]

KIB = 1024
MIB = 1024 * KIB
GIB = 1024 * MIB

_TOO_MANY = 2**62

_SUFFIXES = {"": 1, "B": 1, "K": KIB, "KIB": KIB, "M": MIB, "MIB": MIB, "G": GIB, "GIB": GIB}
_SUFFIXES |= {"KB": 10**3, "MB": 10**6, "GB": 10**9, "TB": 10**12, "T": 1024 * GIB, "TIB": 1024 * GIB}


def format_bytes(size_bytes: float) -> str:
    """Write a size with a binary unit, as in `1.5 GiB`."""
    for unit, factor in (("GiB", GIB), ("MiB", MIB), ("KiB", KIB)):
        if abs(size_bytes) >= factor:
            return f"{size_bytes / factor:.1f} {unit}"
    return f"{size_bytes:.0f} B"


def parse_bytes(text: str) -> int:
    """Read `512M`, `1GiB`, `10GB` (10^10) or `1048576` as a number of bytes.

    Raises:
        ConfigError: the text isn't a size, or one that no machine has.
    """
    match = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([A-Za-z]*)\s*", text)
    if match is None or match[2].upper() not in _SUFFIXES:
        raise ConfigError(f"{text!r} is not a size", remedy="write it as 512M, 1GiB or a number of bytes")
    size_bytes = float(match[1]) * _SUFFIXES[match[2].upper()]
    if size_bytes >= _TOO_MANY:
        raise ConfigError(f"{text[:40]!r} is too large a size", remedy="sizes are below 4 EiB, 2^62 bytes")
    return int(size_bytes)


def format_count(count: float) -> str:
    """Write a count with thousands separators, rounded to an integer."""
    return f"{count:,.0f}"


def format_seconds(seconds: float) -> str:
    """Write a duration as `0.42 s`, `1:05` or `2:03:04`."""
    if seconds < 60:
        return f"{seconds:.2f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02d}:{rest:02d}" if hours else f"{minutes}:{rest:02d}"
