"""How many micro-batches a batch can be cut into. Light to import: settings are checked before torch is needed."""

from dlrm_scale.config import Config
from dlrm_scale.errors import ConfigError

__all__ = ["check_micro_batches"]


def check_micro_batches(config: Config, ranks: int) -> None:
    """Refuse more micro-batches than a rank's full batch has rows: some would be empty.

    The last batch of an epoch may still be shorter, and is then cut into its rows.

    Args:
        config: `data.batch_size` and `train.micro_batches` are read.
        ranks: among which a batch is divided; 1 where the number isn't known yet.

    Raises:
        ConfigError: naming both settings.
    """
    rows = config.data.batch_size // ranks
    if config.train.micro_batches > max(1, rows):
        raise ConfigError(
            f"train.micro_batches = {config.train.micro_batches}: a rank's batch has only {rows} rows "
            f"(data.batch_size = {config.data.batch_size} over {ranks} rank{'s' if ranks > 1 else ''})",
            remedy=f"use at most {max(1, rows)}; a few bound the memory of activations, each costs a pass of its own",
        )
