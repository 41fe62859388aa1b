"""Finds what to resume from: a baseline and the deltas after it, linked by the hashes of their manifests.

There is no pointer to the latest checkpoint. The newest manifest whose whole chain is valid is the latest, newest
meaning (trainer start, sequence number): a later start's commits replace what an older one wrote after the fork.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from dlrm_scale.checkpoint.format import file_fault
from dlrm_scale.checkpoint.manifest import FORMAT_MAJOR, Manifest, parse_manifest, parse_manifest_name
from dlrm_scale.checkpoint.storage import Location, Storage, open_storage
from dlrm_scale.errors import CheckpointError
from dlrm_scale.units import MIB

__all__ = [
    "MANIFEST_LIMIT_BYTES",
    "Chain",
    "ManifestFile",
    "Skipped",
    "check_format",
    "find_chain",
    "open_chain",
    "read_manifests",
]

MANIFEST_LIMIT_BYTES = 512 * MIB
"""A larger manifest is refused unread; 1 TiB of tables makes about 10 MiB."""


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
        tip_sha256: of the last manifest.
        skipped: newer checkpoints that can't be used, and why.
    """

    storage: Storage
    manifests: tuple[Manifest, ...]
    tip_sha256: str
    skipped: tuple[Skipped, ...] = ()

    @property
    def tip(self) -> Manifest:
        """The checkpoint to resume from."""
        return self.manifests[-1]

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


@dataclass(frozen=True, kw_only=True)
class ManifestFile:
    """A file in `manifests/`: its manifest and hash, or why it can't be read."""

    name: str
    manifest: Manifest | None
    sha256: str
    reason: str | None


def read_manifests(storage: Storage) -> list[ManifestFile]:
    """Read every manifest, oldest first; temporary ones are left out, unreadable ones carry the reason."""
    names = [name for name in storage.list_names("manifests") if parse_manifest_name(name) is not None]
    return [_read_manifest(storage, name) for name in sorted(names, key=_age)]


def find_chain(location: Location, *, verify: Literal["size", "full"] = "size") -> Chain | None:
    """Find the newest checkpoint whose whole chain is valid.

    Args:
        location: of the checkpoints.
        verify: `size` checks that every data file is there with its size, `full` reads and hashes all of them.

    Returns:
        The chain, with what was skipped and why; None if nothing was ever committed.

    Raises:
        CheckpointError: there are checkpoints and none is valid, or they have a newer format.
    """
    storage = open_storage(location)
    check_format(storage)
    names = [name for name in storage.list_names("manifests") if parse_manifest_name(name) is not None]
    finder = _Finder(storage, read_all=verify == "full")
    skipped: list[Skipped] = []
    for name in sorted(names, key=_age, reverse=True):
        found = finder.chain_of(name)
        if isinstance(found, Chain):
            return Chain(
                storage=storage, manifests=found.manifests, tip_sha256=found.tip_sha256, skipped=tuple(skipped)
            )
        tip = finder.manifest(name).manifest
        skipped.append(Skipped(name=name, step=tip.step if tip else None, reason=found))
    if skipped:
        listed = "\n  ".join(str(skip) for skip in skipped)
        raise CheckpointError(
            f"no checkpoint in {storage.address} is valid:\n  {listed}",
            remedy="restore the named files from a copy, or start a new run in another run.path",
        )
    return None


def open_chain(location: Location, name: str) -> Chain:
    """Open the chain that ends in manifest `name`: what rank 0 found and told the others.

    Raises:
        CheckpointError: it can't be read or isn't valid.
    """
    storage = open_storage(location)
    check_format(storage)
    found = _Finder(storage, read_all=False).chain_of(name)
    if isinstance(found, Chain):
        return found
    raise CheckpointError(f"{name} in {storage.address} can't be used: {found}")


def check_format(storage: Storage) -> None:
    """Check the folder's FORMAT file, if there is one.

    Raises:
        CheckpointError: it is of a newer major version.
    """
    if not storage.exists("FORMAT"):
        return
    try:
        document = json.loads(storage.read("FORMAT", MIB))
        major = document["major"]
    except (OSError, EOFError, ValueError, TypeError, KeyError):
        # Every manifest has the version too, under a hash.
        return
    if isinstance(major, int) and major > FORMAT_MAJOR:
        raise CheckpointError(
            f"{storage.address} has format version {major}, this program reads up to {FORMAT_MAJOR}",
            remedy="use the version of dlrm-scale that wrote it, or a newer one",
        )


class _Finder:
    """Follows parents; each manifest and each data file is looked at once."""

    def __init__(self, storage: Storage, *, read_all: bool) -> None:
        self._storage = storage
        self._read_all = read_all
        self._manifests: dict[str, ManifestFile] = {}
        self._faults: dict[str, str | None] = {}

    def manifest(self, name: str) -> ManifestFile:
        if name not in self._manifests:
            self._manifests[name] = _read_manifest(self._storage, name)
        return self._manifests[name]

    def chain_of(self, name: str) -> Chain | str:
        """The chain that ends in `name`, or why there is none."""
        tip = self.manifest(name)
        links: list[Manifest] = []
        current, expected = tip, tip.sha256
        while True:
            if current.manifest is None:
                return current.reason or f"{current.name} can't be read"
            if current.sha256 != expected:
                return f"{current.name} isn't the one that {links[-1].name} was made from"
            fault = self._fault(current.manifest)
            if fault is not None:
                return fault
            links.append(current.manifest)
            if current.manifest.kind == "baseline":
                break
            parent = current.manifest.parent
            if parent is None:
                return f"{current.name} has no parent"
            current, expected = self.manifest(parent.name), parent.sha256
        schemas = [manifest.table_schema() for manifest in links]
        if any(schema != schemas[0] for schema in schemas):
            return "its checkpoints have different tables"
        return Chain(storage=self._storage, manifests=tuple(reversed(links)), tip_sha256=tip.sha256)

    def _fault(self, manifest: Manifest) -> str | None:
        if manifest.name not in self._faults:
            self._faults[manifest.name] = next(self._file_faults(manifest), None)
        return self._faults[manifest.name]

    def _file_faults(self, manifest: Manifest) -> Iterator[str]:
        for file in manifest.files:
            fault = file_fault(self._storage, file, read_all=self._read_all)
            if fault is not None:
                yield f"{file.name} {fault}"


def _read_manifest(storage: Storage, name: str) -> ManifestFile:
    try:
        manifest, digest = parse_manifest(storage.read(name, MANIFEST_LIMIT_BYTES), name)
    except FileNotFoundError:
        return ManifestFile(name=name, manifest=None, sha256="", reason=f"{name} is missing")
    except (OSError, EOFError, ValueError) as error:
        return ManifestFile(name=name, manifest=None, sha256="", reason=f"{name} can't be read: {error}")
    except CheckpointError as error:
        return ManifestFile(name=name, manifest=None, sha256="", reason=error.message)
    return ManifestFile(name=name, manifest=manifest, sha256=digest, reason=None)


def _age(name: str) -> tuple[int, int]:
    seq, start = parse_manifest_name(name) or (0, 0)
    return start, seq
