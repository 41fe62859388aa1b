"""Telling a `TouchedRows` which rows the lookups read."""

from collections.abc import Sequence

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from dlrm_scale.layout import LocalShard
from dlrm_scale.sharding.ranks import Ranks
from dlrm_scale.sharding.table_kernels import TableKernel
from dlrm_scale.touched_rows import TouchedRows

__all__ = ["mark_lookups", "union_replicated"]


def mark_lookups(
    kernels: Sequence[TableKernel], shards: Sequence[LocalShard], touched: TouchedRows
) -> list[torch.utils.hooks.RemovableHandle]:
    """Mark the ids of each lookup while `touched.enabled`.

    The hook sits on the kernel itself, after the input all-to-all: there the ids are local to the shard under every
    sharding type, and only ids of this rank's shards arrive.

    Args:
        kernels: of this rank.
        shards: their order gives the shard indices of `touched`.
        touched: gets the marks.
    """
    index_of = {shard.region: index for index, shard in enumerate(shards)}
    handles = []
    for kernel in kernels:
        shard_of_key = [
            index_of[region] for region, n in zip(kernel.regions, kernel.features, strict=True) for _ in range(n)
        ]
        handles.append(kernel.module.register_forward_pre_hook(_Marker(shard_of_key, touched)))
    return handles


class _Marker:
    """Forward pre-hook of one kernel."""

    def __init__(self, shard_of_key: list[int], touched: TouchedRows) -> None:
        self._shard_of_key = np.array(shard_of_key, dtype=np.int64)
        self._touched = touched

    def __call__(self, module: nn.Module, arguments: tuple[KeyedJaggedTensor, ...]) -> None:
        if self._touched.enabled:
            features = arguments[0]
            self._touched.mark_keys(self._shard_of_key, features.values(), features.offset_per_key())


def union_replicated(shards: Sequence[LocalShard], touched: TouchedRows, ranks: Ranks) -> None:
    """Merge the marks of data-parallel tables over all ranks: each rank looked up only its own rows. A collective."""
    maps = [touched.current(i) for i, shard in enumerate(shards) if shard.replicated]
    if not maps or ranks.ranks == 1:
        return
    together = torch.cat(maps).cpu()
    dist.all_reduce(together, op=dist.ReduceOp.MAX, group=ranks.control_group)
    start = 0
    for target in maps:
        target.copy_(together[start : start + target.numel()])
        start += target.numel()
