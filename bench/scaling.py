"""One rank with two threads against two ranks with one thread each, the same global batch, for each sharding type.

Ranks are processes that stay alive; each side does some steps, then the other. Rank 0's clock counts, from a barrier to
a barrier; CPU seconds are those of all ranks. Before anything is timed both sides train from the same weights on the
same rows, and their losses, summed over ranks, must agree to 1e-5 (SGD for everything: row-wise Adagrad is another
algorithm under column splits). data_parallel reduces whole tables every step, which is not what it is for at this
size, and does one step where the others do `--steps`.

    python bench/scaling.py --rounds 8 --save
    python bench/scaling.py --quick
"""

import argparse
import json
import multiprocessing
import os
import socket
import time
from dataclasses import dataclass
from multiprocessing.connection import Connection
from typing import get_args

import stamp
from rounds import Round, ratio, show_spread, spread

from dlrm_scale.config import ShardingType
from dlrm_scale.units import GIB

GOAL = 0.85
THREADS = 2
CHECKED_STEPS = 5
DISTINCT_BATCHES = 8
ANSWER_SECONDS = 600


@dataclass(frozen=True, kw_only=True)
class Job:
    """What every rank of a side is told."""

    kind: str
    ranks: int
    threads: int
    rows: int
    dim: int
    batch_size: int
    port: int


def main() -> None:
    """Measure, print a table, and save it if asked."""
    options = _options()
    if options.quick:
        options.rows, options.batch_size, options.rounds, options.steps = 500, 128, 2, 2
        options.kinds = ["table_wise", "row_wise"]
    _check_memory(options)
    one = Side(_job(options, "table_wise", ranks=1))
    kinds = {}
    try:
        for kind in options.kinds:
            kinds[kind] = _compare(one, kind, options)
            print(f"{kind}: {show_spread(kinds[kind]['efficiency']['elapsed'], '.2f')}", flush=True)
    finally:
        one.close()
    result = {
        "bench": "scaling",
        "shape": {"tables": 26, "rows": options.rows, "dim": options.dim, "batch_size": options.batch_size},
        "rounds": options.rounds,
        "steps_a_round": options.steps,
        "goal": GOAL,
        "kinds": kinds,
        "stamp": stamp.stamp(),
    }
    _show(result)
    if options.json:
        print(json.dumps(result))
    if options.save:
        print("saved:", stamp.save("scaling", result))


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kinds", nargs="+", choices=get_args(ShardingType), default=list(get_args(ShardingType)))
    parser.add_argument("--rounds", type=int, default=8, help="alternating rounds a sharding type")
    parser.add_argument("--steps", type=int, default=10, help="steps a round and side")
    parser.add_argument("--rows", type=int, default=100_000, help="rows of each of the 26 tables")
    parser.add_argument("--dim", type=int, default=64, help="columns of each table")
    parser.add_argument("--batch-size", type=int, default=2048, help="rows of the global batch")
    parser.add_argument("--quick", action="store_true", help="tiny tables, two types: does the script work?")
    parser.add_argument("--json", action="store_true", help="print the result as JSON too")
    parser.add_argument("--save", action="store_true", help="write it to bench/results")
    return parser.parse_args()


def _check_memory(options: argparse.Namespace) -> None:
    from shapes import check_memory

    tables = 26 * options.rows * options.dim * 4
    # one rank's, two ranks'; data-parallel tables twice, with gradients and the reduction's buckets
    copies = 8 if "data_parallel" in options.kinds else 2
    check_memory(copies * tables + 3 * GIB, f"--rows {options.rows} --dim {options.dim}")


def _job(options: argparse.Namespace, kind: str, *, ranks: int) -> Job:
    with socket.socket() as probe:
        probe.bind(("localhost", 0))
        port = probe.getsockname()[1]
    return Job(
        kind=kind,
        ranks=ranks,
        threads=THREADS // ranks,
        rows=options.rows,
        dim=options.dim,
        batch_size=options.batch_size,
        port=port,
    )


def _compare(one: "Side", kind: str, options: argparse.Namespace) -> dict:
    two = Side(_job(options, kind, ranks=2))
    try:
        expected, got = one.losses(CHECKED_STEPS), two.losses(CHECKED_STEPS)
        difference = max(abs(a - b) for a, b in zip(expected, got, strict=True))
        if not difference <= 1e-5:
            raise SystemExit(f"not the same work: {kind} has losses {got}, one rank {expected}")
        steps = 1 if kind == "data_parallel" else options.steps
        sides = {"one": one, "two": two}
        rounds: dict[str, list[Round]] = {name: [] for name in sides}
        for number in range(options.rounds):
            for name in list(sides) if number % 2 == 0 else list(sides)[::-1]:
                rounds[name].append(sides[name].time(steps))
    finally:
        two.close()
    efficiency = ratio(rounds["one"], rounds["two"])
    return {
        "loss_difference": difference,
        "steps_a_round": steps,
        "one_rank_milliseconds": spread([r.elapsed for r in rounds["one"]]),
        "two_ranks_milliseconds": spread([r.elapsed for r in rounds["two"]]),
        "one_rank_cpu_milliseconds": spread([r.cpu for r in rounds["one"]]),
        "two_ranks_cpu_milliseconds": spread([r.cpu for r in rounds["two"]]),
        "efficiency": efficiency,
        "goal_met": efficiency["elapsed"]["median"] >= GOAL,
    }


class Side:
    """The ranks of one side, as processes that wait for commands.

    Args:
        job: what they train.
    """

    def __init__(self, job: Job) -> None:
        """Start them; the first command waits until they are ready."""
        context = multiprocessing.get_context("spawn")
        self._ranks: list[tuple[multiprocessing.process.BaseProcess, Connection]] = []
        for rank in range(job.ranks):
            here, there = context.Pipe()
            process = context.Process(target=_serve, args=(rank, job, there), daemon=True)
            process.start()
            there.close()
            self._ranks.append((process, here))

    def losses(self, steps: int) -> list[float]:
        """Put the weights back and train; the mean loss of each global batch."""
        by_rank = self._ask(("losses", steps))
        return [sum(losses) for losses in zip(*by_rank, strict=True)]

    def time(self, steps: int) -> Round:
        """Time steps: elapsed on rank 0, CPU over all ranks."""
        by_rank = self._ask(("time", steps))
        return Round(elapsed=by_rank[0][0], cpu=sum(cpu for _, cpu in by_rank))

    def close(self) -> None:
        """End the processes."""
        for process, connection in self._ranks:
            if process.is_alive():
                connection.send(("end", 0))
        for process, _ in self._ranks:
            process.join(30)
            if process.is_alive():
                process.kill()

    def _ask(self, command: tuple[str, int]) -> list:
        for _, connection in self._ranks:
            connection.send(command)
        answers = []
        for process, connection in self._ranks:
            if not connection.poll(ANSWER_SECONDS):
                raise SystemExit(f"no answer from a rank within {ANSWER_SECONDS} s")
            try:
                answers.append(connection.recv())
            except EOFError:
                raise SystemExit(f"a rank ended with exit code {process.exitcode}; its error is above") from None
        return answers


def _serve(rank: int, job: Job, connection: Connection) -> None:
    os.environ |= {
        "RANK": str(rank),
        "WORLD_SIZE": str(job.ranks),
        "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": str(job.ranks),
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": str(job.port),
        "OMP_NUM_THREADS": str(job.threads),
    }
    import torch
    from shapes import ResettableModel, Shape, cycle, random_batches

    from dlrm_scale.config import Config, DataConfig, DenseOptimizerConfig, ModelConfig, ShardingConfig
    from dlrm_scale.config import SparseOptimizerConfig as SparseConfig
    from dlrm_scale.schema import CATEGORY_COLUMNS
    from dlrm_scale.sharding.pipeline import make_train_pipeline
    from dlrm_scale.sharding.ranks import close_ranks, init_ranks

    torch.set_num_threads(job.threads)
    shape = Shape(
        table_rows=dict.fromkeys(CATEGORY_COLUMNS, job.rows),
        ids_per_bag=dict.fromkeys(CATEGORY_COLUMNS, 1),
        dim=job.dim,
        batch_size=job.batch_size,
    )
    config = Config(
        data=DataConfig(batch_size=job.batch_size),
        model=ModelConfig(dim=job.dim, dense_layers=(512, 256, job.dim)),
        dense_optimizer=DenseOptimizerConfig(kind="sgd"),
        sparse_optimizer=SparseConfig(kind="sgd"),
        sharding=ShardingConfig(kind=job.kind),
    )
    ranks = init_ranks("cpu", ANSWER_SECONDS)
    model = ResettableModel(shape, config, ranks)
    pipeline = make_train_pipeline(model.sharded, "plain")
    batches = random_batches(shape, DISTINCT_BATCHES, rank=rank, ranks=job.ranks)
    turn = cycle(batches)

    def step() -> float:
        batch, row_loss_sum, _ = pipeline.progress(turn)
        return row_loss_sum.item() / batch.rows_global

    while True:
        what, steps = connection.recv()
        if what == "end":
            break
        if what == "losses":
            model.reset()
            turn = cycle(batches)
            connection.send([step() for _ in range(steps)])
            continue
        step()  # caches are cold after the other side's turn
        torch.distributed.barrier(ranks.control_group)
        start, cpu_start = time.perf_counter(), time.process_time()
        for _ in range(steps):
            step()
        torch.distributed.barrier(ranks.control_group)
        elapsed, cpu = time.perf_counter() - start, time.process_time() - cpu_start
        connection.send((1000 * elapsed / steps, 1000 * cpu / steps))
    close_ranks()


def _show(result: dict) -> None:
    print(
        f"| sharding type | 1 rank x 2 threads, ms | 2 ranks x 1 thread, ms | 1 rank / 2 ranks, goal {GOAL} | by CPU "
        "| goal |\n|---|---|---|---|---|---|"
    )
    for kind, found in result["kinds"].items():
        print(
            f"| {kind} | {show_spread(found['one_rank_milliseconds'], '.1f')} "
            f"| {show_spread(found['two_ranks_milliseconds'], '.1f')} "
            f"| {show_spread(found['efficiency']['elapsed'], '.2f')} | {found['efficiency']['cpu']['median']:.2f} "
            f"| {'met' if found['goal_met'] else 'missed'} |"
        )
    load = result["stamp"]["load_average"][0]
    print(f"load average {load}: above {THREADS}, other work disturbed the numbers")


if __name__ == "__main__":
    main()
