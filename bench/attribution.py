"""What attributing a step's time costs, on one rank: steps of one model with and without it, alternating one by one.

With it, a step has what a training run adds: the clock's intervals in the pipeline and around the parts of the loop,
and the hooks in the forward pass. What a log line adds, its seconds and their curves in TensorBoard, is timed alone and
spread over the steps between two lines. CPU seconds of the main thread are told too: they don't see what else runs.

    python bench/attribution.py --steps 200 --save
"""

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, nullcontext

import stamp
import torch
from hooks import Hooks, hooks_of, set_hooks
from torch.utils.tensorboard import SummaryWriter

from dlrm_scale.batch import Batch, make_batch
from dlrm_scale.config import Config, DenseOptimizerConfig, ModelConfig, ShardingConfig
from dlrm_scale.models.build import build_model
from dlrm_scale.models.tables import table_specs
from dlrm_scale.schema import CATEGORY_COLUMNS, INTEGER_COLUMNS
from dlrm_scale.sharding.pipeline import make_train_pipeline
from dlrm_scale.sharding.ranks import close_ranks, init_ranks
from dlrm_scale.sharding.shard import ShardedModel, shard_model
from dlrm_scale.sharding.step_phases import mark_phases
from dlrm_scale.telemetry import StepClock
from dlrm_scale.train.attribution.attribution import IntervalWindow

_LOOP_INTERVALS = ("dense_optimizer", "logging", "agreement", "checkpoint")


class NoClock(StepClock):
    """A clock that never looks."""

    def interval(self, name: str) -> AbstractContextManager[None]:
        """Nothing."""
        return nullcontext()

    busy = whole = interval


def main() -> None:
    """Measure, print, and save if asked."""
    options = _options()
    torch.set_num_threads(options.threads)
    sharded = _sharded(options)
    batches = _batches(options)
    bare = hooks_of(sharded.module)
    clock = StepClock()
    mark_phases(sharded, clock)
    marked = hooks_of(sharded.module)
    sides = {
        "without": (_step(sharded, batches, NoClock()), bare),
        "with": (_step(sharded, batches, clock), marked),
    }
    result = _result(_measure(sides, options.steps), options)
    close_ranks()
    for kind in ("elapsed", "cpu"):
        one = result[kind]
        print(
            f"{kind:8s} a step without {one['without_milliseconds']:.2f} ms, paired difference "
            f"{1000 * one['difference_milliseconds']:+.0f} us (quartiles {1000 * one['quartiles'][0]:+.0f} to "
            f"{1000 * one['quartiles'][1]:+.0f}), with log lines {one['overhead_share']:+.2%} of a step"
        )
    print(
        f"the calls alone: {result['calls_alone_microseconds']:.0f} us a step, "
        f"{result['log_alone_microseconds']:.0f} us a log line; with these {result['calls_share']:.2%} of a step"
    )
    if options.json:
        print(json.dumps(result))
    if options.save:
        print("saved:", stamp.save("attribution", result))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200, help="steps of each side")
    parser.add_argument("--threads", type=int, default=2, help="torch threads")
    parser.add_argument("--rows", type=int, default=20_000, help="rows of each of the 26 tables")
    parser.add_argument("--dim", type=int, default=64, help="columns of each table")
    parser.add_argument("--batch-size", type=int, default=2048, help="rows of a batch")
    parser.add_argument("--log-every", type=int, default=20, help="steps between log lines")
    parser.add_argument("--json", action="store_true", help="print the result as JSON too")
    parser.add_argument("--save", action="store_true", help="write it to bench/results")
    return parser.parse_args()


def _sharded(options: argparse.Namespace) -> ShardedModel:
    config = Config(
        model=ModelConfig(dim=options.dim, dense_layers=(512, 256, options.dim), over_layers=(512, 512, 256, 1)),
        dense_optimizer=DenseOptimizerConfig(kind="sgd", learning_rate=0.01),
        sharding=ShardingConfig(kind="table_wise"),
    )
    tables = table_specs(config.model, dict.fromkeys(CATEGORY_COLUMNS, options.rows))
    return shard_model(build_model(config.model, tables), tables, config, init_ranks("cpu", 60))


def _batches(options: argparse.Namespace) -> list[Batch]:
    generator = torch.Generator().manual_seed(0)
    rows = options.batch_size
    return [
        make_batch(
            dense_features=torch.randn(rows, len(INTEGER_COLUMNS), generator=generator),
            ids=torch.randint(0, options.rows, (len(CATEGORY_COLUMNS), rows), generator=generator),
            labels=(torch.rand(rows, generator=generator) < 0.25).float(),
        )
        for _ in range(8)
    ]


def _cycle(batches: list[Batch]) -> Iterator[Batch]:
    while True:
        yield from batches


def _step(sharded: ShardedModel, batches: list[Batch], clock: StepClock) -> Callable[[], None]:
    pipeline, turn = make_train_pipeline(sharded, "plain", clock), _cycle(batches)

    def step() -> None:
        pipeline.progress(turn)
        _loop_part(clock)

    return step


def _loop_part(clock: StepClock) -> None:
    for name in _LOOP_INTERVALS:
        with clock.interval(name):
            pass


def _log(clock: StepClock, window: IntervalWindow, board: SummaryWriter, number: int) -> None:
    with clock.interval("logging"):
        for name, value in IntervalWindow.rank_time(window.take()).seconds.items():
            board.add_scalar(f"train/interval_seconds/{name}", value, number)


def _measure(sides: dict[str, tuple[Callable[[], None], Hooks]], steps: int) -> dict[str, dict[str, list[float]]]:
    """Milliseconds of each step, elapsed and of the main thread's CPU, by side."""
    milliseconds: dict[str, dict[str, list[float]]] = {name: {"elapsed": [], "cpu": []} for name in sides}
    for number in range(-5, steps):  # the first ones warm up
        for name in list(sides) if number % 2 == 0 else list(sides)[::-1]:
            step, hooks = sides[name]
            set_hooks(hooks)
            start, cpu_start = time.perf_counter(), time.thread_time()
            step()
            elapsed, cpu = time.perf_counter() - start, time.thread_time() - cpu_start
            if number >= 0:
                milliseconds[name]["elapsed"].append(1000 * elapsed)
                milliseconds[name]["cpu"].append(1000 * cpu)
    return milliseconds


def _calls_alone_microseconds() -> tuple[float, float]:
    """What the calls cost with nothing to time: those of a step (8 parts, 3 hooks, 1 wait, 4 of the loop), of a log."""
    clock = StepClock()
    count = 2000
    start = time.perf_counter()
    for _ in range(count):
        for name in ("data_wait", "copy", "dense_optimizer", "dense_forward", "dense_optimizer"):
            with clock.interval(name):
                pass
        for name in ("input_all_to_all", "lookup", "output_all_to_all", "output_all_to_all"):
            clock.begin(name)
            clock.end()
        with clock.busy("backward"):
            pass
        _loop_part(clock)
    of_step = (time.perf_counter() - start) / count
    window = IntervalWindow(clock)
    with tempfile.TemporaryDirectory() as folder, SummaryWriter(folder) as board:
        start = time.perf_counter()
        for number in range(100):
            _loop_part(clock)
            with clock.interval("lookup"), clock.interval("copy"), clock.interval("data_wait"):
                _log(clock, window, board, number)
        of_log = (time.perf_counter() - start) / 100
    return 1e6 * of_step, 1e6 * of_log


def _result(steps: dict[str, dict[str, list[float]]], options: argparse.Namespace) -> dict:
    calls, log = _calls_alone_microseconds()
    log_milliseconds = log / 1000 / options.log_every
    result = {
        "bench": "attribution",
        "steps": options.steps,
        "threads": options.threads,
        "shape": {"tables": 26, "rows": options.rows, "dim": options.dim, "batch_size": options.batch_size},
        "log_every_steps": options.log_every,
        "calls_alone_microseconds": calls,
        "log_alone_microseconds": log,
        "stamp": stamp.stamp(),
    }
    for kind in ("elapsed", "cpu"):
        without = statistics.median(steps["without"][kind])
        differences = [b - a for a, b in zip(steps["without"][kind], steps["with"][kind], strict=True)]
        low, middle, high = statistics.quantiles(differences, n=4)
        result[kind] = {
            "without_milliseconds": without,
            "difference_milliseconds": middle,
            "quartiles": [low, high],
            "overhead_share": (middle + log_milliseconds) / without,
        }
    without = statistics.median(steps["without"]["elapsed"])
    result["calls_share"] = (calls / 1000 + log_milliseconds) / without
    return result


if __name__ == "__main__":
    main()
