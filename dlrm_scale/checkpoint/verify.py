"""What checkpoints a folder holds and whether they are sound."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal

from dlrm_scale.checkpoint.chain.chain import Chain, find_chain, open_chain, open_step
from dlrm_scale.checkpoint.chain.dead_branches import LeftBehind, dead_branches
from dlrm_scale.checkpoint.files.file_names import checkpoint_name, parse_manifest_name
from dlrm_scale.checkpoint.files.format import file_fault, tensors_are_intact
from dlrm_scale.checkpoint.files.manifest import FileRecord, Manifest, ParentRecord
from dlrm_scale.checkpoint.files.manifest_files import (
    ManifestFile,
    check_format,
    format_fault,
    list_manifests,
    no_checkpoint,
    read_manifests,
)
from dlrm_scale.checkpoint.storage.storage import Location, Storage, open_storage
from dlrm_scale.errors import CheckpointError, MissingCheckpointError

__all__ = [
    "CheckpointRow",
    "Problem",
    "VerifyLevel",
    "chain_of_step",
    "data_bytes",
    "list_checkpoints",
    "read_checkpoint",
    "verify",
]

VerifyLevel = Literal["manifest", "size", "full"]
"""manifest: manifests and their links; size: also that data files are there; full: also every byte. (A whole restore is
checked by `restore_check`.)"""

HEADER_FAULT = (
    "has a damaged header: its rows and values are intact, and restores, exports and merges use them, but safetensors "
    "can't open the file any more"
)


@dataclass(frozen=True, kw_only=True)
class Problem:
    """One damaged file.

    Attributes:
        file: its name in the folder of checkpoints.
        reason: what is wrong with it.
        breaks: manifests of the checkpoints that can't be restored for it, oldest first.
    """

    file: str
    reason: str
    breaks: tuple[str, ...]


@dataclass(frozen=True, kw_only=True)
class CheckpointRow:
    """One checkpoint in a listing.

    Attributes:
        seq: sequence number.
        start: trainer start that wrote it.
        kind: `baseline`, `delta`, `merged`, or `?` if unreadable.
        step: its step.
        rows: table rows in it.
        bytes: of its data files.
        created_unix_seconds: when it was committed.
        state: `ok`, or what is wrong with it or with what it is based on.
        name: its manifest.
        dead_branch: which start has left it behind; None if training goes on from it, or may.
    """

    seq: int
    start: int
    kind: str
    step: int | None
    rows: int
    bytes: int
    created_unix_seconds: float | None
    state: str
    name: str
    dead_branch: LeftBehind | None = None


def list_checkpoints(location: Location) -> list[CheckpointRow]:
    """List all checkpoints, oldest first; data files are checked for presence and size.

    Raises:
        CheckpointError: the folder is missing or has a newer format.
    """
    storage = _open(location)
    check_format(storage)
    broken: dict[str, str] = {}
    rows = []
    for problem in _problems(storage, "size"):
        for name in problem.breaks:
            broken.setdefault(name, f"{problem.file} {problem.reason}")
    files = read_manifests(storage)
    dead = dead_branches(storage, {file.name: file.manifest.step if file.manifest else None for file in files})
    for file in files:
        seq, start = parse_manifest_name(file.name) or (0, 0)
        m = file.manifest
        rows.append(
            CheckpointRow(
                seq=seq,
                start=start,
                kind=m.kind if m else "?",
                step=m.step if m else None,
                rows=m.table_rows_written if m else 0,
                bytes=m.size_bytes if m else 0,
                created_unix_seconds=m.created_unix_seconds if m else None,
                state=broken.get(file.name, "ok"),
                name=file.name,
                dead_branch=dead.get(file.name),
            )
        )
    return rows


def read_checkpoint(location: Location, which: str | int) -> Manifest:
    """Read the manifest of one checkpoint.

    Args:
        location: of the checkpoints.
        which: its step; `latest`, or `previous` for the one before that; or its name, with `manifests/` and `.json` or
            without. Of several checkpoints of a step the newest counts, and the trainer's own manifest before merges
            that are equal to it.

    Raises:
        MissingCheckpointError: there is none, and all manifests can be read.
        CheckpointError: it is damaged, or it may be one whose manifest can't be read.
    """
    storage = _open(location)
    files = read_manifests(storage)
    if not files:
        raise no_checkpoint(storage)
    word = str(which)
    if word in ("latest", "previous"):
        found = _counted_back(files, 0 if word == "latest" else 1)
    elif word.isdecimal():
        found = _newest([f for f in files if f.manifest is not None and f.manifest.step == int(word)])
    else:
        name = f"manifests/{word.removeprefix('manifests/').removesuffix('.json')}.json"
        found = [f for f in files if f.name == name] or [f for f in files if checkpoint_name(f.name) == name]
    if not found:
        unread = "".join(f"\n  {file.reason}" for file in files if file.reason is not None)
        known = sorted({file.manifest.step for file in files if file.manifest is not None})
        what = {"latest": "no checkpoint", "previous": "only one checkpoint"}.get(word, f"no checkpoint {word}")
        kind = CheckpointError if unread else MissingCheckpointError
        raise kind(
            f"{storage.address} has {what if not word.isdecimal() else f'no checkpoint of step {word}'}{unread}",
            remedy=f"name one of these steps: {', '.join(map(str, known)) or 'none'}; or a name that "
            "`dlrm-scale checkpoint ls` lists",
        )
    own = [f for f in found if f.manifest is not None and f.manifest.merge is None]
    chosen = (own or [f for f in found if f.manifest is not None] or found)[-1]
    if chosen.manifest is None:
        raise CheckpointError(
            str(chosen.reason), remedy="put it back from a copy, or name another: `dlrm-scale checkpoint ls` lists them"
        )
    return chosen.manifest


def _newest(files: list[ManifestFile]) -> list[ManifestFile]:
    """Of manifests, the oldest first, those that stand for the newest checkpoint among them."""
    return [file for file in files if checkpoint_name(file.name) == checkpoint_name(files[-1].name)]


def _counted_back(files: list[ManifestFile], back: int) -> list[ManifestFile]:
    """The manifests of the newest checkpoint, or of the one that is so many before it."""
    names = list(dict.fromkeys(checkpoint_name(file.name) for file in files))
    return [file for file in files if checkpoint_name(file.name) == names[-1 - back]] if back < len(names) else []


def chain_of_step(location: Location, step: int | str | None) -> Chain:
    """The chain to the checkpoint of a step, or of a manifest's name, the newest for None; its files are all there.

    Raises:
        MissingCheckpointError: there is none.
        CheckpointError: it isn't whole.
    """
    storage = _open(location)
    if step is None:
        chain = find_chain(storage)
        if chain is None:
            raise no_checkpoint(storage)
        return chain
    return open_chain(storage, step) if isinstance(step, str) else open_step(storage, step)


def verify(
    location: Location, level: VerifyLevel = "full", *, progress: Callable[[int], None] = lambda size_bytes: None
) -> list[Problem]:
    """Check every checkpoint of a folder.

    Files that a trainer or a merge removes meanwhile, with all manifests that name them, are no problems.

    Args:
        location: of the checkpoints.
        level: how much is read.
        progress: told the bytes of each data file that has been checked.

    Returns:
        The damaged files; empty if all is sound.

    Raises:
        CheckpointError: the folder is missing or has a newer format.
    """
    storage = _open(location)
    problems = _problems(storage, level, progress)
    fault = format_fault(storage)
    return problems if fault is None else [Problem(file="FORMAT", reason=fault, breaks=()), *problems]


def data_bytes(location: Location) -> int:
    """Bytes of all data files that readable manifests name: what `verify` reads at level `full`."""
    sizes = {d.name: d.size_bytes for f in read_manifests(_open(location)) if f.manifest for d in f.manifest.files}
    return sum(sizes.values())


def _open(location: Location) -> Storage:
    storage = open_storage(location)
    if not storage.exists("manifests"):
        raise no_checkpoint(storage)
    check_format(storage)
    return storage


@dataclass
class _Fault:
    """What is wrong with a file, the manifests that name it, and those that it leaves without a chain."""

    reason: str
    named_by: list[str] = field(default_factory=list)
    breaks: list[str] = field(default_factory=list)


def _problems(
    storage: Storage, level: VerifyLevel, progress: Callable[[int], None] = lambda size_bytes: None
) -> list[Problem]:
    files = read_manifests(storage)
    faults: dict[str, _Fault] = {}
    looked: dict[str, str | None] = {}
    causes: dict[str, set[str]] = {}
    """For each manifest that no chain leads to, the faults that each of its ways meets."""
    leading: dict[ParentRecord, list[str]] = {}
    for file in files:
        if file.checkpoint is not None:
            leading.setdefault(file.checkpoint, []).append(file.name)

    def note(fault: str, reason: str, by: str) -> None:
        faults.setdefault(fault, _Fault(reason)).named_by.append(by)

    # By sequence number, which a parent's is below: its faults are known before its children's.
    for file in sorted(files, key=lambda file: parse_manifest_name(file.name) or (0, 0)):
        own: set[str] = set()
        if file.manifest is None:
            note(file.name, _without_name(file.reason or "can't be read", file.name), file.name)
            own.add(file.name)
        else:
            for data in file.manifest.files if level != "manifest" else ():
                if data.name not in looked:
                    looked[data.name] = _data_fault(storage, data, level)
                    progress(data.size_bytes)
                fault = looked[data.name]
                if fault is not None:
                    note(data.name, fault, file.name)
                    if fault != HEADER_FAULT:
                        own.add(data.name)
            parent = file.manifest.parent
            if file.manifest.kind != "baseline" and parent is not None:
                ways = leading.get(parent, [])
                if not ways:
                    same_name = any(other.name == parent.name and other.manifest for other in files)
                    unreadable = any(other.name == parent.name for other in files) and not same_name
                    if not unreadable:
                        reason = f"isn't the one that {file.name} was made from" if same_name else "is missing"
                        note(parent.name, reason, file.name)
                    own.add(parent.name)
                elif all(causes[way] for way in ways):
                    own |= set().union(*(causes[way] for way in ways))
        causes[file.name] = own
        for fault in own:
            faults[fault].breaks.append(file.name)
    if faults:
        left = set(list_manifests(storage))
        faults = {name: fault for name, fault in faults.items() if not left.isdisjoint(fault.named_by)}
    return [
        Problem(file=name, reason=faults[name].reason, breaks=tuple(faults[name].breaks)) for name in sorted(faults)
    ]


def _data_fault(storage: Storage, record: FileRecord, level: VerifyLevel) -> str | None:
    """As `file_fault`; of a file that only `safetensors` misses something of, `HEADER_FAULT`."""
    fault = file_fault(storage, record, read_all=level == "full")
    if fault is None or file_fault(storage, record, read_all=False) is not None:
        return fault
    return HEADER_FAULT if tensors_are_intact(storage, record) else fault


def _without_name(reason: str, name: str) -> str:
    return reason.removeprefix(f"{name} ")
