"""Removes files that no manifest names: leftovers of crashes, and never of a program that is still running.

A trainer's files belong to a start and a save. When a later start has claimed the root, an older one can't commit any
more; when a start has committed a later save, no rank of it writes the earlier one. A merge's files belong to its
number. It is dead when no live lease has the number (see `leases`), as a merge takes its lease before it writes and
gives it back after it has committed.

A merge that was only stopped for longer than its lease must not commit once its data goes. So the sweeper fences it:

    sweeper    create fences/<number>, remove its temporary manifest, read the manifests, remove data that none names
    merge      write the temporary manifest, look for the fence, look for its data, link the manifest

A temporary manifest from before the removal is gone, and the link fails, or has been linked, and the data stays; one
from after it finds the fence, or, when that has been taken away again, finds data missing.
"""

from collections.abc import Callable, Collection
from contextlib import suppress

from dlrm_scale.checkpoint.chain.leases import expired_leases, read_leases
from dlrm_scale.checkpoint.chain.starts import fence_name, newest_start
from dlrm_scale.checkpoint.files.file_names import (
    merge_number,
    parse_data_name,
    parse_manifest_name,
    parse_temporary_name,
)
from dlrm_scale.checkpoint.files.manifest_files import ManifestFile, read_manifests
from dlrm_scale.checkpoint.storage.storage import Storage

__all__ = ["dead_merges", "stale_leftovers", "sweep_merges", "sweep_orphans", "sweep_stale", "unnamed_data"]


def sweep_orphans(
    storage: Storage, *, start: int, keep: Collection[str] = (), progress: Callable[[], None] = lambda: None
) -> list[str]:
    """Remove a trainer's data files that no manifest names, and temporary manifests; only before its ranks write.

    Args:
        storage: the checkpoints.
        start: number of this start; what a newer one has written stays.
        keep: names of manifests that are missing and may be put back: their data stays.
        progress: called after each manifest that was read.

    Returns:
        Names of the removed files.

    Raises:
        OSError: a file can't be removed.
    """
    # In this order: an older trainer's link either fails then, or has been made and is read below.
    temporary = [
        name
        for name in storage.list_names("manifests")
        if (numbers := parse_temporary_name(name)) is not None and numbers[1] <= start
    ]
    removed = _remove(storage, temporary)
    data_names = _unnamed(storage.list_names("data"), read_manifests(storage, progress))
    kept = {parse_manifest_name(name) for name in keep}
    orphans = [
        name
        for name in data_names
        if (numbers := parse_data_name(name)) is not None and numbers[1] <= start and numbers[:2] not in kept
    ]
    return removed + _remove(storage, orphans)


def unnamed_data(storage: Storage) -> list[str]:
    """Names of data files that no manifest names; somebody may be about to."""
    return _unnamed(storage.list_names("data"), read_manifests(storage))


def stale_leftovers(storage: Storage, *, now: float) -> list[str]:
    """Names of leftovers that can be told beside a running trainer, and of leases that have ended.

    Args:
        storage: the checkpoints.
        now: Unix seconds.
    """
    # In this order: what a start before this one has committed, and knows that it has, was linked before the newer
    # claim, so it is read below. A claim that comes later makes nothing stale that was listed here.
    start = newest_start(storage)
    listed = storage.list_names("manifests") + storage.list_names("data")
    files = read_manifests(storage)
    temporary = [name for name in listed if parse_temporary_name(name) is not None]
    unnamed = _unnamed([name for name in listed if name.startswith("data/")], files)
    stale = _stale(temporary + unnamed, start, [file.name for file in files])
    return stale + expired_leases(storage, now=now)


def sweep_stale(storage: Storage, *, now: float) -> list[str]:
    """Remove what `stale_leftovers` finds.

    Raises:
        OSError: a file can't be removed.
    """
    # As in `sweep_orphans`: a link that is still to come either fails then, or has been made and is read below.
    start = newest_start(storage)
    listed = storage.list_names("manifests")
    temporary = [name for name in listed if parse_temporary_name(name) is not None]
    removed = _remove(storage, _stale(temporary, start, listed))
    return removed + _remove(storage, stale_leftovers(storage, now=now))


def dead_merges(storage: Storage, *, now: float) -> dict[int, list[str]]:
    """Uncommitted files of merges that nobody runs, by the merge's number.

    Args:
        storage: the checkpoints.
        now: Unix seconds.

    Raises:
        OSError: a lease can't be read.
    """
    # In this order: whoever had files when they were listed had his lease before, and is seen or has committed.
    listed = storage.list_names("manifests") + storage.list_names("data") + storage.list_names("fences")
    live = {lease.token for lease in read_leases(storage, now=now) if lease.kind == "merge"}
    unnamed = set(_unnamed([name for name in listed if name.startswith("data/")], read_manifests(storage)))
    found: dict[int, list[str]] = {}
    for name in listed:
        number = merge_number(name)
        if name.startswith("fences/") and name.removeprefix("fences/").isdecimal():
            number = int(name.removeprefix("fences/"))
        elif name in unnamed or name.endswith(".tmp"):
            number = merge_number(name)
        else:
            number = None
        if number is not None and str(number) not in live:
            found.setdefault(number, []).append(name)
    return found


def sweep_merges(storage: Storage, *, now: float) -> list[str]:
    """Remove what merges that nobody runs have left.

    Args:
        storage: the checkpoints.
        now: Unix seconds.

    Returns:
        Names of the removed files.

    Raises:
        OSError: a file can't be removed.
    """
    removed: list[str] = []
    for number in dead_merges(storage, now=now):
        storage.make_folders("fences")
        with suppress(FileExistsError):
            # empty: a full disk has room for it
            storage.write_durably(fence_name(number), b"")
        storage.sync_folder("fences")
        # Listed anew: it may have written one since.
        temporary = [
            name for name in storage.list_names("manifests") if name.endswith(".tmp") and merge_number(name) == number
        ]
        removed += _remove(storage, temporary)
        data_names = {name for name in storage.list_names("data") if merge_number(name) == number}
        removed += _remove(storage, _unnamed(sorted(data_names), read_manifests(storage)))
        removed += _remove(storage, [fence_name(number)])
    return [name for name in removed if not name.startswith("fences/")]


def _stale(names: list[str], start: int, manifests: list[str]) -> list[str]:
    """Those of a trainer's files that no manifest will name: of an older start, or of a save before a committed one."""
    saved = [numbers[0] for name in manifests if (numbers := parse_manifest_name(name)) and numbers[1] == start]
    newest = max(saved, default=0)
    found = []
    for name in names:
        numbers = parse_temporary_name(name) or parse_data_name(name)
        if numbers is not None and (numbers[1] < start or (numbers[1] == start and numbers[0] < newest)):
            found.append(name)
    return found


def _unnamed(data_names: list[str], files: list[ManifestFile]) -> list[str]:
    """Data files that no manifest names, and that none that can't be read might name."""
    named = {data.name for file in files if file.manifest is not None for data in file.manifest.files}
    unread = [file.name for file in files if file.manifest is None]
    unread_merges = {merge_number(name) for name in unread}
    unread_seqs = {numbers[0] for name in unread if (numbers := parse_manifest_name(name)) is not None}
    return [
        name
        for name in data_names
        if name not in named
        and (parse_data_name(name) or (None,))[0] not in unread_seqs
        and (merge_number(name) is None or merge_number(name) not in unread_merges)
    ]


def _remove(storage: Storage, names: list[str]) -> list[str]:
    if any(name.startswith("data/") for name in names):
        # A manifest that a killed program removed may come back after a loss of power; its removal has to be durable
        # before its data goes.
        storage.sync_folder("manifests")
    for name in names:
        storage.remove(name)
    for folder in sorted({name.split("/")[0] for name in names}):
        storage.sync_folder(folder)
    return names
