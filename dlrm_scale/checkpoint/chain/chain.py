"""Finds what to resume from: a baseline and the deltas after it, linked by the hashes of their manifests.

There is no pointer to the latest checkpoint. The newest one that a valid chain leads to is the latest, newest meaning
(trainer start, sequence number): a later start's commits replace what an older one wrote after the fork. Of several
chains to it, through merges or not, the one is taken that a restore reads fastest (see `chain_search`).
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType
from typing import Literal

from dlrm_scale.checkpoint.chain.chain_search import ChainSearch
from dlrm_scale.checkpoint.files.file_names import checkpoint_name, manifest_name
from dlrm_scale.checkpoint.files.format import file_fault
from dlrm_scale.checkpoint.files.manifest import Manifest, ParentRecord
from dlrm_scale.checkpoint.files.manifest_files import (
    ManifestFile,
    check_format,
    checkpoint_age,
    format_fault,
    read_manifest,
    read_manifests,
)
from dlrm_scale.checkpoint.storage.storage import Location, Storage, open_storage
from dlrm_scale.errors import CheckpointError, MissingCheckpointError

__all__ = [
    "Chain",
    "ManifestFile",
    "Skipped",
    "check_format",
    "find_chain",
    "open_chain",
    "open_manifests",
    "open_step",
    "read_manifests",
]


@dataclass(frozen=True, kw_only=True)
class Skipped:
    """A newer checkpoint that can't be used.

    Attributes:
        name: its manifest.
        step: its step; None if the manifest can't be read.
        reason: naming the damaged file.
    """

    name: str
    step: int | None
    reason: str

    def __str__(self) -> str:
        """One line for the user."""
        step = "" if self.step is None else f" (step {self.step})"
        return f"{self.name}{step}: {self.reason}"


@dataclass(frozen=True, kw_only=True)
class Chain:
    """A baseline and its deltas in the order in which they are applied.

    Attributes:
        storage: where the checkpoints are.
        manifests: the first is the baseline, the last the checkpoint to resume from.
        tip_sha256: hash by which deltas on the last one know it; of a merge that of the checkpoint it is equal to.
        skipped: newer checkpoints that can't be used, and why.
        release: to be called after the restore; gives back a lease that keeps its files from removal, if it has one.
        detours: what is wrong with files that the search for it met, and that this chain does without.
        newest_seen: name of the newest checkpoint that was there when this one was chosen, whole or not; "" if that
            isn't known.
    """

    storage: Storage
    manifests: tuple[Manifest, ...]
    tip_sha256: str
    skipped: tuple[Skipped, ...] = ()
    detours: tuple[str, ...] = ()
    newest_seen: str = ""
    release: Callable[[], None] = field(default=lambda: None, compare=False, repr=False)

    @property
    def name(self) -> str:
        """The trainer's manifest of the checkpoint to resume from, which may be gone where a merge stands for it."""
        return manifest_name(self.tip.seq, self.tip.start)

    @property
    def tip(self) -> Manifest:
        """The checkpoint to resume from."""
        return self.manifests[-1]

    @property
    def checkpoint(self) -> ParentRecord:
        """The checkpoint to resume from, as deltas on it name it."""
        return ParentRecord(name=self.name, sha256=self.tip_sha256)

    @property
    def step(self) -> int:
        """Its step."""
        return self.tip.step

    @property
    def baseline_bytes(self) -> int:
        """Bytes of the baseline's data."""
        return self.manifests[0].size_bytes

    @property
    def delta_bytes(self) -> int:
        """Bytes of the deltas' data."""
        return sum(manifest.size_bytes for manifest in self.manifests[1:])

    @property
    def size_bytes(self) -> int:
        """Bytes that a restore reads, over all ranks."""
        return self.baseline_bytes + self.delta_bytes


def find_chain(
    location: Location,
    *,
    verify: Literal["size", "full"] = "size",
    damaged: Mapping[str, str] = MappingProxyType({}),
) -> Chain | None:
    """Find the newest checkpoint whose whole chain is valid.

    Args:
        location: of the checkpoints.
        verify: `size` checks that every data file is there with its size, `full` reads and hashes all of them.
        damaged: what a restore has found to be wrong with data files, by their names; it goes by other files.

    Returns:
        The chain, with what was skipped and why; None if nothing was ever committed.

    Raises:
        CheckpointError: there are checkpoints and none is valid, or they have a newer format.
    """
    storage = open_storage(location)
    check_format(storage)
    search = ChainSearch(storage, read_all=verify == "full", damaged=damaged)
    skipped: list[Skipped] = []
    for name in reversed(search.checkpoints):
        found = _chain_to(search, storage, search.named(name))
        if isinstance(found, Chain):
            return replace(found, skipped=tuple(skipped))
        steps = [file.manifest.step for file in search.files_of(name) if file.manifest is not None]
        skipped.append(Skipped(name=name, step=steps[0] if steps else None, reason=found))
    if skipped:
        listed = "\n  ".join(str(skip) for skip in skipped)
        raise CheckpointError(
            f"no checkpoint in {storage.address} is valid:\n  {listed}",
            remedy="restore the named files from a copy, or start a new run in another run.path",
        )
    return None


def open_chain(location: Location, name: str, *, damaged: Mapping[str, str] = MappingProxyType({})) -> Chain:
    """Open the cheapest chain to the checkpoint `name`: what rank 0 found and told the others.

    Args:
        location: of the checkpoints.
        name: of its manifest, which may be gone where a merge stands for it; a merge's name means what it is equal to.
        damaged: as in `find_chain`.

    Raises:
        CheckpointError: it can't be read or isn't valid.
    """
    storage = open_storage(location)
    check_format(storage)
    search = ChainSearch(storage, damaged=damaged)
    found = _chain_to(search, storage, search.named(checkpoint_name(name) or name))
    if isinstance(found, Chain):
        return found
    raise CheckpointError(f"{name} in {storage.address} can't be used: {found}")


def open_manifests(location: Location, names: Sequence[str]) -> Chain:
    """Open the chain of these manifests, oldest first: exactly what another rank has chosen.

    Raises:
        CheckpointError: one can't be read, isn't based on the one before, or a data file isn't there.
    """
    storage = open_storage(location)
    files = [read_manifest(storage, name) for name in names]
    manifests = []
    for file in files:
        if file.manifest is None:
            raise CheckpointError(file.reason or f"{file.name} can't be read")
        manifests.append(file.manifest)
        for data in file.manifest.files:
            fault = file_fault(storage, data, read_all=False)
            if fault is not None:
                raise CheckpointError(f"{data.name} {fault}")
    for before, manifest in zip(files, manifests[1:], strict=False):
        if manifest.parent != before.checkpoint:
            raise CheckpointError(f"{before.name} isn't the one that {manifest.name} was made from")
    checkpoint = files[-1].checkpoint
    assert checkpoint is not None
    return Chain(storage=storage, manifests=tuple(manifests), tip_sha256=checkpoint.sha256)


def open_step(location: Location, step: int) -> Chain:
    """Open the cheapest chain to the newest checkpoint of a step.

    Raises:
        MissingCheckpointError: no checkpoint has this step, and all manifests can be read.
        CheckpointError: it isn't valid, or it may be one whose manifest can't be read.
    """
    storage = open_storage(location)
    check_format(storage)
    search = ChainSearch(storage)
    steps: set[int] = set()
    for name in reversed(search.checkpoints):
        found = {file.manifest.step for file in search.files_of(name) if file.manifest is not None}
        steps |= found
        if step in found:
            chain = _chain_to(search, storage, search.named(name))
            if isinstance(chain, Chain):
                return chain
            raise CheckpointError(
                f"{name} (step {step}) in {storage.address} can't be used: {chain}",
                remedy="put the named files back from a copy, or name another step that `checkpoint ls` lists",
            )
    known = ", ".join(map(str, sorted(steps))) or "none"
    unread = [file.reason for name in search.checkpoints for file in search.files_of(name) if file.reason is not None]
    kind = CheckpointError if unread else MissingCheckpointError
    raise kind(
        f"{storage.address} has no checkpoint of step {step}" + "".join(f"\n  {reason}" for reason in unread),
        remedy=f"name one of these: {known}",
    )


def _chain_to(search: ChainSearch, storage: Storage, checkpoint: ParentRecord | str) -> Chain | str:
    """The chain to a checkpoint, or why there is none."""
    if isinstance(checkpoint, str):
        return checkpoint
    path = search.path_to(checkpoint)
    if isinstance(path, str):
        return path
    used, age = {file.name for file in path.files}, checkpoint_age(path.checkpoint.name)
    fault = format_fault(storage)
    return Chain(
        storage=storage,
        manifests=tuple(file.manifest for file in path.files if file.manifest is not None),
        tip_sha256=path.checkpoint.sha256,
        detours=(
            *(() if fault is None else (f"FORMAT {fault}",)),
            *(reason for name, reason in search.faults.items() if name not in used and checkpoint_age(name) <= age),
        ),
        newest_seen=search.checkpoints[-1],
    )
