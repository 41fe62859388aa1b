"""Checkpoints that a later start has left behind by going on from an older one.

    start 1     1 <- 2 <- 3 <- 4
    start 2          ^---------- 5 <- 6         3 and 4 are a dead branch: training doesn't go on from them any more

Each start's record says which checkpoint it goes on from. A start that has saved nothing leaves nothing behind: the
next one goes on from the newest checkpoint, on whatever branch it is. Below a start whose record can't be read nothing
is called dead.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass

from dlrm_scale.checkpoint.chain.starts import read_start
from dlrm_scale.checkpoint.files.file_names import checkpoint_name, parse_manifest_name
from dlrm_scale.checkpoint.files.manifest_files import checkpoint_age
from dlrm_scale.checkpoint.storage.storage import Storage

__all__ = ["LeftBehind", "dead_branches"]


@dataclass(frozen=True, kw_only=True)
class LeftBehind:
    """How a checkpoint came to be on a dead branch.

    Attributes:
        start: the trainer's start that went on from an older one.
        from_step: step of that older one; None if it is gone, or the start began anew.
    """

    start: int
    from_step: int | None

    def __str__(self) -> str:
        """In words for the user."""
        where = "elsewhere" if self.from_step is None else f"from step {self.from_step}"
        return f"dead branch: start {self.start} went on {where}"


def dead_branches(storage: Storage, steps: Mapping[str, int | None]) -> dict[str, LeftBehind]:
    """Find the manifests of dead branches.

    Args:
        storage: the checkpoints.
        steps: of all manifests of the root, by name; None of those that can't be read.

    Returns:
        By name, those on dead branches; merges that stand for them are too.

    Raises:
        OSError: a start's record can't be read for an outage.
    """
    step_of = {checkpoint_name(name): step for name, step in steps.items() if step is not None}
    newest = max((checkpoint_age(name)[0] for name in steps), default=0)
    last_seq, origins, known_from = _live_starts(storage, newest, step_of)
    found = {}
    for name in steps:
        start, seq = checkpoint_age(name)
        if start >= known_from and seq > last_seq.get(start, -1):
            later = min(live for live in last_seq if live > start)
            found[name] = LeftBehind(start=later, from_step=origins[later])
    return found


def _live_starts(
    storage: Storage, newest: int, step_of: Mapping[str | None, int]
) -> tuple[dict[int, float], dict[int, int | None], int]:
    """The starts that led to where the newest one is, followed back by their records.

    Returns:
        The last sequence number of each that still counts; the step that each went on from; the first start that is
        known about.
    """
    last_seq: dict[int, float] = {newest: math.inf}
    origins: dict[int, int | None] = {}
    start = newest
    while start:
        record = read_start(storage, start)
        if record is None or "continues" not in record:
            return last_seq, origins, start
        origin, step = str(record["continues"]), record.get("continues_step")
        origins[start] = step_of.get(origin, step if isinstance(step, int) else None)
        seq, before = parse_manifest_name(origin) or (0, 0)
        if not 0 < before < start:
            # it began anew, or its record is nonsense
            return last_seq, origins, 0 if record["continues"] is None else start
        last_seq[before] = seq
        start = before
    return last_seq, origins, 0
