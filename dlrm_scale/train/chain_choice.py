"""Which checkpoint all ranks restore: the newest whose chain is whole, or the one that was asked for."""

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from datetime import timedelta
from functools import partial
from types import MappingProxyType

import torch.distributed as dist

from dlrm_scale.checkpoint import Chain, Location, Storage, find_chain, list_checkpoints, open_chain, open_storage
from dlrm_scale.checkpoint.chain.chain import open_manifests
from dlrm_scale.checkpoint.chain.leases import hold_chain
from dlrm_scale.checkpoint.files.format import OUTAGE_REMEDY
from dlrm_scale.errors import CheckpointError, MissingCheckpointError, StorageError
from dlrm_scale.sharding.ranks import Ranks

__all__ = ["agree_on_chain", "gather_patiently"]


def agree_on_chain(
    location: Location,
    ranks: Ranks,
    step: int | None = None,
    *,
    manifest: str = "",
    damaged: Mapping[str, str] = MappingProxyType({}),
) -> Chain | None:
    """Find the newest checkpoint whose files are all there, the same on every rank; a collective.

    Their bytes are checked while they are read (`restore_run`), so that a chain is read once. Until then a lease of
    rank 0 keeps them from removal: `release` of the chain gives it back.

    Args:
        location: of the run's checkpoints.
        ranks: the process group.
        step: take the checkpoint of this step instead of the newest.
        manifest: take the checkpoint of this manifest, by its name; "" for one of the others.
        damaged: what a restore has found to be wrong with data files, by their names; equal on all ranks.

    Returns:
        None if there is no checkpoint, or no way to the one asked for without damaged files.

    Raises:
        CheckpointError: checkpoints exist but none is whole, or ranks see different files.
        StorageError: they can't be read.
    """
    storage = open_storage(location)
    verdict: object = None
    held = ExitStack()
    if ranks.rank == 0:
        try:
            choose = partial(_choose, storage, step, manifest, damaged)
            chosen = held.enter_context(hold_chain(storage, choose, for_others=ranks.ranks > 1))
            verdict = (
                None if chosen is None else (_identity(chosen), chosen.skipped, chosen.detours, chosen.newest_seen)
            )
        except CheckpointError as error:
            verdict = error
        except OSError as error:
            verdict = StorageError(f"{storage.address} can't be read: {error}", remedy=OUTAGE_REMEDY)
    verdict = gather_patiently(verdict, ranks)[0]
    if isinstance(verdict, CheckpointError):
        raise verdict
    if verdict is None:
        return None
    assert isinstance(verdict, tuple)
    expected, skipped, detours, newest_seen = verdict
    failure: object = None
    try:
        # Not the cheapest chain by this rank's own look: a merge may have come in between.
        chain = open_manifests(storage, expected[1])
        if _identity(chain) != expected:
            raise CheckpointError(f"{chain.name} is another one here than on rank 0")
    except CheckpointError as error:
        failure = error
    except OSError as error:
        failure = StorageError(f"{storage.address} can't be read: {error}", remedy=OUTAGE_REMEDY)
    for rank, view in enumerate(gather_patiently(failure, ranks)):
        if isinstance(view, CheckpointError):
            held.close()
            kind = StorageError if isinstance(view, StorageError) else CheckpointError
            raise kind(
                f"rank {rank} can't open the checkpoint that rank 0 chose: {view.message}",
                remedy="put run.path on storage that all hosts share",
            )
    assert chain is not None
    return replace(chain, skipped=skipped, detours=detours, newest_seen=newest_seen, release=held.close)


def gather_patiently(value: object, ranks: Ranks) -> list[object]:
    """Every rank's value, by rank, however long one reads files: 1 TiB takes longer than a collective is waited for."""
    if ranks.ranks == 1:
        return [value]
    values: list[object] = [None] * ranks.ranks
    with _patient_group() as group:
        dist.all_gather_object(values, value, group=group)
    return values


@contextmanager
def _patient_group() -> Iterator[dist.ProcessGroup]:
    group = dist.new_group(backend="gloo", timeout=timedelta(days=1))
    yield group
    dist.destroy_process_group(group)


def _identity(chain: Chain) -> tuple[str, tuple[str, ...]]:
    return chain.tip_sha256, tuple(manifest.name for manifest in chain.manifests)


def _choose(storage: Storage, step: int | None, manifest: str, damaged: Mapping[str, str]) -> Chain | None:
    """The chain that is asked for; None if there is no checkpoint, or the one asked for is known to be damaged."""
    if step is None and not manifest:
        return find_chain(storage, damaged=damaged)
    name = manifest or _named(storage, step)
    try:
        return open_chain(storage, name, damaged=damaged)
    except CheckpointError:
        if damaged:
            return None
        raise


def _named(storage: Storage, step: int | None) -> str:
    rows = list_checkpoints(storage)
    names = {row.step: row.name for row in rows if row.state == "ok"}
    if step not in names:
        known = ", ".join(map(str, sorted(s for s in names if s is not None))) or "none"
        # one whose manifest can't be read may have any step
        kind = CheckpointError if any(row.step in (step, None) for row in rows) else MissingCheckpointError
        raise kind(f"{storage.address} has no whole checkpoint of step {step}", remedy=f"name one of these: {known}")
    return names[step]
