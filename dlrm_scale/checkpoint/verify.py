"""What checkpoints a folder holds and whether they are sound."""

from dataclasses import dataclass
from typing import Literal

from dlrm_scale.checkpoint.chain import check_format, read_manifests
from dlrm_scale.checkpoint.format import file_fault
from dlrm_scale.checkpoint.manifest import Manifest, parse_manifest_name
from dlrm_scale.checkpoint.storage import Location, Storage, open_storage
from dlrm_scale.errors import CheckpointError

__all__ = ["CheckpointRow", "Problem", "VerifyLevel", "list_checkpoints", "read_checkpoint", "verify"]

VerifyLevel = Literal["manifest", "size", "full"]
"""manifest: manifests and their links; size: also that data files are there; full: also every byte."""


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


def list_checkpoints(location: Location) -> list[CheckpointRow]:
    """List all checkpoints, oldest first; data files are checked for presence and size.

    Raises:
        CheckpointError: the folder is missing or has a newer format.
    """
    storage = _open(location)
    broken: dict[str, str] = {}
    rows = []
    for problem in _problems(storage, "size"):
        for name in problem.breaks:
            broken.setdefault(name, f"{problem.file} {problem.reason}")
    for file in read_manifests(storage):
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
            )
        )
    return rows


def read_checkpoint(location: Location, seq: int) -> Manifest:
    """Read the manifest with a sequence number, the newest start's if there are several.

    Raises:
        CheckpointError: there is none, or it is damaged.
    """
    storage = _open(location)
    files = [f for f in read_manifests(storage) if (parse_manifest_name(f.name) or (-1,))[0] == seq]
    if not files:
        raise CheckpointError(
            f"{storage.address} has no checkpoint {seq}", remedy="list them with `dlrm-scale checkpoint ls`"
        )
    if files[-1].manifest is None:
        raise CheckpointError(str(files[-1].reason))
    return files[-1].manifest


def verify(location: Location, level: VerifyLevel = "full") -> list[Problem]:
    """Check every checkpoint of a folder.

    Returns:
        The damaged files; empty if all is sound.

    Raises:
        CheckpointError: the folder is missing or has a newer format.
    """
    return _problems(_open(location), level)


def _open(location: Location) -> Storage:
    storage = open_storage(location)
    if not storage.exists("manifests"):
        raise CheckpointError(f"{storage.address} holds no checkpoints", remedy="name a run's folder, as in runs/a")
    check_format(storage)
    return storage


def _problems(storage: Storage, level: VerifyLevel) -> list[Problem]:
    files = read_manifests(storage)
    by_name = {file.name: file for file in files}
    faults: dict[str, str] = {}
    breaks: dict[str, list[str]] = {}
    broken_by: dict[str, set[str]] = {}
    for file in files:  # oldest first, so that a parent's faults are known before its children's
        own: set[str] = set()
        broken_by[file.name] = own
        manifest = file.manifest
        if manifest is None:
            faults[file.name] = _without_name(file.reason or "can't be read", file.name)
            own.add(file.name)
        else:
            if level != "manifest":
                for data in manifest.files:
                    fault = faults.get(data.name) or file_fault(storage, data, read_all=level == "full")
                    if fault is not None:
                        faults[data.name] = fault
                        own.add(data.name)
            parent = manifest.parent
            if manifest.kind != "baseline" and parent is not None:
                if parent.name not in by_name:
                    faults[parent.name] = "is missing"
                    own.add(parent.name)
                elif by_name[parent.name].manifest is not None and by_name[parent.name].sha256 != parent.sha256:
                    faults[parent.name] = f"isn't the one that {file.name} was made from"
                    own.add(parent.name)
                own |= broken_by.get(parent.name, set())
        for name in own:
            breaks.setdefault(name, []).append(file.name)
    return [Problem(file=name, reason=faults[name], breaks=tuple(breaks[name])) for name in sorted(faults)]


def _without_name(reason: str, name: str) -> str:
    return reason.removeprefix(f"{name} ")
