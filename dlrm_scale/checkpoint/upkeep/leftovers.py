"""What a check of checkpoints notes besides damage: leftovers, and records of starts that can't be read."""

from dlrm_scale.checkpoint.chain.holders import has_ended
from dlrm_scale.checkpoint.chain.starts import newest_start, read_start, start_name
from dlrm_scale.checkpoint.files.file_names import parse_data_name
from dlrm_scale.checkpoint.storage.storage import Storage
from dlrm_scale.checkpoint.upkeep.sweep import dead_merges, stale_leftovers, unnamed_data

__all__ = ["unread_starts", "verify_notes"]

_SHOWN = 3


def unread_starts(storage: Storage) -> list[str]:
    """A line for each start whose record can't be read: a crash has torn it, or it is damaged.

    Raises:
        OSError: the storage doesn't answer.
    """
    stems = [name.removeprefix("starts/").removesuffix(".json") for name in storage.list_names("starts")]
    numbers = sorted(int(stem) for stem in stems if stem.isdecimal())
    return [
        f"{start_name(number)} can't be read: its number still counts, and who started then isn't known"
        for number in numbers
        if read_start(storage, number) is None
    ]


def verify_notes(storage: Storage, *, now: float) -> list[str]:
    """Lines on what is no fault of a checkpoint: starts as above, and data files that nobody will commit.

    Files that a trainer or a merge may be writing aren't named; whether the newest trainer has ended is known on its
    own host only.

    Args:
        storage: the checkpoints.
        now: Unix seconds.

    Raises:
        OSError: the storage doesn't answer.
    """
    newest = newest_start(storage)
    record = read_start(storage, newest) if newest else None
    # Before the manifests are read: what the trainer has committed until it ended is named by them.
    ended = record is not None and has_ended(record)
    names = {name for name in unnamed_data(storage) if ended and parse_data_name(name) is not None}
    names |= {name for name in stale_leftovers(storage, now=now) if name.startswith("data/")}
    for found in dead_merges(storage, now=now).values():
        names |= {name for name in found if name.startswith("data/")}
    notes = unread_starts(storage)
    if names:
        some = ", ".join(sorted(names)[:_SHOWN]) + (", …" if len(names) > _SHOWN else "")
        notes.append(
            f"no manifest names {len(names)} of the files in data/ ({some}): they are of a save or merge that wasn't "
            "committed, or their manifest is gone; a start or `checkpoint gc` removes them"
        )
    return notes
