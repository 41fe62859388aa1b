"""A sharding plan as people read it: rows of a table."""

from dlrm_scale.layout import ShardLayout, TableLayout

__all__ = ["plan_rows", "state_bytes"]


def state_bytes(rows: int, columns: int, optimizer: str) -> int:
    """Bytes of optimizer state of a shard: one float32 a row, or two a weight, or none."""
    return {"rowwise_adagrad": 4 * rows, "adam": 8 * rows * columns}.get(optimizer, 0)


def plan_rows(layout: ShardLayout, optimizer: str) -> list[dict[str, object]]:
    """Describe a layout, one row a table.

    Keys: table, rows, dim, type, shards, ranks (those that hold a non-empty shard), bytes_per_rank (weights and
    state on the fullest rank).
    """
    return [_row(table, layout.ranks, optimizer) for table in layout.tables]


def _row(table: TableLayout, ranks: int, optimizer: str) -> dict[str, object]:
    held = [0] * ranks
    for region in table.regions:
        size_bytes = 4 * region.rows * region.columns + state_bytes(region.rows, region.columns, optimizer)
        for rank in range(ranks) if table.replicated else (region.rank,):
            held[rank] += size_bytes
    return {
        "table": table.spec.name,
        "rows": table.spec.rows,
        "dim": table.spec.dim,
        "type": table.sharding_type,
        "shards": len(table.regions),
        "ranks": [rank for rank, size_bytes in enumerate(held) if size_bytes],
        "bytes_per_rank": max(held),
    }
