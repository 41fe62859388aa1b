"""The current window of each of a rank's streams in memory, permuted, and the copy of a batch out of them.

Shapes: S streams of this rank, up to W rows a window, B rows of this rank in a step, T of them true.

Rows are permuted when a window is read and stand next to each other from then on, since a batch takes only a few of
each stream: it copies runs of B / S x 160 bytes (36 ns a row; 65 ns with columns; rows left in file order and picked
one by one take 2.7 times as long).

One reader reads a window when a batch asks for it. More readers are threads that read the next windows meanwhile, into
slots that no stream has:

```
slots        0     1     2   ...  S-1  |  S   S+1  ...  S+2N-1
streams      0     1     2   ...  S-1  |  two for each of N readers: one read, one being read
next window of stream 1 was read into slot S: stream 1 takes slot S, and slot 1 is free for a reader
```

Memory: a window of 16,384 rows may grow by one row less than a record batch: 64 streams with room for 24,575 rows take
252 MB, divided between the ranks, and each reader beyond the first case 8 MB. The bags of multi-hot columns lie in a
pool for each stream. All pools have room for the largest window's ids so far and a quarter more: with 200 ids a row
25 MB a stream, twice that while they grow. A reader's bags wait in a pool of their own until the stream's is free.
"""

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice

import numpy as np

from dlrm_scale.data.loading.ragged_rows import BagColumns, RaggedRows, with_room
from dlrm_scale.data.loading.readers import ITEMS_A_READER, Readers
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
from dlrm_scale.data.loading.window_sequence import WantedWindow

__all__ = ["WindowBuffers", "windows_ahead"]

Sequences = Callable[[], Iterator[WantedWindow]]


def windows_ahead(readers: int) -> int:
    """Return how many windows are in memory at most beyond one a stream."""
    return ITEMS_A_READER * readers if readers > 1 else 0


class WindowBuffers:
    """Holds a rank's windows and makes batches of them; memory is taken by `start`.

    Args:
        record_batches: where rows come from.
        sequence: makes an iterator over the windows in the order in which batches will ask for them.
        streams: how many the rank has, S.
        window_rows: rows of the largest window, W.
        multi_hot: the multi-hot columns.
        readers: threads that read windows; with one, they are read in the thread that takes rows.
    """

    def __init__(
        self,
        record_batches: RecordBatchCache,
        sequence: Sequences,
        streams: int,
        window_rows: int,
        multi_hot: Sequence[str] = (),
        *,
        readers: int = 1,
    ) -> None:
        self._record_batches = record_batches
        self._sequence = sequence
        self._window_rows = window_rows
        self._multi_hot = multi_hot
        self._reader_count = readers
        self._readers: Readers[_Read] | None = None
        self._next = np.zeros(streams, np.int64)  # row of the window that comes next
        self._left = np.zeros(streams, np.int64)  # rows of the window that haven't been taken
        self._missing = np.zeros(streams, np.int64)  # rows of a stream that the current batch still needs
        self._target = np.zeros(streams, np.int64)  # where they go in it

    @property
    def hidden_seconds(self) -> float:
        """Time of all readers together, less the time that was waited for them; 0 with one reader."""
        readers = self._readers
        return readers.making_seconds - readers.wait_seconds if readers is not None else 0.0

    def start(self) -> None:
        """Take memory and begin to read ahead, if there are readers for that."""
        streams = len(self._next)
        words = RAGGED_ROW_WORDS if self._multi_hot else ROW_WORDS
        slots = streams + windows_ahead(self._reader_count)
        self._windows: Int32s = np.empty((slots, self._window_rows, words), np.int32)
        self._slots = np.arange(streams)
        self._pools: Int32s = np.empty((streams, 0), np.int32)
        if self._reader_count == 1:
            self._wanted = self._sequence()
            self._reader = _WindowReader(self._record_batches, self._multi_hot)
            return
        self._free = _Free(slots=deque(range(streams, slots)), pools=deque())
        self._readers = Readers(
            [
                _read_ahead(
                    islice(self._sequence(), number, None, self._reader_count),
                    _WindowReader(self._record_batches, self._multi_hot),
                    self._windows,
                    self._free,
                )
                for number in range(self._reader_count)
            ],
            name="window-reader",
        )
        self._readers.start()

    def begin_epoch(self) -> None:
        """Go to the next epoch of the sequence: rows of the last that `drop_last` leaves out are forgotten."""
        self._left[:] = 0

    def close(self) -> None:
        """End the threads, if there are any."""
        if self._readers is not None:
            self._readers.close()

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
            s = copy_rows(
                self._windows,
                self._slots,
                self._next,
                self._left,
                self._missing,
                self._target,
                labels,
                dense_bits,
                ids,
            )
            if s < 0:
                return
            self._next_window(s)

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
                self._slots,
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
            if s < len(self._slots):
                self._next_window(s)
            else:
                # As much again as the rows so far took, or the largest window's ids for a start.
                more = max(rows.used, self._pools.shape[1])
                rows.pools = with_room(rows.pools, rows.used + more, "data.batch_size")

    def _begin(self, counts: Int64s) -> None:
        self._missing[:] = counts
        np.cumsum(counts[:-1], out=self._target[1:])
        self._target[0] = 0

    def _next_window(self, s: int) -> None:
        """Give stream `s`, whose window is used up, the next one of the sequence, which is its own."""
        if self._readers is None:
            wanted = next(self._wanted)
            self._pools, _ = self._reader.read(wanted, self._windows[s], self._pools, s)
        else:
            # free before the next is taken: the slots are as many as streams and readers can hold
            self._free.slots.append(int(self._slots[s]))
            read = next(self._readers)
            wanted = read.wanted
            self._slots[s] = read.slot
            if self._multi_hot:
                self._pools = with_room(self._pools, read.used)
                self._pools[s, : read.used] = read.pools[0, : read.used]
                self._free.pools.append(read.pools)
        assert wanted.stream_index == s
        self._next[s] = wanted.skip
        self._left[s] = wanted.window.rows - wanted.skip


@dataclass(frozen=True, kw_only=True)
class _Read:
    """A window that a reader has read.

    Attributes:
        wanted: which one.
        slot: where its rows are.
        pools: `[1, capacity]`, its bags, if there are multi-hot columns.
        used: ids in the pool.
    """

    wanted: WantedWindow
    slot: int
    pools: Int32s
    used: int


@dataclass(frozen=True, kw_only=True)
class _Free:
    """Memory that readers may use; a deque's operations are atomic.

    Attributes:
        slots: never empty when a reader wants one.
        pools: `[1, capacity]` each; readers make another where there is none.
    """

    slots: deque[int]
    pools: deque[Int32s]


class _WindowReader:
    """Reads windows, in one thread."""

    def __init__(self, record_batches: RecordBatchCache, multi_hot: Sequence[str]) -> None:
        self._record_batches = record_batches
        self._bag_columns = BagColumns(multi_hot) if multi_hot else None

    def read(self, wanted: WantedWindow, words: Int32s, pools: Int32s, pool_index: int) -> tuple[Int32s, int]:
        """Read and permute a window.

        Args:
            wanted: which one.
            words: `[W, 40 or 41]`, gets its rows.
            pools: `[P, capacity]`; one of them gets its bags.
            pool_index: which.

        Returns:
            The pools, which are new ones if they were too small, and the ids in that one.
        """
        order, window = wanted.order, wanted.window
        places = order.places(window)
        done = used = 0
        for part, record_batch, skip, count, _ in order.pieces_of(window):
            rows = self._record_batches.read(part, record_batch)
            piece = places[done : done + count]
            if self._bag_columns is None:
                scatter_rows(rows.labels, rows.dense.view(np.int32), rows.ids, skip, piece, words)
            else:
                pools, used = self._bag_columns.scatter(rows, skip, piece, words, pools, used, pool_index=pool_index)
            done += count
        return pools, used


def _read_ahead(wanted: Iterator[WantedWindow], reader: _WindowReader, windows: Int32s, free: _Free) -> Iterator[_Read]:
    """Read one reader's windows; refers to nothing that owns its thread."""
    for window in wanted:
        slot = free.slots.popleft()
        try:
            pools = free.pools.pop()
        except IndexError:
            pools = np.empty((1, 0), np.int32)
        pools, used = reader.read(window, windows[slot], pools, 0)
        yield _Read(wanted=window, slot=slot, pools=pools, used=used)
