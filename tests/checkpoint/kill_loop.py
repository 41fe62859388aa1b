"""Kills ranks with SIGKILL while they save, and checks what is left on the disk; run as a script.

    python -m tests.checkpoint.kill_loop ROOT points NAME...       kills at named points of each rank
    python -m tests.checkpoint.kill_loop ROOT operations STRIDE    kills before the operations of each rank
    python -m tests.checkpoint.kill_loop ROOT random COUNT SEED    kills at random moments of one long run
    python -m tests.checkpoint.kill_loop ROOT survivor             rank 1 dies while it saves and rank 0 lives

Each rank is a process. This one imports torch once and forks them, which takes milliseconds where a start takes
seconds; their store is in a process of its own, as under a launcher. A rank resumes by a restore into its own shards,
checks that they are those of the step, and acknowledges every committed step through a pipe. Steps change rows as a
function of their number. When one rank is dead, the other is killed a moment later. Prints one JSON line.
"""

import json
import os
import random
import select
import shutil
import signal
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed

from dlrm_scale.checkpoint import CheckpointEngine, find_chain, restore
from dlrm_scale.checkpoint.saving.staging import HostStaging
from dlrm_scale.config import CheckpointConfig
from dlrm_scale.layout import LocalShard
from tests.checkpoint.failpoints import POINTS, TracedTouchedRows, arm
from tests.checkpoint.faulty_storage import Trace, TracedStorage, TracedStore, kill_at
from tests.checkpoint.simulated_run import load_chain, make_layout, shards_of
from tests.checkpoint.stepped_run import OPTIMIZER, TABLES, touched_rows, truth_of

CONFIG = {"baseline_ratio": 0.5, "keep_baselines": 1, "vote_timeout_seconds": 60}
"""About every fourth save is a baseline, after which old chains are removed."""

RANKS = 2
_LONGEST_SECONDS = 60.0


def check_disk(root: Path) -> int:
    """Return the step that a resume takes; fails if it hasn't the rows of that step."""
    chain = find_chain(root, verify="full")
    if chain is None:
        return 0
    assert chain.skipped == (), chain.skipped
    loaded = load_chain(chain, make_layout("table_wise", 3, TABLES), truth_of(chain.step), optimizer=OPTIMIZER)
    assert loaded.equals(truth_of(chain.step)), f"wrong rows at step {chain.step}"
    return chain.step


def train_rank(
    root: Path, rank: int, port: int, generation: int, acknowledge: int, saves: int, prepare: Callable[[Trace], None]
) -> None:
    """One rank: resumes, then saves after every step, acknowledging each commit."""
    client = torch.distributed.TCPStore("127.0.0.1", port, None, False, timedelta(seconds=30))
    trace = Trace()
    prepare(trace)
    chain = find_chain(root, verify="full")
    step = chain.step if chain is not None else 0
    layout = make_layout("row_wise", RANKS, TABLES)
    right = shards_of(layout, truth_of(step), rank)
    shards = right
    if chain is not None:
        shards = shards_of(layout, truth_of(step), rank, blank=True)
        restore(chain, layout=layout, shards=shards, rank=rank, ranks=RANKS, optimizer=OPTIMIZER)
        assert all(torch.equal(a.weight, b.weight) for a, b in zip(shards, right, strict=True)), "wrong rows"
        assert all(torch.equal(a.state[n], b.state[n]) for a, b in zip(shards, right, strict=True) for n in b.state)
    touched = TracedTouchedRows([shard.region.rows for shard in shards])
    touched.trace, touched.enabled = trace, True
    engine = CheckpointEngine(
        TracedStorage(root, trace),
        layout=layout,
        shards=shards,
        touched=touched,
        rank=rank,
        ranks=RANKS,
        store=TracedStore(torch.distributed.PrefixStore(str(generation), client), trace),
        config=CheckpointConfig(**CONFIG),
        optimizer=OPTIMIZER,
        resumed_from=chain,
        staging=HostStaging(1 << 20),
    )
    for done in range(step + 1, step + 1 + saves):
        train_step(shards, touched, done)
        engine.save(step=done, cursor={"step": done}, dense={}, rank_state={}, extra={})
        # Every third outcome is waited for; the others come while the next step is trained.
        for outcome in engine.wait() if done % 3 == 0 else engine.poll():
            _say(acknowledge, outcome.step if outcome.committed else f"failed {outcome.error}")
    for outcome in engine.wait():
        _say(acknowledge, outcome.step if outcome.committed else f"failed {outcome.error}")
    _say(acknowledge, f"operations {len(trace.operations)}")


def train_step(shards: list[LocalShard], touched: TracedTouchedRows, step: int) -> None:
    """What a step does to one rank's rows."""
    for table, ids in touched_rows(step).items():
        for index, shard in enumerate(shards):
            region = shard.region
            if region.table == table:
                held = torch.tensor([i - region.row_start for i in ids if region.row_start <= i < region.row_end])
                shard.weight[held.long()] += step
                shard.state["momentum1"][held.long()] += step + len("momentum1")
                touched.mark(index, held.long())


def _say(pipe: int, word: object) -> None:
    os.write(pipe, f"{word}\n".encode())


@dataclass
class Child:
    """A forked process and what it writes.

    Attributes:
        process: its id.
        reading: its pipe.
        lines: read so far, whole ones.
    """

    process: int
    reading: int
    rest: bytes = b""
    lines: list[str] = field(default_factory=list)

    @property
    def acknowledged(self) -> int:
        return max((int(line) for line in self.lines if line.isdecimal()), default=0)

    def kill(self) -> None:
        with suppress(ProcessLookupError):
            os.kill(self.process, signal.SIGKILL)

    def read_lines(self, count: int) -> None:
        """Wait until it has written so many lines, or ends."""
        while self.rest.count(b"\n") < count and select.select([self.reading], [], [], _LONGEST_SECONDS)[0]:
            data = os.read(self.reading, 1 << 16)
            if not data:
                return
            self.rest += data

    def finish(self) -> int:
        """Wait for it; its exit code, negative for a signal."""
        while data := os.read(self.reading, 1 << 16):
            self.rest += data
        os.close(self.reading)
        self.lines = self.rest.decode().splitlines()
        return os.waitstatus_to_exitcode(os.waitpid(self.process, 0)[1])


def fork(work: Callable[[int], None]) -> Child:
    """Start `work(write end of a pipe)` in a child."""
    reading, writing = os.pipe()
    process = os.fork()
    if process == 0:
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
    return Child(process, reading)


class Runs:
    """Starts trainers on a store that outlives them."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._generation = 0

    def start(self, root: Path, saves: int, prepare: Callable[[Trace, int], None] = lambda *_: None) -> list[Child]:
        """Start all ranks; `prepare(trace, rank)` is called in each."""
        self._generation += 1

        def work(rank: int) -> Callable[[int], None]:
            return lambda pipe: train_rank(
                root, rank, self._port, self._generation, pipe, saves, lambda trace: prepare(trace, rank)
            )

        return [fork(work(rank)) for rank in range(RANKS)]


@contextmanager
def store_process() -> Iterator[Runs]:
    """A process that serves a store, so that this one, which forks, has no threads."""

    def serve(pipe: int) -> None:
        store = torch.distributed.TCPStore("127.0.0.1", 0, None, True, timedelta(seconds=30), wait_for_workers=False)
        _say(pipe, store.port)
        signal.pause()

    server = fork(serve)
    try:
        yield Runs(int(os.read(server.reading, 64)))
    finally:
        server.kill()
        server.finish()


def end(children: list[Child], killed: int | None, pause_seconds: float) -> list[int]:
    """Wait for rank `killed`, or all; kill the others a moment later, as a launcher does; return the exit codes."""
    if killed is not None:
        # Its pipe is closed when it ends.
        children[killed].read_lines(1 << 30)
        time.sleep(pause_seconds)
        for child in children:
            child.kill()
    return [child.finish() for child in children]


def judge(root: Path, children: list[Child], before: int, where: str) -> int:
    """The step that is found; fails if an acknowledged one is lost or what is found was never saved."""
    acknowledged = max([before, *(child.acknowledged for child in children)])
    found = check_disk(root)
    assert found >= acknowledged, f"{where}: step {acknowledged} was acknowledged, {found} found"
    # One save in flight, and the one before it, whose outcome wasn't told yet.
    assert found <= acknowledged + 2, f"{where}: step {acknowledged} was acknowledged, {found} found"
    return found


def prepare_first(runs: Runs, root: Path) -> int:
    """A run of two chains' worth of saves, killed in the next one so that leftovers lie about."""
    children = runs.start(root, 3)
    assert end(children, None, 0) == [0, 0]
    children = runs.start(root, 9, lambda trace, rank: arm(trace, POINTS["before_sync"], rank, _strike))
    assert end(children, 1, 0) == [-signal.SIGKILL] * 2
    assert check_disk(root) == 3
    return 3


def kill_at_points(root: Path, names: list[str]) -> dict[str, Any]:
    """Each rank is killed at each point; what is left is right, and training goes on from it."""
    kills = []
    with store_process() as runs:
        first = prepare_first(runs, root / "first")
        for name in names or list(POINTS):
            for rank in range(RANKS if POINTS[name].every_rank else 1):
                copy = root / f"{name}-{rank}"
                shutil.copytree(root / "first", copy)

                def prepare(trace: Trace, this: int, name: str = name, rank: int = rank) -> None:
                    if this == rank:
                        arm(trace, POINTS[name], rank, _strike)

                children = runs.start(copy, 9, prepare)
                codes = end(children, rank, 0.01)
                assert codes[rank] == -signal.SIGKILL, f"{name} never came on rank {rank}: {codes}"
                found = judge(copy, children, first, f"{name} on rank {rank}")
                children = runs.start(copy, 4)
                assert end(children, None, 0) == [0, 0], f"after {name} on rank {rank}"
                assert judge(copy, children, found, f"after {name} on rank {rank}") == found + 4
                shutil.rmtree(copy)
                kills.append(f"{name} on rank {rank}")
    return {"kills": len(kills), "points": kills}


def kill_before_operations(root: Path, stride: int) -> dict[str, Any]:
    """Each rank is killed before each of the operations of a start and three saves."""
    kills, steps = 0, set()
    with store_process() as runs:
        first = prepare_first(runs, root / "first")
        shutil.copytree(root / "first", root / "count")
        children = runs.start(root / "count", 3)
        assert end(children, None, 0) == [0, 0]
        counts = [int(child.lines[-1].split()[1]) for child in children]
        for rank in range(RANKS):
            for index in range(0, counts[rank], stride):
                copy = root / "copy"
                shutil.copytree(root / "first", copy)

                def prepare(trace: Trace, this: int, rank: int = rank, index: int = index) -> None:
                    if this == rank:
                        trace.act = kill_at(index)

                children = runs.start(copy, 3, prepare)
                assert end(children, rank, 0.002)[rank] == -signal.SIGKILL
                kills += 1
                steps.add(judge(copy, children, first, f"operation {index} of rank {rank}"))
                shutil.rmtree(copy)
    return {"kills": kills, "operations": counts, "steps": sorted(steps)}


def kill_at_random(root: Path, count: int, seed: int) -> dict[str, Any]:
    """One run that is killed again and again goes on from the last acknowledged step or a later one."""
    chance = random.Random(seed)
    step, orphans = 0, 0
    with store_process() as runs:
        for kill in range(count):
            children = runs.start(root / "ck", 10_000)
            # Some saves on, at any moment of the next one: time is only how the place is drawn.
            children[0].read_lines(chance.choice([0, 0, 1, 2, 3]))
            select.select([], [], [], 0.1 * chance.random())
            first = chance.randrange(RANKS)
            children[first].kill()
            codes = end(children, first, chance.choice([0.0, 0.0, 0.02, 0.1]) * chance.random())
            assert codes == [-signal.SIGKILL] * RANKS, f"kill {kill}: a trainer failed by itself: {codes}"
            step = judge(root / "ck", children, step, f"kill {kill}")
            orphans += _has_orphans(root / "ck")
    return {"kills": count, "steps": step, "kills_that_left_orphans": orphans}


def kill_one_rank(root: Path) -> dict[str, Any]:
    """Rank 1 dies while it writes; rank 0's save fails after the timeout and the last checkpoint loads."""

    def prepare(trace: Trace, rank: int) -> None:
        if rank == 1:
            arm(trace, POINTS["before_sync"], rank, _strike)

    with store_process() as runs:
        assert end(runs.start(root / "ck", 2), None, 0) == [0, 0]
        CONFIG["vote_timeout_seconds"] = 1
        children = runs.start(root / "ck", 1, prepare)
        codes = [child.finish() for child in children]
    assert codes == [0, -signal.SIGKILL], codes
    return {"outcomes": children[0].lines[:-1], "found": check_disk(root / "ck")}


def _strike() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def _has_orphans(root: Path) -> bool:
    named = set()
    for path in (root / "manifests").glob("*.json"):
        named |= {file["name"] for file in json.loads(path.read_text())["manifest"]["files"]}
    return any(f"data/{path.name}" not in named for path in (root / "data").iterdir())


if __name__ == "__main__":
    torch.set_num_threads(1)
    where, what, words = Path(sys.argv[1]), sys.argv[2], sys.argv[3:]
    if what == "points":
        result = kill_at_points(where, words)
    elif what == "operations":
        result = kill_before_operations(where, int(words[0]))
    elif what == "random":
        result = kill_at_random(where, int(words[0]), int(words[1]))
    else:
        result = kill_one_rank(where)
    sys.stdout.write(json.dumps(result) + "\n")
