"""Our checkpoints beside `torch.distributed.checkpoint` (sync and async), on one model of over 5 million rows of 64.

Four parts, each in alternating rounds with both sides on the same tensors and the same disk, everything synced:

    write     a baseline, and a delta of the rows that 100 steps touch, against whole copies by dcp
    restore   a baseline and 12 deltas, and a baseline alone, hashes checked, against `dcp.load`; values must be equal
    training  steps of the real model with a checkpoint every 100 steps, by neither, by us, by dcp's async save
    curves    rows and bytes of a delta by interval and skew of the ids, in fp32 and int8, as a table and a plot

    python bench/checkpoint.py --rounds 5 --save
    python bench/checkpoint.py --quick
"""

import argparse
import json
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import stamp
import torch
from checkpoint_sides import Dcp, Ours, Saved, ZipfIds
from rounds import show_spread, spread
from shapes import check_memory, cycle

from dlrm_scale.batch import Batch, make_batch
from dlrm_scale.config import Config, DenseOptimizerConfig, ModelConfig, ShardingConfig
from dlrm_scale.models.build import build_model
from dlrm_scale.models.tables import table_specs
from dlrm_scale.schema import CATEGORY_COLUMNS, INTEGER_COLUMNS
from dlrm_scale.sharding.pipeline import make_train_pipeline
from dlrm_scale.sharding.ranks import close_ranks, init_ranks
from dlrm_scale.sharding.shard import ShardedModel, shard_model
from dlrm_scale.telemetry import StepClock
from dlrm_scale.units import GIB, MIB

BATCH_ROWS = 2048
INTERVAL_STEPS = 100
CHAIN_DELTAS = 12
GOALS = {
    "delta_bytes": 1 / 15,
    "int8_delta_bytes": 1 / 45,
    "baseline_seconds": 0.6,
    "restore_seconds": 0.7,
    "stall_share": 0.01,
    "overhead": 0.02,
}
# Distinct values of the 26 columns in Criteo's Kaggle set.
CRITEO_ROWS = (
    *(1460, 583, 10131227, 2202608, 305, 24, 12517, 633, 3, 93145, 5683, 8351593, 3194, 27, 14992, 5461306),
    *(10, 5652, 2173, 4, 7046547, 18, 15, 286181, 105, 142572),
)


def main() -> None:
    """Measure, print, and save if asked."""
    options = _options()
    if options.quick:
        options.cap, options.rounds, options.intervals, options.skews = 2000, 2, [10, 30], [1.1]
    torch.set_num_threads(options.threads)
    rows = {name: min(count, options.cap) for name, count in zip(CATEGORY_COLUMNS, CRITEO_ROWS, strict=True)}
    table_bytes = 4 * options.dim * sum(rows.values())
    check_memory(4 * table_bytes + 2 * GIB, f"--cap {options.cap} --dim {options.dim}")
    sharded = _sharded(rows, options)
    sizes = [shard.region.rows for shard in sharded.local_shards]
    interval = 10 if options.quick else INTERVAL_STEPS
    with tempfile.TemporaryDirectory(dir=options.folder) as name:
        folder = Path(name)
        result: dict[str, object] = {
            "bench": "checkpoint",
            "shape": {"rows": sum(sizes), "dim": options.dim, "batch_rows": BATCH_ROWS, "interval_steps": interval},
            "rounds": options.rounds,
            "goals": GOALS,
            "write": _write(folder, sharded, sizes, interval, options),
            "restore": _restore(folder, sharded, sizes, interval, options),
            "training": _training(folder, sharded, rows, interval, options),
            "curves": _curves(folder, sharded, sizes, options),
        }
    close_ranks()
    result["stamp"] = stamp.stamp()
    _show(result)
    if options.json:
        print(json.dumps(result))
    if options.save:
        print("saved:", stamp.save("checkpoint", result))
        _plot(result, Path(__file__).with_name("results") / "checkpoint_touched_rows.svg")


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=5, help="alternating rounds of each part")
    parser.add_argument("--threads", type=int, default=2, help="torch threads")
    parser.add_argument("--cap", type=int, default=1_000_000, help="most rows of a table; Criteo's sizes below it")
    parser.add_argument("--dim", type=int, default=64, help="columns of each table")
    parser.add_argument("--skew", type=float, default=1.1, help="exponent of the ids' Zipf law")
    parser.add_argument("--skews", type=float, nargs="+", default=[1.05, 1.1, 1.2], help="those of the curves")
    parser.add_argument("--intervals", type=int, nargs="+", default=[10, 30, 100, 300, 1000], help="of the curves")
    parser.add_argument("--folder", help="where checkpoints go (a folder of their own in it)")
    parser.add_argument("--quick", action="store_true", help="tiny tables: does the script work?")
    parser.add_argument("--json", action="store_true", help="print the result as JSON too")
    parser.add_argument("--save", action="store_true", help="write it, and the plot, to bench/results")
    return parser.parse_args()


def _sharded(rows: dict[str, int], options: argparse.Namespace) -> ShardedModel:
    config = Config(
        model=ModelConfig(dim=options.dim, dense_layers=(512, 256, options.dim), over_layers=(512, 512, 256, 1)),
        dense_optimizer=DenseOptimizerConfig(kind="adagrad"),
        sharding=ShardingConfig(kind="table_wise"),
    )
    tables = table_specs(config.model, rows)
    return shard_model(build_model(config.model, tables), tables, config, init_ranks("cpu", 60))


def _in_turns(rounds: int, sides: dict[str, Callable[[], Saved | float]]) -> dict[str, list[Saved | float]]:
    found: dict[str, list[Saved | float]] = {name: [] for name in sides}
    for number in range(rounds):
        for name in list(sides) if number % 2 == 0 else list(sides)[::-1]:
            found[name].append(sides[name]())
    return found


def _write(
    folder: Path, sharded: ShardedModel, sizes: Sequence[int], interval: int, options: argparse.Namespace
) -> dict[str, object]:
    ids = ZipfIds(sizes, options.skew, seed=1)
    dcp = Dcp(folder, sharded)
    exact, rounded = Ours(folder / "exact", sharded), Ours(folder / "int8", sharded, delta_rows="int8")
    for side in (exact, rounded):
        side.save()

    def baseline() -> Saved:
        side = Ours(folder / "baseline", sharded)
        try:
            return side.save()
        finally:
            side.close()

    def delta(side: Ours) -> Saved:
        for _ in range(interval):
            side.mark(ids.draw(BATCH_ROWS))
        return side.save()

    found = _in_turns(
        options.rounds,
        {
            "baseline": baseline,
            "delta": lambda: delta(exact),
            "delta, int8 rows": lambda: delta(rounded),
            "dcp.save": lambda: dcp.save("sync"),
            "dcp.async_save": lambda: dcp.save("async"),
        },
    )
    for side in (exact, rounded, dcp):
        side.close()
    peers = [saved for saved in found["dcp.save"] if isinstance(saved, Saved)]
    return {
        name: {
            "stall_seconds": spread([s.stall_seconds for s in saves]),
            "seconds": spread([s.seconds for s in saves]),
            "cpu_seconds": spread([s.cpu_seconds for s in saves]),
            "bytes": spread([s.bytes for s in saves]),
            "seconds_to_dcp": spread([s.seconds / peer.seconds for s, peer in zip(saves, peers, strict=True)]),
            "bytes_to_dcp": spread([s.bytes / peer.bytes for s, peer in zip(saves, peers, strict=True)]),
        }
        for name, saves in ((n, [s for s in values if isinstance(s, Saved)]) for n, values in found.items())
    }


def _restore(
    folder: Path, sharded: ShardedModel, sizes: Sequence[int], interval: int, options: argparse.Namespace
) -> dict[str, object]:
    ids = ZipfIds(sizes, options.skew, seed=2)
    alone, chain, dcp = Ours(folder / "alone", sharded), Ours(folder / "chain", sharded), Dcp(folder, sharded)
    chain.save()
    for _ in range(CHAIN_DELTAS):
        drawn = [
            torch.cat(parts).unique() for parts in zip(*(ids.draw(BATCH_ROWS) for _ in range(interval)), strict=True)
        ]
        for shard, touched in zip(sharded.local_shards, drawn, strict=True):
            shard.weight[touched] += 0.5
        chain.mark(drawn)
        chain.save()
    alone.save()
    dcp.save("sync")
    expected = {name: values.clone() for name, values in dcp.state.items()}
    sides = {"baseline and 12 deltas": chain.restore, "baseline": alone.restore, "dcp.load": dcp.load}

    def checked(load: Callable[[], float]) -> Callable[[], float]:
        def run() -> float:
            for values in dcp.state.values():
                values.detach().zero_()
            seconds = load()
            if not all(torch.equal(values, expected[name]) for name, values in dcp.state.items()):
                raise SystemExit("not the same work: a restored tensor differs")
            return seconds

        return run

    found = _in_turns(options.rounds, {name: checked(load) for name, load in sides.items()})
    for side in (alone, chain, dcp):
        side.close()
    peers = [float(s) for s in found["dcp.load"] if not isinstance(s, Saved)]
    return {
        name: {
            "seconds": spread([s for s in values if not isinstance(s, Saved)]),
            "to_dcp": spread([s / p for s, p in zip(values, peers, strict=True) if not isinstance(s, Saved)]),
        }
        for name, values in found.items()
    }


def _training(
    folder: Path, sharded: ShardedModel, rows: dict[str, int], interval: int, options: argparse.Namespace
) -> dict[str, object]:
    """Time intervals that begin with a checkpoint; a save that is still being written at the end is awaited untimed."""
    ours, dcp = Ours(folder / "training", sharded), Dcp(folder, sharded)
    sharded.track(ours.touched)
    batches = _batches(list(rows.values()), options.skew)
    pipeline, turn = make_train_pipeline(sharded, "plain", StepClock()), cycle(batches)

    def steps() -> float:
        start = time.perf_counter()
        for _ in range(interval):
            pipeline.progress(turn)
        return time.perf_counter() - start

    ours.save()
    steps()
    ours.touched.enabled = False  # the other sides don't track, and their rows aren't in our deltas

    def with_ours() -> Saved:
        ours.touched.enabled = True
        start = time.perf_counter()
        stall = ours.begin()
        steps()
        seconds = time.perf_counter() - start
        ours.touched.enabled = False
        outcome = ours.wait()
        return Saved(stall_seconds=stall, seconds=seconds, cpu_seconds=0.0, bytes=outcome.bytes)

    def with_dcp() -> Saved:
        with dcp.saving("async") as start:
            stall = time.perf_counter() - start
            steps()
            seconds = time.perf_counter() - start
        return Saved(stall_seconds=stall, seconds=seconds, cpu_seconds=0.0, bytes=0)

    found = _in_turns(options.rounds, {"none": steps, "delta": with_ours, "dcp.async_save": with_dcp})
    bare = [s for s in found["none"] if not isinstance(s, Saved)]
    for side in (ours, dcp):
        side.close()
    return {"seconds_without": spread(bare)} | {
        name: {
            "overhead": spread(
                [s.seconds / b - 1 for s, b in zip(found[name], bare, strict=True) if isinstance(s, Saved)]
            ),
            "stall_share": spread(
                [s.stall_seconds / b for s, b in zip(found[name], bare, strict=True) if isinstance(s, Saved)]
            ),
        }
        for name in ("delta", "dcp.async_save")
    }


def _batches(sizes: Sequence[int], skew: float) -> list[Batch]:
    ids, generator = ZipfIds(sizes, skew, seed=3), torch.Generator().manual_seed(3)
    return [
        make_batch(
            dense_features=torch.randn(BATCH_ROWS, len(INTEGER_COLUMNS), generator=generator),
            ids=torch.stack(ids.draw(BATCH_ROWS)),
            labels=(torch.rand(BATCH_ROWS, generator=generator) < 0.25).float(),
        )
        for _ in range(INTERVAL_STEPS)
    ]


def _curves(
    folder: Path, sharded: ShardedModel, sizes: Sequence[int], options: argparse.Namespace
) -> list[dict[str, float]]:
    points = []
    for skew in options.skews:
        sides = {"": Ours(folder / "fp32", sharded), "int8_": Ours(folder / "int8", sharded, delta_rows="int8")}
        whole = {name: side.save().bytes for name, side in sides.items()}
        for interval in options.intervals:
            ids = ZipfIds(sizes, skew, seed=interval)
            for _ in range(interval):
                drawn = ids.draw(BATCH_ROWS)
                for side in sides.values():
                    side.mark(drawn)
            saves = {name: side.save() for name, side in sides.items()}
            points.append(
                {"skew": skew, "interval_steps": interval, "rows_share": saves[""].rows / sum(sizes)}
                | {f"{name}bytes_share": saved.bytes / whole[name] for name, saved in saves.items()}
            )
        for side in sides.values():
            side.close()
    return points


def _show(result: dict) -> None:
    shape, interval = result["shape"], result["shape"]["interval_steps"]
    print(f"{shape['rows']:,} rows x {shape['dim']} with row-wise Adagrad state; {result['rounds']} rounds")
    print("| write | stall, s | until durable, s | CPU s | MiB | seconds to dcp.save | bytes to dcp.save |")
    print("|---|---|---|---|---|---|---|")
    for name, one in result["write"].items():
        print(
            f"| {name} | {show_spread(one['stall_seconds'], '.2f')} | {show_spread(one['seconds'], '.2f')} "
            f"| {one['cpu_seconds']['median']:.2f} | {one['bytes']['median'] / MIB:.1f} "
            f"| {show_spread(one['seconds_to_dcp'], '.2f')} | 1/{1 / one['bytes_to_dcp']['median']:.1f} |"
        )
    print("| restore | s | to dcp.load |\n|---|---|---|")
    for name, one in result["restore"].items():
        print(f"| {name} | {show_spread(one['seconds'], '.2f')} | {show_spread(one['to_dcp'], '.2f')} |")
    training = result["training"]
    print(f"a checkpoint every {interval} steps ({show_spread(training['seconds_without'], '.2f')} s without):")
    for name in ("delta", "dcp.async_save"):
        one = training[name]
        print(
            f"{name}: overhead {show_spread(one['overhead'], '+.1%')}, stall {show_spread(one['stall_share'], '.2%')}"
        )
    print("| skew | steps | rows touched | bytes to a baseline | int8 |\n|---|---|---|---|---|")
    for point in result["curves"]:
        print(
            f"| {point['skew']} | {point['interval_steps']} | {point['rows_share']:.2%} "
            f"| 1/{1 / point['bytes_share']:.1f} | 1/{1 / point['int8_bytes_share']:.1f} |"
        )
    write = result["write"]
    met = {
        "delta_bytes": write["delta"]["bytes_to_dcp"]["median"],
        "int8_delta_bytes": write["delta, int8 rows"]["bytes_to_dcp"]["median"],
        "baseline_seconds": write["baseline"]["seconds_to_dcp"]["median"],
        "restore_seconds": result["restore"]["baseline and 12 deltas"]["to_dcp"]["median"],
        "stall_share": training["delta"]["stall_share"]["median"],
        "overhead": training["delta"]["overhead"]["median"],
    }
    for name, value in met.items():
        print(f"{name}: {value:.4f}, goal {GOALS[name]:.4f}: {'met' if value <= GOALS[name] else 'missed'}")
    print(f"load average {result['stamp']['load_average'][0]}")


def _plot(result: dict, path: Path) -> None:
    try:
        from matplotlib.figure import Figure
    except ImportError:
        print("no plot: install matplotlib")
        return
    axes = (figure := Figure(figsize=(7, 4.5))).subplots()
    for skew in dict.fromkeys(point["skew"] for point in result["curves"]):
        points = [point for point in result["curves"] if point["skew"] == skew]
        steps = [point["interval_steps"] for point in points]
        line = axes.plot(steps, [100 * p["rows_share"] for p in points], "o-", label=f"rows touched, skew {skew}")
        int8 = [100 * p["int8_bytes_share"] for p in points]
        axes.plot(steps, int8, "--", color=line[0].get_color(), label=f"bytes with int8 rows, skew {skew}")
    axes.set(
        xscale="log", yscale="log", xlabel=f"steps of {BATCH_ROWS} rows between checkpoints", ylabel="% of a baseline"
    )
    axes.grid(visible=True, which="both", alpha=0.3)
    axes.legend(fontsize=7)
    figure.savefig(path, bbox_inches="tight")
    print("plot:", path)


if __name__ == "__main__":
    main()
