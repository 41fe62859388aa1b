"""The newest checkpoint that a run's files tell of, as all ranks must know it."""

from dlrm_scale.errors import ConfigError
from dlrm_scale.sharding.ranks import Ranks
from dlrm_scale.train.run_folder import RunFolder
from dlrm_scale.train.told_checkpoints import ToldCheckpoint, newest_told

__all__ = ["told_on_all_ranks"]


def told_on_all_ranks(folder: RunFolder, ranks: Ranks) -> ToldCheckpoint | None:
    """The newest committed checkpoint that a run's files tell of, on all ranks; a collective, and rank 0 reads.

    To be called before the checkpoints are looked at: what is committed in between is newer, and not missed.

    Raises:
        ConfigError: the log can't be read.
    """
    told: object = None
    if ranks.rank == 0:
        try:
            told = newest_told(folder.log, folder.best)
        except OSError as error:
            told = ConfigError(f"{folder.log} can't be read: {error.strerror}", remedy="check its permissions")
    told = ranks.broadcast_object(told)
    if isinstance(told, ConfigError):
        raise told
    return told if isinstance(told, ToldCheckpoint) else None
