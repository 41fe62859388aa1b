"""Where a run keeps its checkpoints."""

from pathlib import Path

from dlrm_scale.config import Config
from dlrm_scale.errors import ConfigError
from dlrm_scale.recipes.load import load_config

__all__ = ["checkpoint_location", "find_checkpoints"]


def checkpoint_location(config: Config) -> str:
    """Folder or URL of a run's checkpoints by its config: `checkpoint.path`, or a folder inside the run's."""
    return config.checkpoint.path or str(Path(config.run.path) / "checkpoints")


def find_checkpoints(run: str) -> str:
    """Folder or URL of the checkpoints that a user means.

    Args:
        run: a run's folder, wherever it was moved to; a folder of checkpoints; either of them as `file://…`; or the
            URL of a store.

    Raises:
        ConfigError: the run's config can't be read.
    """
    protocol, separator, path = run.partition("://")
    if separator and protocol not in ("file", "local"):
        return run
    run = path if separator else run
    folder = Path(run)
    if (folder / "config.toml").is_file():
        try:
            return load_config(folder / "config.toml").checkpoint.path or str(folder / "checkpoints")
        except ConfigError as error:
            if not (folder / "checkpoints").is_dir():
                raise
            remedy = "put config.toml back from a copy" if error.remedy is None else error.remedy
            raise ConfigError(
                error.message, remedy=f"{remedy}; its checkpoints can be named themselves: {folder / 'checkpoints'}"
            ) from None
    return str(folder / "checkpoints") if (folder / "checkpoints").is_dir() else run
