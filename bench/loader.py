"""The shuffled training loader against torch's `DataLoader` with workers and torchrec's loader, in alternating rounds.

What each side does stands in `loader_sides.py`. Every side must first use every row once. Each round of a side is a
process of its own: it loads a few batches to have its code compiled, then some epochs by the clock. CPU seconds count
all threads and processes. Memory is the peak above the start, that of worker processes included. One-hot rows are 40
values; multi-hot rows have MLPerf's bags, 214 ids on average.

The last line is the time to the first batch of a run that resumes at two thirds of an epoch of 4.37 billion rows (the
1TB set): positions are those of such an epoch, record batches are read from this bench's file in their place.

    python bench/loader.py --rounds 5 --save
"""

import argparse
import json
import multiprocessing
import re
import resource
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt
import stamp
import torch
from loader_sides import ROW_NUMBER_COLUMN, Batch, Side, make_rows, sides

from dlrm_scale.config import DataConfig
from dlrm_scale.data.dataset.dataset import ROWS_PER_RECORD_BATCH, Dataset, RowRange, Rows
from dlrm_scale.data.loading.loader import TrainLoader
from dlrm_scale.units import MIB

TERABYTE_ROWS = 4_373_472_329
WARM_UP_BATCHES = 8
Found = dict[str, float]
T = TypeVar("T")


def main() -> None:
    """Measure, print two tables, and save them if asked."""
    options = _options()
    torch.set_num_threads(1)
    result: dict[str, object] = {"stamp": stamp.stamp(), "options": vars(options)}
    for kind, rows in (("one-hot", options.rows), ("multi-hot", options.multi_hot_rows)):
        multi_hot = kind == "multi-hot"
        with tempfile.TemporaryDirectory(dir=options.folder) as folder:
            make_rows(Path(folder), rows, multi_hot=multi_hot)
            found = _alternate(Path(folder), rows, options, multi_hot=multi_hot)
            print(f"\n{kind}: {rows:,} rows, {options.epochs} epochs, batch {options.batch_size}")
            result[kind] = _summary(found)
            if not multi_hot:
                seconds = [_in_process(_first_batch_seconds, Path(folder)) for _ in range(options.rounds)]
                result["seconds_to_first_batch_of_4_37e9_rows"] = median = statistics.median(seconds)
                print(f"first batch at two thirds of 4.37e9 rows: {median:.2f} s, goal 1 s")
    result["load_average_at_the_end"] = stamp.stamp()["load_average"]
    if options.save:
        print(stamp.save("loader", json.loads(json.dumps(result, default=str))))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=3_000_000)
    parser.add_argument("--multi-hot-rows", type=int, default=300_000)
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--batch-size", type=int, default=2048)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--folder", type=Path, help="where to put the rows; the system's temporary folder by default")
    parser.add_argument("--save", action="store_true")
    return parser.parse_args()


def _alternate(folder: Path, rows: int, options: argparse.Namespace, *, multi_hot: bool) -> dict[str, list[Found]]:
    contenders = {
        name: kind(folder, options.batch_size, options.workers) for name, kind in sides(multi_hot=multi_hot).items()
    }
    for name, side in contenders.items():
        if not _in_process(_uses_every_row_once, side, rows):
            raise SystemExit(f"{name} doesn't use every row once")
    found: dict[str, list[Found]] = {name: [] for name in contenders}
    for round_ in range(options.rounds):
        for name, side in contenders.items():
            found[name].append(_in_process(_measure, side, options.epochs, round_))
    return found


def _summary(found: dict[str, list[Found]]) -> dict[str, object]:
    print(
        "| loader | Mrow per CPU-second | Mrow/s | peak MiB | ours / its rows per CPU-second |\n|---|---|---|---|---|"
    )
    ours = [f["mrow_per_cpu_second"] for f in found["dlrm_scale"]]
    summary: dict[str, object] = {}
    for name, rounds in found.items():
        medians = {key: statistics.median(f[key] for f in rounds) for key in rounds[0]}
        ratios = [a / f["mrow_per_cpu_second"] for a, f in zip(ours, rounds, strict=True)]
        spread = {"median": statistics.median(ratios), "least": min(ratios), "most": max(ratios)}
        summary[name] = {**medians, "ours_to_its_rows_per_cpu_second": spread, "rounds": rounds}
        print(
            f"| {name} | {medians['mrow_per_cpu_second']:.2f} | {medians['mrow_per_second']:.2f} "
            f"| {medians['peak_bytes'] / MIB:,.0f} | {spread['median']:.2f} ({min(ratios):.2f} to {max(ratios):.2f}) |"
        )
    return summary


def _in_process(function: Callable[..., T], *arguments: object) -> T:
    """Call a function in a process of its own and return what it returns."""
    context = multiprocessing.get_context("fork")
    here, there = context.Pipe()
    process = context.Process(target=_send_result, args=(there, function, arguments))
    process.start()
    there.close()
    try:
        result: T = here.recv()
    except EOFError:
        raise SystemExit(f"{function} failed") from None
    process.join()
    return result


def _send_result(connection: Connection, function: Callable[..., object], arguments: tuple[object, ...]) -> None:
    connection.send(function(*arguments))


def _row_numbers(batch: Batch) -> npt.NDArray[Any]:
    features = batch[2]
    ends = features.offset_per_key()
    numbers: npt.NDArray[Any] = features.values()[ends[ROW_NUMBER_COLUMN] : ends[ROW_NUMBER_COLUMN + 1]].numpy()
    return numbers.copy()


def _uses_every_row_once(side: Side, rows: int) -> bool:
    seen = np.concatenate([_row_numbers(batch) for batch in side.batches(1, 0)])
    return np.array_equal(np.sort(seen), np.arange(rows))


def _measure(side: Side, epochs: int, seed: int) -> Found:
    before_bytes = _memory_bytes("VmRSS")
    for batch, _ in zip(side.batches(1, seed), range(WARM_UP_BATCHES), strict=False):
        batch[2].offset_per_key()
    cpu, wall = _cpu_seconds(), time.perf_counter()
    batches: Iterator[Batch] = side.batches(epochs, seed)
    rows = sum(len(labels) for _, labels, _ in batches)
    del batches
    cpu, wall = _cpu_seconds() - cpu, time.perf_counter() - wall
    peak_bytes = _memory_bytes("VmHWM") - before_bytes
    largest_worker_bytes = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024
    if largest_worker_bytes:
        peak_bytes += side.workers * max(0, largest_worker_bytes - before_bytes)
    return {"mrow_per_cpu_second": rows / cpu / 1e6, "mrow_per_second": rows / wall / 1e6, "peak_bytes": peak_bytes}


def _cpu_seconds() -> float:
    """Processor time of all threads and of processes that have ended."""
    children = resource.getrusage(resource.RUSAGE_CHILDREN)
    return time.process_time() + children.ru_utime + children.ru_stime


def _memory_bytes(entry: str) -> int:
    match = re.search(rf"{entry}:\s*(\d+)", Path("/proc/self/status").read_text())
    assert match is not None
    return int(match[1]) * 1024


class _TerabyteDataset(Dataset):
    """A manifest with the rows of the 1TB set over a small file."""

    def __init__(self, real: Dataset) -> None:
        self.real, self.path, self.multi_hot = real, real.path, ()
        part = replace(real.manifest.parts[0], rows=TERABYTE_ROWS)
        split = {**real.manifest.split, "train": (RowRange(start=0, end=TERABYTE_ROWS),)}
        self.manifest = replace(real.manifest, parts=(part,), split=split)

    def read(self, part_index: int, record_batch_index: int) -> Rows:
        return self.real.read(0, record_batch_index % (self.real.rows // ROWS_PER_RECORD_BATCH))


def _first_batch_seconds(folder: Path) -> float:
    config = DataConfig(batch_size=65_536)
    probe = TrainLoader(Dataset.open(folder), config, rank=0, ranks=1, epochs=1)
    next(probe)  # Compiles the kernels, or loads them.
    probe.close()
    start = time.perf_counter()
    dataset = _TerabyteDataset(Dataset.open(folder))
    cursor = probe.start.to_json()
    streams, step = int(str(cursor["streams"])), TERABYTE_ROWS // config.batch_size * 2 // 3
    cursor |= {"epoch": 1, "step_in_epoch": step, "stream_rows_consumed": step * config.batch_size // streams}
    loader = TrainLoader(dataset, config, rank=0, ranks=1, epochs=2, cursor=cursor)
    next(loader)
    seconds = time.perf_counter() - start
    loader.close()
    return seconds


if __name__ == "__main__":
    main()
