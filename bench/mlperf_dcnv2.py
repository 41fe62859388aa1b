"""MLPerf's DLRM-DCNv2 on CPU: samples a second and core, against the same model in plain torch.

Shape of mlcommons/training, recommendation_v2: 26 tables of dim 128 with the published rows, capped (`--rows-cap`), and
the published bags, 214 ids a row, uniform; three cross layers of rank 512; Adagrad for the dense part and row-wise
Adagrad for the tables. One rank. All sides start from the same weights and see the same batches; before anything is
timed their losses must agree: 1e-4 in fp32, 2e-2 in bf16, over 4 steps. Rounds alternate; plain torch does fewer steps.
The floor is the step's matrix products plus three random reads of each looked-up row, in the same rounds.

    python bench/mlperf_dcnv2.py --rounds 5 --compile --save
    python bench/mlperf_dcnv2.py --quick
"""

import argparse
import json
import statistics

import stamp
import torch
from floors import gather_floor, matrix_products, product_floor, products_flops
from plain_dcnv2 import PlainDcnV2, PlainRowwiseAdagrad
from rounds import Contender, Round, alternate, check_equal_losses, ratio, show_spread, spread
from shapes import LayerVariants, Precision, ResettableModel, Shape, check_memory, cycle, random_batches

from dlrm_scale.batch import Batch
from dlrm_scale.config import Config, DataConfig, ShardingConfig
from dlrm_scale.host_cores import usable_cores
from dlrm_scale.recipes.load import load_config
from dlrm_scale.schema import CATEGORY_COLUMNS, INTEGER_COLUMNS
from dlrm_scale.sharding.pipeline import make_train_pipeline
from dlrm_scale.sharding.ranks import close_ranks, init_ranks
from dlrm_scale.units import GIB

ROWS = (
    40000000, 39060, 17295, 7424, 20265, 3, 7122, 1543, 63, 40000000, 3067956, 405282, 10, 2209, 11938, 155, 4, 976, 14,
    40000000, 40000000, 40000000, 590152, 12973, 108, 36,
)  # fmt: skip
IDS_PER_BAG = (3, 2, 1, 2, 6, 1, 1, 1, 1, 7, 3, 8, 1, 6, 9, 5, 1, 1, 1, 12, 100, 27, 10, 3, 1, 1)
GOAL_SAMPLES_PER_SECOND_AND_CORE = 1500
DISTINCT_BATCHES = 4
CHECKED_STEPS = 4
FP32_TOLERANCE, BF16_TOLERANCE = 1e-4, 2e-2
BF16_STEPS_SHARE = 0.25
"""A processor that emulates bf16 takes several times as long as in fp32."""
PEER, OURS, OURS_BF16 = "plain torch fp32", "dlrm_scale fp32", "dlrm_scale bf16"
PRODUCTS, PRODUCTS_BF16, GATHERS = "floor: products fp32", "floor: products bf16", "floor: 3 gathers a lookup"


def main() -> None:
    """Measure, print a table, and save it if asked."""
    options = _options()
    if options.quick:
        options.rows_cap, options.batch_size, options.rounds, options.steps, options.threads = 500, 64, 2, 2, 1
    torch.set_num_threads(options.threads)
    shape = Shape(
        table_rows={n: min(rows, options.rows_cap) for n, rows in zip(CATEGORY_COLUMNS, ROWS, strict=True)},
        ids_per_bag=dict(zip(CATEGORY_COLUMNS, IDS_PER_BAG, strict=True)),
        dim=128,
        batch_size=options.batch_size,
    )
    check_memory(2 * shape.table_bytes + 3 * GIB, f"--rows-cap {options.rows_cap}")
    config = _config(shape)
    ours = ResettableModel(shape, config, init_ranks("cpu", 60))
    batches = random_batches(shape, DISTINCT_BATCHES)
    notes: list[str] = []
    contenders = {
        PEER: _peer(shape, ours, batches),
        **_ours(shape, ours, batches, compiled=options.compile, notes=notes),
    }
    differences = check_equal_losses(contenders, CHECKED_STEPS)
    products = matrix_products(config.model, shape)
    tables = {s.region.table: s.weight for s in ours.sharded.local_shards}
    contenders |= {
        PRODUCTS: Contender(step=product_floor(products, torch.float32), steps_share=0.5),
        PRODUCTS_BF16: Contender(step=product_floor(products, torch.bfloat16), steps_share=0.5),
        GATHERS: Contender(step=gather_floor(tables, batches[0]), steps_share=0.5),
    }
    rounds = alternate(contenders, options.rounds, options.steps)
    close_ranks()
    cores = min(options.threads, usable_cores())
    result = {
        "bench": "mlperf_dcnv2",
        "table_rows": list(shape.table_rows.values()),
        "ids_per_bag": list(IDS_PER_BAG),
        "batch_size": shape.batch_size,
        "threads": options.threads,
        "cores": cores,
        "rounds": options.rounds,
        "steps_a_round": options.steps,
        "gflop_a_step": products_flops(products) / 1e9,
        "goal_samples_per_second_and_core": GOAL_SAMPLES_PER_SECOND_AND_CORE,
        "loss_differences": differences,
        "notes": notes,
        "contenders": {name: _summary(name, rounds, shape.batch_size, cores) for name in rounds},
        "stamp": stamp.stamp(),
    }
    _show(result)
    if options.json:
        print(json.dumps(result))
    if options.save:
        print("saved:", stamp.save("mlperf_dcnv2", result))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows-cap", type=int, default=500_000, help="most rows of a table")
    parser.add_argument("--batch-size", type=int, default=2048, help="rows of a batch")
    parser.add_argument("--rounds", type=int, default=5, help="alternating rounds")
    parser.add_argument("--steps", type=int, default=4, help="steps a round of ours; the others do half")
    parser.add_argument("--threads", type=int, default=2, help="torch threads")
    parser.add_argument("--compile", action="store_true", help="time compiled layers too")
    parser.add_argument("--quick", action="store_true", help="tiny tables and two rounds: does the script work?")
    parser.add_argument("--json", action="store_true", help="print the result as JSON too")
    parser.add_argument("--save", action="store_true", help="write it to bench/results")
    return parser.parse_args()


def _config(shape: Shape) -> Config:
    recipe = load_config("mlperf_dcnv2", [])
    return recipe.model_copy(
        update={"data": DataConfig(batch_size=shape.batch_size), "sharding": ShardingConfig(kind="table_wise")}
    )


def _peer(shape: Shape, ours: ResettableModel, batches: list[Batch]) -> Contender:
    config = ours.config
    model = PlainDcnV2(
        shape.table_rows,
        shape.dim,
        len(INTEGER_COLUMNS),
        config.model.dense_layers,
        config.model.over_layers,
        config.model.dcn_num_layers,
        config.model.dcn_low_rank_dim,
    )
    tables = {name: table.weight for name, table in model.tables.items()}
    dense = {name: p for name, p in model.named_parameters() if not name.startswith("tables.")}
    sparse_optimizer = PlainRowwiseAdagrad(
        list(tables.values()), config.sparse_optimizer.learning_rate, config.sparse_optimizer.eps
    )
    dense_optimizer = torch.optim.Adagrad(
        dense.values(), lr=config.dense_optimizer.learning_rate, eps=config.dense_optimizer.eps
    )

    def reset() -> None:
        ours.reset()
        ours.copy_tables_into(tables)
        sources = ours.sharded.dense_parameters
        with torch.no_grad():
            for name, target in dense.items():
                target.copy_(sources[_our_name(name, sources)])
            for state in dense_optimizer.state.values():
                state["sum"].zero_()
                state["step"].zero_()
            for sums in sparse_optimizer.sums:
                sums.zero_()

    prepared = [_plain_inputs(shape, batch) for batch in batches]
    turn = cycle(prepared)
    loss_of = torch.nn.BCEWithLogitsLoss()

    def step() -> float:
        features, ids, offsets, labels = next(turn)
        dense_optimizer.zero_grad(set_to_none=True)
        loss = loss_of(model(features, ids, offsets), labels)
        loss.backward()
        dense_optimizer.step()
        sparse_optimizer.step()
        return loss.item()

    return Contender(step=step, reset=reset, tolerance=FP32_TOLERANCE, steps_share=0.5)


def _our_name(name: str, ours: dict[str, torch.nn.Parameter]) -> str:
    """Which of our parameters is the peer's `name`."""
    part, number, kind = name.split(".")
    crossnet = "dlrm.inter_arch.crossnet"
    match part:
        case "down":
            return f"{crossnet}.V_kernels.{number}"
        case "up":
            return f"{crossnet}.{'W_kernels' if kind == 'weight' else 'bias'}.{number}"
    prefix = "dlrm.dense_arch." if part == "bottom" else "dlrm.over_arch."
    names = [n for n in ours if n.startswith(prefix) and n.endswith(kind)]  # in the order of the layers
    return names[int(number) // 2]


def _plain_inputs(shape: Shape, batch: Batch) -> tuple:
    features = batch.sparse_features
    ids = list(features.values().split(features.length_per_key()))
    offsets = [torch.arange(shape.batch_size + 1) * shape.ids_per_bag[name] for name in features.keys()]
    return batch.dense_features, ids, offsets, batch.labels


def _ours(
    shape: Shape, model: ResettableModel, batches: list[Batch], *, compiled: bool, notes: list[str]
) -> dict[str, Contender]:
    pipeline = make_train_pipeline(model.sharded, "plain")
    layers = LayerVariants(model.dense_part, shape.batch_size)

    def contender(precision: Precision, compiled: bool) -> Contender:
        turn = cycle(batches)

        def step() -> float:
            batch, row_loss_sum, _ = pipeline.progress(turn)
            return row_loss_sum.item() / batch.rows_global

        return Contender(
            step=step,
            enter=lambda: layers.enter(precision, compiled=compiled),
            reset=model.reset,
            tolerance=FP32_TOLERANCE if precision == "fp32" else BF16_TOLERANCE,
            steps_share=1.0 if precision == "fp32" else BF16_STEPS_SHARE,
        )

    contenders = {}
    variants: list[tuple[str, Precision, bool]] = [(OURS, "fp32", False), (OURS_BF16, "bf16", False)]
    if compiled:
        variants += [(f"{OURS}, compiled", "fp32", True), (f"{OURS_BF16}, compiled", "bf16", True)]
    for name, precision, is_compiled in variants:
        failure = layers.prepare(precision, compiled=is_compiled)
        if failure is None:
            contenders[name] = contender(precision, is_compiled)
        else:
            notes.append(f"{name}: {failure}")
    return contenders


def _summary(name: str, rounds: dict[str, list[Round]], batch_size: int, cores: int) -> dict:
    mine = rounds[name]
    summary: dict = {
        "milliseconds": spread([r.elapsed for r in mine]),
        "cpu_milliseconds": spread([r.cpu for r in mine]),
        "by_round": [round(r.elapsed, 1) for r in mine],
    }
    if name.startswith("floor"):
        return summary
    products = rounds[PRODUCTS_BF16 if "bf16" in name else PRODUCTS]
    floor = [
        Round(elapsed=p.elapsed + g.elapsed, cpu=p.cpu + g.cpu) for p, g in zip(products, rounds[GATHERS], strict=True)
    ]
    return {
        **summary,
        "samples_per_second_and_core": spread([1000 * batch_size / r.elapsed / cores for r in mine]),
        "samples_per_cpu_second": spread([1000 * batch_size / r.cpu for r in mine]),
        "floor_samples_per_second_and_core": 1000 * batch_size / statistics.median(f.elapsed for f in floor) / cores,
        "speed_against_plain_torch": ratio(rounds[PEER], mine),
        "times_the_floor": ratio(mine, floor),
    }


def _show(result: dict) -> None:
    goal = result["goal_samples_per_second_and_core"]
    print(f"batch {result['batch_size']}, {sum(result['table_rows']):,} rows x 128, {result['cores']} cores")
    for note in result["notes"]:
        print(note)
    print(
        f"| contender | samples/s/core (range), goal {goal} | samples per CPU-second | floor's | times the floor | "
        "speed against plain torch | goal |\n|---|---|---|---|---|---|---|"
    )
    for name, found in result["contenders"].items():
        if "samples_per_second_and_core" not in found:
            print(f"| {name} | {show_spread(found['milliseconds'], '.0f')} ms a step | | | | | |")
            continue
        rate = found["samples_per_second_and_core"]
        met = "" if name == PEER else "met" if rate["median"] >= goal else "missed"
        print(
            f"| {name} | {show_spread(rate, ',.0f')} | {found['samples_per_cpu_second']['median']:,.0f} "
            f"| {found['floor_samples_per_second_and_core']:,.0f} "
            f"| {found['times_the_floor']['elapsed']['median']:.2f} "
            f"| {show_spread(found['speed_against_plain_torch']['elapsed'], '.2f')} | {met} |"
        )
    load, bf16 = result["stamp"]["load_average"][0], result["stamp"]["bf16_instructions"]
    print(f"load average {load}; bf16 instructions: {', '.join(bf16) or 'none, so bf16 is emulated'}")


if __name__ == "__main__":
    main()
