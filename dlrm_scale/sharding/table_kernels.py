"""The fbgemm kernels of a sharded model on this rank, and the live shards inside them."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torchrec.distributed.batched_embedding_kernel import BatchedDenseEmbeddingBag, BatchedFusedEmbeddingBag
from torchrec.distributed.embeddingbag import ShardedEmbeddingBagCollection
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad

from dlrm_scale.layout import LocalShard, ShardLayout, ShardRegion

__all__ = ["TableKernel", "host_memory_of", "local_shards", "sharded_collections", "table_kernels"]


@dataclass(frozen=True, kw_only=True)
class TableKernel:
    """One fbgemm kernel: several shards in one batch of lookups.

    Attributes:
        module: TorchRec's wrapper; called with a KeyedJaggedTensor whose ids are local to the shards.
        regions: its shards, in the order of the kernel's features. A table that has several column shards on this
            rank occurs once for each.
        features: number of features of each shard.
        fused: the optimizer runs inside the backward pass; false for data-parallel tables.
    """

    module: BatchedFusedEmbeddingBag | BatchedDenseEmbeddingBag
    regions: tuple[ShardRegion, ...]
    features: tuple[int, ...]
    fused: bool


def sharded_collections(model: nn.Module) -> dict[str, ShardedEmbeddingBagCollection]:
    """Find the sharded table collections of a model, by path."""
    return {name: m for name, m in model.named_modules() if isinstance(m, ShardedEmbeddingBagCollection)}


def table_kernels(model: nn.Module, rank: int) -> list[TableKernel]:
    """List the kernels of this rank, in TorchRec's order."""
    return [
        _kernel(kernel, rank)
        for collection in sharded_collections(model).values()
        for lookup in collection._lookups
        for kernel in _kernel_modules(lookup)
    ]


def local_shards(
    kernels: list[TableKernel], layout: ShardLayout, rank: int, dense_optimizer: torch.optim.Optimizer | None
) -> list[LocalShard]:
    """Collect this rank's shards with live views of weights and optimizer state.

    Args:
        kernels: of this rank.
        layout: gives the order: tables, then regions; empty shards included.
        rank: this rank.
        dense_optimizer: what updates the data-parallel tables; None if there are none.
    """
    shards: dict[ShardRegion, LocalShard] = {}
    for kernel in kernels:
        states = list(_fused_states(kernel) if kernel.fused else _dense_states(kernel, dense_optimizer))
        weights = kernel.module.split_embedding_weights()
        for region, weight, state in zip(kernel.regions, weights, states, strict=True):
            shards[region] = LocalShard(region=region, weight=weight.detach(), state=state, replicated=not kernel.fused)
    wanted = layout.regions_of_rank(rank)
    assert set(wanted) == set(shards), f"plan and kernels differ: {set(wanted) ^ set(shards)}"
    return [shards[region] for region in wanted]


def host_memory_of(kernel: TableKernel) -> list[torch.Tensor]:
    """List the tensors that hold a fused kernel's tables and state in main memory: one each for all its shards."""
    tables = kernel.module.emb_module
    named = (getattr(tables, name, None) for name in ("weights_host", "momentum1_host", "momentum2_host"))
    return [tensor.detach() for tensor in named if isinstance(tensor, torch.Tensor) and tensor.numel()]


def _kernel_modules(lookup: nn.Module) -> nn.ModuleList:
    unwrapped = lookup.module if isinstance(lookup, DistributedDataParallel) else lookup
    modules = unwrapped._emb_modules
    assert isinstance(modules, nn.ModuleList)
    return modules


def _kernel(module: BatchedFusedEmbeddingBag | BatchedDenseEmbeddingBag, rank: int) -> TableKernel:
    configs = module.config.embedding_tables
    regions = []
    for table in configs:
        at = table.local_metadata  # None for data-parallel tables
        row_start, column_start = at.shard_offsets if at is not None else (0, 0)
        regions.append(
            ShardRegion(
                table=table.name,
                row_start=row_start,
                row_end=row_start + table.local_rows,
                column_start=column_start,
                column_end=column_start + table.local_cols,
                rank=rank if at is not None else 0,
            )
        )
    return TableKernel(
        module=module,
        regions=tuple(regions),
        features=tuple(table.num_features() for table in configs),
        fused=isinstance(module, BatchedFusedEmbeddingBag),
    )


def _fused_states(kernel: TableKernel) -> Iterator[dict[str, torch.Tensor]]:
    split = kernel.module.emb_module.split_optimizer_states()
    if not split:  # SGD has none
        yield from ({} for _ in kernel.regions)
    for states in split:
        yield {f"momentum{i}": state for i, state in enumerate(states, start=1)}


def _dense_states(kernel: TableKernel, optimizer: torch.optim.Optimizer | None) -> Iterator[dict[str, torch.Tensor]]:
    parameters = dict(kernel.module.named_parameters_by_table())
    for region in kernel.regions:
        if isinstance(optimizer, RowWiseAdagrad):
            # `[rows, 1]` in the optimizer; the fused kernels name the same value momentum1 and keep it `[rows]`.
            yield {"momentum1": optimizer.state[parameters[region.table]]["sum"].view(-1)}
        else:
            yield {}
