"""A training step of this project against a plain-torch DLRM of the same shape and against this machine's floors.

All start from the same weights and see the same batches; before anything is timed their losses must agree: 1e-5 in
fp32, 5e-3 in bf16. One rank, SGD for everything. Rounds alternate, so that a busy machine hits all; ratios are taken
within a round. The floor of a step is its matrix products plus three random reads of each looked-up row, both measured
in the same rounds.

    python bench/train_step.py --rounds 10 --save
    python bench/train_step.py --dims 16 64 128 --ids-per-bag 1 10 --rounds 10 --save
    python bench/train_step.py --quick
"""

import argparse
import json
from collections.abc import Callable

import stamp
import torch
from floors import gather_floor, matrix_products, product_floor, products_flops
from plain_dlrm import PlainDlrm
from rounds import Contender, Round, alternate, check_equal_losses, ratio, show_spread, spread
from shapes import LayerVariants, Precision, ResettableModel, Shape, check_memory, cycle, random_batches

from dlrm_scale.batch import Batch
from dlrm_scale.config import Config, DenseOptimizerConfig, ModelConfig, ShardingConfig, SparseOptimizerConfig
from dlrm_scale.schema import CATEGORY_COLUMNS, INTEGER_COLUMNS
from dlrm_scale.sharding.pipeline import make_train_pipeline
from dlrm_scale.sharding.ranks import Ranks, close_ranks, init_ranks
from dlrm_scale.touched_rows import TouchedRows
from dlrm_scale.units import GIB

RATE = 0.01
OVER_LAYERS = (512, 512, 256, 1)
DISTINCT_BATCHES = 8
CHECKED_STEPS = 5
BF16_TOLERANCE = 5e-3
BF16_STEPS_SHARE = 0.3
"""A processor that emulates bf16 takes several times as long as in fp32."""
PEER, PEER_BF16 = "plain torch", "plain torch, bf16 autocast"
OURS, TRACKED, OURS_BF16 = "dlrm_scale fp32", "dlrm_scale fp32, touched rows tracked", "dlrm_scale bf16"
COMPILED = "dlrm_scale bf16, compiled"
PRODUCTS, PRODUCTS_BF16, GATHERS = "floor: products fp32", "floor: products bf16", "floor: 3 gathers a lookup"
GOALS = {(64, 1, OURS): 1.15, (64, 1, OURS_BF16): 1.7, (64, 10, OURS): 1.3}
"""Speed against plain torch by dim, ids a bag and contender."""


def main() -> None:
    """Measure, print a table a shape, and save them if asked."""
    options = _options()
    if options.quick:
        options.rows, options.batch_size, options.rounds, options.steps, options.threads = 1000, 256, 2, 2, 1
    torch.set_num_threads(options.threads)
    ranks = init_ranks("cpu", 60)
    shapes = []
    for dim in options.dims:
        for ids_per_bag in options.ids_per_bag:
            shape = Shape(
                table_rows=dict.fromkeys(CATEGORY_COLUMNS, options.rows),
                ids_per_bag=dict.fromkeys(CATEGORY_COLUMNS, ids_per_bag),
                dim=dim,
                batch_size=options.batch_size,
            )
            shapes.append(_measure(shape, options, ranks))
            _show(shapes[-1])
    close_ranks()
    result = {
        "bench": "train_step",
        "threads": options.threads,
        "rounds": options.rounds,
        "steps_a_round": options.steps,
        "shapes": shapes,
        "stamp": stamp.stamp(),
    }
    load = result["stamp"]["load_average"][0]
    print(f"{options.threads} threads, load average {load}: above the threads, other work disturbed the numbers")
    if options.json:
        print(json.dumps(result))
    if options.save:
        print("saved:", stamp.save("train_step", result))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=10, help="alternating rounds")
    parser.add_argument("--steps", type=int, default=10, help="steps a round and contender")
    parser.add_argument("--threads", type=int, default=2, help="torch threads")
    parser.add_argument("--rows", type=int, default=100_000, help="rows of each of the 26 tables")
    parser.add_argument("--dims", type=int, nargs="+", default=[64], help="columns of the tables, a run each")
    parser.add_argument("--batch-size", type=int, default=2048, help="rows of a batch")
    parser.add_argument("--ids-per-bag", type=int, nargs="+", default=[1, 10], help="lookups of a bag, a run each")
    parser.add_argument("--compile", action="store_true", help="time bf16 with compiled layers too")
    parser.add_argument("--quick", action="store_true", help="tiny tables and two rounds: does the script work?")
    parser.add_argument("--json", action="store_true", help="print the result as JSON too")
    parser.add_argument("--save", action="store_true", help="write it to bench/results")
    return parser.parse_args()


def _measure(shape: Shape, options: argparse.Namespace, ranks: Ranks) -> dict:
    check_memory(2 * shape.table_bytes + 2 * GIB, f"dim {shape.dim}")
    model_config = ModelConfig(dim=shape.dim, dense_layers=(512, 256, shape.dim), over_layers=OVER_LAYERS)
    config = Config(
        model=model_config,
        dense_optimizer=DenseOptimizerConfig(kind="sgd", learning_rate=RATE),
        sparse_optimizer=SparseOptimizerConfig(kind="sgd", learning_rate=RATE),
        sharding=ShardingConfig(kind="table_wise"),
    )
    batches = random_batches(shape, DISTINCT_BATCHES)
    ours = ResettableModel(shape, config, ranks)
    notes: list[str] = []
    contenders = {
        **_peers(shape, ours, batches),
        **_ours(shape, ours, batches, compiled=options.compile, notes=notes),
    }
    products = matrix_products(model_config, shape)
    tables = {s.region.table: s.weight for s in ours.sharded.local_shards}
    differences = check_equal_losses(contenders, CHECKED_STEPS)
    contenders |= {
        PRODUCTS: Contender(step=product_floor(products, torch.float32)),
        PRODUCTS_BF16: Contender(step=product_floor(products, torch.bfloat16), steps_share=BF16_STEPS_SHARE),
        GATHERS: Contender(step=gather_floor(tables, batches[0])),
    }
    rounds = alternate(contenders, options.rounds, options.steps)
    return {
        "tables": len(shape.table_rows),
        "rows": options.rows,
        "dim": shape.dim,
        "ids_per_bag": shape.lookups // len(shape.table_rows),
        "batch_size": shape.batch_size,
        "dense_layers": list(model_config.dense_layers),
        "over_layers": list(OVER_LAYERS),
        "gflop_a_step": products_flops(products) / 1e9,
        "loss_differences": differences,
        "notes": notes,
        "contenders": {name: _summary(name, rounds, shape) for name in rounds},
    }


def _peers(shape: Shape, ours: ResettableModel, batches: list[Batch]) -> dict[str, Contender]:
    model = PlainDlrm(shape.table_rows, shape.dim, len(INTEGER_COLUMNS), (512, 256, shape.dim), OVER_LAYERS)
    tables = dict(zip(shape.table_rows, (t.weight for t in model.tables), strict=True))

    def reset() -> None:
        ours.reset()
        ours.copy_tables_into(tables)
        with torch.no_grad():
            dense = [p for name, p in model.named_parameters() if not name.startswith("tables.")]
            for target, source in zip(dense, ours.sharded.dense_parameters.values(), strict=True):
                target.copy_(source)

    return {
        PEER: Contender(step=_plain_step(model, batches, bf16=False), reset=reset),
        PEER_BF16: Contender(
            step=_plain_step(model, batches, bf16=True),
            reset=reset,
            tolerance=BF16_TOLERANCE,
            steps_share=BF16_STEPS_SHARE,
        ),
    }


def _plain_step(model: PlainDlrm, batches: list[Batch], *, bf16: bool) -> Callable[[], float]:
    optimizer = torch.optim.SGD(model.parameters(), lr=RATE)
    loss_of = torch.nn.BCEWithLogitsLoss()
    count = len(model.tables)
    prepared = []
    for batch in batches:
        ids = list(batch.sparse_features.values().view(count, -1).unbind())
        per_bag = len(ids[0]) // len(batch.labels)
        prepared.append((batch.dense_features, ids, torch.arange(0, len(ids[0]) + 1, per_bag), batch.labels))
    turn = cycle(prepared)

    def step() -> float:
        dense, ids, offsets, labels = next(turn)
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=bf16):
            logits = model(dense, ids, offsets)
        loss = loss_of(logits.float(), labels)
        loss.backward()
        optimizer.step()
        return loss.item()

    return step


def _ours(
    shape: Shape, model: ResettableModel, batches: list[Batch], *, compiled: bool, notes: list[str]
) -> dict[str, Contender]:
    sharded = model.sharded
    touched = TouchedRows([s.region.rows for s in sharded.local_shards])
    sharded.track(touched)
    pipeline = make_train_pipeline(sharded, "plain")
    layers = LayerVariants(model.dense_part, shape.batch_size)

    def contender(precision: Precision, *, compiled: bool = False, tracked: bool = False) -> Contender:
        turn = cycle(batches)

        def enter() -> None:
            layers.enter(precision, compiled=compiled)
            touched.enabled = tracked

        def step() -> float:
            batch, row_loss_sum, _ = pipeline.progress(turn)
            return row_loss_sum.item() / batch.rows_global

        tolerance, share = (1e-5, 1.0) if precision == "fp32" else (BF16_TOLERANCE, BF16_STEPS_SHARE)
        return Contender(step=step, enter=enter, reset=model.reset, tolerance=tolerance, steps_share=share)

    layers.prepare("fp32", compiled=False)
    layers.prepare("bf16", compiled=False)
    contenders = {
        OURS: contender("fp32"),
        TRACKED: contender("fp32", tracked=True),
        OURS_BF16: contender("bf16"),
    }
    if compiled:
        failure = layers.prepare("bf16", compiled=True)
        if failure is None:
            contenders[COMPILED] = contender("bf16", compiled=True)
        else:
            notes.append(f"can't compile: {failure}")
    return contenders


def _summary(name: str, rounds: dict[str, list[Round]], shape: Shape) -> dict:
    mine = rounds[name]
    elapsed = spread([r.elapsed for r in mine])
    summary: dict = {
        "milliseconds": elapsed,
        "cpu_milliseconds": spread([r.cpu for r in mine]),
        "by_round": [round(r.elapsed, 2) for r in mine],
    }
    if name.startswith("floor"):
        return summary
    products = rounds[PRODUCTS_BF16 if "bf16" in name else PRODUCTS]
    floor = [
        Round(elapsed=p.elapsed + g.elapsed, cpu=p.cpu + g.cpu) for p, g in zip(products, rounds[GATHERS], strict=True)
    ]
    ids_per_bag = shape.lookups // len(shape.table_rows)
    goal = GOALS.get((shape.dim, ids_per_bag, name))
    speed = ratio(rounds[PEER], mine)
    return {
        **summary,
        "samples_per_second": 1000 * shape.batch_size / elapsed["median"],
        "speed_against_plain_torch": speed,
        "times_the_floor": ratio(mine, floor),
        "goal": goal,
        "goal_met": None if goal is None else speed["elapsed"]["median"] >= goal,
    }


def _show(shape: dict) -> None:
    print(
        f"\n26 tables x {shape['rows']:,} x {shape['dim']}, {shape['ids_per_bag']} ids a bag, "
        f"batch {shape['batch_size']}, {shape['gflop_a_step']:.1f} GFLOP of matrix products a step"
    )
    for note in shape["notes"]:
        print(note)
    print(
        "| contender | ms a step (range) | CPU ms | speed against plain torch | by CPU | times the floor | goal |"
        "\n|---|---|---|---|---|---|---|"
    )
    for name, found in shape["contenders"].items():
        row = f"| {name} | {show_spread(found['milliseconds'], '.1f')} | {found['cpu_milliseconds']['median']:.1f} |"
        if "goal" not in found:
            print(f"{row} | | | |")
            continue
        speed = found["speed_against_plain_torch"]
        goal = "" if found["goal"] is None else f"{found['goal']}: {'met' if found['goal_met'] else 'missed'}"
        print(
            f"{row} {show_spread(speed['elapsed'], '.2f')} | {speed['cpu']['median']:.2f} "
            f"| {found['times_the_floor']['elapsed']['median']:.2f} | {goal} |"
        )


if __name__ == "__main__":
    main()
