"""Batches of this rank for training and for evaluation; each loader makes them ahead in a thread.

`data.readers` beyond 1 are threads that read for that one. Neither they nor their number change a batch.

In every step all ranks have the same number of rows B; a rank that has fewer is padded with rows of weight 0 and empty
bags, since row-wise, table-row-wise and grid sharding need equal batches. Which true rows a global batch has doesn't
depend on the number of ranks.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial

import torch

from dlrm_scale.batch import Batch, JaggedIds, make_batch
from dlrm_scale.config import DataConfig
from dlrm_scale.data.dataset.dataset import Dataset
from dlrm_scale.data.loading.buffer_pool import BufferPool
from dlrm_scale.data.loading.cursor import Cursor
from dlrm_scale.data.loading.file_rows import FileRows
from dlrm_scale.data.loading.order import Int64s, Order
from dlrm_scale.data.loading.pieces import split_pieces
from dlrm_scale.data.loading.prefetch import Prefetcher
from dlrm_scale.data.loading.ragged_rows import BagColumns, RaggedRows
from dlrm_scale.data.loading.record_batch_cache import RecordBatchCache
from dlrm_scale.data.loading.streams import choose_streams
from dlrm_scale.data.loading.window_sequence import window_sequence
from dlrm_scale.data.loading.windows import WindowBuffers
from dlrm_scale.errors import CheckpointError, ConfigError, DatasetError
from dlrm_scale.schema import CATEGORY_COLUMNS, INTEGER_COLUMNS

__all__ = ["BATCHES_IN_USE", "EvalLoader", "TrainLoader"]

BATCHES_IN_USE = 4
"""Batches outside the queue whose memory is used again: one in the making, and those that a trainer works on."""


class TrainLoader:
    """One iterator over this rank's batches of all epochs; `iter` doesn't start again.

    `Batch.cursor` is the position after the batch; a loader made with it goes on with the next batch, on any number of
    ranks, bit for bit. Random numbers are the loader's own: no global generator is read or moved.

    Args:
        dataset: where rows come from.
        config: batch size, seed, streams, window, prefetch, readers.
        rank: this rank.
        ranks: number of ranks.
        epochs: passes over the training rows, those before the cursor included.
        cursor: where to go on; the beginning by default.
        pin_memory: batches are in page-locked memory.

    Attributes:
        order: the order of rows.
        rows: training rows of an epoch, N.
        dropped_rows: rows of each epoch that `drop_last` leaves out.
        steps_per_epoch: global batches of an epoch.
        total_steps: global batches of all epochs.
        start_step: global batches before the cursor.

    Raises:
        DatasetError: no training rows, or not the cursor's dataset.
        ConfigError: more ranks than streams, `drop_last` leaves nothing, or a setting differs from the cursor's.
        CheckpointError: a damaged cursor.
    """

    def __init__(
        self,
        dataset: Dataset,
        config: DataConfig,
        *,
        rank: int,
        ranks: int,
        epochs: int,
        cursor: Mapping[str, object] | None = None,
        pin_memory: bool = False,
    ) -> None:
        assert 0 <= rank < ranks
        pieces = split_pieces(dataset, "train")
        if len(pieces) == 0:
            raise DatasetError(
                f"{dataset.path} has no training rows", remedy="preprocess with a smaller --validation or more files"
            )
        given = None if cursor is None else Cursor.from_json(cursor)
        start = Cursor(
            fingerprint=dataset.fingerprint,
            seed=config.seed,
            batch_size=config.batch_size,
            # A run keeps its streams: 0 in the config means the cursor's.
            streams=config.streams or (given.streams if given else 0),
            window_rows=config.window_rows,
            drop_last=config.drop_last,
        )
        if given is not None:
            given.check_continues(start)
        start = replace(start, streams=choose_streams(config.batch_size, ranks, start.streams))
        self.order = Order(
            pieces,
            seed=config.seed,
            streams=start.streams,
            window_rows=config.window_rows,
            batch_size=config.batch_size,
            drop_last=config.drop_last,
        )
        self.rows = self.order.rows
        self.dropped_rows = self.order.dropped_rows
        self.steps_per_epoch = self.order.steps_per_epoch
        if self.steps_per_epoch == 0:
            raise ConfigError(
                f"data.drop_last leaves nothing: {self.rows} training rows, data.batch_size = {config.batch_size}",
                remedy=f"use a batch size of at most {self.rows}, or data.drop_last=false",
            )
        self.total_steps = epochs * self.steps_per_epoch
        self.start = given or start
        if self.start.step_in_epoch >= self.steps_per_epoch:
            raise CheckpointError(
                f"the data cursor is damaged: step {self.start.step_in_epoch} of {self.steps_per_epoch} in an epoch",
                remedy="resume from another checkpoint",
            )
        self.start_step = self.start.epoch * self.steps_per_epoch + self.start.step_in_epoch
        self._rank, self._ranks = rank, ranks
        pool = BufferPool(config.prefetch_batches + BATCHES_IN_USE, pin_memory=pin_memory)
        self._record_batches = RecordBatchCache(dataset)
        streams = self.order.rank_streams(rank, ranks)
        self._windows = WindowBuffers(
            self._record_batches,
            partial(
                window_sequence,
                self.order,
                streams,
                first_epoch=self.start.epoch,
                epochs=epochs,
                first_step=self.start.step_in_epoch,
            ),
            len(streams),
            self.order.largest_window_rows,
            dataset.multi_hot,
            readers=config.readers,
        )
        source = _train_batches(self._windows, dataset.multi_hot, self.order, self.start, rank, ranks, epochs, pool)
        self._prefetcher = Prefetcher(source, depth=config.prefetch_batches, name="train-loader")

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        return next(self._prefetcher)

    def read_ahead(self) -> None:
        """Read the first batches now, so that they are ready at the first `next`."""
        self._prefetcher.start()

    @property
    def wait_seconds(self) -> float:
        """How long the consumer has waited for batches so far."""
        return self._prefetcher.wait_seconds

    @property
    def fetch_seconds(self) -> float:
        """How long threads have read from storage so far, all together."""
        return self._record_batches.fetch_seconds

    @property
    def prep_seconds(self) -> float:
        """How long threads have made batches of what they had read so far, all together."""
        making_seconds = self._prefetcher.making_seconds + self._windows.hidden_seconds
        return max(0.0, making_seconds - self.fetch_seconds)

    def row_numbers(self, epoch: int, step_in_epoch: int) -> Int64s:
        """Return the numbers in the dataset of this rank's true rows of a global batch, in the batch's order."""
        return self.order.row_numbers(epoch, step_in_epoch, self._rank, self._ranks)

    def close(self) -> None:
        """End the threads; batches that nobody took are dropped."""
        self._prefetcher.close()


def _train_batches(
    windows: WindowBuffers,
    multi_hot: Sequence[str],
    order: Order,
    start: Cursor,
    rank: int,
    ranks: int,
    epochs: int,
    pool: BufferPool,
) -> Iterator[Batch]:
    ragged = RaggedRows(BagColumns(multi_hot)) if multi_hot else None
    full = order.share(0, rank, ranks)
    first_step = start.step_in_epoch
    windows.start()
    try:
        for epoch in range(start.epoch, epochs):
            windows.begin_epoch()
            for step in range(first_step, order.steps_per_epoch):
                share = full if step < order.full_steps else order.share(step, rank, ranks)
                ids: torch.Tensor | JaggedIds
                if ragged is None:
                    labels, dense, ids = _one_hot_tensors(pool, share.rows, share.true_rows)
                    windows.take(share.stream_rows, labels.numpy(), dense.numpy(), ids.numpy())
                else:
                    windows.take_ragged(share.stream_rows, ragged)
                    labels, dense, ids = _ragged_tensors(pool, share.rows, ragged)
                at_end = step + 1 == order.steps_per_epoch
                yield make_batch(
                    dense_features=dense,
                    ids=ids,
                    labels=labels,
                    rows_global=share.rows_global,
                    ranks=ranks,
                    cursor=start.json_at(
                        epoch=epoch + at_end,
                        step_in_epoch=0 if at_end else step + 1,
                        stream_rows_consumed=0 if at_end else (step + 1) * order.rows_per_step,
                    ),
                )
            first_step = 0
    finally:
        windows.close()


class EvalLoader:
    """Every row of a split exactly once, in file order; each `iter` starts again.

    A global batch is the next `batch_size` rows; a rank has a contiguous part of it. All ranks see the same number of
    batches, none if the split is empty.

    Args:
        dataset: where rows come from.
        split: `validation`, `test` or `train`.
        batch_size: global batch size in rows.
        rank: this rank.
        ranks: number of ranks; may exceed the batch size.
        limit_rows: only the first so many rows; 0 means all.
        pin_memory: batches are in page-locked memory.
        prefetch_batches: batches that the thread keeps ready.
        readers: threads that read files for it; with one, that thread reads them.

    Attributes:
        rows: rows that are covered, N.
        steps: global batches.
        wait_seconds: how long consumers have waited for batches so far.
    """

    def __init__(
        self,
        dataset: Dataset,
        *,
        split: str,
        batch_size: int,
        rank: int,
        ranks: int,
        limit_rows: int = 0,
        pin_memory: bool = False,
        prefetch_batches: int = 4,
        readers: int = 1,
    ) -> None:
        assert 0 <= rank < ranks
        assert batch_size >= 1
        available = dataset.split_rows(split)
        self.rows = min(available, limit_rows) if limit_rows else available
        self.steps = -(-self.rows // batch_size)
        self.wait_seconds = 0.0
        self._depth = prefetch_batches
        self._pin_memory = pin_memory
        self._arguments = (dataset, split, self.rows, batch_size, rank, ranks, readers)

    def __iter__(self) -> Iterator[Batch]:
        pool = BufferPool(self._depth + BATCHES_IN_USE, pin_memory=self._pin_memory)
        prefetcher = Prefetcher(_eval_batches(*self._arguments, pool), depth=self._depth, name="eval-loader")
        waited = 0.0
        try:
            for batch in prefetcher:
                self.wait_seconds += prefetcher.wait_seconds - waited
                waited = prefetcher.wait_seconds
                yield batch
        finally:
            prefetcher.close()


def _eval_batches(
    dataset: Dataset, split: str, rows: int, batch_size: int, rank: int, ranks: int, readers: int, pool: BufferPool
) -> Iterator[Batch]:
    def shares() -> Iterator[tuple[int, int, int]]:
        """Yield the rows of each global batch, and this rank's first row and the one after its last in the split."""
        for start in range(0, rows, batch_size):
            n = min(batch_size, rows - start)
            yield n, start + n * rank // ranks, start + n * (rank + 1) // ranks

    ragged = RaggedRows(BagColumns(dataset.multi_hot)) if dataset.multi_hot else None
    files = FileRows(dataset, split, lambda: ((first, last) for _, first, last in shares()), readers=readers)
    try:
        for rows_global, first, last in shares():
            rows_on_rank = -(-rows_global // ranks)
            ids: torch.Tensor | JaggedIds
            if ragged is None:
                labels, dense, ids = _one_hot_tensors(pool, rows_on_rank, last - first)
                for source, skip, n, target in files.read(first, last):
                    labels.numpy()[target : target + n] = source.labels[skip : skip + n]
                    dense.numpy()[target : target + n] = source.dense[:, skip : skip + n].T
                    ids.numpy()[:, target : target + n] = source.ids[:, skip : skip + n]
            else:
                ragged.begin(last - first)
                for source, skip, n, target in files.read(first, last):
                    ragged.add(source, skip, n, target)
                labels, dense, ids = _ragged_tensors(pool, rows_on_rank, ragged)
            yield make_batch(
                dense_features=dense,
                ids=ids,
                labels=labels,
                rows_global=rows_global,
                ranks=ranks,
            )
    finally:
        files.close()


def _one_hot_tensors(pool: BufferPool, rows: int, true_rows: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return labels `[B]`, dense features `[B, 13]` and ids `[26, true rows]`; padding is zero, the rest unset."""
    labels, dense, ids = pool.tensors(
        ((rows,), torch.float32),
        ((rows, len(INTEGER_COLUMNS)), torch.float32),
        ((len(CATEGORY_COLUMNS), true_rows), torch.int64),
    )
    if true_rows < rows:
        labels[true_rows:] = 0
        dense[true_rows:] = 0
    return labels, dense, ids


def _ragged_tensors(pool: BufferPool, rows: int, ragged: RaggedRows) -> tuple[torch.Tensor, torch.Tensor, JaggedIds]:
    """Return labels `[B]`, dense features `[B, 13]` and bags of the rows that were gathered; padding is zero."""
    true_rows = len(ragged.words)
    ids_per_key = ragged.count().tolist()
    labels, dense, values, lengths, offsets = pool.tensors(
        ((rows,), torch.float32),
        ((rows, len(INTEGER_COLUMNS)), torch.float32),
        ((sum(ids_per_key),), torch.int64),
        ((len(CATEGORY_COLUMNS) * rows,), torch.int32),
        ((len(CATEGORY_COLUMNS) * rows + 1,), torch.int32),
    )
    labels[true_rows:] = 0
    dense[true_rows:] = 0
    ragged.emit(labels.numpy(), dense.numpy(), values.numpy(), lengths.numpy(), offsets.numpy())
    return labels, dense, JaggedIds(values, lengths, offsets, ids_per_key, true_rows)
