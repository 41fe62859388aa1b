"""Merges checkpoints while a trainer goes on: no GPU, no process group, and no word to the trainer.

    lease       the manifests that are read are kept from removal, and the merge's files from sweepers
    write       data files under the merge's number, as many as the newest checkpoint has, synced
    commit      the manifest is linked to its name; it says which checkpoint it is equal to

A crash before the link leaves the chain as it was; after it there is one more way to the same checkpoint. What was read
stays until retention removes it. Deltas on the checkpoint that a merge is equal to can be applied to the merge.
"""

import secrets
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from dlrm_scale.checkpoint.chain.chain import Chain
from dlrm_scale.checkpoint.chain.leases import CLOCK_SKEW_SECONDS, Lease, keep_renewing, read_leases, removals_of
from dlrm_scale.checkpoint.files.manifest import Manifest
from dlrm_scale.checkpoint.storage.storage import Storage
from dlrm_scale.checkpoint.upkeep.merge_memory import fitting, merge_memory_bytes
from dlrm_scale.checkpoint.upkeep.merge_plan import MergePlan, MergeTarget, plan_merge
from dlrm_scale.checkpoint.upkeep.merge_run import MergeRun, Progress
from dlrm_scale.checkpoint.upkeep.sweep import sweep_merges
from dlrm_scale.errors import ConfigError, StorageError
from dlrm_scale.units import GIB, format_bytes

__all__ = ["MEMORY_LIMIT_BYTES", "Merged", "merge_chain"]

MEMORY_LIMIT_BYTES = GIB
"""For blocks of rows, beside what the program itself takes."""

_LOOK_AGAIN_SECONDS = 0.2


@dataclass(frozen=True, kw_only=True)
class Merged:
    """A committed merge.

    Attributes:
        manifest: the result.
        plan: what it was made of.
        seconds: how long it took.
    """

    manifest: Manifest
    plan: MergePlan
    seconds: float


def merge_chain(
    storage: Storage,
    choose: Callable[[], Chain | None],
    to: MergeTarget,
    *,
    memory_limit_bytes: int = MEMORY_LIMIT_BYTES,
    progress: Progress = lambda done, total: None,
    number: int | None = None,
    now: Callable[[], float] = time.time,
    pause: Callable[[float], None] = time.sleep,
) -> list[Merged]:
    """Merge a chain, several manifests at a time where they don't fit into memory together.

    Leftovers of dead merges are swept first.

    Args:
        storage: the checkpoints.
        choose: finds the chain; may be called several times.
        to: what to make of it.
        memory_limit_bytes: for blocks of rows.
        progress: called after each block.
        number: of the merge; drawn if None. A parameter for tests.
        now: a clock in Unix seconds.
        pause: waits for some seconds.

    Returns:
        What was committed, the last one equal to the chain; empty if there was nothing to merge.

    Raises:
        DamagedFileError: a file is damaged (it is named).
        ConfigError: memory is too short.
        StorageError: another merge is running, or the merge was stopped for so long that its lease has ended. Nothing
            but what was committed before is left.
        OSError: the storage fails or is full.
    """
    number = number if number is not None else secrets.randbelow(2**40)
    lease = Lease(storage, "merge", token=str(number), now=now)
    with keep_renewing(lease):
        lease.take()
        _refuse_a_second(storage, lease, now)
        sweep_merges(storage, now=now())
        chain = _hold(storage, choose, lease, now, pause)
        plan = plan_merge(chain.manifests, chain.checkpoint, to) if chain is not None else None
        if plan is None:
            return []
        return list(_in_parts(storage, plan, lease, memory_limit_bytes, progress, now))


def _in_parts(
    storage: Storage,
    plan: MergePlan,
    lease: Lease,
    memory_limit_bytes: int,
    progress: Progress,
    now: Callable[[], float],
) -> Iterator[Merged]:
    """Merge a plan; where it doesn't fit into memory, groups of its deltas first."""
    left = list(plan.manifests)
    first_delta = 1 if plan.kind == "baseline" else 0
    place = first_delta
    while (count := fitting(left, memory_limit_bytes)) < len(left):
        count = fitting(left[place:], memory_limit_bytes)
        if count < 2 and place == first_delta:
            need = merge_memory_bytes(left[: first_delta + 2])
            raise ConfigError(
                f"merging {left[0].name} and what follows takes {format_bytes(need)} of memory, and "
                f"{format_bytes(memory_limit_bytes)} are allowed",
                remedy="raise --memory-limit",
            )
        if count < 2:
            place = first_delta
            continue
        after = left[place + count] if place + count < len(left) else None
        equal_to = after.parent if after is not None and after.parent is not None else plan.equal_to
        group = tuple(left[place : place + count])
        part = MergePlan(kind="delta", manifests=group, equal_to=equal_to, reason="all don't fit at once")
        # Each result has a number of its own, as two of them may be equal to the same checkpoint.
        part_lease = Lease(storage, "merge", token=str(secrets.randbelow(2**40)), now=now)
        with keep_renewing(part_lease):
            part_lease.take()
            merged = _timed(storage, part, part_lease, int(part_lease.token), progress)
        yield merged
        left[place : place + count] = [merged.manifest]
        lease.take([manifest.name for manifest in left])
        place = place + 1 if place + 2 < len(left) else first_delta
    yield _timed(storage, replace(plan, manifests=tuple(left)), lease, int(lease.token), progress)


def _timed(storage: Storage, plan: MergePlan, lease: Lease, number: int, progress: Progress) -> Merged:
    began = time.monotonic()
    manifest = MergeRun(storage=storage, plan=plan, lease=lease, number=number, progress=progress).run()
    return Merged(manifest=manifest, plan=plan, seconds=time.monotonic() - began)


def _hold(
    storage: Storage,
    choose: Callable[[], Chain | None],
    lease: Lease,
    now: Callable[[], float],
    pause: Callable[[float], None],
) -> Chain | None:
    """Choose a chain and keep it from removal with the merge's lease; as `hold_chain`."""
    while (chain := choose()) is not None:
        names = [manifest.name for manifest in chain.manifests]
        lease.take(names)
        if not removals_of(storage, names, now=now()) and all(storage.exists(name) for name in names):
            return chain
        lease.take()
        pause(_LOOK_AGAIN_SECONDS)
    return None


def _refuse_a_second(storage: Storage, lease: Lease, now: Callable[[], float]) -> None:
    leases = read_leases(storage, now=now())
    others = [o for o in leases if o.kind == "merge" and o.token != lease.token and not o.has_ended]
    if others:
        seconds = max(other.expires_unix_seconds for other in others) - now() + CLOCK_SKEW_SECONDS
        raise StorageError(
            f"{others[0].owner} is merging in {storage.address}, or has been killed while it did",
            remedy=f"wait for it; if it is dead, its lease is over within {max(0.0, seconds):.0f} s",
        )
