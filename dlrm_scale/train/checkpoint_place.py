"""Whether a run may keep its checkpoints where `checkpoint.path` says."""

import os
import tempfile
from contextlib import suppress
from pathlib import Path

from dlrm_scale.checkpoint import Storage, open_storage
from dlrm_scale.checkpoint.chain.starts import RunIdentity, check_owner
from dlrm_scale.checkpoint.files.format import OUTAGE_REMEDY
from dlrm_scale.checkpoint.files.manifest_files import list_manifests
from dlrm_scale.checkpoint.storage.local_storage import LocalStorage
from dlrm_scale.errors import ConfigError, DlrmScaleError, StorageError
from dlrm_scale.sharding.ranks import Ranks
from dlrm_scale.train.run_folder import RunRequest
from dlrm_scale.train.running_trainer import refuse_running_trainer

__all__ = ["check_place", "unwritable_folder", "write_check"]


def check_place(request: RunRequest, ranks: Ranks) -> None:
    """See that the ranks share the place and that no other run has it; reads only. A collective.

    One place, one run: this one would stop the other's trainer, and remove its checkpoints as old ones.

    Raises:
        ConfigError: `memory://` with several ranks, another run's place, or a run that is being trained on this host.
        StorageError: it can't be read.
    """
    if ranks.ranks > 1 and request.checkpoints.startswith("memory://"):
        raise ConfigError(
            f"checkpoint.path = {request.checkpoints} with {ranks.ranks} ranks: memory:// is each process's own "
            "memory, so no rank would see what another has written",
            remedy="name a folder or an object store that all ranks share, or train on one rank",
        )
    fault: object = None
    if ranks.rank == 0:
        storage = open_storage(request.checkpoints)
        try:
            check_owner(storage, _identity(request))
            if request.resume:
                refuse_running_trainer(storage, request.folder.log)
            else:
                _refuse_a_used_place(storage)
        except DlrmScaleError as error:
            fault = error
        except OSError as error:
            fault = StorageError(f"{storage.address} can't be read: {error}", remedy=OUTAGE_REMEDY)
    fault = ranks.broadcast_object(fault)
    if isinstance(fault, DlrmScaleError):
        raise fault


def _identity(request: RunRequest) -> RunIdentity:
    """Of a run that exists what its folder says; a new one has no id yet."""
    return request.folder.identity() if request.resume else RunIdentity(id="", path=request.config.run.path)


def _refuse_a_used_place(storage: Storage) -> None:
    used = list_manifests(storage)
    if used:
        raise ConfigError(
            f"{storage.address} holds the checkpoints of another run, {used[-1]} among them",
            remedy="set checkpoint.path to another folder or URL, or go on with that run: --set run.path=… "
            "--resume auto",
        )


def write_check(request: RunRequest, ranks: Ranks) -> list[str]:
    """See that every rank could write to the place, and leave nothing there. A collective.

    Returns:
        A note where that can't be known without leaving something.

    Raises:
        ConfigError: some rank couldn't.
    """
    storage = open_storage(request.checkpoints)
    if not isinstance(storage, LocalStorage):
        return [f"checkpoint.path = {request.checkpoints}: looked at, not written to; whether it may be is seen then"]
    reason = unwritable_folder(Path(storage.address))
    reasons = ranks.gather_objects(reason)
    for rank, found in enumerate(reasons):
        if found is not None:
            key = "checkpoint.path" if request.config.checkpoint.path else "checkpoints, in run.path"
            raise ConfigError(
                f"{key}: rank {rank} can't write to {storage.address}: {found}",
                remedy="name a folder that can be written, on storage that all ranks share",
            )
    return []


def unwritable_folder(folder: Path) -> str | None:
    """Why nothing can be made in a folder, which need not be there yet; None if something can. Leaves nothing."""
    # not by `Path.exists`, which raises below a folder that may not be looked into
    there = next(path for path in (folder, *folder.parents) if os.path.exists(path))
    if not there.is_dir():
        return f"{there} is a file"
    try:
        made = Path(tempfile.mkdtemp(prefix=".dlrm-scale-", dir=there))
    except OSError as error:
        return f"{there} can't be written: {error.strerror}"
    with suppress(OSError):
        made.rmdir()
    return None
