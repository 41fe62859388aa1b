"""What one shard takes on its rank, in bytes: what it keeps, and what a step needs for it."""

from dataclasses import dataclass

from dlrm_scale.sharding.plan_rows import state_bytes

__all__ = ["ID_COPIES", "VECTOR_COPIES", "ShardMemory", "shard_memory"]

_REPLICA_COPIES = 2
"""A data-parallel table's gradient is as large as the table, and DDP's bucket holds it once more (measured on CPU with
2 and 3 ranks, SGD and row-wise Adagrad)."""

ID_COPIES = 10
"""Of a lookup's 8-byte id: half of them as it comes and is sent, half where it is received and sorted by row."""

VECTOR_COPIES = 3
"""Of a row's pooled vectors: as looked up, exchanged, joined with the bottom MLP's, and some gradients (measured)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardMemory:
    """Bytes by use.

    Attributes:
        weights: of a shard that no other rank has.
        optimizer_state: of any shard.
        replicas: weights of a data-parallel table.
        replica_gradients: what a step needs for those besides.
        touched_rows: maps of rows that changed.
        vectors: pooled vectors of a step, with their gradients.
        ids: that a step receives for the shard.
    """

    weights: int
    optimizer_state: int
    replicas: int
    replica_gradients: int
    touched_rows: int
    vectors: int = 0
    ids: int = 0

    @property
    def static_bytes(self) -> int:
        """Without what depends on the batch."""
        return self.weights + self.optimizer_state + self.replicas + self.replica_gradients + self.touched_rows

    @property
    def all_bytes(self) -> int:
        """All of it."""
        return self.static_bytes + self.vectors + self.ids


def shard_memory(
    rows: int,
    columns: int,
    optimizer: str,
    *,
    replicated: bool,
    touched_maps: int = 1,
    pooled_rows: int = 0,
    ids: float = 0.0,
) -> ShardMemory:
    """Count a shard's bytes.

    Args:
        rows: of the shard.
        columns: of the shard.
        optimizer: of the tables.
        replicated: a data-parallel table, whole.
        touched_maps: of changed rows, a byte a row each.
        pooled_rows: samples whose vectors the shard makes in a step.
        ids: that it receives in a step.
    """
    weights = 4 * rows * columns
    return ShardMemory(
        weights=0 if replicated else weights,
        optimizer_state=state_bytes(rows, columns, optimizer),
        replicas=weights if replicated else 0,
        replica_gradients=_REPLICA_COPIES * weights if replicated else 0,
        touched_rows=touched_maps * rows,
        vectors=4 * VECTOR_COPIES * pooled_rows * columns,
        ids=round(8 * ids * ID_COPIES / 2),
    )
