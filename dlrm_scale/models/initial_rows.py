"""Initial embedding rows: a function of (seed, table, global row, column), equal under every plan and rank count.

    key(table)      = blake2b(seed, table name)
    state(row)      = mix(key ^ mix(row * GOLDEN))
    bits(row, col)  = mix(state + (col + 1) * GOLDEN)         the SplitMix64 sequence that starts at the row's state
    value           = ((bits >> 40) * 2 + 1 - 2**24) / 2**24 * bound     24 bits, symmetric about zero, never zero

SplitMix64: Steele, Lea and Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014.
"""

import hashlib
import math

import numba
import numpy as np
import torch

from dlrm_scale.layout import ShardRegion
from dlrm_scale.schema import TableSpec

__all__ = ["fill_initial_rows"]

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MULTIPLIER_1 = np.uint64(0xBF58476D1CE4E5B9)
_MULTIPLIER_2 = np.uint64(0x94D049BB133111EB)

_CHUNK_ELEMENTS = 4 * 1024 * 1024
"""Elements of one host chunk (16 MiB) where the weights can't be filled in place."""


def fill_initial_rows(weight: torch.Tensor, spec: TableSpec, region: ShardRegion, seed: int) -> None:
    """Fill one shard with its part of the table's initial values, uniform within `1 / sqrt(rows)`.

    Contiguous float32 weights on CPU are filled in place; others (CUDA, other dtypes, strided views)
    through host chunks of 16 MiB.

    Args:
        weight: `[region.rows, region.columns]`, filled in place.
        spec: the whole table.
        region: where `weight` lies in it.
        seed: `model.seed`.
    """
    if tuple(weight.shape) != (region.rows, region.columns) or region.table != spec.name:
        raise ValueError(f"weight {tuple(weight.shape)} is not region {region} of table {spec.name}")
    if weight.numel() == 0:
        return
    key = np.uint64(_table_key(spec.name, seed))
    scale = np.float32(2.0**-24 / math.sqrt(spec.rows))
    target = weight.detach()
    if target.device.type == "cpu" and target.dtype == torch.float32 and target.is_contiguous():
        _fill(target.numpy(), key, region.row_start, region.column_start, scale)
        return
    chunk_rows = max(1, _CHUNK_ELEMENTS // region.columns)
    for start in range(0, region.rows, chunk_rows):
        part = target[start : start + chunk_rows]
        host = np.empty(tuple(part.shape), dtype=np.float32)
        _fill(host, key, region.row_start + start, region.column_start, scale)
        part.copy_(torch.from_numpy(host))


def _table_key(name: str, seed: int) -> int:
    return int.from_bytes(hashlib.blake2b(f"rows/{seed}/{name}".encode(), digest_size=8).digest(), "little")


@numba.njit(inline="always")
def _mix(z):  # type: ignore[no-untyped-def]
    z = (z ^ (z >> np.uint64(30))) * _MULTIPLIER_1
    z = (z ^ (z >> np.uint64(27))) * _MULTIPLIER_2
    return z ^ (z >> np.uint64(31))


@numba.njit(nogil=True)
def _fill(out, key, row_start, column_start, scale):  # type: ignore[no-untyped-def]
    for i in range(out.shape[0]):
        state = _mix(key ^ _mix(np.uint64(row_start + i) * _GOLDEN)) + np.uint64(column_start) * _GOLDEN
        for j in range(out.shape[1]):
            bits = _mix(state + np.uint64(j + 1) * _GOLDEN)
            odd = np.int32(bits >> np.uint64(40)) * np.int32(2) + np.int32(1 - (1 << 24))
            out[i, j] = np.float32(odd) * scale
