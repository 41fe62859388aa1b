"""What the batches of a rank take, from the sizes of rows and bags alone."""

from collections.abc import Sequence

import numpy as np

from dlrm_scale.config import Config
from dlrm_scale.data.dataset.dataset import ROWS_PER_RECORD_BATCH, Dataset
from dlrm_scale.layout import ShardLayout
from dlrm_scale.models.size_estimate import dense_sizes
from dlrm_scale.schema import CATEGORY_COLUMNS, INTEGER_COLUMNS
from dlrm_scale.sharding.ranks import Ranks
from dlrm_scale.sharding.shard_memory import ID_COPIES

__all__ = ["batch_bytes", "id_bytes", "looked_up_columns", "looked_up_ids", "mean_ids", "scoring_bytes"]

_SCORED_VECTOR_COPIES = 2
"""Of a row's pooled vectors without gradients: as they arrive, and joined with the bottom MLP's (measured on 1 and 2
ranks). On several ranks those that are looked up here come on top."""
_SCORED_ACTIVATIONS = 0.5
"""Of the activations of a training step: a layer's are freed when the next one has its own (measured)."""
_SAMPLED_RECORD_BATCHES = 4


def mean_ids(dataset: Dataset) -> list[float]:
    """Return the mean number of ids of each category column in a row: `[26]`.

    The manifest says it of datasets that this package made; of others a few record batches do.

    Raises:
        DatasetError: a part can't be read.
    """
    known = [1.0 if not c.multi_hot else c.statistics.get("pooling") for c in dataset.manifest.columns]
    sampled: dict[str, float] = {}
    if not all(isinstance(ids, int | float) for ids in known):
        sampled = _sampled_mean_ids(dataset)
    return [
        float(ids) if isinstance(ids, int | float) else sampled[column.name]
        for column, ids in zip(dataset.manifest.columns, known, strict=True)
    ]


def _sampled_mean_ids(dataset: Dataset) -> dict[str, float]:
    """Count the ids in record batches that lie evenly over the dataset."""
    places = [
        (part, batch)
        for part, info in enumerate(dataset.manifest.parts)
        for batch in range(-(-info.rows // ROWS_PER_RECORD_BATCH))
    ]
    chosen = np.unique(np.linspace(0, max(0, len(places) - 1), _SAMPLED_RECORD_BATCHES).astype(np.int64))
    ids, rows = dict.fromkeys(dataset.multi_hot, 0), 0
    for place in chosen.tolist() if places else []:
        read = dataset.read(*places[place])
        rows += len(read.labels)
        for name, bags in read.bags.items():
            ids[name] += len(bags.values)
    return {name: count / max(1, rows) for name, count in ids.items()}


def batch_bytes(rows: int, ids: Sequence[float]) -> int:
    """Return the bytes of a batch of so many rows on a rank.

    Args:
        rows: with padding.
        ids: as `mean_ids`.
    """
    lengths_and_offsets = 8 * len(CATEGORY_COLUMNS) if any(n != 1 for n in ids) else 0
    a_row = 4 * (1 + len(INTEGER_COLUMNS)) + 8 * sum(ids) + lengths_and_offsets
    return int(rows * a_row * 9 / 8)  # buffers have an eighth to spare


def looked_up_columns(layout: ShardLayout, rank: int, ranks: int) -> int:
    """Return the columns that a rank looks up for every row of the global batch, as if for its own rows alone."""
    columns = 0
    for table in layout.tables:
        if table.replicated:
            columns += table.spec.dim
            continue
        here = [r for r in table.regions if r.rank == rank and r.rows]
        columns += ranks * sum({(r.column_start, r.column_end): r.columns for r in here}.values())
    return columns


def id_bytes(rows: int, layout: ShardLayout, ranks: Ranks, ids: Sequence[float]) -> int:
    """Return what the ids of a batch of so many rows a rank take on their way to the tables."""
    received = looked_up_ids(layout, ranks.rank, ranks.ranks, ids)
    return int(8 * rows * ID_COPIES * (sum(ids) + received) / 2)


def scoring_bytes(config: Config, split_rows: int, layout: ShardLayout, ranks: Ranks, ids: Sequence[float]) -> int:
    """Return what a batch takes while it is scored without training: it may be much larger than one that is trained on.

    Args:
        config: batch sizes and model.
        split_rows: rows that are scored; a batch has no more.
        layout: the plan.
        ranks: the process group.
        ids: as `mean_ids`.
    """
    rows_global = min(config.train.validation_batch_size or config.data.batch_size, split_rows)
    rows = -(-rows_global // ranks.ranks)
    dense = dense_sizes(config.model, len(layout.tables))
    floats = _SCORED_VECTOR_COPIES * dense.vectors_per_row + _SCORED_ACTIVATIONS * dense.activations_per_row
    if ranks.ranks > 1:
        floats += looked_up_columns(layout, ranks.rank, ranks.ranks)
    return int(4 * rows * floats) + id_bytes(rows, layout, ranks, ids)


def looked_up_ids(layout: ShardLayout, rank: int, ranks: int, pooling: Sequence[float]) -> float:
    """Ids that this rank looks up for a row of its batch: those of all ranks' rows in the tables that it has whole.

    A row-wise shard gets as much as its share of the rows; frequent ids in one place make that more.
    """
    ids = 0.0
    for table, per_row in zip(layout.tables, pooling, strict=True):
        if table.replicated:
            ids += per_row
        else:
            ids += sum(ranks * per_row * r.rows / table.spec.rows for r in table.regions if r.rank == rank)
    return ids
