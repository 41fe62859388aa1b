"""TorchRec's `ShardingPlan` from and to a layout."""

from collections.abc import Mapping, Sequence

from torch import nn
from torch.distributed._shard.sharding_spec import EnumerableShardingSpec, ShardMetadata
from torchrec.distributed.embedding_types import EmbeddingComputeKernel
from torchrec.distributed.sharding_plan import placement
from torchrec.distributed.types import EmbeddingModuleShardingPlan, ParameterSharding, ShardingPlan
from torchrec.modules.embedding_modules import EmbeddingBagCollection

from dlrm_scale.layout import ShardLayout, ShardRegion, TableLayout
from dlrm_scale.schema import TableSpec
from dlrm_scale.sharding.shard_shapes import region_order

__all__ = ["layout_of", "torchrec_plan"]


def torchrec_plan(layout: ShardLayout, model: nn.Module, device_type: str, ranks_per_host: int) -> ShardingPlan:
    """Give a layout to TorchRec.

    Args:
        layout: of the model's tables; regions of one table have shapes that TorchRec makes (`shard_shapes`).
        model: unsharded.
        device_type: `cpu` or `cuda`.
        ranks_per_host: tells a rank's device on its host.
    """
    plan: dict[str, EmbeddingModuleShardingPlan] = {}
    by_name = {table.spec.name: table for table in layout.tables}
    for path, module in model.named_modules():
        if isinstance(module, EmbeddingBagCollection):
            plan[path] = EmbeddingModuleShardingPlan(
                {
                    config.name: _parameter(by_name[config.name], layout.ranks, device_type, ranks_per_host)
                    for config in module.embedding_bag_configs()
                }
            )
    return ShardingPlan(plan)


def layout_of(plan: ShardingPlan, tables: Sequence[TableSpec], ranks: int) -> ShardLayout:
    """Describe a plan in global coordinates, without TorchRec's types.

    Args:
        plan: of a model with these tables.
        tables: the order of the layout's tables.
        ranks: how many ranks the plan is for.
    """
    parameters: Mapping[str, ParameterSharding] = {
        name: parameter
        for module in plan.plan.values()
        if isinstance(module, EmbeddingModuleShardingPlan)
        for name, parameter in module.items()
    }
    return ShardLayout(ranks=ranks, tables=tuple(_table_layout(t, parameters[t.name]) for t in tables))


def _parameter(table: TableLayout, ranks: int, device_type: str, ranks_per_host: int) -> ParameterSharding:
    if table.replicated:
        return ParameterSharding(
            sharding_type=table.sharding_type,
            compute_kernel=EmbeddingComputeKernel.DENSE.value,
            ranks=list(range(ranks)),
        )
    # TorchRec reads the shards of a grid column by column; where rows are whole or columns are, the order is the same.
    regions = sorted(table.regions, key=lambda r: (r.column_start, r.row_start, r.rank))
    return ParameterSharding(
        sharding_type=table.sharding_type,
        compute_kernel=EmbeddingComputeKernel.FUSED.value,
        ranks=[r.rank for r in regions],
        sharding_spec=EnumerableShardingSpec(
            [
                ShardMetadata(
                    shard_offsets=[r.row_start, r.column_start],
                    shard_sizes=[r.rows, r.columns],
                    placement=placement(device_type, r.rank, ranks_per_host),
                )
                for r in regions
            ]
        ),
    )


def _table_layout(table: TableSpec, parameter: ParameterSharding) -> TableLayout:
    if parameter.sharding_type == "data_parallel":
        whole = ShardRegion(
            table=table.name, row_start=0, row_end=table.rows, column_start=0, column_end=table.dim, rank=0
        )
        return TableLayout(spec=table, sharding_type="data_parallel", regions=(whole,), replicated=True)
    regions = [
        ShardRegion(
            table=table.name,
            row_start=shard.shard_offsets[0],
            row_end=shard.shard_offsets[0] + shard.shard_sizes[0],
            column_start=shard.shard_offsets[1],
            column_end=shard.shard_offsets[1] + shard.shard_sizes[1],
            rank=shard.placement.rank(),
        )
        for shard in parameter.sharding_spec.shards
    ]
    return TableLayout(
        spec=table, sharding_type=parameter.sharding_type, regions=tuple(sorted(regions, key=region_order))
    )
