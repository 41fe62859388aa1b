"""Kills trainers with SIGKILL while they save, and checks what is left on the disk; run as a script.

    python -m tests.checkpoint.kill_loop ROOT operations STRIDE   kills before the operations of three saves
    python -m tests.checkpoint.kill_loop ROOT random COUNT        kills at random moments of one long run
    python -m tests.checkpoint.kill_loop ROOT rank                two processes; rank 1 dies while it saves

This process imports torch once and forks the trainers, which takes milliseconds where a start takes seconds. A trainer
resumes, checks that it has the rows of its step, and acknowledges each committed step through a pipe. Steps change
rows as a function of their number. Prints one JSON line.
"""

import json
import os
import random
import select
import shutil
import signal
import socket
import sys
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed

from dlrm_scale.checkpoint import CheckpointEngine, find_chain
from dlrm_scale.config import CheckpointConfig
from dlrm_scale.layout import LocalShard
from dlrm_scale.schema import TableSpec
from dlrm_scale.touched_rows import TouchedRows
from tests.checkpoint.faulty_storage import Trace, TracedStorage, kill_at
from tests.checkpoint.simulated_run import Run, Truth, load_chain, make_layout

TABLES = (TableSpec(name="C1", rows=61, dim=8), TableSpec(name="C2", rows=3, dim=4))
OPTIMIZER = "rowwise_adagrad"
CONFIG = {"baseline_ratio": 0.5, "keep_baselines": 1, "vote_timeout_seconds": 60}


def touched_rows(step: int) -> dict[str, list[int]]:
    """Rows that a step changes."""
    chosen = random.Random(step)
    return {spec.name: chosen.sample(range(spec.rows), min(spec.rows, 5)) for spec in TABLES}


def truth_of(step: int) -> Truth:
    """The tables after a step."""
    truth = Truth(
        weight={s.name: torch.zeros(s.rows, s.dim) for s in TABLES},
        state={s.name: {"momentum1": torch.zeros(s.rows)} for s in TABLES},
    )
    for done in range(1, step + 1):
        for table, ids in touched_rows(done).items():
            truth.weight[table][ids] += done
            truth.state[table]["momentum1"][ids] += done + len("momentum1")
    return truth


def check_disk(root: Path) -> int:
    """Return the step that a resume takes; fails if it hasn't the rows of that step."""
    chain = find_chain(root, verify="full")
    if chain is None:
        return 0
    loaded = load_chain(chain, make_layout("row_wise", 3, TABLES), truth_of(chain.step), optimizer=OPTIMIZER)
    assert loaded.equals(truth_of(chain.step)), f"wrong rows at step {chain.step}"
    return chain.step


def train(root: Path, acknowledge: int, saves: int, kill_before: int | None) -> None:
    """Two ranks as threads; resumes, then saves after every step, acknowledging each commit."""
    chain = find_chain(root, verify="full")
    step = chain.step if chain is not None else 0
    trace = Trace()
    run = Run(
        root,
        make_layout("row_wise", 2, TABLES),
        truth_of(step),
        resumed_from=chain,
        storages=[TracedStorage(root, trace) for _ in range(2)],
        **CONFIG,
    )
    if kill_before is not None:
        trace.act = kill_at(kill_before)
    for done in range(step + 1, step + 1 + saves):
        for table, ids in touched_rows(done).items():
            run.change(table, ids, float(done))
        outcome = run.save(done)
        assert outcome.committed, outcome.error
        os.write(acknowledge, f"{done}\n".encode())
    os.write(acknowledge, f"operations {len(trace.operations)}\n".encode())


def fork(work: Callable[[int], None]) -> tuple[int, int]:
    """Start `work(write end of a pipe)` in a child; returns its id and the pipe's read end."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reading)
        try:
            # After a fork torch makes its thread pool anew, and two threads that need it at once trip over that.
            torch.set_num_threads(1)
            work(writing)
            os._exit(0)
        except BaseException:
            traceback.print_exc()
            os._exit(1)
    os.close(writing)
    return child, reading


def finish(child: int, reading: int) -> tuple[int, list[str]]:
    """Wait for a child; returns its exit code (negative: the signal) and the lines it wrote."""
    with os.fdopen(reading) as pipe:
        lines = pipe.read().splitlines()
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), lines


def kill_before_operations(root: Path, stride: int) -> dict[str, Any]:
    """The state on the disk is that before or after the interrupted save, for each operation that it meets."""
    first = root / "first"
    code, lines = finish(*fork(lambda pipe: train(first, pipe, 2, None)))
    assert code == 0
    copy = root / "count"
    shutil.copytree(first, copy)
    _, lines = finish(*fork(lambda pipe: train(copy, pipe, 3, None)))
    operations = int(lines[-1].split()[1])
    kills, steps = 0, set()
    for index in range(0, operations, stride):
        shutil.rmtree(copy)
        shutil.copytree(first, copy)
        code, lines = finish(*fork(lambda pipe, k=index: train(copy, pipe, 3, k)))
        # The ranks' operations interleave anew each time, so that the last ones may not come.
        assert code in (0, -signal.SIGKILL)
        kills += code == -signal.SIGKILL
        acknowledged = max([2, *(int(line) for line in lines if line.isdecimal())])
        found = check_disk(copy)
        assert found >= acknowledged, f"operation {index}: step {acknowledged} was acknowledged, {found} found"
        assert found <= acknowledged + 1
        steps.add(found)
    return {"kills": kills, "operations": operations, "steps": sorted(steps)}


def kill_at_random(root: Path, count: int) -> dict[str, Any]:
    """One run that is killed again and again goes on from the last acknowledged step or the one after."""
    chosen = random.Random(0)
    acknowledged, torn = 0, 0
    for _ in range(count):
        child, reading = fork(lambda pipe: train(root / "ck", pipe, 10_000, None))
        # Any moment within the first saves: time is only how the place is drawn.
        select.select([], [], [], 0.02 + 0.2 * chosen.random())
        os.kill(child, signal.SIGKILL)
        code, lines = finish(child, reading)
        assert code == -signal.SIGKILL, "the trainer failed by itself"
        acknowledged = max([acknowledged, *(int(line) for line in lines if line.isdecimal())])
        found = check_disk(root / "ck")
        assert acknowledged <= found <= acknowledged + 1, f"acknowledged {acknowledged}, found {found}"
        acknowledged = found
        torn += _has_orphans(root / "ck")
    return {"kills": count, "steps": acknowledged, "kills_that_left_orphans": torn}


def kill_one_rank(root: Path) -> dict[str, Any]:
    """Rank 1 dies while it writes; rank 0's save fails after the timeout and the last checkpoint loads."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    children = [fork(lambda pipe, r=rank: train_rank(root / "ck", pipe, r, port)) for rank in range(2)]
    results = [finish(*child) for child in children]
    assert [code for code, _ in results] == [0, -signal.SIGKILL], results
    return {"outcomes": results[0][1], "found": check_disk(root / "ck")}


def train_rank(root: Path, acknowledge: int, rank: int, port: int) -> None:
    """One rank in a process of its own: a good save, then one in which rank 1 dies."""
    layout = make_layout("row_wise", 2, TABLES)
    store = torch.distributed.TCPStore("127.0.0.1", port, 2, rank == 0, timedelta(seconds=30))
    shards = _blank_shards(root, layout, rank)
    touched = TouchedRows([shard.region.rows for shard in shards])
    trace = Trace()
    engine = CheckpointEngine(
        TracedStorage(root, trace),
        layout=layout,
        shards=shards,
        touched=touched,
        rank=rank,
        ranks=2,
        store=store,
        config=CheckpointConfig(vote_timeout_seconds=30),
        optimizer=OPTIMIZER,
    )
    for step in (0, 1):
        engine._ballot._timeout_seconds = 30 if step == 0 else 1
        if rank == 1 and step == 1:
            trace.act = lambda index, operation, name: (
                kill_at(index)(index, operation, name) if operation == "sync" else None
            )
        engine.save(step=step, cursor={}, dense={}, rank_state={}, extra={})
        outcome = engine.wait()[-1]
        os.write(acknowledge, f"{outcome.committed} {outcome.error}\n".encode())
    # Rank 0 holds the store, so it ends last by itself: rank 1 is gone.


def _blank_shards(root: Path, layout: Any, rank: int) -> list[LocalShard]:
    truth = truth_of(0)
    return [
        LocalShard(
            region=region,
            weight=truth.weight[region.table][region.row_start : region.row_end].clone(),
            state={"momentum1": truth.state[region.table]["momentum1"][region.row_start : region.row_end].clone()},
        )
        for region in layout.regions_of_rank(rank)
    ]


def _has_orphans(root: Path) -> bool:
    named = set()
    for path in (root / "manifests").glob("*.json"):
        named |= {file["name"] for file in json.loads(path.read_text())["manifest"]["files"]}
    return any(f"data/{path.name}" not in named for path in (root / "data").iterdir())


if __name__ == "__main__":
    torch.set_num_threads(1)
    where, what = Path(sys.argv[1]), sys.argv[2]
    if what == "operations":
        result = kill_before_operations(where, int(sys.argv[3]))
    elif what == "random":
        result = kill_at_random(where, int(sys.argv[3]))
    else:
        result = kill_one_rank(where)
    sys.stdout.write(json.dumps(result) + "\n")
