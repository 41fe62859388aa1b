"""What a plan's tables take on one rank, known before any of them is allocated."""

from dataclasses import dataclass

from dlrm_scale.layout import ShardLayout
from dlrm_scale.sharding.shard_memory import shard_memory

__all__ = ["TableMemory", "table_memory"]


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
    shards = [
        (r.table, shard_memory(r.rows, r.columns, optimizer, replicated=r.table in replicated))
        for r in layout.regions_of_rank(rank)
    ]
    by_table: dict[str, int] = {}
    for table, shard in shards:
        by_table[table] = by_table.get(table, 0) + shard.weights + shard.replicas
    return TableMemory(
        weights=sum(shard.weights for _, shard in shards),
        optimizer_state=sum(shard.optimizer_state for _, shard in shards),
        replicas=sum(shard.replicas for _, shard in shards),
        replica_gradients=sum(shard.replica_gradients for _, shard in shards),
        touched_rows=sum(shard.touched_rows for _, shard in shards),
        largest_table=max(by_table, key=lambda name: by_table[name], default=""),
    )
