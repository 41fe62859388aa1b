"""What a run will take on this rank, item by item, before its tables are allocated.

Counted exactly: tables, their state and maps, dense parameters, windows, batches. Estimated: activations, from layer
sizes; what a process grows by that no size explains, from measurements.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from dlrm_scale.config import Config
from dlrm_scale.data.dataset.dataset import Dataset
from dlrm_scale.data.loading.loader import BATCHES_IN_USE, TrainLoader
from dlrm_scale.data.loading.row_kernels import RAGGED_ROW_WORDS, ROW_WORDS
from dlrm_scale.data.loading.windows import windows_ahead
from dlrm_scale.layout import ShardLayout
from dlrm_scale.models.size_estimate import ACTIVATION_COPIES, DENSE_STATES, dense_sizes
from dlrm_scale.sharding.memory_estimate import table_memory
from dlrm_scale.sharding.ranks import Ranks
from dlrm_scale.sharding.shard_memory import VECTOR_COPIES
from dlrm_scale.train.memory.batch_memory import batch_bytes, id_bytes, looked_up_columns, mean_ids, scoring_bytes
from dlrm_scale.train.memory.process_memory import resident_bytes
from dlrm_scale.units import MIB

__all__ = [
    "READER_BYTES",
    "SCORE_BYTES",
    "MemoryEstimate",
    "MemoryItem",
    "estimate_dense",
    "estimate_memory",
]

_RECORD_BATCHES_BYTES = 12 * MIB
READER_BYTES = 4 * MIB
"""Of a thread that reads ahead, beside its windows: the record batches it holds, the numbers that permute a window."""
_GROWTH_BYTES = 128 * MIB
"""Compiled numba functions, threads, allocator and library buffers that come with the first steps (CPU, measured)."""
_GROWTH_RANK_0_BYTES = 16 * MIB
"""TensorBoard and metrics, on rank 0."""
SCORE_BYTES = 12
"""Of a validation row: its logit to rank, and room to sort and exchange them."""


@dataclass(frozen=True, kw_only=True)
class MemoryItem:
    """One use of memory.

    Attributes:
        name: for people.
        size_bytes: predicted.
        on_device: in the memory of the GPU; everything is in main memory on CPU.
    """

    name: str
    size_bytes: int
    on_device: bool = False


@dataclass(frozen=True, kw_only=True)
class MemoryEstimate:
    """One rank's memory.

    Attributes:
        rank: which.
        items: what is still to be allocated.
        held_bytes: main memory that the process has already, libraries included.
        largest_table: the table with most bytes here, or "".
        largest_table_type: its sharding type.
        trains_nothing: rows are only scored.
    """

    rank: int
    items: tuple[MemoryItem, ...]
    held_bytes: int
    largest_table: str = ""
    largest_table_type: str = ""
    trains_nothing: bool = False

    @property
    def host_bytes(self) -> int:
        """Main memory to come."""
        return sum(item.size_bytes for item in self.items if not item.on_device)

    @property
    def device_bytes(self) -> int:
        """GPU memory to come; 0 on CPU."""
        return sum(item.size_bytes for item in self.items if item.on_device)

    @property
    def peak_bytes(self) -> int:
        """Main memory of the process at its peak."""
        return self.held_bytes + self.host_bytes


def estimate_memory(
    config: Config, dataset: Dataset, layout: ShardLayout, loader: TrainLoader, ranks: Ranks
) -> MemoryEstimate:
    """Predict this rank's memory, but for the staging of checkpoints: that takes a part of what is left.

    Args:
        config: the whole run's.
        dataset: its multi-hot columns set the size of batches.
        layout: the plan.
        loader: before it has read anything.
        ranks: the process group.
    """
    on_gpu = ranks.device.type == "cuda"
    tables = table_memory(layout, ranks.rank, config.sparse_optimizer.kind)
    dense = dense_sizes(config.model, len(layout.tables))
    rows = -(-config.data.batch_size // ranks.ranks)
    pooling = mean_ids(dataset)
    a_batch = batch_bytes(rows, pooling)
    validation_rows = -(-(config.train.validation_batch_size or config.data.batch_size) // ranks.ranks)
    states = DENSE_STATES[config.dense_optimizer.kind]
    slices = min(config.train.micro_batches, rows)
    activations = int(4 * dense.activations_per_row * -(-rows // slices) * ACTIVATION_COPIES)
    vectors = 4 * rows * VECTOR_COPIES * max(dense.vectors_per_row, looked_up_columns(layout, ranks.rank, ranks.ranks))
    training = activations + vectors + id_bytes(rows, layout, ranks, pooling)
    scoring = scoring_bytes(config, dataset.split_rows("validation"), layout, ranks, pooling)
    batches = (config.data.prefetch_batches + BATCHES_IN_USE) * a_batch
    device = [
        ("tables", tables.weights),
        ("data-parallel tables", tables.replicas),
        ("gradients of data-parallel tables", tables.replica_gradients),
        ("optimizer state of tables", tables.optimizer_state),
        ("maps of touched rows", tables.touched_rows * (3 if config.checkpoint.policy != "consecutive" else 2)),
        ("dense parameters, gradients and state", 4 * dense.parameters * (3 + states)),
        ("activations", max(training, scoring)),
        ("batches on the device", 4 * a_batch if on_gpu else 0),
    ]
    host = [
        ("windows of the loader", _window_bytes(config, loader, ranks, pooling) + _RECORD_BATCHES_BYTES),
        ("batches", batches + (config.data.prefetch_batches + BATCHES_IN_USE) * batch_bytes(validation_rows, pooling)),
        ("scores of a validation", SCORE_BYTES * -(-dataset.split_rows("validation") // ranks.ranks)),
        ("dense copy of checkpoints", 4 * dense.parameters * (1 + states) if ranks.rank == 0 else 0),
        ("growth of the process", _GROWTH_BYTES + (_GROWTH_RANK_0_BYTES if ranks.rank == 0 else 0)),
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
    )


def estimate_dense(config: Config, tables: int, ranks: Ranks, *, trains: bool = True) -> MemoryEstimate:
    """Predict what the dense part alone takes: it is built, in main memory, before there is a plan.

    Args:
        config: the whole run's.
        tables: number of tables.
        ranks: the process group.
        trains: gradients and optimizer state are needed too.
    """
    copies = 3 + DENSE_STATES[config.dense_optimizer.kind] if trains and ranks.device.type == "cpu" else 1
    size_bytes = 4 * dense_sizes(config.model, tables).parameters * copies
    item = MemoryItem(name="dense parameters, gradients and state", size_bytes=size_bytes)
    return MemoryEstimate(rank=ranks.rank, items=(item,), held_bytes=resident_bytes())


def _window_bytes(config: Config, loader: TrainLoader, ranks: Ranks, pooling: Sequence[float]) -> int:
    order, readers = loader.order, config.data.readers
    windows = len(order.rank_streams(ranks.rank, ranks.ranks)) + windows_ahead(readers)
    rows = windows * min(order.largest_window_rows, order.rows)
    bags = sum(ids for ids in pooling if ids != 1)
    words = (RAGGED_ROW_WORDS + 2 * 1.25 * bags) if bags else ROW_WORDS
    return int(4 * words * rows) + (READER_BYTES * readers if readers > 1 else 0)
