"""Removes what no restore needs any more.

Manifests go first, then their data, so that a crash in between leaves files without a manifest, never the reverse.
What can't be read isn't removed, and neither is data that it might name. Leases and pins of others are respected, and
one removal runs at a time (see `leases`).

    B1 <- d2 <- d3 <- d4 <- d5          M3 is a merged baseline equal to d3
    M3 <- d4 <- d5                      two chains that share no data file: M3 d4 d5, and B1 d2 d3

A file that no manifest names may be one that a rank is writing just now for the next save. So this module removes only
data of the manifests that it removes; see `sweep` for the rest.
"""

import json
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from dlrm_scale.checkpoint.chain.chain_search import ChainSearch, Path
from dlrm_scale.checkpoint.chain.leases import Lease, keep_renewing, read_leases
from dlrm_scale.checkpoint.chain.pins import read_pins
from dlrm_scale.checkpoint.chain.starts import start_name, starts_after
from dlrm_scale.checkpoint.files.file_names import checkpoint_name, merge_number, parse_data_name, parse_manifest_name
from dlrm_scale.checkpoint.files.manifest import Manifest, ParentRecord
from dlrm_scale.checkpoint.files.manifest_files import ManifestFile, checkpoint_age
from dlrm_scale.checkpoint.storage.storage import Storage
from dlrm_scale.errors import CheckpointError
from dlrm_scale.units import MIB

__all__ = ["OldChains", "old_chains", "remove_old_chains", "remove_superseded"]


@dataclass(frozen=True, kw_only=True)
class OldChains:
    """What retention would do.

    Attributes:
        chains: that are kept, the newest first; they share no data file.
        removable: manifests that no kept chain and no pin needs, the newest first; empty while there are fewer chains
            than asked for.
    """

    chains: tuple[Path, ...]
    removable: tuple[Manifest, ...]


def old_chains(
    storage: Storage, search: ChainSearch, tip: ParentRecord, *, keep_baselines: int, pinned: Collection[str] = ()
) -> OldChains:
    """Choose what to keep, and find what is old.

    The newest chain is the one to the tip. The next ones lead to the newest checkpoints in its history that can be
    reached without its data files, each by the cheapest way. History follows parents, through baselines too, so that
    chains that a resume has passed over as damaged don't count; neither does one whose files aren't all there.

    Besides these and pinned checkpoints, what a trainer's next delta may be based on is kept: what the newest one is
    based on, and what a start that hasn't saved yet goes on from. So is what checkpoints newer than the tip need: the
    tip of a trainer that another one has taken over from, or of a merge of an older step, need not be in their history.

    Args:
        storage: the checkpoints.
        search: over them.
        tip: the newest commit; nothing newer is removed.
        keep_baselines: chains to keep, at least 1.
        pinned: names of more pinned checkpoints, besides those in the root.

    Raises:
        CheckpointError: the record of a start that has saved nothing can't be read, so it isn't known what it goes on
            from.
    """
    first = search.path_to(tip)
    chains = [first] if isinstance(first, Path) else []
    history = sorted(_history(search, tip.name), key=checkpoint_age, reverse=True) if chains else []
    used: set[str] = {name for chain in chains for name in chain.data_names}
    for name in history:
        if len(chains) == keep_baselines:
            break
        checkpoint = search.named(name)
        path = search.path_to(checkpoint, without=used) if isinstance(checkpoint, ParentRecord) else ""
        if isinstance(path, Path):
            chains.append(path)
            used |= path.data_names
    if len(chains) < keep_baselines:
        return OldChains(chains=tuple(chains), removable=())
    kept = {file.name for chain in chains for file in chain.files}
    # What is damaged may be mended by a copy; it goes once enough newer chains are whole.
    since = checkpoint_age(chains[-1].checkpoint.name)
    kept |= _ways_to(search, _broken(search, [name for name in history if checkpoint_age(name) > since]))
    for name in {*read_pins(storage), *pinned, *_bases_of_next(storage, search), *_newer(search, tip.name)}:
        kept |= _needed_for(search, name)
    # It says what the next one is based on, even where a merge stands for it.
    kept |= {file.name for file in search.files_of(tip.name) if file.manifest and file.manifest.since_baseline}
    old = [
        file.manifest
        for file in _all_files(search)
        if file.manifest is not None and file.name not in kept and checkpoint_age(file.name) <= checkpoint_age(tip.name)
    ]
    return OldChains(chains=tuple(chains), removable=tuple(old))


def remove_old_chains(
    storage: Storage,
    *,
    tip_name: str,
    keep_baselines: int,
    pinned: Collection[str] = (),
    progress: Callable[[], None] = lambda: None,
    now: Callable[[], float] = time.time,
) -> list[str]:
    """Keep the newest chains that share no data file, and remove what is older than the newest commit and not needed.

    Nothing is removed while there are fewer chains, and while another removal runs.

    Args:
        storage: the checkpoints.
        tip_name: the newest commit, by the name of its trainer's manifest.
        keep_baselines: chains to keep, at least 1.
        pinned: names of checkpoints that are kept besides those pinned in the root.
        progress: called after each file that was looked at or removed.
        now: a clock in Unix seconds.

    Returns:
        Names of the removed files.

    Raises:
        OSError: a file can't be removed; what is left is still consistent.
        CheckpointError: as `old_chains`.
    """
    with _removal(storage, now) as lease:
        if lease is None:
            return []
        search = ChainSearch(storage, progress=progress)
        tip = search.named(tip_name)
        if isinstance(tip, str):
            return []
        found = old_chains(storage, search, tip, keep_baselines=keep_baselines, pinned=pinned)
        return _remove_manifests(storage, search, lease, found.removable, pinned, progress, now)


def remove_superseded(
    storage: Storage,
    *,
    tip_name: str,
    keep_baselines: int,
    pinned: Collection[str] = (),
    progress: Callable[[], None] = lambda: None,
    now: Callable[[], float] = time.time,
) -> list[str]:
    """After the commit of a delta with all rows since its baseline, remove those of that baseline that it replaces.

    The last `keep_baselines` stay, so that a damaged one isn't the only one; one whose files aren't all there doesn't
    count. What they, newer checkpoints and deltas to come are based on stays too, and other baselines' deltas, which
    `remove_old_chains` looks after.

    Args, returns and raises as `remove_old_chains`.
    """
    with _removal(storage, now) as lease:
        if lease is None:
            return []
        search = ChainSearch(storage, progress=progress)
        tip = search.named(tip_name)
        found = search.path_to(tip) if isinstance(tip, ParentRecord) else ""
        if not isinstance(found, Path):
            return []
        kept = {file.name for file in found.files}
        older = [
            file
            for file in _all_files(search)
            if file.manifest is not None
            and file.manifest.kind == "delta"
            and checkpoint_age(file.name) < checkpoint_age(tip_name)
            and found.files[0].name in _ways_to(search, [file.name])
        ]
        whole = 1
        for file in older:
            if whole == keep_baselines:
                break
            path = search.path_to(ParentRecord(name=file.name, sha256=file.sha256))
            if isinstance(path, Path) and file.name not in kept:
                whole += 1
                kept |= {base.name for base in path.files}
        for name in {*read_pins(storage), *pinned, *_bases_of_next(storage, search), *_newer(search, tip_name)}:
            kept |= _needed_for(search, name)
        old = [file.manifest for file in older if file.manifest is not None and file.name not in kept]
        return _remove_manifests(storage, search, lease, old, pinned, progress, now)


@contextmanager
def _removal(storage: Storage, now: Callable[[], float]) -> Iterator[Lease | None]:
    """The right to remove; None while another has it."""
    lease = Lease(storage, "removal", now=now)
    with keep_renewing(lease):
        lease.take()
        others = [o for o in read_leases(storage, now=now()) if o.kind == "removal" and o.token != lease.token]
        yield None if others else lease


def _remove_manifests(
    storage: Storage,
    search: ChainSearch,
    lease: Lease,
    old: Collection[Manifest],
    pinned: Collection[str],
    progress: Callable[[], None],
    now: Callable[[], float],
) -> list[str]:
    """Say what is to be removed, then look for readers, new pins and new starts, then remove what is left."""
    if not old:
        return []
    lease.take([manifest.name for manifest in old])
    users = [other for other in read_leases(storage, now=now()) if other.kind != "removal"]
    held = {manifest.name for manifest in old if any(user.holds_any([manifest.name]) for user in users)}
    for name in {*read_pins(storage), *pinned, *_bases_of_next(storage, search)}:
        held |= _needed_for(search, name)
    going = [manifest for manifest in old if manifest.name not in held]
    gone = {manifest.name for manifest in going}
    # Data that another manifest names, or one that can't be read might name by its own name.
    others = [file for file in _all_files(search) if file.name not in gone]
    named = {data.name for file in others if file.manifest is not None for data in file.manifest.files}
    unread = {_writer(file.name) for file in others if file.manifest is None}
    data_names = [data.name for manifest in going for data in manifest.files]
    data_names = [name for name in data_names if name not in named and _writer(name) not in unread]
    # A trainer or a merge may just have linked what stays and be about to sync it. After a loss of power the removals
    # could be there, and the new name not.
    storage.sync_folder("manifests")
    removed = _remove(storage, [manifest.name for manifest in going], lease, progress)
    return removed + _remove(storage, data_names, lease, progress)


def _remove(storage: Storage, names: list[str], lease: Lease, progress: Callable[[], None]) -> list[str]:
    for name in names:
        lease.check()
        storage.remove(name)
        progress()
    for folder in sorted({name.split("/")[0] for name in names}):
        storage.sync_folder(folder)
    return names


def _history(search: ChainSearch, tip_name: str) -> set[str]:
    """Names of the checkpoint and of all that it and its merges come from, through baselines."""
    found: set[str] = set()
    left = [tip_name]
    while left:
        name = left.pop()
        if name not in found:
            found.add(name)
            manifests = [file.manifest for file in search.files_of(name)]
            left += [m.parent.name for m in manifests if m is not None and m.parent is not None]
    return found


def _broken(search: ChainSearch, names: Sequence[str]) -> list[str]:
    """Those of some checkpoints, the newest first, that no whole chain leads to."""
    whole: set[str] = set()
    broken = []
    for name in names:
        if name in whole:
            continue
        checkpoint = search.named(name)
        path = search.path_to(checkpoint) if isinstance(checkpoint, ParentRecord) else ""
        if isinstance(path, Path):
            # Every link of a whole chain is the end of one: no search for each delta.
            whole |= {file.checkpoint.name for file in path.files if file.checkpoint is not None}
        else:
            broken.append(name)
    return broken


def _ways_to(search: ChainSearch, names: Collection[str]) -> set[str]:
    """Names of all manifests on any way from a baseline to these checkpoints."""
    found: set[str] = set()
    seen: set[str] = set()
    left = list(names)
    while left:
        name = left.pop()
        if name in seen:
            continue
        seen.add(name)
        for file in search.files_of(name):
            found.add(file.name)
            manifest = file.manifest
            if manifest is not None and manifest.kind != "baseline" and manifest.parent is not None:
                left.append(manifest.parent.name)
    return found


def _needed_for(search: ChainSearch, name: str) -> set[str]:
    """Names of the manifests on the cheapest way to a checkpoint; on all ways, where none is whole."""
    checkpoint = search.named(checkpoint_name(name) or name)
    path = search.path_to(checkpoint) if isinstance(checkpoint, ParentRecord) else ""
    return {file.name for file in path.files} if isinstance(path, Path) else _ways_to(search, [name])


def _newer(search: ChainSearch, tip_name: str) -> list[str]:
    """Names of the checkpoints that are newer than the tip."""
    return [name for name in search.checkpoints if checkpoint_age(name) > checkpoint_age(tip_name)]


def _bases_of_next(storage: Storage, search: ChainSearch) -> Iterator[str]:
    """What a delta in flight may be based on, besides the newest checkpoint.

    One with all rows since its baseline has the parent of the newest delta; the first one of a start has what it
    resumed from, which need not be the newest. Of all starts that the search knows no commit of, not of the newest
    alone: one may have committed since, and another one go on from that.
    """
    manifests = [file.manifest for file in _all_files(search) if file.manifest is not None]
    newest = next((manifest for manifest in manifests if manifest.merge is None), None)
    if newest is not None and newest.since_baseline and newest.parent is not None:
        yield newest.parent.name
    for start in starts_after(storage, max((manifest.start for manifest in manifests), default=0)):
        name = start_name(start)
        try:
            continues = json.loads(storage.read(name, MIB))["continues"]
        except FileNotFoundError:
            continue  # it has given its claim back
        except (OSError, EOFError, ValueError, KeyError, TypeError) as error:
            raise CheckpointError(
                f"{name} can't be read, so nothing is removed that it might go on from: {error!r}",
                remedy="try again; if the trainer of this start is gone, resume the run once",
            ) from error
        if continues is not None:
            yield str(continues)


def _all_files(search: ChainSearch) -> list[ManifestFile]:
    """Every manifest, the newest first, so that what others are based on goes last."""
    return [file for name in reversed(search.checkpoints) for file in reversed(search.files_of(name))]


def _writer(name: str) -> object:
    """What a manifest's name has in common with those of its data: merge number, or sequence number and start."""
    number = merge_number(name)
    return number if number is not None else parse_manifest_name(name) or parse_data_name(name)
