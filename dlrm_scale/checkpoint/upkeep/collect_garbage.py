"""Removes old checkpoints and leftovers beside a running trainer, or says what it would remove."""

import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

from dlrm_scale.checkpoint.chain.chain import find_chain
from dlrm_scale.checkpoint.chain.chain_search import ChainSearch, Path
from dlrm_scale.checkpoint.chain.dead_branches import LeftBehind, dead_branches
from dlrm_scale.checkpoint.chain.leases import read_leases
from dlrm_scale.checkpoint.chain.pins import read_pins
from dlrm_scale.checkpoint.files.manifest_files import no_checkpoint
from dlrm_scale.checkpoint.storage.storage import Storage
from dlrm_scale.checkpoint.upkeep.retention import old_chains, remove_old_chains
from dlrm_scale.checkpoint.upkeep.sweep import dead_merges, stale_leftovers, sweep_merges, sweep_stale
from dlrm_scale.errors import StorageError

__all__ = ["DeadBranch", "Garbage", "collect_garbage"]


@dataclass(frozen=True, kw_only=True)
class DeadBranch:
    """Checkpoints that one start has left behind.

    Attributes:
        left: by which start.
        first_step: the lowest step of them.
        last_step: the highest.
        removed: names of the manifests that were removed, or would be.
        kept: names of the others: pinned, in use, needed by a chain, or not old enough yet.
    """

    left: LeftBehind
    first_step: int
    last_step: int
    removed: tuple[str, ...]
    kept: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class Garbage:
    """What was removed, or would be.

    Attributes:
        chains: that stay, the newest first; they share no data file.
        pinned: names of checkpoints that stay besides.
        dead_branches: what was left behind, and what became of it.
        damaged: newer checkpoints than those of the chains that can't be used, and why.
        users: who reads or merges just now, and keeps what they hold.
        removed: names of files.
        removed_bytes: of them; small files of a few hundred bytes don't count.
    """

    chains: tuple[Path, ...]
    pinned: tuple[str, ...]
    dead_branches: tuple[DeadBranch, ...]
    damaged: tuple[str, ...]
    users: tuple[str, ...]
    removed: tuple[str, ...]
    removed_bytes: int


def collect_garbage(
    storage: Storage, *, keep_baselines: int, dry_run: bool, now: Callable[[], float] = time.time
) -> Garbage:
    """Keep the newest chains and pinned checkpoints, and remove the rest and what crashes have left.

    Args:
        storage: the checkpoints.
        keep_baselines: chains to keep; nothing old is removed while there are fewer.
        dry_run: only say what would be removed. Leases that readers take later aren't known then.
        now: a clock in Unix seconds.

    Raises:
        CheckpointError: there is no checkpoint, or none can be restored.
        StorageError: another removal is running.
        OSError: a file can't be removed; what is left is still consistent.
    """
    chain = find_chain(storage)
    if chain is None:
        raise no_checkpoint(storage)
    leases = read_leases(storage, now=now())
    remover = next((lease for lease in leases if lease.kind == "removal"), None)
    if remover is not None:
        raise StorageError(
            f"{remover.owner} is removing checkpoints in {storage.address}, or has been killed while it did",
            remedy="try again in some minutes",
        )
    search = ChainSearch(storage)
    found = old_chains(storage, search, chain.checkpoint, keep_baselines=keep_baselines)
    going = [m for m in found.removable if not any(lease.holds_any([m.name]) for lease in leases)]
    files = [file for name in search.checkpoints for file in search.files_of(name)]
    steps = {file.name: file.manifest.step if file.manifest is not None else None for file in files}
    left_behind = dead_branches(storage, steps)
    sizes = {data.name: data.size_bytes for manifest in going for data in manifest.files}
    left = [*stale_leftovers(storage, now=now())]
    left += [name for names in dead_merges(storage, now=now()).values() for name in names]
    sizes |= {name: _size_bytes(storage, name) for name in left}
    if dry_run:
        removed = [*(manifest.name for manifest in going), *sizes]
    else:
        # Leftovers first: that needs no lease, and a full disk has room for a better one then.
        removed = sweep_stale(storage, now=now())
        removed += remove_old_chains(storage, tip_name=chain.name, keep_baselines=keep_baselines, now=now)
        removed += sweep_merges(storage, now=now())
    return Garbage(
        chains=found.chains,
        pinned=tuple(sorted(read_pins(storage))),
        dead_branches=_branches(left_behind, steps, removed),
        damaged=tuple(map(str, chain.skipped)),
        users=tuple(f"{lease.kind} by {lease.owner}" for lease in leases),
        removed=tuple(removed),
        removed_bytes=sum(sizes.get(name, 0) for name in removed),
    )


def _branches(
    left_behind: Mapping[str, LeftBehind], steps: Mapping[str, int | None], removed: Collection[str]
) -> tuple[DeadBranch, ...]:
    found = []
    for left in sorted(set(left_behind.values()), key=lambda left: left.start):
        names = [name for name, by in left_behind.items() if by == left]
        known = [step for name in names if (step := steps[name]) is not None]
        found.append(
            DeadBranch(
                left=left,
                first_step=min(known, default=0),
                last_step=max(known, default=0),
                removed=tuple(name for name in names if name in removed),
                kept=tuple(name for name in names if name not in removed),
            )
        )
    return tuple(found)


def _size_bytes(storage: Storage, name: str) -> int:
    try:
        return storage.size_bytes(name)
    except FileNotFoundError:
        return 0
