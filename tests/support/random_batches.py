"""Random global batches, and a rank's padded share of one.

Shapes: N rows of the global batch, K tables, B rows on a rank.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from dlrm_scale.batch import Batch
from dlrm_scale.schema import INTEGER_COLUMNS, TableSpec

__all__ = ["GlobalBatch", "random_batches", "rank_batch"]


@dataclass(frozen=True, kw_only=True)
class GlobalBatch:
    """All true rows of one step.

    Attributes:
        dense_features: `[N, 13]` float32.
        lengths: `[K, N]` int32, ids in each bag.
        ids: K arrays of int64, the bags of one table one after another.
        labels: `[N]` float32.
    """

    dense_features: np.ndarray
    lengths: np.ndarray
    ids: tuple[np.ndarray, ...]
    labels: np.ndarray

    @property
    def rows(self) -> int:
        return len(self.labels)


def random_batches(
    tables: Sequence[TableSpec], rows_per_step: Sequence[int], *, seed: int = 0, most_ids_per_bag: int = 1
) -> list[GlobalBatch]:
    """Make one batch a step.

    Ids come from raw 32-bit categories, half of them at or above 2**31, taken modulo the table; about a third are
    one of three hot ids, so that rows repeat in a batch.

    Args:
        tables: what the ids must fit.
        rows_per_step: N of each step.
        seed: equal seeds give equal batches.
        most_ids_per_bag: 1 gives one id in every bag; more gives bags of 0 to that many ids.
    """
    rng = np.random.default_rng(seed)
    return [_random_batch(rng, tables, rows, most_ids_per_bag) for rows in rows_per_step]


def _random_batch(
    rng: np.random.Generator, tables: Sequence[TableSpec], rows: int, most_ids_per_bag: int
) -> GlobalBatch:
    shape = (len(tables), rows)
    one_hot = most_ids_per_bag == 1
    lengths = np.ones(shape, np.int32) if one_hot else rng.integers(0, most_ids_per_bag + 1, shape, dtype=np.int32)
    ids = []
    for table, bag_lengths in zip(tables, lengths, strict=True):
        raw = rng.integers(0, 2**32, int(bag_lengths.sum()), dtype=np.uint32)
        hot = rng.integers(0, 3, raw.size, dtype=np.uint32) + np.uint32(2**32 - 3)
        raw = np.where(rng.random(raw.size) < 0.35, hot, raw)
        ids.append(raw.astype(np.int64) % table.rows)
    return GlobalBatch(
        dense_features=rng.normal(size=(rows, len(INTEGER_COLUMNS))).astype(np.float32),
        lengths=lengths,
        ids=tuple(ids),
        labels=(rng.random(rows) < 0.3).astype(np.float32),
    )


def rank_batch(batch: GlobalBatch, tables: Sequence[TableSpec], rank: int = 0, ranks: int = 1) -> Batch:
    """Cut out a rank's rows: the first B = ceil(N / ranks) for rank 0 and so on, the last ranks padded to B."""
    rows_per_rank = -(-batch.rows // ranks)
    start, end = (min(r * rows_per_rank, batch.rows) for r in (rank, rank + 1))
    padding = rows_per_rank - (end - start)
    lengths = np.pad(batch.lengths[:, start:end], ((0, 0), (0, padding)))
    bounds = [np.concatenate(([0], np.cumsum(bag_lengths))) for bag_lengths in batch.lengths]
    values = [ids[b[start] : b[end]] for ids, b in zip(batch.ids, bounds, strict=True)]
    return Batch(
        dense_features=torch.from_numpy(np.pad(batch.dense_features[start:end], ((0, padding), (0, 0)))),
        sparse_features=KeyedJaggedTensor(
            keys=[t.name for t in tables],
            values=torch.from_numpy(np.concatenate(values)),
            lengths=torch.from_numpy(lengths.reshape(-1).copy()),
        ),
        labels=torch.from_numpy(np.pad(batch.labels[start:end], (0, padding))),
        weights=torch.from_numpy(np.pad(np.ones(end - start, np.float32), (0, padding))),
        loss_scale=torch.tensor(ranks / batch.rows),
        rows_global=batch.rows,
        rows_local=end - start,
    )
