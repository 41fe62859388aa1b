"""A training step of this project against a plain-torch DLRM of the same shape, in alternating rounds.

Both start from the same weights and see the same batches; before anything is timed their losses must agree. One rank,
fp32, SGD for everything. Rounds alternate, so that a busy machine hits both; the ratio is taken within a round.

    python bench/train_step.py --rounds 10 --save
"""

import argparse
import json
import statistics
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import stamp
import torch
from plain_dlrm import PlainDlrm
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from dlrm_scale.batch import Batch, make_batch
from dlrm_scale.config import Config, DenseOptimizerConfig, ModelConfig, ShardingConfig, SparseOptimizerConfig
from dlrm_scale.models.build import build_model
from dlrm_scale.models.initial_rows import fill_initial_rows
from dlrm_scale.models.tables import table_specs
from dlrm_scale.schema import CATEGORY_COLUMNS, INTEGER_COLUMNS
from dlrm_scale.sharding.pipeline import make_train_pipeline
from dlrm_scale.sharding.ranks import close_ranks, init_ranks
from dlrm_scale.sharding.shard import ShardedModel, shard_model
from dlrm_scale.touched_rows import TouchedRows

RATE = 0.01
DENSE_LAYERS = (512, 256)
OVER_LAYERS = (512, 512, 256, 1)
DISTINCT_BATCHES = 8
WARM_UP_STEPS = 5

Step = Callable[[], float]


@dataclass(frozen=True, kw_only=True)
class Shape:
    """What is trained."""

    table_rows: dict[str, int]
    dim: int
    batch_size: int
    ids_per_bag: int


def main() -> None:
    """Measure, print a table, and save it if asked."""
    options = _options()
    torch.set_num_threads(options.threads)
    shape = Shape(
        table_rows=dict.fromkeys(CATEGORY_COLUMNS, options.rows),
        dim=options.dim,
        batch_size=options.batch_size,
        ids_per_bag=options.ids_per_bag,
    )
    batches = _batches(shape)
    sharded = _sharded(shape)
    plain = _plain_copy(shape, sharded)
    touched = TouchedRows([s.region.rows for s in sharded.local_shards])
    sharded.track(touched)
    ours = _our_step(sharded, batches)
    peers: dict[str, Step] = {
        "plain torch": _plain_step(plain, batches),
        "dlrm_scale": _with_tracking(touched, False, ours),
        "dlrm_scale, touched rows tracked": _with_tracking(touched, True, ours),
    }
    _check_equal_losses(peers["plain torch"], peers["dlrm_scale"])
    rounds = _measure(peers, options.rounds, options.steps)
    result = _result(rounds, shape, options)
    close_ranks()
    _show(result)
    if options.json:
        print(json.dumps(result))
    if options.save:
        print("saved:", stamp.save(f"train_step_{options.ids_per_bag}_per_bag", result))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=10, help="alternating rounds")
    parser.add_argument("--steps", type=int, default=10, help="steps a round and peer")
    parser.add_argument("--threads", type=int, default=2, help="torch threads")
    parser.add_argument("--rows", type=int, default=100_000, help="rows of each of the 26 tables")
    parser.add_argument("--dim", type=int, default=64, help="columns of each table")
    parser.add_argument("--batch-size", type=int, default=2048, help="rows of a batch")
    parser.add_argument("--ids-per-bag", type=int, default=1, help="lookups a row and table")
    parser.add_argument("--json", action="store_true", help="print the result as JSON too")
    parser.add_argument("--save", action="store_true", help="write it to bench/results")
    return parser.parse_args()


def _batches(shape: Shape) -> list[Batch]:
    generator = torch.Generator().manual_seed(0)
    return [_batch(shape, generator) for _ in range(DISTINCT_BATCHES)]


def _batch(shape: Shape, generator: torch.Generator) -> Batch:
    rows, count = shape.batch_size, len(shape.table_rows)
    ids = torch.stack(
        [torch.randint(0, n, (rows * shape.ids_per_bag,), generator=generator) for n in shape.table_rows.values()]
    )
    batch = make_batch(
        dense_features=torch.randn(rows, len(INTEGER_COLUMNS), generator=generator),
        ids=ids[:, :rows].contiguous(),
        labels=(torch.rand(rows, generator=generator) < 0.25).float(),
        keys=list(shape.table_rows),
    )
    if shape.ids_per_bag > 1:
        batch.sparse_features = KeyedJaggedTensor(
            keys=list(shape.table_rows),
            values=ids.view(-1),
            lengths=torch.full((count * rows,), shape.ids_per_bag, dtype=torch.int32),
        )
    return batch


def _sharded(shape: Shape) -> ShardedModel:
    config = Config(
        model=ModelConfig(dim=shape.dim, dense_layers=(*DENSE_LAYERS, shape.dim), over_layers=OVER_LAYERS),
        dense_optimizer=DenseOptimizerConfig(kind="sgd", learning_rate=RATE),
        sparse_optimizer=SparseOptimizerConfig(kind="sgd", learning_rate=RATE),
        sharding=ShardingConfig(kind="table_wise"),
    )
    tables = table_specs(config.model, shape.table_rows)
    sharded = shard_model(build_model(config.model, tables), tables, config, init_ranks("cpu", 60))
    specs = {t.name: t for t in tables}
    for shard in sharded.local_shards:
        fill_initial_rows(shard.weight, specs[shard.region.table], shard.region, config.model.seed)
    return sharded


def _plain_copy(shape: Shape, sharded: ShardedModel) -> PlainDlrm:
    plain = PlainDlrm(shape.table_rows, shape.dim, len(INTEGER_COLUMNS), (*DENSE_LAYERS, shape.dim), OVER_LAYERS)
    weights = {s.region.table: s.weight for s in sharded.local_shards}
    sources = [*(weights[name] for name in shape.table_rows), *sharded.dense_parameters.values()]
    with torch.no_grad():
        for target, source in zip(plain.parameters(), sources, strict=True):
            target.copy_(source)
    return plain


def _plain_step(model: PlainDlrm, batches: list[Batch]) -> Step:
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    loss_of = torch.nn.BCEWithLogitsLoss()
    count = len(model.tables)
    prepared = []
    for batch in batches:
        ids = list(batch.sparse_features.values().view(count, -1).unbind())
        per_bag = len(ids[0]) // len(batch.labels)
        offsets = torch.arange(0, len(ids[0]) + 1, per_bag)
        prepared.append((batch.dense_features, ids, offsets, batch.labels))
    turn = _cycle(prepared)

    def step() -> float:
        dense, ids, offsets, labels = next(turn)
        optimizer.zero_grad(set_to_none=True)
        loss = loss_of(model(dense, ids, offsets), labels)
        loss.backward()
        optimizer.step()
        return loss.item()

    return step


def _our_step(sharded: ShardedModel, batches: list[Batch]) -> Step:
    pipeline = make_train_pipeline(sharded, "plain")
    turn = _cycle(batches)

    def step() -> float:
        batch, row_loss_sum, _ = pipeline.progress(turn)
        return row_loss_sum.item() / batch.rows_global

    return step


def _with_tracking(touched: TouchedRows, enabled: bool, step: Step) -> Step:
    def tracked() -> float:
        touched.enabled = enabled
        return step()

    return tracked


def _cycle(items: list) -> Iterator:
    while True:
        yield from items


def _check_equal_losses(plain: Step, ours: Step) -> None:
    for number in range(WARM_UP_STEPS):
        expected, got = plain(), ours()
        if abs(expected - got) > 1e-5:
            raise SystemExit(f"not the same work: step {number} has loss {expected} in plain torch and {got} here")


def _measure(peers: dict[str, Step], rounds: int, steps: int) -> dict[str, list[tuple[float, float]]]:
    """Milliseconds a step, elapsed and CPU (summed over threads), one pair a round."""
    milliseconds: dict[str, list[tuple[float, float]]] = {name: [] for name in peers}
    for number in range(rounds):
        names = list(peers) if number % 2 == 0 else list(peers)[::-1]
        for name in names:
            peers[name]()  # the first step after a switch finds cold caches
            start, cpu_start = time.perf_counter(), time.process_time()
            for _ in range(steps):
                peers[name]()
            elapsed, cpu = time.perf_counter() - start, time.process_time() - cpu_start
            milliseconds[name].append((1000 * elapsed / steps, 1000 * cpu / steps))
    return milliseconds


def _result(
    rounds: dict[str, list[tuple[float, float]]], shape: Shape, options: argparse.Namespace
) -> dict[str, object]:
    return {
        "bench": "train_step",
        "shape": {
            "tables": len(shape.table_rows),
            "rows": options.rows,
            "dim": shape.dim,
            "batch_size": shape.batch_size,
            "ids_per_bag": shape.ids_per_bag,
            "dense_layers": [*DENSE_LAYERS, shape.dim],
            "over_layers": list(OVER_LAYERS),
        },
        "rounds": options.rounds,
        "steps_a_round": options.steps,
        "threads": options.threads,
        "peers": {name: _summary(values, rounds["plain torch"], shape) for name, values in rounds.items()},
        "stamp": stamp.stamp(),
    }


def _summary(
    values: list[tuple[float, float]], base: list[tuple[float, float]], shape: Shape
) -> dict[str, float | list[float]]:
    elapsed, cpu = ([pair[i] for pair in values] for i in (0, 1))
    median = statistics.median(elapsed)
    ratios, cpu_ratios = ([b[i] / v[i] for b, v in zip(base, values, strict=True)] for i in (0, 1))
    return {
        "median_milliseconds": median,
        "least_milliseconds": min(elapsed),
        "median_cpu_milliseconds": statistics.median(cpu),
        "samples_per_second": 1000 * shape.batch_size / median,
        "speed_against_plain_torch": statistics.median(ratios),
        "cpu_speed_against_plain_torch": statistics.median(cpu_ratios),
        "milliseconds_by_round": [round(v, 2) for v in elapsed],
    }


def _show(result: dict) -> None:
    print(
        f"{'peer':34s} {'median ms':>10s} {'least':>9s} {'CPU ms':>8s} {'samples/s':>10s} {'speed':>7s} {'by CPU':>7s}"
    )
    for name, peer in result["peers"].items():
        print(
            f"{name:34s} {peer['median_milliseconds']:10.1f} {peer['least_milliseconds']:9.1f} "
            f"{peer['median_cpu_milliseconds']:8.1f} {peer['samples_per_second']:10,.0f} "
            f"{peer['speed_against_plain_torch']:6.2f}x {peer['cpu_speed_against_plain_torch']:6.2f}x"
        )
    load = result["stamp"]["load_average"][0]
    print(f"{result['threads']} threads, load average {load}: above the threads, other work disturbed the numbers")


if __name__ == "__main__":
    main()
