"""The current window of each of a rank's streams in memory, permuted, and the copy of a batch out of them.

Shapes: S streams of this rank, up to W rows a window, B rows of this rank in a step, T of them true.

Rows are permuted when a window is read and stand next to each other from then on, since a batch takes only a few of
each stream: it copies runs of B / S x 160 bytes (36 ns a row; 65 ns with columns; rows left in file order and picked
one by one take 2.7 times as long).

Memory: a window of 16,384 rows may grow by one row less than a record batch: 64 streams with room for 24,575 rows take
252 MB, divided between the ranks. The bags of multi-hot columns lie in a pool for each stream. All pools have room for
the largest window's ids so far and a quarter more: with 200 ids a row 25 MB a stream, twice that while they grow.
"""

from collections.abc import Sequence

import numpy as np

from dlrm_scale.data.loading.order import EpochOrder
from dlrm_scale.data.loading.ragged_rows import BagColumns, RaggedRows, with_room
from dlrm_scale.data.loading.record_batch_cache import RecordBatchCache
from dlrm_scale.data.loading.row_kernels import (
    RAGGED_ROW_WORDS,
    ROW_WORDS,
    Float32s,
    Int32s,
    Int64s,
    copy_ragged_rows,
    copy_rows,
    scatter_rows,
)

__all__ = ["WindowBuffers"]


class WindowBuffers:
    """Reads a rank's streams from any position on.

    Args:
        record_batches: where rows come from.
        streams: the rank's streams, S of them.
        window_rows: rows of the largest window, W.
        bag_columns: the multi-hot columns, if there are any.
    """

    def __init__(
        self,
        record_batches: RecordBatchCache,
        streams: Sequence[int],
        window_rows: int,
        bag_columns: BagColumns | None = None,
    ) -> None:
        self._record_batches = record_batches
        self._streams = streams
        self._bag_columns = bag_columns
        self._order: EpochOrder | None = None
        words = ROW_WORDS if bag_columns is None else RAGGED_ROW_WORDS
        self._windows: Int32s = np.empty((len(streams), window_rows, words), np.int32)
        self._pools: Int32s = np.empty((len(streams), 0), np.int32)
        self._next = np.zeros(len(streams), np.int64)  # row of the window that comes next
        self._left = np.zeros(len(streams), np.int64)  # rows of the window that haven't been taken
        self._offset = np.zeros(len(streams), np.int64)  # row of the stream that follows the window
        self._missing = np.zeros(len(streams), np.int64)  # rows of a stream that the current batch still needs
        self._target = np.zeros(len(streams), np.int64)  # where they go in it

    def seek(self, order: EpochOrder, offset: int) -> None:
        """Go to row `offset` of every stream in an epoch; windows are read when rows are taken."""
        self._order = order
        self._left[:] = 0
        self._offset[:] = offset

    def take(self, counts: Int64s, labels: Float32s, dense: Float32s, ids: Int64s) -> None:
        """Copy the next rows of every stream, one stream after the other; not for datasets with multi-hot columns.

        Args:
            counts: `[S]` rows of each stream, T in all.
            labels: `[B]` float32, filled up to T.
            dense: `[B, 13]` float32, filled likewise.
            ids: `[26, T]` int64.

        Raises:
            DatasetError: as `Dataset.read`.
        """
        self._begin(counts)
        dense_bits = dense.view(np.int32)
        while True:
            s = copy_rows(self._windows, self._next, self._left, self._missing, self._target, labels, dense_bits, ids)
            if s < 0:
                return
            self._read_window(s)

    def take_ragged(self, counts: Int64s, rows: RaggedRows) -> None:
        """Copy the next rows of every stream with their bags, one stream after the other.

        Args:
            counts: `[S]` rows of each stream, T in all.
            rows: gets T rows.

        Raises:
            DatasetError: as `Dataset.read`.
            ConfigError: a window has too many ids.
        """
        self._begin(counts)
        rows.begin(int(counts.sum()))
        while True:
            s, rows.used = copy_ragged_rows(
                self._windows,
                self._pools,
                self._next,
                self._left,
                self._missing,
                self._target,
                rows.columns.flags,
                rows.words,
                rows.pools[0],
                rows.used,
            )
            if s < 0:
                return
            if s < len(self._streams):
                self._read_window(s)
            else:
                # As much again as the rows so far took, or the largest window's ids for a start.
                more = max(rows.used, self._pools.shape[1])
                rows.pools = with_room(rows.pools, rows.used + more, "data.batch_size")

    def _begin(self, counts: Int64s) -> None:
        self._missing[:] = counts
        np.cumsum(counts[:-1], out=self._target[1:])
        self._target[0] = 0

    def _read_window(self, s: int) -> None:
        assert self._order is not None
        offset = int(self._offset[s])
        window = self._order.window_at(self._streams[s], offset)
        places = self._order.places(window)
        done = used = 0
        for part, record_batch, skip, count, _ in self._order.pieces_of(window):
            rows = self._record_batches.read(part, record_batch)
            piece = places[done : done + count]
            if self._bag_columns is None:
                scatter_rows(rows.labels, rows.dense.view(np.int32), rows.ids, skip, piece, self._windows[s])
            else:
                self._pools, used = self._bag_columns.scatter(
                    rows, skip, piece, self._windows[s], self._pools, used, pool_index=s
                )
            done += count
        begin = offset - self._order.stream_offset(window)
        self._next[s] = begin
        self._left[s] = window.rows - begin
        self._offset[s] = offset - begin + window.rows
