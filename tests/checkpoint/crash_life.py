"""Lives of a trainer with failures, kills and resumes, recorded operation by operation.

life = Life()
life.start()                                            a trainer starts, or resumes
life.save()                                             a step and its checkpoint
life.save(fail=Meets("write", "-r1."))                  which fails at such an operation
life.save(kill=Meets("link"))                           the trainer is killed at one
life.save(beside=(Meets("link"), life.collect))         another program runs from start to end at one
"""

import errno
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch

from dlrm_scale.checkpoint import Chain, find_chain, restore
from dlrm_scale.checkpoint.chain.leases import hold_chain
from dlrm_scale.checkpoint.storage.storage import Storage
from dlrm_scale.checkpoint.upkeep.collect_garbage import collect_garbage
from dlrm_scale.checkpoint.upkeep.merge import merge_chain
from dlrm_scale.checkpoint.upkeep.merge_plan import MergeTarget
from dlrm_scale.errors import CheckpointError
from dlrm_scale.schema import TableSpec
from tests.checkpoint.crash_judge import faults_of, rows_that_are, tables_of
from tests.checkpoint.faulty_storage import Trace, TracedStorage, TracedStore
from tests.checkpoint.memory_storage import MemoryStorage
from tests.checkpoint.simulated_run import Run, Truth, make_layout, shards_of
from tests.checkpoint.stepped_run import OPTIMIZER, TABLES, train_step, truth_of

__all__ = ["Beside", "Condition", "Life", "Meets", "MortalStore", "WaitsError"]


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
Beside = tuple[Condition, Callable[[], object]]
"""A program that runs from start to end before the operation that meets a condition."""


class WaitsError(Exception):
    """A program waits for one that stands still until it is done."""


class Life:
    """A root and the trainers that use it one after the other, in memory.

    Args:
        config: settings of every trainer.

    Attributes:
        encoded: whether deltas may be.
        gave_way: how often a program left the root to one that it was beside of.
        ran_beside: how often a program ran within another.
        may_fail: whether another program may although nothing is injected here.
        refused: how often a trainer was, as another had committed meanwhile.
    """

    def __init__(self, **config: object) -> None:
        self.config = {"baseline_ratio": 0.5, "keep_baselines": 1, **config}
        self.storage: Storage = MemoryStorage()
        self.trace = Trace()
        self.trace.act = self._act
        self.tables: tuple[TableSpec, ...] = TABLES
        self.step = 0
        self.acknowledged = 0
        self.dead = True
        self.run: Run | None = None
        self.encoded = "delta_rows" in config
        self.gave_way = 0
        self.ran_beside = 0
        self.refused = 0
        self.may_fail = False
        self._fail: Condition | None = None
        self._error = errno.ENOSPC
        self._kill: Condition | None = None
        self._beside: Beside | None = None
        self._seconds_later = 0

    def start(
        self,
        ranks: int = 2,
        *,
        kind: str = "row_wise",
        kill: Condition | None = None,
        tables: tuple[TableSpec, ...] | None = None,
        beside: Beside | None = None,
        **options: object,
    ) -> bool:
        """A trainer starts, resuming from what there is; says whether it lives.

        With `tables` the model has these from now on; new ones and new rows begin as if they had always been there.
        """
        self.tables = tables if tables is not None else self.tables
        # What it looks for comes before it.
        self.dead, self._kill = False, None
        chain = find_chain(self.storage, verify="full")
        self.step = chain.step if chain is not None else 0
        assert self.step >= self.acknowledged, f"resumes from {self.step}, {self.acknowledged} was acknowledged"
        layout, truth = make_layout(kind, ranks, self.tables), truth_of(self.step, self.tables)
        if chain is not None and tables_of(chain) != self.tables:
            _warm_start(chain, truth, self.tables, encoded=self.encoded)
        self._kill, self._beside = kill, beside
        store = MortalStore(self)
        try:
            self.run = Run(
                self.storage,
                layout,
                truth,
                resumed_from=chain,
                optimizer=OPTIMIZER,
                storages=self._storages(ranks),
                store=store,
                **{**self.config, **options},
            )
        except (CheckpointError, RuntimeError) as error:
            if not self.dead and "another trainer has committed" in str(error):
                # While it was looking for what to go on from. As told, it is started again.
                self.refused += 1
                return self.start(ranks, kind=kind, kill=kill, tables=tables, **options)
            if not self.dead:
                raise
        self._beside = None
        return not self.dead

    def save(
        self,
        *,
        fail: Condition | None = None,
        kill: Condition | None = None,
        error: int = errno.ENOSPC,
        beside: Beside | None = None,
    ) -> bool:
        """A step of training and its checkpoint; says whether all ranks count it as saved."""
        assert self.run is not None
        assert not self.dead
        self.step += 1
        train_step(self.run, self.step)
        self._fail, self._kill, self._error, self._beside = fail, kill, error, beside
        outcomes = self.run.save_all(self.step)
        self._fail = self._beside = None
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
        beside: Beside | None = None,
    ) -> bool:
        """Another program merges while the trainer, if there is one, goes on; says whether it got to its end."""
        trainer_is_dead, self.dead = self.dead, False
        self._fail, self._kill, self._error, self._beside = fail, kill, error, beside
        try:
            self.merge_within(to)
        except (OSError, CheckpointError):
            assert fail is not None or kill is not None or self.may_fail
            return False
        finally:
            self._fail = self._kill = self._beside = None
            self.dead = trainer_is_dead
            # The next one comes when the lease of a dead one has ended.
            self._seconds_later += 1000
        return True

    def collect(self, *, kill: Condition | None = None, beside: Beside | None = None) -> bool:
        """Another program removes old checkpoints and leftovers; says whether it got to its end."""
        trainer_is_dead, self.dead = self.dead, False
        self._kill, self._beside = kill, beside
        try:
            self.collect_within()
        except (OSError, CheckpointError):
            assert kill is not None
            return False
        finally:
            self._kill = self._beside = None
            self.dead = trainer_is_dead
            self._seconds_later += 1000
        return True

    def restore(self, *, beside: Beside | None = None) -> None:
        """Another program restores, and gets a whole checkpoint that isn't older than what was acknowledged."""
        self._beside = beside
        self.restore_within()
        self._beside = None

    def merge_within(self, to: MergeTarget = "auto") -> None:
        """Merge in the middle of another program, which isn't touched; as all that ends in `_within`."""
        storage = self._storages(1)[0]
        self._give_way(
            "is merging in", lambda: merge_chain(storage, lambda: find_chain(storage), to, now=self._now, pause=_waits)
        )

    def collect_within(self) -> None:
        """Remove old checkpoints and leftovers."""
        keep, storage = int(str(self.config["keep_baselines"])), self._storages(1)[0]
        work = lambda: collect_garbage(storage, keep_baselines=keep, dry_run=False, now=self._now)  # noqa: E731
        self._give_way("is removing checkpoints in", work)

    def restore_within(self) -> None:
        """Restore."""
        storage, acknowledged = self._storages(1)[0], self.acknowledged

        def work() -> None:
            with hold_chain(storage, lambda: find_chain(storage), now=self._now, pause=_waits) as chain:
                assert chain is not None
                assert chain.step >= acknowledged
                assert faults_of(chain, encoded=self.encoded) == []

        self._give_way("no other reason", work)

    def _give_way(self, words: str, work: Callable[[], object]) -> None:
        try:
            work()
        except WaitsError:
            self.gave_way += 1
        except CheckpointError as error:
            if words not in str(error):
                raise
            self.gave_way += 1

    def _storages(self, count: int) -> list[Storage]:
        return [TracedStorage(self.storage, self.trace) for _ in range(count)]

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
        if self._beside is not None and self._beside[0](operation, name):
            program, self._beside = self._beside[1], None
            self.ran_beside += 1
            program()
        if operation == "outcome" and json.loads(name)["committed"]:
            self._acknowledge()

    def _acknowledge(self) -> None:
        self.acknowledged = self.step
        self.trace.acknowledge(self.step)


def _waits(seconds: float) -> None:
    raise WaitsError


def _warm_start(chain: Chain, truth: Truth, tables: Sequence[TableSpec], *, encoded: bool) -> None:
    """Restore what a chain has of other tables; the rest is left as it was."""
    rows = {spec.name: spec.rows for spec in tables_of(chain)}
    layout = make_layout("table_wise", 1, tables)
    shards = shards_of(layout, truth, 0)
    for shard in shards:
        kept = rows.get(shard.region.table, 0)
        shard.weight[:kept] = float("nan")
        for values in shard.state.values():
            values[:kept] = float("nan")
    restore(
        chain,
        layout=layout,
        shards=shards,
        rank=0,
        ranks=1,
        optimizer=OPTIMIZER,
        allow_new_tables=True,
        allow_resized_tables=True,
    )
    for shard, right in zip(shards, shards_of(layout, truth, 0), strict=True):
        assert rows_that_are(right.weight, shard.weight, "int8_rows" if encoded else None).all()
        assert rows_that_are(right.state["momentum1"], shard.state["momentum1"], "bf16" if encoded else None).all()


class MortalStore(TracedStore):
    """A store that nobody can ask any more once the trainer is dead, so that no rank waits for another."""

    def __init__(self, life: Life) -> None:
        super().__init__(torch.distributed.HashStore(), life.trace)
        self._life = life

    def check(self, keys: list[str]) -> bool:
        if self._life.dead:
            raise RuntimeError("dead")
        return bool(self._store.check(keys))  # type: ignore[attr-defined]
