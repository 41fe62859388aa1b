"""Shards without rows: what a rank gets of a table that has fewer rows than there are ranks."""

from collections.abc import Sequence

import torch
from torch import nn

from dlrm_scale.sharding.table_kernels import TableKernel

__all__ = ["support_empty_shards"]


def support_empty_shards(kernels: Sequence[TableKernel]) -> None:
    """Make fbgemm 1.8's CPU kernels work with shards of 0 rows.

    Two faults, both found with row-wise sharding of a 3-row table on 4 ranks:

    - The backward pass tells tables apart by where their rows start. Two empty shards at the end of a kernel
      start where it ends, and it stops with "doesn't support embedding tables with more than 2B rows". One row that
      nobody looks up, counted at the end, keeps the last start inside.
    - A kernel whose shards are all empty has no host memory, takes itself for a GPU kernel and stops with
      "weights[0] must be a GPU or MTIA tensor". One spare row of memory, outside every shard, keeps it on the CPU.

    Args:
        kernels: of this rank; changed in place, before the first lookup.
    """
    for kernel in kernels:
        tables = kernel.module.emb_module
        if not kernel.fused or not tables.use_cpu or kernel.regions[-1].rows:
            continue
        tables.hash_size_cumsum[-1] += 1
        if all(region.rows == 0 for region in kernel.regions):
            columns = max(region.columns for region in kernel.regions)
            tables.weights_host = nn.Parameter(torch.zeros(columns))
            for name in ("momentum1_host", "momentum2_host"):
                if getattr(tables, name).numel() == 0:
                    setattr(tables, name, nn.Parameter(torch.zeros(columns)))
