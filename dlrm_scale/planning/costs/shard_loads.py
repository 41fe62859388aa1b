"""What each shard of a table asks of its rank in a step: milliseconds where they add up, bytes where they don't.

Times of lookups and of moving ids add up over the tables of a rank. Collectives take the bytes of all tables of a
sharding type together, so that bytes are kept until a type's are known.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dlrm_scale.planning.cluster.cluster import Cluster, LookupCosts
from dlrm_scale.planning.costs.lookup_work import RowHits, row_hits
from dlrm_scale.planning.costs.step_setting import StepSetting
from dlrm_scale.planning.tables.table_set import TableStats
from dlrm_scale.sharding.shard_memory import ID_COPIES, ShardMemory, shard_memory

__all__ = ["MEMORY_PARTS", "ROW_CUT_TYPES", "ShardLoads", "TableLoads"]

Numbers = NDArray[np.float64]

ROW_CUT_TYPES = ("row_wise", "table_row_wise", "grid_shard")
"""Types that cut rows, so that every rank of a group makes partial sums of all vectors."""

MEMORY_PARTS = ("weights", "optimizer_state", "replicas", "replica_gradients", "touched_rows", "vectors", "ids")
"""Uses of memory, as `ShardMemory` names them."""

_MORE_COPIES = {"row_wise": 1, "table_row_wise": 3, "grid_shard": 3, "table_column_wise": 2}
"""Of the vectors that a rank makes, beyond `VECTOR_COPIES`: partial sums are cut and joined again for every exchange
(measured: peaks of 42 plans of three models on two ranks)."""

_MILLION = 1e6
_ID_BYTES, _LENGTH_BYTES = 8, 4


@dataclass(frozen=True, kw_only=True)
class ShardLoads:
    """Shards of one table that differ only in their rows.

    Attributes:
        input_ms: `[shards]`, moving and cutting ids beside the exchange.
        lookup_ms: `[shards]`.
        update_ms: `[shards]`.
        replica_ms: `[shards]`, of a data-parallel table's gradient and optimizer.
        input_bytes: `[shards]`, ids and lengths that the rank receives.
        output_bytes: one rank's larger side of the exchange of vectors: an all-to-all, or a reduce-scatter for types
            that cut rows.
        cross_bytes: of the all-to-all between hosts that follows the reduce-scatter within them.
        replica_bytes: of the all-reduce of a data-parallel table's gradient.
        memory_bytes: `[MEMORY_PARTS, shards]`.
    """

    input_ms: Numbers
    lookup_ms: Numbers
    update_ms: Numbers
    replica_ms: Numbers
    input_bytes: Numbers
    output_bytes: float
    cross_bytes: float
    replica_bytes: float
    memory_bytes: NDArray[np.int64]


class TableLoads:
    """Loads of any shard of one table; what doesn't depend on the plan is worked out once.

    Args:
        table: with its lookups.
        cluster: with the costs.
        setting: of the step.
    """

    def __init__(self, table: TableStats, cluster: Cluster, setting: StepSetting) -> None:
        self._table, self._cluster, self._setting = table, cluster, setting
        self._global: RowHits = row_hits(table, setting.batch_size_per_rank * setting.ranks)

    def of(self, sharding_type: str, columns: int) -> ShardLoads:
        """Work out shards of a type.

        Args:
            sharding_type: TorchRec's name.
            columns: of a shard.

        Returns:
            One for each part of the rows, by rising rows: `ranks` of row_wise, `ranks_per_host` of table_row_wise and
            grid_shard, else one.
        """
        if sharding_type == "data_parallel":
            return self._replica()
        table, setting = self._table, self._setting
        parts = {"row_wise": setting.ranks, "table_row_wise": setting.ranks_per_host}.get(sharding_type, 1)
        parts = setting.ranks_per_host if sharding_type == "grid_shard" else parts
        block = -(-table.rows // parts)
        cuts = np.minimum(np.arange(parts + 1, dtype=np.int64) * block, table.rows)
        lookups, unique = self._global.between(cuts[:-1], cuts[1:])
        samples = setting.batch_size_per_rank * setting.ranks
        costs = self._cluster.input
        input_ms = (costs.value_ms.value * lookups + costs.bag_ms.value * samples) / _MILLION
        cuts_rows = sharding_type in ROW_CUT_TYPES
        if cuts_rows:
            own = setting.batch_size_per_rank * table.lookups_per_sample
            input_ms = input_ms + costs.bucketize_ms.value * own / _MILLION
        vector_bytes = float(setting.value_bytes * samples * columns)
        within_host = sharding_type in ("table_row_wise", "grid_shard")
        return ShardLoads(
            input_ms=input_ms,
            lookup_ms=_pooled_ms(self._cluster.forward, lookups, unique, columns, samples),
            update_ms=_pooled_ms(self._cluster.backward, lookups, unique, columns, samples),
            replica_ms=np.zeros(parts),
            input_bytes=_ID_BYTES * lookups + _LENGTH_BYTES * samples,
            output_bytes=vector_bytes,
            cross_bytes=vector_bytes / setting.ranks_per_host if within_host else 0.0,
            replica_bytes=0.0,
            memory_bytes=self._memory(np.diff(cuts), lookups, columns, samples, sharding_type),
        )

    @property
    def bucketize_ms(self) -> float:
        """Cutting a rank's own ids by row ranges: every rank does it, whichever ranks the shards are on."""
        own = self._setting.batch_size_per_rank * self._table.lookups_per_sample
        return self._cluster.input.bucketize_ms.value * own / _MILLION

    def _replica(self) -> ShardLoads:
        table, setting = self._table, self._setting
        samples = setting.batch_size_per_rank
        hits = row_hits(table, samples)
        lookups, unique = hits.lookups[-1:], hits.unique_rows[-1:]
        elements = table.rows * table.dim
        memory = shard_memory(
            table.rows,
            table.dim,
            setting.optimizer,
            replicated=True,
            touched_maps=setting.touched_maps,
            pooled_rows=samples,
        )
        return ShardLoads(
            input_ms=np.zeros(1),
            lookup_ms=_pooled_ms(self._cluster.forward, lookups, unique, table.dim, samples),
            update_ms=_pooled_ms(self._cluster.backward, lookups, unique, table.dim, samples),
            replica_ms=np.array([self._cluster.replicas.element_ms.value * elements / _MILLION]),
            input_bytes=np.zeros(1),
            output_bytes=0.0,
            cross_bytes=0.0,
            replica_bytes=4.0 * elements,
            memory_bytes=_column(memory)[:, None],
        )

    def _memory(
        self, rows: NDArray[np.int64], lookups: Numbers, columns: int, samples: int, sharding_type: str
    ) -> NDArray[np.int64]:
        counts, which = np.unique(rows, return_inverse=True)
        columns_of_counts = [
            _column(
                shard_memory(
                    int(count),
                    columns,
                    self._setting.optimizer,
                    replicated=False,
                    touched_maps=self._setting.touched_maps,
                    pooled_rows=samples,
                )
            )
            for count in counts
        ]
        memory = np.stack(columns_of_counts, axis=1)[:, which]
        memory[MEMORY_PARTS.index("vectors")] += 4 * _MORE_COPIES.get(sharding_type, 0) * samples * columns
        memory[MEMORY_PARTS.index("ids")] = np.rint(8 * lookups * ID_COPIES / 2).astype(np.int64)
        return memory


def _column(memory: ShardMemory) -> NDArray[np.int64]:
    return np.array([getattr(memory, part) for part in MEMORY_PARTS], dtype=np.int64)


def _pooled_ms(costs: LookupCosts, lookups: Numbers, unique: Numbers, columns: int, samples: int) -> Numbers:
    """See `LookupCosts`; the call itself is charged once a type."""
    an_id = costs.lookup_ms.value + columns * costs.element_ms.value
    a_row = costs.unique_row_ms.value + columns * costs.unique_element_ms.value
    written = costs.output_element_ms.value * columns * samples
    found: Numbers = costs.table_ms.value + (an_id * lookups + a_row * unique + written) / _MILLION
    return found
