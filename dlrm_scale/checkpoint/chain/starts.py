"""The starts of trainers in a folder of checkpoints: the newest owns it, and fences off those before it."""

from dlrm_scale.checkpoint.storage.storage import Storage
from dlrm_scale.errors import CheckpointError

__all__ = ["FencedError", "check_fence", "fence_name", "newest_start"]


def newest_start(storage: Storage) -> int:
    """The highest number in `starts/`; 0 where there is none."""
    numbers = [name.removeprefix("starts/").removesuffix(".json") for name in storage.list_names("starts")]
    return max((int(number) for number in numbers if number.isdecimal()), default=0)


class FencedError(CheckpointError):
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
