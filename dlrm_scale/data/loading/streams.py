"""How many streams the order of rows is cut into; imports nothing heavy, so that a wrong number is found at once."""

from dlrm_scale.config import DataConfig
from dlrm_scale.errors import ConfigError

__all__ = ["DEFAULT_STREAMS", "check_streams", "choose_streams"]

DEFAULT_STREAMS = 64


def check_streams(config: DataConfig) -> None:
    """Refuse streams that no number of ranks could use, before there are ranks.

    Raises:
        ConfigError: `data.streams` is no power of two, or doesn't divide `data.batch_size`.
    """
    if config.streams:
        _check_divides(config.streams, config.batch_size)


def choose_streams(batch_size: int, ranks: int, streams: int = 0) -> int:
    """Return the number of streams: as asked for, or the largest power of two that divides the batch, at most 64.

    With more than 64 ranks the limit is the next power of two.

    Args:
        batch_size: global batch size in rows.
        ranks: number of ranks; each owns at least one stream.
        streams: what the config or cursor says; 0 chooses.

    Raises:
        ConfigError: the streams don't divide the batch, or there are more ranks than streams.
    """
    if streams == 0:
        limit = max(DEFAULT_STREAMS, 1 << (ranks - 1).bit_length())
        streams = min(batch_size & -batch_size, limit)
        remedy = f"make data.batch_size a multiple of {1 << (ranks - 1).bit_length()}, or use at most {streams} ranks"
    else:
        _check_divides(streams, batch_size)
        remedy = f"use at most {streams} ranks; only a new run can have more streams"
    if ranks > streams:
        raise ConfigError(
            f"{ranks} ranks need at least {ranks} streams, a global batch of {batch_size} rows has {streams}",
            remedy=remedy,
        )
    return streams


def _check_divides(streams: int, batch_size: int) -> None:
    if streams & (streams - 1) or batch_size % streams:
        raise ConfigError(
            f"data.streams = {streams} must be a power of two that divides data.batch_size = {batch_size}",
            remedy=f"use {min(batch_size & -batch_size, DEFAULT_STREAMS)}, or 0 to let it be chosen",
        )
