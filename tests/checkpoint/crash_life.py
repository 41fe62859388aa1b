"""Lives of a trainer with failures, kills and resumes, recorded operation by operation, and a judge of what is left.

life = Life()
life.start()                                a trainer starts, or resumes
life.save()                                 a step and its checkpoint
life.save(fail=Meets("write", "-r1."))      which fails at such an operation
life.save(kill=Meets("link"))               the trainer is killed at one
examine(life)                               every crash state of all that
"""

import errno
import json
import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cache

import torch

from dlrm_scale.checkpoint import find_chain, restore
from dlrm_scale.checkpoint.files.format import file_fault
from dlrm_scale.checkpoint.files.manifest_files import read_manifests
from dlrm_scale.checkpoint.upkeep.merge import merge_chain
from dlrm_scale.checkpoint.upkeep.merge_plan import MergeTarget
from dlrm_scale.errors import CheckpointError
from tests.checkpoint.crash_states import CrashState, Disk, crash_states
from tests.checkpoint.faulty_storage import Event, Trace, TracedStorage, TracedStore
from tests.checkpoint.memory_storage import MemoryStorage
from tests.checkpoint.simulated_run import Run, Truth, make_layout, shards_of
from tests.checkpoint.stepped_run import OPTIMIZER, TABLES, train_step, truth_of

__all__ = ["Findings", "Life", "Meets", "examine", "judge", "random_life"]

ERRORS = (errno.ENOSPC, errno.EIO, errno.EDQUOT, errno.EROFS, errno.EMFILE)


@dataclass
class Meets:
    """Holds at the `nth` operation of a kind whose name contains `part`; `operation` "" is any."""

    operation: str = ""
    part: str = ""
    nth: int = 1

    def __call__(self, operation: str, name: str) -> bool:
        if self.operation in ("", operation) and self.part in name:
            self.nth -= 1
            return self.nth == 0
        return False


Condition = Callable[[str, str], bool]


class Life:
    """A root and the trainers that use it one after the other, in memory.

    Args:
        config: settings of every trainer.
    """

    def __init__(self, **config: object) -> None:
        self.config = {"baseline_ratio": 0.5, "keep_baselines": 1, **config}
        self.storage = MemoryStorage()
        self.trace = Trace()
        self.trace.act = self._act
        self.step = 0
        self.acknowledged = 0
        self.dead = True
        self.run: Run | None = None
        self._fail: Condition | None = None
        self._error = errno.ENOSPC
        self._kill: Condition | None = None
        self._seconds_later = 0

    def start(
        self, ranks: int = 2, *, kind: str = "row_wise", kill: Condition | None = None, **options: object
    ) -> bool:
        """A trainer starts, resuming from what there is; says whether it lives."""
        chain = find_chain(self.storage, verify="full")
        self.step = chain.step if chain is not None else 0
        assert self.step >= self.acknowledged, f"resumes from {self.step}, {self.acknowledged} was acknowledged"
        self.dead, self._kill = False, kill
        store = _MortalStore(self)
        try:
            self.run = Run(
                self.storage,
                make_layout(kind, ranks, TABLES),
                truth_of(self.step),
                resumed_from=chain,
                optimizer=OPTIMIZER,
                storages=[TracedStorage(self.storage, self.trace) for _ in range(ranks)],
                store=store,
                **{**self.config, **options},
            )
        except (CheckpointError, RuntimeError):
            assert self.dead
        return not self.dead

    def save(self, *, fail: Condition | None = None, kill: Condition | None = None, error: int = errno.ENOSPC) -> bool:
        """A step of training and its checkpoint; says whether all ranks count it as saved."""
        assert self.run is not None
        assert not self.dead
        self.step += 1
        train_step(self.run, self.step)
        self._fail, self._kill, self._error = fail, kill, error
        outcomes = self.run.save_all(self.step)
        self._fail = None
        if not self.dead and any(outcome.committed for outcome in outcomes):
            self._acknowledge()
        return not self.dead and all(outcome.committed for outcome in outcomes)

    def merge(
        self,
        to: MergeTarget = "auto",
        *,
        fail: Condition | None = None,
        kill: Condition | None = None,
        error: int = errno.ENOSPC,
    ) -> bool:
        """Another program merges while the trainer, if there is one, goes on; says whether it got to its end."""
        trainer_is_dead, self.dead = self.dead, False
        self._fail, self._kill, self._error = fail, kill, error
        storage = TracedStorage(self.storage, self.trace)
        try:
            merge_chain(storage, lambda: find_chain(storage), to, now=self._now)
        except (OSError, CheckpointError):
            assert fail is not None or kill is not None
            return False
        finally:
            self._fail = self._kill = None
            self.dead = trainer_is_dead
            # The next one comes when the lease of a dead one has ended.
            self._seconds_later += 1000
        return True

    def _now(self) -> float:
        return time.time() + self._seconds_later

    def _act(self, index: int, operation: str, name: str) -> None:
        if self._kill is not None and self._kill(operation, name):
            self.dead = True
        if self.dead:
            # What a dead process would have done: nothing.
            raise OSError(errno.ESHUTDOWN, "dead")
        if self._fail is not None and operation not in ("vote", "outcome") and self._fail(operation, name):
            raise OSError(self._error, "injected")
        if operation == "outcome" and json.loads(name)["committed"]:
            self._acknowledge()

    def _acknowledge(self) -> None:
        self.acknowledged = self.step
        self.trace.acknowledge(self.step)


class _MortalStore(TracedStore):
    """A store that nobody can ask any more once the trainer is dead, so that no rank waits for another."""

    def __init__(self, life: Life) -> None:
        super().__init__(torch.distributed.HashStore(), life.trace)
        self._life = life

    def check(self, keys: list[str]) -> bool:
        if self._life.dead:
            raise RuntimeError("dead")
        return bool(self._store.check(keys))  # type: ignore[attr-defined]


@dataclass
class Findings:
    """What went through the judge.

    Attributes:
        states: disks.
        resumed: of them also gone on from.
        problems: what is wrong, with the place.
    """

    states: int = 0
    resumed: int = 0
    problems: list[str] = field(default_factory=list)


def examine(
    life: Life,
    *,
    share: float = 1.0,
    seed: int = 0,
    samples: int = 8,
    resume_every: int = 0,
    start: Disk | None = None,
    until: str | None = None,
) -> Findings:
    """Judge the crash states of a life.

    Args:
        life: as lived.
        share: of the states that are looked at, drawn by `seed`.
        seed: of everything drawn.
        samples: as in `crash_states`.
        resume_every: from each so many-th state a trainer resumes, saves, and crashes again; 0: from none.
        start: the disk that the life began with.
        until: stop at the first state with a problem that these words are in.
    """
    found = Findings()
    verdicts: dict[frozenset[tuple[str, bytes]], tuple[int, list[str]]] = {}
    for state in crash_states(life.trace.done, start=start, share=share, samples=samples, seed=seed):
        found.states += 1
        key = frozenset(state.files.items())
        if key not in verdicts:
            verdicts[key] = judge(MemoryStorage(state.files, state.folders))
        step, problems = verdicts[key]
        if step < state.acknowledged:
            problems = [*problems, f"step {state.acknowledged} was acknowledged, {step} is found"]
        place = f"after {state.operations} operations ({_last(life.trace.done, state)}), with {state.kept}"
        found.problems += [f"{problem}: {place}" for problem in problems]
        if until is not None and any(until in problem for problem in problems):
            break
        if resume_every and found.states % resume_every == 0 and not problems:
            found.resumed += 1
            again = _go_on(state)
            inner = examine(
                again, share=min(share, 0.1), seed=seed, start=Disk.of(state.files, state.folders, state.acknowledged)
            )
            found.states += inner.states
            found.problems += [f"{problem}, of a run that resumed {place}" for problem in inner.problems]
    return found


def judge(storage: MemoryStorage) -> tuple[int, list[str]]:
    """The step that a resume takes, 0 for none, and what is wrong with what it gets."""
    problems = [
        f"{file.name} is there and its {data.name} {fault}"
        for file in read_manifests(storage)
        for data in (file.manifest.files if file.manifest is not None else ())
        if (fault := file_fault(storage, data, read_all=True)) is not None
    ]
    try:
        chain = find_chain(storage, verify="full")
    except CheckpointError as error:
        return 0, [*problems, error.message]
    if chain is None:
        return 0, problems
    problems += [f"skipped {skip}" for skip in chain.skipped]
    ranks = chain.tip.ranks
    layout, truth = make_layout("table_wise", ranks, TABLES), _right(chain.step)
    for rank in range(ranks):
        shards = shards_of(layout, truth, rank, blank=True)
        got = restore(chain, layout=layout, shards=shards, rank=rank, ranks=ranks, optimizer=OPTIMIZER)
        for shard, right in zip(shards, shards_of(layout, truth, rank), strict=True):
            same = torch.equal(shard.weight, right.weight) and all(
                torch.equal(shard.state[name], values) for name, values in right.state.items()
            )
            if not same:
                problems.append(f"table {shard.region.table} isn't that of step {chain.step}")
        if not torch.equal(got.dense["over.weight"], torch.full((3, 2), float(chain.step))):
            problems.append(f"the dense weights aren't those of step {chain.step}")
        if got.cursor != {"step": chain.step}:
            problems.append(f"the cursor isn't that of step {chain.step}")
        if got.rank_state is None or got.rank_state["rng"].tolist() != [rank, chain.step % 256]:
            problems.append(f"rank {rank}'s state isn't that of step {chain.step}")
    return chain.step, problems


def random_life(seed: int) -> Life:
    """Three starts on one to three ranks: saves of which some fail and the last is killed, and merges beside them."""
    chance = random.Random(seed)
    life = Life(
        baseline_ratio=chance.choice([1e-9, 0.3, 1.0]),
        keep_baselines=chance.choice([1, 2]),
        policy=chance.choice(["consecutive", "one_shot", "intermittent"]),
    )
    for _ in range(3):
        kind = chance.choice(["row_wise", "table_wise", "data_parallel"])
        staging = chance.choice([0, 1 << 20])
        kill = Meets(nth=chance.randint(1, 8)) if chance.random() < 0.2 else None
        if not life.start(chance.randint(1, 3), kind=kind, kill=kill, staging_limit_bytes=staging):
            continue
        for _ in range(chance.randint(2, 4)):
            fails = chance.random() < 0.4
            life.save(fail=Meets(nth=chance.randint(1, 60)) if fails else None, error=chance.choice(ERRORS))
            if chance.random() < 0.2:
                cut = Meets(nth=chance.randint(1, 80))
                how = chance.choice([{}, {"fail": cut}, {"kill": cut}])
                life.merge(chance.choice(["delta", "baseline"]), error=chance.choice(ERRORS), **how)
        life.save(kill=Meets(nth=chance.randint(1, 80)))
    return life


def _go_on(state: CrashState) -> Life:
    life = Life()
    life.storage = MemoryStorage(state.files, state.folders)
    life.acknowledged = state.acknowledged
    life.start()
    assert life.save()
    assert life.save()
    return life


@cache
def _right(step: int) -> Truth:
    return truth_of(step)


def _last(events: Sequence[Event], state: CrashState) -> str:
    if not state.operations:
        return "none"
    event = events[state.operations - 1]
    return f"{event.operation} {event.name}"
