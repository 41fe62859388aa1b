"""The manifests of a root as files: read, or the reason why they can't be."""

import json
from collections.abc import Callable
from dataclasses import dataclass

from dlrm_scale.checkpoint.files.file_names import checkpoint_name, parse_manifest_name
from dlrm_scale.checkpoint.files.manifest import FORMAT_MAJOR, FORMAT_NAME, Manifest, ParentRecord
from dlrm_scale.checkpoint.files.manifest_text import parse_manifest
from dlrm_scale.checkpoint.storage.storage import Storage
from dlrm_scale.checkpoint.storage.store_calls import is_outage
from dlrm_scale.errors import CheckpointError, MissingCheckpointError
from dlrm_scale.units import MIB

__all__ = [
    "MANIFEST_LIMIT_BYTES",
    "ManifestFile",
    "check_format",
    "checkpoint_age",
    "format_fault",
    "has_checkpoint",
    "list_manifests",
    "no_checkpoint",
    "read_manifest",
    "read_manifests",
]

MANIFEST_LIMIT_BYTES = 512 * MIB
"""A larger manifest is refused unread; 1 TiB of tables makes about 10 MiB."""


@dataclass(frozen=True, kw_only=True)
class ManifestFile:
    """A file in `manifests/`: its manifest and hash, or why it can't be read."""

    name: str
    manifest: Manifest | None
    sha256: str
    reason: str | None

    @property
    def checkpoint(self) -> ParentRecord | None:
        """The checkpoint that it restores: its own name and hash, or what a merge is equal to; None if unreadable."""
        if self.manifest is None:
            return None
        if self.manifest.merge is not None:
            return self.manifest.merge.equal_to
        return ParentRecord(name=self.name, sha256=self.sha256)


def checkpoint_age(name: str) -> tuple[int, int]:
    """Start and sequence number of a manifest: a later start's commits replace what an older one wrote after a fork."""
    seq, start = parse_manifest_name(name) or (0, 0)
    return start, seq


def has_checkpoint(storage: Storage, name: str) -> bool:
    """Whether a checkpoint, by the name of its trainer's manifest, is still there; a merge may stand for it."""
    return any(checkpoint_name(found) == name for found in storage.list_names("manifests"))


def no_checkpoint(storage: Storage) -> CheckpointError:
    """What to raise where nothing was ever committed; exit code 2, unless there is data that no manifest names."""
    remedy = "name a run that has saved one, as in runs/a"
    if storage.address.startswith("memory://"):
        remedy = "memory:// is seen only by the process that wrote it: name a folder, or a bucket as s3://… or gs://…"
    if storage.list_names("data"):
        return CheckpointError(
            f"{storage.address} holds no checkpoint, and data/ has files: manifests/ is lost, or a trainer was killed "
            "before its first checkpoint was whole",
            remedy="put manifests/ back from a copy, or train again",
        )
    return MissingCheckpointError(f"{storage.address} holds no checkpoint", remedy=remedy)


def list_manifests(storage: Storage) -> list[str]:
    """Names of all committed manifests, oldest first; merges behind the checkpoint that they are equal to."""
    names = [name for name in storage.list_names("manifests") if parse_manifest_name(name) is not None]
    return sorted(names, key=checkpoint_age)


def read_manifests(storage: Storage, progress: Callable[[], None] = lambda: None) -> list[ManifestFile]:
    """Read every manifest, oldest first; temporary ones are left out, unreadable ones carry the reason."""
    found = []
    for name in list_manifests(storage):
        found.append(read_manifest(storage, name))
        progress()
    return found


def read_manifest(storage: Storage, name: str) -> ManifestFile:
    """Read one manifest; a missing, damaged or inconsistent one carries the reason.

    Raises:
        OSError: the storage doesn't answer.
    """
    try:
        manifest, digest = parse_manifest(storage.read(name, MANIFEST_LIMIT_BYTES), name)
    except FileNotFoundError:
        return ManifestFile(name=name, manifest=None, sha256="", reason=f"{name} is missing")
    except (OSError, EOFError, ValueError) as error:
        if is_outage(error):
            raise
        return ManifestFile(name=name, manifest=None, sha256="", reason=f"{name} can't be read: {error}")
    except CheckpointError as error:
        return ManifestFile(name=name, manifest=None, sha256="", reason=error.message)
    return ManifestFile(name=name, manifest=manifest, sha256=digest, reason=None)


def format_fault(storage: Storage) -> str | None:
    """Why the folder's FORMAT file says nothing; None if it does, or there is none.

    Raises:
        OSError: the storage doesn't answer.
    """
    found = _major_version(storage)
    return found if isinstance(found, str) else None


def check_format(storage: Storage) -> None:
    """Check the folder's FORMAT file, if there is one.

    A damaged one is let pass: every manifest has the version too, under a hash, and the next start writes it anew.

    Raises:
        CheckpointError: it is of a newer major version.
        OSError: the storage doesn't answer.
    """
    major = _major_version(storage)
    if isinstance(major, int) and major > FORMAT_MAJOR:
        raise CheckpointError(
            f"{storage.address} has format version {major}, this program reads up to {FORMAT_MAJOR}",
            remedy="use the version of dlrm-scale that wrote it, or a newer one",
        )


def _major_version(storage: Storage) -> int | str:
    """Of the FORMAT file, 0 where there is none; or what is wrong with it, in words that follow its name."""
    try:
        content = json.loads(storage.read("FORMAT", MIB))
        name, major = content["format"], content["major"]
    except FileNotFoundError:
        return 0
    except (OSError, EOFError, ValueError, TypeError, KeyError) as error:
        if is_outage(error):
            raise
        return "is damaged: it isn't the JSON that a trainer has written"
    if name != FORMAT_NAME:
        return f"is damaged: it names the format {str(name)[:40]!r} instead of {FORMAT_NAME}"
    return major if isinstance(major, int) else "is damaged: its major version is no number"
