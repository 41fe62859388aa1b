"""The loaders that `loader.py` compares, and the rows that they load.

Each side yields (dense features `[B, 13]`, labels `[B]`, KeyedJaggedTensor) for all epochs. None handles single rows in
Python. The rows' numbers are the ids of one-hot column C3, so that coverage can be checked.
"""

from collections.abc import Iterator, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info
from torchrec.datasets.criteo import InMemoryBinaryCriteoIterDataPipe
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from dlrm_scale.config import DataConfig
from dlrm_scale.data.dataset.dataset import (
    ROWS_PER_RECORD_BATCH,
    ColumnInfo,
    Dataset,
    DatasetManifest,
    PartWriter,
    RowRange,
    Rows,
    write_manifest,
)
from dlrm_scale.data.loading.loader import TrainLoader
from dlrm_scale.data.source.raw_block import Bags
from dlrm_scale.schema import CATEGORY_COLUMNS, INTEGER_COLUMNS

__all__ = ["MLPERF_IDS_PER_BAG", "ROW_NUMBER_COLUMN", "TABLE_ROWS", "Batch", "Side", "make_rows", "sides"]

TABLE_ROWS = 1_000_000
ROW_NUMBER_COLUMN = 2
MLPERF_IDS_PER_BAG = (3, 2, 1, 2, 6, 1, 1, 1, 1, 7, 3, 8, 1, 6, 9, 5, 1, 1, 1, 12, 100, 27, 10, 3, 1, 1)
"""Of MLPerf's multi-hot Criteo data, 214 a row; bags here have these sizes on average."""

Batch = tuple[torch.Tensor, torch.Tensor, KeyedJaggedTensor]


def make_rows(folder: Path, rows: int, *, multi_hot: bool) -> Dataset:
    """Write random rows as a dataset and, where they are one-hot, as torchrec's .npy files."""
    random = np.random.default_rng(0)
    names = [name for name, mean in zip(CATEGORY_COLUMNS, MLPERF_IDS_PER_BAG, strict=True) if multi_hot and mean > 1]
    arrays: dict[str, list[npt.NDArray[Any]]] = {"dense": [], "labels": [], "sparse": []}
    with PartWriter(folder / "part-00000.arrow", multi_hot=names) as writer:
        for start in range(0, rows, 50_000):
            n = min(50_000, rows - start)
            ids = random.integers(0, TABLE_ROWS, (len(CATEGORY_COLUMNS), n), np.int32)
            ids[ROW_NUMBER_COLUMN] = np.arange(start, start + n)
            dense = random.random((len(INTEGER_COLUMNS), n), np.float32)
            labels = random.integers(0, 2, n, np.uint8)
            bags = {name: _bags(random, n, MLPERF_IDS_PER_BAG[CATEGORY_COLUMNS.index(name)]) for name in names}
            writer.write(labels, dense, ids, bags)
            for name, array in (("dense", dense.T), ("labels", labels.astype(np.int32)[:, None]), ("sparse", ids.T)):
                arrays[name].append(array)
        part = writer.close()
    if not multi_hot:
        for name, blocks in arrays.items():
            np.save(folder / f"day_0_{name}.npy", np.concatenate(blocks))
    split: dict[str, tuple[RowRange, ...]] = {"train": (RowRange(start=0, end=rows),), "validation": (), "test": ()}
    columns = tuple(
        ColumnInfo(name=name, table_rows=max(rows, TABLE_ROWS), method="modulo", statistics={}, multi_hot=name in names)
        for name in CATEGORY_COLUMNS
    )
    manifest = DatasetManifest(parts=(part,), columns=columns, transforms={}, split=split, statistics={})
    write_manifest(folder, manifest)
    return Dataset.open(folder)


def _bags(random: np.random.Generator, rows: int, mean: int) -> Bags:
    offsets = np.concatenate([[0], np.cumsum(random.integers(1, 2 * mean, rows))]).astype(np.int32)
    return Bags(values=random.integers(0, TABLE_ROWS, offsets[-1], np.int32), offsets=offsets)


class Side:
    """One loader.

    Args:
        folder: made by `make_rows`.
        batch_size: rows.
        workers: processes of `DataLoader`.
    """

    def __init__(self, folder: Path, batch_size: int, workers: int) -> None:
        self.folder, self.batch_size, self.workers = folder, batch_size, workers

    def batches(self, epochs: int, seed: int) -> Iterator[Batch]:
        """Load every row in each epoch."""
        raise NotImplementedError


class _Ours(Side):
    def batches(self, epochs: int, seed: int) -> Iterator[Batch]:
        config = DataConfig(batch_size=self.batch_size, seed=seed)
        loader = TrainLoader(Dataset.open(self.folder), config, rank=0, ranks=1, epochs=epochs)
        for batch in loader:
            yield batch.dense_features, batch.labels, batch.sparse_features
        loader.close()


class _DataLoader(Side):
    """Torch's worker processes; each takes its share of the record batches and permutes windows of two with numpy."""

    def batches(self, epochs: int, seed: int) -> Iterator[Batch]:
        rows = _ShuffledRows(self.folder, self.batch_size, seed)
        loader = DataLoader(
            rows,
            batch_size=None,
            num_workers=self.workers,
            prefetch_factor=4,
            persistent_workers=True,
            multiprocessing_context="fork",
        )
        for _ in range(epochs):
            for dense, labels, values, lengths in loader:
                yield dense, labels, KeyedJaggedTensor(list(CATEGORY_COLUMNS), values, lengths=lengths)


class _ShuffledRows(IterableDataset[tuple[torch.Tensor, ...]]):
    def __init__(self, folder: Path, batch_size: int, seed: int) -> None:
        self.folder, self.batch_size, self.seed = folder, batch_size, seed

    def __iter__(self) -> Iterator[tuple[torch.Tensor, ...]]:
        worker = get_worker_info()
        assert worker is not None
        dataset = Dataset.open(self.folder)
        random = np.random.default_rng((self.seed, worker.id))
        count = -(-dataset.rows // ROWS_PER_RECORD_BATCH)
        share = np.random.default_rng(self.seed).permutation(count)[worker.id :: worker.num_workers]
        for start in range(0, len(share), 2):
            window = _joined([dataset.read(0, int(b)) for b in share[start : start + 2]])
            places = random.permutation(len(window.labels))
            for first in range(0, len(places), self.batch_size):
                rows = places[first : first + self.batch_size]
                values, lengths = _columns(window, rows)
                yield (
                    torch.from_numpy(np.ascontiguousarray(window.dense[:, rows].T)),
                    torch.from_numpy(window.labels[rows].astype(np.float32)),
                    torch.from_numpy(values),
                    torch.from_numpy(lengths),
                )


def _joined(read: list[Rows]) -> Rows:
    bags: Mapping[str, Bags] = {
        name: Bags(
            values=np.concatenate([r.bags[name].values for r in read]),
            offsets=np.concatenate([[0], np.cumsum(np.concatenate([np.diff(r.bags[name].offsets) for r in read]))]),
        )
        for name in read[0].bags
    }
    labels, dense, ids = (np.concatenate([r[i] for r in read], axis=-1) for i in range(3))
    return Rows(labels, dense, ids, bags)


def _columns(window: Rows, rows: npt.NDArray[np.int64]) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int32]]:
    """Return the ids of rows, column after column, and the lengths of their bags."""
    if not window.bags:
        ids = window.ids[:, rows].astype(np.int64)
        return ids.reshape(-1), np.ones(ids.size, np.int32)
    values, lengths = [], []
    for k, name in enumerate(CATEGORY_COLUMNS):
        if name not in window.bags:
            values.append(window.ids[k, rows])
            lengths.append(np.ones(len(rows), np.int32))
            continue
        bags = window.bags[name]
        sizes = (bags.offsets[rows + 1] - bags.offsets[rows]).astype(np.int32)
        ends = np.cumsum(sizes)
        places = np.arange(ends[-1]) + np.repeat(bags.offsets[rows] - (ends - sizes), sizes)
        values.append(bags.values[places])
        lengths.append(sizes)
    return np.concatenate(values).astype(np.int64), np.concatenate(lengths)


class _Torchrec(Side):
    """Torchrec's own loader: all rows in memory, batches in file order, rows permuted inside each batch."""

    def batches(self, epochs: int, seed: int) -> Iterator[Batch]:
        dense, sparse, labels = ([str(self.folder / f"day_0_{name}.npy")] for name in ("dense", "sparse", "labels"))
        pipe = InMemoryBinaryCriteoIterDataPipe(
            "train", dense, sparse, labels, self.batch_size, rank=0, world_size=1, shuffle_batches=True
        )
        for _ in range(epochs):
            for batch in pipe:
                yield batch.dense_features, batch.labels, batch.sparse_features


class _FileOrder(Side):
    """Not shuffled at all: slices of mapped .npy files."""

    def batches(self, epochs: int, seed: int) -> Iterator[Batch]:
        dense, sparse, labels = (
            np.load(self.folder / f"day_0_{name}.npy", mmap_mode="r") for name in ("dense", "sparse", "labels")
        )
        cuts = [*range(0, len(dense), self.batch_size), len(dense)]
        for _ in range(epochs):
            for a, z in pairwise(cuts):
                ids = torch.from_numpy(sparse[a:z].T.astype(np.int64, order="C"))
                lengths = torch.ones(ids.numel(), dtype=torch.int32)
                features = KeyedJaggedTensor(list(CATEGORY_COLUMNS), ids.view(-1), lengths=lengths)
                yield torch.from_numpy(dense[a:z].copy()), torch.from_numpy(labels[a:z, 0].astype(np.float32)), features


def sides(*, multi_hot: bool) -> dict[str, type[Side]]:
    """Return the loaders that can load such rows; ours comes first."""
    both: dict[str, type[Side]] = {"dlrm_scale": _Ours, "DataLoader": _DataLoader}
    return both if multi_hot else {**both, "torchrec in memory": _Torchrec, "numpy, not shuffled": _FileOrder}
