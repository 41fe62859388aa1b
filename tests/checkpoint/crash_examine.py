"""Every crash state of a life is judged, and some are gone on from; and lives at random to do that with."""

import errno
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from dlrm_scale.schema import TableSpec
from tests.checkpoint.crash_judge import judge
from tests.checkpoint.crash_life import Life, Meets
from tests.checkpoint.crash_states import CrashState, Disk, crash_states
from tests.checkpoint.faulty_storage import Event
from tests.checkpoint.memory_storage import MemoryStorage
from tests.checkpoint.stepped_run import RESIZED, TABLES

__all__ = ["Findings", "examine", "random_life"]

ERRORS = (errno.ENOSPC, errno.EIO, errno.EDQUOT, errno.EROFS, errno.EMFILE)


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
            verdicts[key] = judge(MemoryStorage(state.files, state.folders), encoded=life.encoded)
        step, problems = verdicts[key]
        if step < state.acknowledged:
            problems = [*problems, f"step {state.acknowledged} was acknowledged, {step} is found"]
        place = f"after {state.operations} operations ({_last(life.trace.done, state)}), with {state.kept}"
        found.problems += [f"{problem}: {place}" for problem in problems]
        if until is not None and any(until in problem for problem in problems):
            break
        if resume_every and found.states % resume_every == 0 and not problems:
            found.resumed += 1
            again = _go_on(life, state)
            inner = examine(
                again, share=min(share, 0.1), seed=seed, start=Disk.of(state.files, state.folders, state.acknowledged)
            )
            found.states += inner.states
            found.problems += [f"{problem}, of a run that resumed {place}" for problem in inner.problems]
    return found


def random_life(seed: int, make: Callable[..., Life] = Life) -> Life:
    """Three starts on one to three ranks: saves of which some fail and the last is killed, and merges beside them.

    Every third life has encoded deltas, and in every fourth the tables change.
    """
    chance = random.Random(seed)
    codecs = {"delta_rows": "int8", "delta_state": "bf16"} if seed % 3 == 1 else {}
    life = make(
        baseline_ratio=chance.choice([1e-9, 0.3, 1.0]),
        keep_baselines=chance.choice([1, 2]),
        policy=chance.choice(["consecutive", "one_shot", "intermittent"]),
        **codecs,
    )
    for start in range(3):
        kind = chance.choice(["row_wise", "table_wise", "data_parallel"])
        staging = chance.choice([0, 1 << 20])
        kill = Meets(nth=chance.randint(1, 8)) if chance.random() < 0.2 else None
        options = {"staging_limit_bytes": staging, "lossy_restores": start if codecs else 0}
        tables = _tables_of_start(start) if seed % 4 == 2 else None
        if not life.start(chance.randint(1, 3), kind=kind, kill=kill, tables=tables, **options):
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


def _tables_of_start(start: int) -> tuple[TableSpec, ...]:
    return (TABLES, RESIZED, (*TABLES, RESIZED[-1]))[start]


def _go_on(life: Life, state: CrashState) -> Life:
    again = Life(**life.config)
    again.storage = MemoryStorage(state.files, state.folders)
    again.acknowledged = state.acknowledged
    again.start(tables=life.tables)
    assert again.save()
    assert again.save()
    return again


def _last(events: Sequence[Event], state: CrashState) -> str:
    if not state.operations:
        return "none"
    event = events[state.operations - 1]
    return f"{event.operation} {event.name}"
