"""The one hash of raw category ids: splitmix64's finalizer (Steele, Lea and Flood, 2014).

A bijection of 64 bits, so that distinct ids never tie; sorting by it is the "hash order" of counts and vocabularies.
"""

from typing import Any

import numpy as np
import numpy.typing as npt
from numba import njit

__all__ = ["id_hashes", "mix"]


@njit(cache=True, nogil=True)
def mix(value: Any) -> Any:  # pragma: no cover - compiled
    """Return the hash, uint64, of an id; for compiled code."""
    value = np.uint64(value) + np.uint64(0x9E3779B97F4A7C15)
    value = (value ^ (value >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    value = (value ^ (value >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return value ^ (value >> np.uint64(31))


@njit(cache=True, nogil=True)
def _mix_all(ids: Any, hashes: Any) -> None:  # pragma: no cover - compiled
    for i in range(ids.shape[0]):
        hashes[i] = mix(ids[i])


def id_hashes(ids: npt.NDArray[np.uint32]) -> npt.NDArray[np.uint64]:
    """Return the hashes of ids, [n] uint32 to [n] uint64."""
    hashes = np.empty(len(ids), np.uint64)
    _mix_all(ids, hashes)
    return hashes
