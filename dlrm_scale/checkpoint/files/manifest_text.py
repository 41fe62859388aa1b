"""A manifest as the bytes of its file, and read back with all checks."""

import hashlib
import json

from pydantic import ValidationError

from dlrm_scale.checkpoint.files.manifest import FORMAT_MAJOR, Manifest
from dlrm_scale.checkpoint.files.manifest_check import check_manifest
from dlrm_scale.errors import CheckpointError

__all__ = ["parse_manifest", "serialize_manifest"]


def serialize_manifest(manifest: Manifest) -> tuple[bytes, str]:
    """The file's content and the sha256 that children name their parent by."""
    body = _canonical(manifest.model_dump(mode="json"))
    digest = hashlib.sha256(body).hexdigest()
    return b'{"manifest":' + body + b',"sha256":"' + digest.encode() + b'"}\n', digest


def parse_manifest(data: bytes, name: str) -> tuple[Manifest, str]:
    """Read and check a manifest.

    Args:
        data: content of the file.
        name: its name, for messages and against the numbers inside.

    Returns:
        The manifest and its sha256.

    Raises:
        CheckpointError: damaged, of a newer major version, or inconsistent; the message names the file.
    """
    try:
        outer = json.loads(data)
        inner, digest = outer["manifest"], outer["sha256"]
        body = _canonical(inner)
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise CheckpointError(f"{name} is not a manifest: {error!r}") from error
    if hashlib.sha256(body).hexdigest() != digest:
        raise CheckpointError(f"{name} is damaged: its sha256 doesn't match its content")
    major = inner.get("major") if isinstance(inner, dict) else None
    if isinstance(major, int) and major > FORMAT_MAJOR:
        raise CheckpointError(
            f"{name} has format version {major}, this program reads up to {FORMAT_MAJOR}",
            remedy="use the version of dlrm-scale that wrote it, or a newer one",
        )
    try:
        manifest = Manifest.model_validate_json(body)
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(str(part) for part in first["loc"])
        raise CheckpointError(f"{name} breaks the format at {place}: {first['msg']}") from error
    if name != manifest.name:
        raise CheckpointError(f"{name} holds the manifest {manifest.name}")
    check_manifest(manifest)
    return manifest, digest


def _canonical(value: object) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()
