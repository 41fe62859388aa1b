"""The starts of trainers in a folder of checkpoints: the newest owns it, and fences off those before it.

starts/<n>.json says who started and what it goes on from. A folder belongs to one run: the newest record that names a
run says to which. Records from before runs were named, and damaged ones, say nothing.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass

from dlrm_scale.checkpoint.files.manifest_files import list_manifests
from dlrm_scale.checkpoint.storage.storage import Storage
from dlrm_scale.checkpoint.storage.store_calls import is_outage
from dlrm_scale.errors import ConfigError, SaveError
from dlrm_scale.units import MIB

__all__ = [
    "FencedError",
    "RunIdentity",
    "check_fence",
    "check_owner",
    "fence_name",
    "newest_start",
    "read_start",
    "start_name",
    "starts_after",
]


@dataclass(frozen=True, kw_only=True)
class RunIdentity:
    """Which run a trainer trains.

    Attributes:
        id: random, for the run's whole life, wherever its folder is moved to; "" of a run that has none yet.
        path: its folder, for messages.
    """

    id: str
    path: str


def start_name(number: int) -> str:
    """Name of the record of a start."""
    return f"starts/{number}.json"


def newest_start(storage: Storage) -> int:
    """The highest number in `starts/`; 0 where there is none."""
    return max(_numbers(storage), default=0)


def starts_after(storage: Storage, number: int) -> list[int]:
    """The numbers in `starts/` above one, in order."""
    return sorted(found for found in _numbers(storage) if found > number)


def read_start(storage: Storage, number: int) -> Mapping[str, object] | None:
    """The record of a start; None if it is missing or damaged.

    Raises:
        OSError: the storage doesn't answer.
    """
    try:
        record = json.loads(storage.read(start_name(number), MIB))
    except (OSError, EOFError, ValueError) as error:
        if is_outage(error):
            raise
        return None
    return record if isinstance(record, dict) else None


def check_owner(storage: Storage, run: RunIdentity, *, below: int | None = None) -> None:
    """Refuse a folder that another run has started in.

    One that was begun anew in the same folder may take over what its predecessor left there, if that saved nothing.

    Args:
        storage: the checkpoints.
        run: who wants to start.
        below: look at starts before this one; None for all.

    Raises:
        ConfigError: it belongs to another run, which is named.
        OSError: the storage doesn't answer.
    """
    for number in sorted(_numbers(storage), reverse=True):
        record = read_start(storage, number) if below is None or number < below else None
        if record is None or not record.get("run_id"):
            continue
        if record["run_id"] == run.id:
            return
        saved = bool(list_manifests(storage))
        if record.get("run_path") == run.path and not saved:
            return
        what = "holds its checkpoints" if saved else "it has started there and saved nothing yet"
        raise ConfigError(
            f"{storage.address} belongs to another run, {record.get('run_path')} (id {record['run_id']}, start "
            f"{number} on {record.get('host')}): {what}",
            remedy="set checkpoint.path to another folder or URL; to train on from that run's weights start a new run "
            "with --init-from; if it is gone for good, remove what it left there",
        )


class FencedError(SaveError):
    """A newer trainer owns the folder."""


def check_fence(storage: Storage, start: int) -> None:
    """Refuse to go on if a newer trainer has started in the folder.

    Raises:
        FencedError: one has.
    """
    newest = newest_start(storage)
    if newest > start:
        raise FencedError(
            f"start {newest} has taken over {storage.address}; this is start {start}",
            remedy="stop one of the two trainers, or give each its own run.path",
        )


def fence_name(number: int) -> str:
    """Name of the file that keeps a merge from committing."""
    return f"fences/{number}"


def _numbers(storage: Storage) -> list[int]:
    names = [name.removeprefix("starts/").removesuffix(".json") for name in storage.list_names("starts")]
    return [int(number) for number in names if number.isdecimal()]
