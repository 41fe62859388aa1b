"""Removes what no restore needs: old chains after a commit, and the leftovers of a crash at a start.

Manifests go first, then their data, so that a crash in between leaves files without a manifest, never the reverse.
What can't be read isn't removed, and neither is data that it might name.

A file that no manifest names may be one that a rank is writing just now for the next save. So a commit removes only
data of the manifests that it removes; only a start, before any rank writes, looks for files without a manifest.
"""

from collections.abc import Callable, Collection

from dlrm_scale.checkpoint.chain import ManifestFile, read_manifests
from dlrm_scale.checkpoint.format import file_fault
from dlrm_scale.checkpoint.manifest import (
    Manifest,
    parse_data_name,
    parse_manifest_name,
    parse_temporary_name,
)
from dlrm_scale.checkpoint.storage import Storage

__all__ = ["remove_old_chains", "remove_superseded", "sweep_orphans"]


def remove_old_chains(
    storage: Storage,
    *,
    tip_name: str,
    keep_baselines: int,
    pinned: Collection[str] = (),
    progress: Callable[[], None] = lambda: None,
) -> list[str]:
    """Keep the last `keep_baselines` chains in the history of a commit and remove everything older than it.

    History follows parents, through baselines too, so that chains that a resume has passed over as damaged don't
    count. Neither does one whose files aren't all there. Nothing is removed while there are fewer chains.

    Args:
        storage: the checkpoints.
        tip_name: manifest of the newest commit.
        keep_baselines: chains to keep, at least 1.
        pinned: manifests of checkpoints that are kept besides, with what they are based on.
        progress: called after each removal.

    Returns:
        Names of the removed files.

    Raises:
        OSError: a file can't be removed; what is left is still consistent.
    """
    files = {file.name: file for file in read_manifests(storage)}
    kept = _history(storage, files, tip_name, keep_baselines)
    if kept is None:
        return []
    tip_age = _age(kept[0])
    kept_names = {manifest.name for manifest in kept} | _with_bases(files, pinned)
    old = [
        file.manifest
        for file in reversed(files.values())
        if file.manifest is not None and file.name not in kept_names and _age(file.manifest) < tip_age
    ]
    removed = _remove(storage, [manifest.name for manifest in old], progress)
    return removed + _remove(storage, [file.name for manifest in old for file in manifest.files], progress)


def remove_superseded(
    storage: Storage,
    *,
    tip_name: str,
    keep_baselines: int,
    pinned: Collection[str] = (),
    progress: Callable[[], None] = lambda: None,
) -> list[str]:
    """After the commit of a delta with all rows since its baseline, remove those of that baseline that it replaces.

    The last `keep_baselines` stay, so that a damaged one isn't the only one; one whose files aren't all there doesn't
    count. What they are based on stays too, and other baselines' deltas, which `remove_old_chains` looks after.

    Args, returns and raises as `remove_old_chains`.
    """
    files = {file.name: file for file in read_manifests(storage)}
    tip_file = files.get(tip_name)
    if tip_file is None or tip_file.manifest is None:
        return []
    tip = tip_file.manifest
    baselines = _baselines(files, _with_bases(files, [tip_name]))
    older = [
        file.manifest
        for file in reversed(files.values())
        if file.manifest is not None and file.manifest.kind != "baseline" and _age(file.manifest) < _age(tip)
    ]
    deltas = [m for m in older if _baselines(files, _with_bases(files, [m.name])) == baselines]
    whole = [m.name for m in deltas if all(file_fault(storage, f, read_all=False) is None for f in m.files)]
    kept = _with_bases(files, [tip_name, *whole[: keep_baselines - 1], *pinned])
    old = [manifest for manifest in deltas if manifest.name not in kept]
    removed = _remove(storage, [manifest.name for manifest in old], progress)
    return removed + _remove(storage, [file.name for manifest in old for file in manifest.files], progress)


def sweep_orphans(storage: Storage, *, start: int) -> list[str]:
    """Remove data files that no manifest names, and temporary manifests; only before the ranks of a start write.

    Args:
        storage: the checkpoints.
        start: number of this start; what a newer one has written stays.

    Returns:
        Names of the removed files.

    Raises:
        OSError: a file can't be removed.
    """
    files = read_manifests(storage)
    named = {data.name for file in files if file.manifest is not None for data in file.manifest.files}
    kept_seqs = {_seq_of(file) for file in files if file.manifest is None}
    orphans = [
        name
        for name in storage.list_names("data")
        if name not in named
        and (numbers := parse_data_name(name)) is not None
        and numbers[0] not in kept_seqs
        and numbers[1] <= start
    ]
    temporary = [
        name
        for name in storage.list_names("manifests")
        if (numbers := parse_temporary_name(name)) is not None and numbers[1] <= start
    ]
    return _remove(storage, temporary) + _remove(storage, orphans)


def _history(
    storage: Storage, files: dict[str, ManifestFile], tip_name: str, keep_baselines: int
) -> list[Manifest] | None:
    """Manifests from the tip back to the `keep_baselines`-th whole chain's baseline; None if there aren't so many."""
    history: list[Manifest] = []
    whole_chains, is_whole = 0, True
    name: str | None = tip_name
    while name is not None:
        manifest = files[name].manifest if name in files else None
        if manifest is None:
            return None
        history.append(manifest)
        is_whole = is_whole and all(file_fault(storage, file, read_all=False) is None for file in manifest.files)
        if manifest.kind == "baseline":
            whole_chains += is_whole
            is_whole = True
            if whole_chains == keep_baselines:
                return history
        name = manifest.parent.name if manifest.parent else None
    return None


def _with_bases(files: dict[str, ManifestFile], names: Collection[str]) -> set[str]:
    """Names of manifests and of all that they are based on, back to a baseline."""
    found: set[str] = set()
    for tip in names:
        name: str | None = tip
        while name is not None and name in files and name not in found:
            found.add(name)
            manifest = files[name].manifest
            based = manifest is not None and manifest.kind != "baseline" and manifest.parent is not None
            name = manifest.parent.name if based and manifest is not None and manifest.parent is not None else None
    return found


def _baselines(files: dict[str, ManifestFile], names: Collection[str]) -> set[str]:
    """Those of the names that are baselines; none where a chain is broken."""
    found = ((name, files[name].manifest) for name in names)
    return {name for name, manifest in found if manifest is not None and manifest.kind == "baseline"}


def _remove(storage: Storage, names: list[str], progress: Callable[[], None] = lambda: None) -> list[str]:
    for name in names:
        storage.remove(name)
        progress()
    for folder in sorted({name.split("/")[0] for name in names}):
        storage.sync_folder(folder)
    return names


def _age(manifest: Manifest) -> tuple[int, int]:
    return manifest.start, manifest.seq


def _seq_of(file: ManifestFile) -> int:
    numbers = parse_manifest_name(file.name)
    return numbers[0] if numbers else -1
