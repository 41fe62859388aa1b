"""What a plan's tables take on one rank, known before any of them is allocated."""

from dataclasses import dataclass

from dlrm_scale.layout import ShardLayout, ShardRegion
from dlrm_scale.sharding.plan_rows import state_bytes

__all__ = ["TableMemory", "table_memory"]

_REPLICA_COPIES = 2
"""A data-parallel table's gradient is as large as the table, and DDP's bucket holds it once more (measured on CPU with
2 and 3 ranks, SGD and row-wise Adagrad)."""


@dataclass(frozen=True, kw_only=True)
class TableMemory:
    """Bytes of one rank's shards.

    Attributes:
        weights: of sharded tables.
        optimizer_state: of all tables.
        replicas: weights of data-parallel tables.
        replica_gradients: what a step needs for them besides.
        touched_rows: one map of the rows that changed.
        largest_table: the table with most bytes here, or "".
    """

    weights: int
    optimizer_state: int
    replicas: int
    replica_gradients: int
    touched_rows: int
    largest_table: str


def table_memory(layout: ShardLayout, rank: int, optimizer: str) -> TableMemory:
    """Add up a rank's shards.

    Args:
        layout: the plan.
        rank: which rank.
        optimizer: of the tables.
    """
    replicated = {table.spec.name for table in layout.tables if table.replicated}
    regions = layout.regions_of_rank(rank)
    weights = sum(_weight_bytes(r) for r in regions if r.table not in replicated)
    replicas = sum(_weight_bytes(r) for r in regions if r.table in replicated)
    by_table: dict[str, int] = {}
    for region in regions:
        by_table[region.table] = by_table.get(region.table, 0) + _weight_bytes(region)
    return TableMemory(
        weights=weights,
        optimizer_state=sum(state_bytes(r.rows, r.columns, optimizer) for r in regions),
        replicas=replicas,
        replica_gradients=_REPLICA_COPIES * replicas,
        touched_rows=sum(r.rows for r in regions),
        largest_table=max(by_table, key=lambda name: by_table[name], default=""),
    )


def _weight_bytes(region: ShardRegion) -> int:
    return 4 * region.rows * region.columns
