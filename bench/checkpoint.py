"""Our checkpoints beside `torch.distributed.checkpoint` (sync and async), on one model of 8.6 million rows of 64.

Five parts, each in alternating rounds with both sides on the same tensors and the same disk, everything synced:

    write     a baseline, and a delta of the rows that 100 steps touch, against whole copies by dcp
    restore   a baseline and 12 deltas, and a baseline alone, hashes checked, against `dcp.load`; values must be equal,
              with all files in the page cache and (cold) with none.
              Then the chain is merged into a baseline by a process whose memory and reads are counted
    long      1,000 deltas with `dlrm-scale checkpoint merge` beside them, restored as above
    training  steps of the real model with a checkpoint every 100 steps, by neither, by us, by dcp's async save
    curves    rows and bytes of a delta by interval and skew of the ids, in fp32 and int8, as a table and a plot

    python bench/checkpoint.py --rounds 5 --save
    python bench/checkpoint.py --cap 1000000      # 5.6 million rows
    python bench/checkpoint.py --quick
"""

import argparse
import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import checkpoint_parts as parts
import stamp
import torch
from checkpoint_long_chain import long_chain
from checkpoint_report import goals, plot, show
from checkpoint_sides import staging_of
from shapes import check_memory

from dlrm_scale.config import Config, DenseOptimizerConfig, ModelConfig, ShardingConfig
from dlrm_scale.models.build import build_model
from dlrm_scale.models.tables import table_specs
from dlrm_scale.schema import CATEGORY_COLUMNS
from dlrm_scale.sharding.ranks import close_ranks, init_ranks
from dlrm_scale.sharding.shard import ShardedModel, shard_model
from dlrm_scale.units import GIB

INTERVAL_STEPS = 100
# Distinct values of the 26 columns in Criteo's Kaggle set.
CRITEO_ROWS = (
    *(1460, 583, 10131227, 2202608, 305, 24, 12517, 633, 3, 93145, 5683, 8351593, 3194, 27, 14992, 5461306),
    *(10, 5652, 2173, 4, 7046547, 18, 15, 286181, 105, 142572),
)
T = TypeVar("T")


def main() -> None:
    """Measure, print, and save if asked."""
    options = _options()
    if options.quick:
        options.cap, options.rounds, options.intervals, options.skews = 2000, 2, [10, 30], [1.1]
        options.long_deltas = 60
    torch.set_num_threads(options.threads)
    rows = {name: min(count, options.cap) for name, count in zip(CATEGORY_COLUMNS, CRITEO_ROWS, strict=True)}
    # The model, our staging memory, dcp's copy, expected values; the merger.
    check_memory(4 * 4 * options.dim * sum(rows.values()) + 3 * GIB, f"--cap {options.cap} --dim {options.dim}")
    sharded = _timed("model", lambda: _sharded(rows, options))
    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        bed = parts.Bed(
            folder=Path(name),
            sharded=sharded,
            staging=staging_of(sharded),
            interval=10 if options.quick else INTERVAL_STEPS,
            rounds=options.rounds,
            skew=options.skew,
        )
        shape = {"dim": options.dim, "batch_rows": parts.BATCH_ROWS, "interval_steps": bed.interval}
        result: dict[str, object] = {
            "bench": "checkpoint",
            "shape": {"rows": sum(bed.table_rows), **shape},
            "rounds": options.rounds,
            "quick": options.quick,
            "write": _timed("write", lambda: parts.writing(bed)),
            "restore": _timed("restore", lambda: parts.restoring(bed)),
            "long_chain": _timed("long chain", lambda: _long_chain(bed, options)),
            "training": _timed("training", lambda: parts.training(bed)),
            "curves": _timed("curves", lambda: parts.curves(bed, options.skews, options.intervals)),
        }
    close_ranks()
    result["goals"] = goals(result)
    result["stamp"] = stamp.stamp()
    show(result)
    if options.json:
        print(json.dumps(result))
    if options.save:
        print("saved:", stamp.save("checkpoint", result))
        plot(result, Path(__file__).with_name("results") / "checkpoint_touched_rows.svg")


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5, help="alternating rounds of each part")
    parser.add_argument("--threads", type=int, default=2, help="torch threads")
    parser.add_argument("--cap", type=int, default=1_600_000, help="most rows of a table; Criteo's sizes below it")
    parser.add_argument("--dim", type=int, default=64, help="columns of each table")
    parser.add_argument("--skew", type=float, default=1.1, help="exponent of the ids' Zipf law")
    parser.add_argument("--skews", type=float, nargs="+", default=[1.05, 1.1, 1.2], help="those of the curves")
    parser.add_argument("--intervals", type=int, nargs="+", default=[10, 30, 100, 300, 1000], help="of the curves")
    parser.add_argument("--long-deltas", type=int, default=1000, help="deltas of the long chain")
    parser.add_argument("--long-steps", type=int, default=3, help="steps between two of them")
    parser.add_argument("--folder", help="where checkpoints go (a folder of their own in it)")
    parser.add_argument("--quick", action="store_true", help="tiny tables: does the script work?")
    parser.add_argument("--json", action="store_true", help="print the result as JSON too")
    parser.add_argument("--save", action="store_true", help="write it, and the plot, to bench/results")
    return parser.parse_args()


def _timed(what: str, part: Callable[[], T]) -> T:
    start, cpu = time.perf_counter(), time.process_time()
    result = part()
    print(f"{what}: {time.perf_counter() - start:.0f} s, {time.process_time() - cpu:.0f} CPU s", flush=True)
    return result


def _sharded(rows: dict[str, int], options: argparse.Namespace) -> ShardedModel:
    config = Config(
        model=ModelConfig(dim=options.dim, dense_layers=(512, 256, options.dim), over_layers=(512, 512, 256, 1)),
        dense_optimizer=DenseOptimizerConfig(kind="adagrad"),
        sharding=ShardingConfig(kind="table_wise"),
    )
    tables = table_specs(config.model, rows)
    return shard_model(build_model(config.model, tables), tables, config, init_ranks("cpu", 60))


def _long_chain(bed: parts.Bed, options: argparse.Namespace) -> dict[str, object]:
    return long_chain(
        bed.folder,
        bed.sharded,
        bed.staging,
        bed.ids(4),
        deltas=options.long_deltas,
        steps=options.long_steps,
        batch_rows=parts.BATCH_ROWS,
        rounds=bed.rounds,
        watch_seconds=0.2 if options.quick else 1.0,
    )


if __name__ == "__main__":
    main()
