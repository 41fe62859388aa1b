"""Opens a folder of checkpoints for one start of the trainer: format, fence, leftovers, and where the chain goes on."""

import json
import secrets
import time
import warnings
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

from dlrm_scale.checkpoint.chain.chain import Chain, check_format
from dlrm_scale.checkpoint.chain.chain_search import ChainSearch, Path
from dlrm_scale.checkpoint.chain.holders import process_record
from dlrm_scale.checkpoint.chain.leases import removals_of
from dlrm_scale.checkpoint.chain.schema_match import can_continue
from dlrm_scale.checkpoint.chain.starts import RunIdentity, check_owner, newest_start, start_name
from dlrm_scale.checkpoint.files.file_names import parse_manifest_name
from dlrm_scale.checkpoint.files.format import OUTAGE_REMEDY
from dlrm_scale.checkpoint.files.manifest import FORMAT_MAJOR, FORMAT_MINOR, FORMAT_NAME, ParentRecord, TableRecord
from dlrm_scale.checkpoint.files.manifest_files import (
    checkpoint_age,
    format_fault,
    list_manifests,
    read_manifest,
    read_manifests,
)
from dlrm_scale.checkpoint.saving.commit import Ballot, ChainState
from dlrm_scale.checkpoint.saving.policy import chain_of
from dlrm_scale.checkpoint.storage.storage import Storage
from dlrm_scale.checkpoint.upkeep.sweep import sweep_orphans
from dlrm_scale.errors import CheckpointError, CheckpointWarning, ConfigError, DlrmScaleError, SaveError, StorageError
from dlrm_scale.layout import ShardLayout

__all__ = ["Start", "open_start"]

_FORMAT_DRAFT = "starts/.FORMAT-"


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
    run: RunIdentity | None = None,
) -> Start:
    """Rank 0 claims the next start number and sweeps leftovers; the others hear of it.

    The claim fences off the trainer before, which may have committed until then. What it committed after this start
    had chosen what to go on from is in no chain of this start, so it refuses to go on. What is linked after that look
    is never acknowledged: its trainer looks for the fence once more (`commit_manifest`).

    Raises:
        StorageError: the folder can't be written.
        CheckpointError: it has a newer format.
        SaveError: it holds checkpoints that `resumed_from` doesn't know of.
        ConfigError: it belongs to another run. All of them on every rank.
    """
    if rank != 0:
        message = ballot.await_start()
        if "error" in message:
            raise _KINDS.get(message["kind"], CheckpointError)(str(message["error"]), remedy=message["remedy"])
        return Start(
            number=int(message["number"]),
            next_seq=int(message["next_seq"]),
            chain=ChainState.model_validate(message["chain"]),
        )
    try:
        chain = _chain_state(storage, layout, tables, optimizer, resumed_from)
        start = _claim(storage, layout, chain, ballot, _resumed_here(storage, resumed_from), run)
    except DlrmScaleError as error:
        _announce_error(ballot, error)
        raise
    except OSError as error:
        failure = StorageError(f"can't open checkpoints: {error}", remedy=OUTAGE_REMEDY)
        _announce_error(ballot, failure)
        raise failure from error
    ballot.announce_start(
        {"number": start.number, "next_seq": start.next_seq, "chain": start.chain.model_dump(mode="json")}
    )
    return start


_KINDS: dict[str, type[DlrmScaleError]] = {kind.__name__: kind for kind in (ConfigError, SaveError, StorageError)}


def _announce_error(ballot: Ballot, error: DlrmScaleError) -> None:
    ballot.announce_start({"error": error.message, "remedy": error.remedy, "kind": type(error).__name__})


def _claim(
    storage: Storage,
    layout: ShardLayout,
    chain: ChainState,
    ballot: Ballot,
    resumed_from: Chain | None,
    run: RunIdentity | None,
) -> Start:
    if run is not None:
        check_owner(storage, run)  # before the claim: the other run's trainer isn't fenced off
    # also the folders that `gc` needs on a disk that has no room for them any more
    storage.make_folders("data", "manifests", "starts", "leases", "fences")
    _write_format(storage)
    check_format(storage)
    record = {
        "created_unix_seconds": time.time(),
        **process_record(),
        "ranks": layout.ranks,
        "layout_fingerprint": layout.fingerprint(),
        "continues": chain.tip_name,
        "continues_step": resumed_from.step if resumed_from is not None else None,
    }
    if run is not None:
        record |= {"run_id": run.id, "run_path": run.path}
    number = newest_start(storage) + 1
    while True:
        try:
            storage.write_durably(start_name(number), json.dumps({"start": number, **record}).encode() + b"\n")
            break
        except FileExistsError:
            number += 1
    storage.sync_folder("starts")
    if run is not None:
        _refuse_to_share(storage, run, number)
    _refuse_to_orphan(storage, resumed_from)
    missing = [skip.name for skip in resumed_from.skipped] if resumed_from is not None else []
    sweep_orphans(storage, start=number, keep=missing, progress=ballot.progress)
    if not chain.needs_baseline and not _is_there(storage, chain, ballot):
        warnings.warn(
            f"{chain.tip_name} in {storage.address} has been removed since it was restored, so the first checkpoint of "
            "this start is a baseline",
            CheckpointWarning,
            stacklevel=4,
        )
        chain = chain.model_copy(update={"needs_baseline": True})
    seqs = [numbers[0] for name in storage.list_names("manifests") if (numbers := parse_manifest_name(name))]
    return Start(number=number, next_seq=max(seqs, default=0) + 1, chain=chain)


def _write_format(storage: Storage) -> None:
    """See that the root has a durable FORMAT file.

    It gets its name when its content is durable. One written in place could be whole for a second start after the kill
    of a first one, and torn by a crash after that start's commits. A damaged one is written anew.

    Raises:
        CheckpointError: it is damaged, and so are all manifests, or they are of a newer version.
    """
    fault = format_fault(storage)
    if fault is not None:
        files = read_manifests(storage)
        if files and all(file.manifest is None for file in files):
            raise CheckpointError(
                f"FORMAT in {storage.address} {fault}, and no manifest can be read:\n  {files[-1].reason}",
                remedy="put the files back from a copy, or start a new run in another run.path",
            )
        storage.remove("FORMAT")
    if not storage.exists("FORMAT"):
        text = json.dumps({"format": FORMAT_NAME, "major": FORMAT_MAJOR, "minor": FORMAT_MINOR})
        temporary = f"{_FORMAT_DRAFT}{secrets.token_hex(8)}.tmp"
        storage.write_durably(temporary, text.encode() + b"\n")
        # Another start at the same time may have linked its own, and then have swept this one.
        with suppress(FileExistsError, FileNotFoundError):
            storage.link(temporary, "FORMAT")
    storage.sync_folder(".")
    for name in storage.list_names("starts"):
        if name.startswith(_FORMAT_DRAFT):
            storage.remove(name)


def _refuse_to_share(storage: Storage, run: RunIdentity, number: int) -> None:
    """Two runs that were begun with one folder at the same moment: the later one gives its claim back."""
    try:
        check_owner(storage, run, below=number)
    except ConfigError:
        storage.remove(start_name(number))
        storage.sync_folder("starts")
        raise


def _refuse_to_orphan(storage: Storage, resumed_from: Chain | None) -> None:
    """See that nothing was committed since the chain was chosen; what was there then is left behind knowingly.

    Raises:
        SaveError: something was.
    """
    known = (0, 0) if resumed_from is None else checkpoint_age(resumed_from.newest_seen or resumed_from.name)
    newer = [name for name in list_manifests(storage) if checkpoint_age(name) > known]
    if not newer:
        return
    newest = read_manifest(storage, newer[-1]).manifest
    what = newer[-1] if newest is None else f"step {newest.step} ({newer[-1]})"
    if resumed_from is None:
        chosen, without = "this start had found no checkpoint", ""
    else:
        chosen = f"this start had chosen to go on from step {resumed_from.step}"
        without = f", or leave it behind with --resume {resumed_from.step}"
    raise SaveError(
        f"{storage.address}: another trainer has committed {what} after {chosen}; to go on would lose its steps",
        remedy=f"start again with --resume auto, which goes on from there{without}; the other trainer can't commit any "
        "more",
    )


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
    here = _resumed_here(storage, resumed_from)
    if here is None:
        return ChainState()
    return chain_of(here, needs_baseline=not can_continue(here.tip, layout, tables, optimizer))


def _resumed_here(storage: Storage, resumed_from: Chain | None) -> Chain | None:
    """The chain, if it is in this folder."""
    return resumed_from if resumed_from is not None and resumed_from.storage.address == storage.address else None
