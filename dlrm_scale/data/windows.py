"""The current window of each of a rank's streams in memory, permuted, and the copy of a batch out of them.

Shapes: S streams of this rank, up to W rows a window, B rows of this rank in a step.

A row is 40 words of 4 bytes: label, 13 dense features (their bits), 26 ids. Rows are permuted when a window is read and
stand next to each other from then on, since a batch takes only a few of each stream: it copies runs of
B / S x 160 bytes (36 ns a row; 65 ns with columns). A window of 16,384 rows may grow by one row less than a record
batch: 64 streams with room for 24,575 rows take 252 MB, divided between the ranks.
"""

from collections.abc import Sequence

import numba
import numpy as np
import numpy.typing as npt

from dlrm_scale.data.order import EpochOrder, Int64s, UInt32s
from dlrm_scale.data.record_batch_cache import RecordBatchCache
from dlrm_scale.schema import RAW_COLUMNS

__all__ = ["WindowBuffers"]

Int32s = npt.NDArray[np.int32]
Float32s = npt.NDArray[np.float32]


class WindowBuffers:
    """Reads a rank's streams from any position on.

    Args:
        record_batches: where rows come from.
        streams: the rank's streams, S of them.
        window_rows: rows of the largest window, W.
    """

    def __init__(self, record_batches: RecordBatchCache, streams: Sequence[int], window_rows: int) -> None:
        self._record_batches = record_batches
        self._streams = streams
        self._order: EpochOrder | None = None
        self._windows = np.empty((len(streams), window_rows, len(RAW_COLUMNS)), np.int32)
        self._next = np.zeros(len(streams), np.int64)  # row of the window that comes next
        self._left = np.zeros(len(streams), np.int64)  # rows of the window that haven't been taken
        self._offset = np.zeros(len(streams), np.int64)  # row of the stream that follows the window

    def seek(self, order: EpochOrder, offset: int) -> None:
        """Go to row `offset` of every stream in an epoch; windows are read when rows are taken."""
        self._order = order
        self._left[:] = 0
        self._offset[:] = offset

    def take(self, counts: Int64s, labels: Float32s, dense: Float32s, ids: Int64s) -> None:
        """Copy the next rows of every stream, one stream after the other.

        Args:
            counts: `[S]` rows of each stream.
            labels: `[B]` float32, filled up to the sum of `counts`.
            dense: `[B, 13]` float32, filled likewise.
            ids: `[26, sum of counts]` int64.

        Raises:
            DatasetError: as `Dataset.read`.
        """
        missing = counts.copy()
        target = np.cumsum(counts) - counts
        while True:
            for s in np.flatnonzero((missing > 0) & (self._left == 0)):
                self._read_window(int(s))
            taken = np.minimum(missing, self._left)
            _copy_rows(self._windows, self._next, taken, target, labels, dense.view(np.int32), ids)
            self._next += taken
            self._left -= taken
            missing -= taken
            target += taken
            if not missing.any():
                return

    def _read_window(self, s: int) -> None:
        assert self._order is not None
        offset = int(self._offset[s])
        window = self._order.window_at(self._streams[s], offset)
        places = self._order.places(window)
        done = 0
        for part, record_batch, skip, rows, _ in self._order.pieces_of(window):
            labels, dense, ids, _ = self._record_batches.read(part, record_batch)
            _scatter_rows(labels, dense.view(np.int32), ids, skip, places[done : done + rows], self._windows[s])
            done += rows
        begin = offset - self._order.stream_offset(window)
        self._next[s] = begin
        self._left[s] = window.rows - begin
        self._offset[s] = offset - begin + window.rows


@numba.njit(cache=True, nogil=True)
def _scatter_rows(
    labels: npt.NDArray[np.uint8],  # [n]
    dense: Int32s,  # [13, n], bits of float32
    ids: Int32s,  # [26, n]
    skip: int,
    places: UInt32s,  # [rows]; unsigned, so that numba doesn't wrap indices
    window: Int32s,  # [W, 40]
) -> None:
    for k in range(len(places)):
        row = window[places[k]]
        row[0] = labels[skip + k]
        for c in range(13):
            row[1 + c] = dense[c, skip + k]
        for c in range(26):
            row[14 + c] = ids[c, skip + k]


@numba.njit(cache=True, nogil=True)
def _copy_rows(
    windows: Int32s,  # [S, W, 40]
    begin: Int64s,  # [S]
    count: Int64s,  # [S]
    target: Int64s,  # [S]
    labels: Float32s,  # [B]
    dense: Int32s,  # [B, 13], bits of float32
    ids: Int64s,  # [26, true rows]
) -> None:
    for s in range(len(count)):
        # Tiles of 32 rows stay in the first-level cache while their ids are turned into columns.
        for tile in range(0, count[s], 32):
            n = min(32, count[s] - tile)
            a, t = begin[s] + tile, target[s] + tile
            for k in range(n):
                labels[t + k] = windows[s, a + k, 0]
                for c in range(13):
                    dense[t + k, c] = windows[s, a + k, 1 + c]
            for c in range(26):
                for k in range(n):
                    ids[c, t + k] = windows[s, a + k, 14 + c]
