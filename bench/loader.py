"""The shuffled training loader against torch's `DataLoader` with worker processes, in alternating rounds.

The peer is written with care, not per row: every worker takes its share of the record batches in random order, permutes
windows of the same size with numpy, makes whole batches and sends them through shared memory; the consumer makes the
KeyedJaggedTensor. Before anything is timed both must use every row once. CPU seconds count all threads and processes.

The second table is the time to the first batch when resuming at two thirds of an epoch: on this dataset, and of the
order alone for a training set of 4.37 billion rows (the 1TB set), whose rows needn't exist to compute a position.

    python bench/loader.py --rounds 3 --save
"""

import argparse
import json
import resource
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import stamp
import torch
from torch.utils.data import DataLoader, IterableDataset, get_worker_info
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from dlrm_scale.config import DataConfig
from dlrm_scale.data.dataset import (
    ROWS_PER_RECORD_BATCH,
    ColumnInfo,
    Dataset,
    DatasetManifest,
    PartWriter,
    RowRange,
    write_manifest,
)
from dlrm_scale.data.loader import TrainLoader
from dlrm_scale.data.order import Order
from dlrm_scale.data.pieces import pieces_of
from dlrm_scale.schema import CATEGORY_COLUMNS, INTEGER_COLUMNS

TABLE_ROWS = 1_000_000
TERABYTE_ROWS = 4_373_472_329

Batch = tuple[torch.Tensor, torch.Tensor, KeyedJaggedTensor]


def main() -> None:
    """Measure, print two tables, and save them if asked."""
    options = _options()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        dataset = _make_dataset(Path(folder), options.rows)
        sides: dict[str, Callable[[int], Iterator[Batch]]] = {
            "dlrm_scale": lambda epoch: _ours(dataset, options.batch_size, epoch),
            "DataLoader": lambda epoch: _peer(Path(folder), options.batch_size, options.workers, epoch),
        }
        for name, side in sides.items():
            _check_every_row_once(name, side(0), options.rows)
        rates: dict[str, list[tuple[float, float]]] = {name: [] for name in sides}
        for round_ in range(options.rounds):
            for name, side in sides.items():
                rates[name].append(_measure(side, round_))
        resume_seconds = _resume_seconds(dataset, options.batch_size)
    order_seconds = _terabyte_order_seconds()
    ratios = [a[0] / b[0] for a, b in zip(rates["dlrm_scale"], rates["DataLoader"], strict=True)]
    result = {
        "stamp": stamp.stamp(),
        "options": vars(options),
        "mrow_per_cpu_second": {name: statistics.median(r[0] for r in found) for name, found in rates.items()},
        "mrow_per_second": {name: statistics.median(r[1] for r in found) for name, found in rates.items()},
        "ratio_per_cpu_second": {"median": statistics.median(ratios), "least": min(ratios), "most": max(ratios)},
        "seconds_to_first_batch_on_resume": resume_seconds,
        "seconds_of_order_on_resume_4_37e9_rows": order_seconds,
    }
    print(f"{options.rows:,} rows, batch {options.batch_size}, {options.workers} workers for DataLoader")
    print("| loader | Mrow per CPU-second | Mrow/s |\n|---|---|---|")
    for name in sides:
        print(f"| {name} | {result['mrow_per_cpu_second'][name]:.2f} | {result['mrow_per_second'][name]:.2f} |")  # type: ignore[index]
    print(f"ratio {statistics.median(ratios):.2f} ({min(ratios):.2f} to {max(ratios):.2f}), goal 4; 2.5 Mrow per CPU-s")
    print(f"resume to first batch: {resume_seconds:.2f} s here; order of 4.37e9 rows {order_seconds:.2f} s, goal 1 s")
    if options.save:
        print(stamp.save("loader", json.loads(json.dumps(result))))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=3_000_000)
    parser.add_argument("--batch-size", type=int, default=2048)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--save", action="store_true")
    return parser.parse_args()


def _make_dataset(folder: Path, rows: int) -> Dataset:
    """Write random rows; the first category holds the number of the row."""
    random = np.random.default_rng(0)
    with PartWriter(folder / "part-00000.arrow") as writer:
        for start in range(0, rows, 100_000):
            n = min(100_000, rows - start)
            ids = random.integers(0, TABLE_ROWS, (len(CATEGORY_COLUMNS), n), np.int32)
            ids[0] = np.arange(start, start + n)
            dense = random.random((len(INTEGER_COLUMNS), n), np.float32)
            writer.write(random.integers(0, 2, n, np.uint8), dense, ids)
        part = writer.close()
    split: dict[str, tuple[RowRange, ...]] = {"train": (RowRange(start=0, end=rows),), "validation": (), "test": ()}
    columns = tuple(
        ColumnInfo(name=name, table_rows=max(rows, TABLE_ROWS), method="modulo", statistics={})
        for name in CATEGORY_COLUMNS
    )
    manifest = DatasetManifest(parts=(part,), columns=columns, transforms={}, split=split, statistics={})
    write_manifest(folder, manifest)
    return Dataset.open(folder)


def _ours(dataset: Dataset, batch_size: int, epoch: int) -> Iterator[Batch]:
    config = DataConfig(batch_size=batch_size, seed=epoch)
    for batch in TrainLoader(dataset, config, rank=0, ranks=1, epochs=1):
        yield batch.dense_features, batch.labels, batch.sparse_features


class _ShuffledRows(IterableDataset[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]):
    """The peer's dataset: a worker's share of the record batches, permuted in windows of two."""

    def __init__(self, folder: Path, batch_size: int, seed: int) -> None:
        self.folder, self.batch_size, self.seed = folder, batch_size, seed

    def __iter__(self) -> Iterator[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
        worker = get_worker_info()
        assert worker is not None
        dataset = Dataset.open(self.folder)
        random = np.random.default_rng((self.seed, worker.id))
        count = -(-dataset.rows // ROWS_PER_RECORD_BATCH)
        share = np.random.default_rng(self.seed).permutation(count)[worker.id :: worker.num_workers]
        for start in range(0, len(share), 2):
            read = [dataset.read(0, int(b)) for b in share[start : start + 2]]
            labels = np.concatenate([r[0] for r in read])
            dense = np.concatenate([r[1] for r in read], axis=1)
            ids = np.concatenate([r[2] for r in read], axis=1)
            places = random.permutation(len(labels))
            for first in range(0, len(labels), self.batch_size):
                rows = places[first : first + self.batch_size]
                yield (
                    torch.from_numpy(np.ascontiguousarray(dense[:, rows].T)),
                    torch.from_numpy(labels[rows].astype(np.float32)),
                    torch.from_numpy(ids[:, rows].astype(np.int64)),
                )


def _peer(folder: Path, batch_size: int, workers: int, epoch: int) -> Iterator[Batch]:
    loader = DataLoader(
        _ShuffledRows(folder, batch_size, epoch), batch_size=None, num_workers=workers, prefetch_factor=4
    )
    for dense, labels, ids in loader:
        lengths = torch.ones(ids.numel(), dtype=torch.int32)
        yield dense, labels, KeyedJaggedTensor(list(CATEGORY_COLUMNS), ids.reshape(-1), lengths=lengths)


def _check_every_row_once(name: str, batches: Iterator[Batch], rows: int) -> None:
    seen = np.concatenate([sparse.values()[: len(labels)].numpy() for _, labels, sparse in batches])
    if not np.array_equal(np.sort(seen), np.arange(rows)):
        raise SystemExit(f"{name} doesn't use every row once")


def _measure(side: Callable[[int], Iterator[Batch]], epoch: int) -> tuple[float, float]:
    """Return Mrow per CPU-second and per second of one epoch, start included."""
    cpu, wall = _cpu_seconds(), time.perf_counter()
    rows = sum(len(labels) for _, labels, _ in side(epoch))
    return rows / (_cpu_seconds() - cpu) / 1e6, rows / (time.perf_counter() - wall) / 1e6


def _cpu_seconds() -> float:
    uses = (resource.getrusage(resource.RUSAGE_SELF), resource.getrusage(resource.RUSAGE_CHILDREN))
    return sum(use.ru_utime + use.ru_stime for use in uses)


def _resume_seconds(dataset: Dataset, batch_size: int) -> float:
    """Return seconds from opening the dataset to the first batch, two thirds into the second epoch."""
    config = DataConfig(batch_size=batch_size)
    first = TrainLoader(dataset, config, rank=0, ranks=1, epochs=3)
    cursor = dict(first.start.to_json())
    step = first.steps_per_epoch * 2 // 3
    cursor |= {"epoch": 1, "step_in_epoch": step, "stream_rows_consumed": step * first.order.rows_per_step}
    start = time.perf_counter()
    loader = TrainLoader(Dataset.open(dataset.path), config, rank=0, ranks=1, epochs=3, cursor=cursor)
    next(loader)
    seconds = time.perf_counter() - start
    loader.close()
    return seconds


def _terabyte_order_seconds() -> float:
    """Return seconds to make the order of the 1TB set and find all 64 windows of a position in it; nothing is read."""
    start = time.perf_counter()
    pieces = pieces_of([TERABYTE_ROWS], [RowRange(start=0, end=TERABYTE_ROWS)])
    order = Order(pieces, seed=0, streams=64, window_rows=16384, batch_size=65_536)
    epoch, offset = order.epoch(1), order.steps_per_epoch * 2 // 3 * order.rows_per_step
    for stream in range(64):
        window = epoch.window_at(stream, offset)
        epoch.places(window)
        list(epoch.pieces_of(window))
    return time.perf_counter() - start


if __name__ == "__main__":
    main()
