"""Where the batches of a timed round come from: memory, the page cache, or storage.

All three give the same rows in the same order, so that rounds differ in nothing else.
"""

import time
from collections.abc import Iterator, Sequence
from itertools import cycle, islice
from typing import Literal

from dlrm_scale.batch import Batch
from dlrm_scale.config import DataConfig
from dlrm_scale.data.dataset.dataset import Dataset
from dlrm_scale.data.loading.loader import TrainLoader
from dlrm_scale.data.loading.page_cache import cached_share, drop_cached
from dlrm_scale.data.loading.streams import choose_streams
from dlrm_scale.sharding.ranks import Ranks
from dlrm_scale.units import MIB

__all__ = ["Source", "Storage", "TimedBatches", "draw_batches", "few_streams", "open_loader", "window_steps"]

Source = Literal["synthetic", "warm", "cold"]

_EPOCHS = 1 << 20
"""A round must not end with the rows of a small dataset."""
_DRAWN_BYTES = 512 * MIB
"""Synthetic batches of a rank take no more; they come again in turn."""


class Storage:
    """A dataset's files on their way into memory. Tests put one with a slow disk in its place.

    Args:
        dataset: whose part files are meant.
    """

    def __init__(self, dataset: Dataset) -> None:
        self.dataset = dataset
        self._paths = [dataset.path / part.file for part in dataset.manifest.parts]

    def begin(self, source: Source) -> float | None:
        """Prepare for a round; before a cold one the files are dropped from the page cache.

        Returns:
            The share of the files that is still in memory, before a cold round; else None.
        """
        if source != "cold":
            return None
        drop_cached(self._paths)
        return cached_share(self._paths)


def few_streams(config: DataConfig, ranks: int) -> DataConfig:
    """Cut the order into as few streams as ranks allow.

    A stream's window lasts `window_rows x streams / batch_size` steps: 512 with 64 streams, and a round shorter than
    that would start with all windows and then read nothing. With few streams a round reads as many bytes a step as an
    epoch does.
    """
    fewest = 1 << (ranks - 1).bit_length()
    most = choose_streams(config.batch_size, ranks, config.streams)
    return config.model_copy(update={"streams": min(fewest, most)})


def window_steps(config: DataConfig) -> int:
    """Steps that a stream's window lasts; `streams` is settled."""
    return max(1, round(config.window_rows * config.streams / config.batch_size))


def open_loader(dataset: Dataset, config: DataConfig, ranks: Ranks) -> TrainLoader:
    """Make a loader that starts with the first batch and doesn't end."""
    return TrainLoader(
        dataset,
        config,
        rank=ranks.rank,
        ranks=ranks.ranks,
        epochs=_EPOCHS,
        pin_memory=ranks.device.type == "cuda",
    )


def draw_batches(dataset: Dataset, config: DataConfig, ranks: Ranks, steps: int) -> list[Batch]:
    """Take the first batches of the order into memory: `steps` of them, or fewer where they are large."""
    loader = open_loader(dataset, config, ranks)
    batches: list[Batch] = []
    size_bytes = 0
    try:
        for batch in islice(loader, steps):
            batches.append(batch)
            size_bytes += batch.dense_features.nbytes + batch.sparse_features.values().nbytes
            if size_bytes >= _DRAWN_BYTES and len(batches) > 1:
                break
    finally:
        loader.close()
    # all ranks must have equally many, so that they come again in the same steps
    fewest = min(int(str(n)) for n in ranks.gather_objects(len(batches)))
    return batches[:fewest]


class TimedBatches:
    """A round's batches, with the time that its consumer waits for them.

    Args:
        source: a loader, or batches that come in turn.
        steps: how many.

    Attributes:
        wait_seconds: of the consumer, so far.
    """

    def __init__(self, source: TrainLoader | Sequence[Batch], steps: int) -> None:
        self._loader = source if isinstance(source, TrainLoader) else None
        self._batches: Iterator[Batch] = islice(iter(source) if self._loader else cycle(source), steps)
        self.wait_seconds = 0.0

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        started = time.perf_counter()
        try:
            return next(self._batches)
        finally:
            self.wait_seconds += time.perf_counter() - started

    def close(self) -> None:
        """End the loader's thread."""
        if self._loader is not None:
            self._loader.close()
