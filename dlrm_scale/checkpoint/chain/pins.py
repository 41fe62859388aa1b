"""Pinned checkpoints: files in the root, so that trainer, merge and gc all know of them.

    pins/<seq>-s<start>.<why>      `user`: by the command; `best`: by the trainer

The name says everything, so a pin can't be unreadable, and one of a checkpoint that doesn't exist (yet) does no harm.
"""

import json
import re
import time
from collections.abc import Callable, Collection
from typing import Literal

from dlrm_scale.checkpoint.chain.chain import open_chain, open_step
from dlrm_scale.checkpoint.chain.chain_search import ChainSearch
from dlrm_scale.checkpoint.chain.leases import removals_of
from dlrm_scale.checkpoint.storage.storage import Storage
from dlrm_scale.errors import CheckpointError, MissingCheckpointError

__all__ = ["pin_step", "read_pins", "replace_pins", "unpin_step"]

_NAME = re.compile(r"pins/([0-9]{8,}-s[0-9]+)\.(user|best)")
_LOOK_AGAIN_SECONDS = 0.2

Why = Literal["user", "best"]


def read_pins(storage: Storage, why: Why | None = None) -> set[str]:
    """Names of pinned checkpoints, each that of its trainer's manifest.

    Args:
        storage: the checkpoints.
        why: only pins for this reason; None for all.
    """
    matches = [_NAME.fullmatch(name) for name in storage.list_names("pins")]
    return {f"manifests/{m[1]}.json" for m in matches if m is not None and why in (None, m[2])}


def replace_pins(storage: Storage, names: Collection[str], why: Why) -> None:
    """Pin these checkpoints for a reason, instead of those before; they need not be committed yet.

    Raises:
        OSError: a pin can't be written or removed.
    """
    before = read_pins(storage, why)
    if before == set(names):
        return
    storage.make_folders("pins")
    for name in sorted(set(names) - before):
        _write(storage, name, why)
    for name in sorted(before - set(names)):
        storage.remove(_pin_name(name, why))
    storage.sync_folder("pins")


def pin_step(
    storage: Storage,
    step: int | str,
    *,
    now: Callable[[], float] = time.time,
    pause: Callable[[float], None] = time.sleep,
) -> str:
    """Pin the newest checkpoint of a step, or the one of a manifest's name.

    The pin is written first. If a removal of its files has begun already, it is waited for.

    Returns:
        Name of the checkpoint.

    Raises:
        MissingCheckpointError: no checkpoint has this step.
        CheckpointError: it isn't whole.
    """
    chain = open_chain(storage, step) if isinstance(step, str) else open_step(storage, step)
    name = chain.name
    already = name in read_pins(storage, "user")
    if not already:
        storage.make_folders("pins")
        _write(storage, name, "user")
        storage.sync_folder("pins")
    try:
        while True:
            chain = open_chain(storage, name)
            names = [manifest.name for manifest in chain.manifests]
            if not removals_of(storage, names, now=now()) and all(storage.exists(name) for name in names):
                return name
            pause(_LOOK_AGAIN_SECONDS)
    except CheckpointError:
        if not already:
            storage.remove(_pin_name(name, "user"))
        raise


def unpin_step(storage: Storage, step: int | str) -> list[str]:
    """Unpin the checkpoints of a step, or the one of a manifest's name, that were pinned by the command.

    Returns:
        Their names.

    Raises:
        MissingCheckpointError: there are none.
    """
    search = ChainSearch(storage)
    pinned = read_pins(storage, "user")
    steps = {name: {f.manifest.step for f in search.files_of(name) if f.manifest is not None} for name in pinned}
    found = sorted(name for name in pinned if step == name or step in steps[name])
    if not found:
        known = ", ".join(str(s) for s in sorted(s for found in steps.values() for s in found)) or "none"
        what = step if isinstance(step, str) else f"step {step}"
        raise MissingCheckpointError(
            f"{what} isn't pinned in {storage.address}", remedy=f"name one of these steps: {known}"
        )
    for name in found:
        storage.remove(_pin_name(name, "user"))
    storage.sync_folder("pins")
    return found


def _write(storage: Storage, name: str, why: Why) -> None:
    text = json.dumps({"checkpoint": name, "why": why, "created_unix_seconds": time.time()})
    storage.write_durably(_pin_name(name, why), text.encode() + b"\n")


def _pin_name(name: str, why: Why) -> str:
    return f"pins/{name.removeprefix('manifests/').removesuffix('.json')}.{why}"
