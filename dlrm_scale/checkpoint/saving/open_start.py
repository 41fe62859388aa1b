"""Opens a folder of checkpoints for one start of the trainer: format, fence, leftovers, and where the chain goes on."""

import json
import os
import platform
import time
import warnings
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

from dlrm_scale.checkpoint.chain.chain import Chain, check_format
from dlrm_scale.checkpoint.chain.chain_search import ChainSearch, Path
from dlrm_scale.checkpoint.chain.leases import removals_of
from dlrm_scale.checkpoint.chain.schema_match import can_continue
from dlrm_scale.checkpoint.chain.starts import newest_start
from dlrm_scale.checkpoint.files.file_names import parse_manifest_name
from dlrm_scale.checkpoint.files.manifest import FORMAT_MAJOR, FORMAT_MINOR, FORMAT_NAME, ParentRecord, TableRecord
from dlrm_scale.checkpoint.saving.commit import Ballot, ChainState
from dlrm_scale.checkpoint.saving.policy import chain_of
from dlrm_scale.checkpoint.storage.storage import Storage
from dlrm_scale.checkpoint.upkeep.sweep import sweep_orphans
from dlrm_scale.errors import CheckpointError
from dlrm_scale.layout import ShardLayout

__all__ = ["Start", "open_start"]


@dataclass(frozen=True, kw_only=True)
class Start:
    """One start of the trainer, the same on all ranks.

    Attributes:
        number: its file in `starts/`; a commit of a lower number is refused from now on.
        next_seq: sequence number of its first save.
        chain: what its first save follows.
    """

    number: int
    next_seq: int
    chain: ChainState


def open_start(
    storage: Storage,
    ballot: Ballot,
    *,
    rank: int,
    layout: ShardLayout,
    tables: Sequence[TableRecord],
    optimizer: str,
    resumed_from: Chain | None,
) -> Start:
    """Rank 0 claims the next start number and sweeps leftovers; the others hear of it.

    Raises:
        CheckpointError: the folder can't be written or has a newer format; on every rank.
    """
    if rank != 0:
        message = ballot.await_start()
        if "error" in message:
            raise CheckpointError(str(message["error"]))
        return Start(
            number=int(message["number"]),
            next_seq=int(message["next_seq"]),
            chain=ChainState.model_validate(message["chain"]),
        )
    try:
        chain = _chain_state(storage, layout, tables, optimizer, resumed_from)
        start = _claim(storage, layout, chain, ballot)
    except (OSError, CheckpointError) as error:
        text = error.message if isinstance(error, CheckpointError) else f"can't open checkpoints: {error}"
        ballot.announce_start({"error": text})
        raise CheckpointError(text) from error
    ballot.announce_start(
        {"number": start.number, "next_seq": start.next_seq, "chain": start.chain.model_dump(mode="json")}
    )
    return start


def _claim(storage: Storage, layout: ShardLayout, chain: ChainState, ballot: Ballot) -> Start:
    storage.make_folders("data", "manifests", "starts")
    text = json.dumps({"format": FORMAT_NAME, "major": FORMAT_MAJOR, "minor": FORMAT_MINOR})
    with suppress(FileExistsError):
        storage.write_durably("FORMAT", text.encode() + b"\n")
        storage.sync_folder(".")
    check_format(storage)
    record = {
        "created_unix_seconds": time.time(),
        "host": platform.node(),
        "pid": os.getpid(),
        "ranks": layout.ranks,
        "layout_fingerprint": layout.fingerprint(),
        "continues": chain.tip_name,
    }
    number = newest_start(storage) + 1
    while True:
        try:
            storage.write_durably(f"starts/{number}.json", json.dumps({"start": number, **record}).encode() + b"\n")
            break
        except FileExistsError:
            number += 1
    storage.sync_folder("starts")
    sweep_orphans(storage, start=number, progress=ballot.progress)
    if not chain.needs_baseline and not _is_there(storage, chain, ballot):
        warnings.warn(
            f"{chain.tip_name} in {storage.address} has been removed since it was restored, so the first checkpoint of "
            "this start is a baseline",
            RuntimeWarning,
            stacklevel=4,
        )
        chain = chain.model_copy(update={"needs_baseline": True})
    seqs = [numbers[0] for name in storage.list_names("manifests") if (numbers := parse_manifest_name(name))]
    return Start(number=number, next_seq=max(seqs, default=0) + 1, chain=chain)


def _is_there(storage: Storage, chain: ChainState, ballot: Ballot) -> bool:
    """Whether what the next delta may be based on can still be restored, and nobody is removing it.

    The lease of the restore is over. From the claim on others keep what the start goes on from (see `retention`), in
    the order of `leases`: they say what they remove, then look for starts; here the claim comes before this look.
    """
    search = ChainSearch(storage, progress=ballot.progress)
    for name, sha256 in ((chain.tip_name, chain.tip_sha256), (chain.baseline_name, chain.baseline_sha256)):
        path = search.path_to(ParentRecord(name=name, sha256=sha256)) if name and sha256 else ""
        if not isinstance(path, Path) or removals_of(storage, [file.name for file in path.files], now=time.time()):
            return False
    return True


def _chain_state(
    storage: Storage,
    layout: ShardLayout,
    tables: Sequence[TableRecord],
    optimizer: str,
    resumed_from: Chain | None,
) -> ChainState:
    if resumed_from is None or resumed_from.storage.address != storage.address:
        return ChainState()
    return chain_of(resumed_from, needs_baseline=not can_continue(resumed_from.tip, layout, tables, optimizer))
