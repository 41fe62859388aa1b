"""What evaluation and prediction will take on this rank, before its tables are allocated; see `estimate_peak`."""

from dlrm_scale.config import Config
from dlrm_scale.data.dataset.dataset import Dataset
from dlrm_scale.data.loading.loader import BATCHES_IN_USE
from dlrm_scale.layout import ShardLayout
from dlrm_scale.models.size_estimate import DENSE_STATES, dense_sizes
from dlrm_scale.sharding.memory_estimate import table_memory
from dlrm_scale.sharding.ranks import Ranks
from dlrm_scale.train.memory.batch_memory import batch_bytes, mean_ids, scoring_bytes
from dlrm_scale.train.memory.estimate_peak import (
    READER_BYTES,
    SCORE_BYTES,
    MemoryEstimate,
    MemoryItem,
)
from dlrm_scale.train.memory.process_memory import resident_bytes
from dlrm_scale.train.metrics.score_ranking import auc_kind
from dlrm_scale.units import MIB

__all__ = ["estimate_scoring"]

_PREFETCHED_BATCHES = 4
"""`EvalLoader`'s own number."""
_GROWTH_BYTES = 64 * MIB
"""As in training, of fewer libraries and threads (CPU, measured with 1 and 2 ranks)."""
_BINNED_BYTES = 96 * MIB
"""Of an AUC that sorts nothing: counts of both labels, and room to add them up."""
_SLICE_BYTES = 3 * MIB // 2
"""Of such an AUC of a slice."""


def estimate_scoring(
    config: Config, dataset: Dataset, layout: ShardLayout, rows: int, ranks: Ranks, *, slices: int = 0
) -> MemoryEstimate:
    """Predict this rank's memory while it scores rows with a checkpoint.

    Args:
        config: of the run.
        dataset: what is scored.
        layout: the plan.
        rows: rows that are scored, over all ranks.
        ranks: the process group.
        slices: of rows, with metrics of their own.
    """
    on_gpu = ranks.device.type == "cuda"
    tables = table_memory(layout, ranks.rank, config.sparse_optimizer.kind)
    dense = dense_sizes(config.model, len(layout.tables))
    ids = mean_ids(dataset)
    rows_a_batch = -(-min(config.train.validation_batch_size or config.data.batch_size, rows) // ranks.ranks)
    a_batch = batch_bytes(rows_a_batch, ids)
    rows_here = -(-rows // ranks.ranks)
    if auc_kind(config.train.auc, rows) == "exact":
        scores = SCORE_BYTES * rows_here * (2 if slices else 1)
    else:
        scores = _BINNED_BYTES + _SLICE_BYTES * slices
    device = [
        ("tables", tables.weights),
        ("data-parallel tables", tables.replicas),
        ("gradients of data-parallel tables", tables.replica_gradients // 2),
        ("optimizer state of tables", tables.optimizer_state),
        ("dense parameters and state", 4 * dense.parameters * (2 + DENSE_STATES[config.dense_optimizer.kind])),
        ("activations", scoring_bytes(config, rows, layout, ranks, ids)),
        ("batches on the device", 2 * a_batch if on_gpu else 0),
    ]
    host = [
        ("batches", (_PREFETCHED_BATCHES + BATCHES_IN_USE) * a_batch),
        ("record batches", READER_BYTES * config.data.readers),
        ("scores", scores),
        ("growth of the process", _GROWTH_BYTES),
    ]
    return MemoryEstimate(
        rank=ranks.rank,
        items=tuple(
            MemoryItem(name=name, size_bytes=size, on_device=on_gpu and part is device)
            for part in (device, host)
            for name, size in part
            if size
        ),
        held_bytes=resident_bytes(),
        largest_table=tables.largest_table,
        largest_table_type=layout.table(tables.largest_table).sharding_type if tables.largest_table else "",
        trains_nothing=True,
    )
