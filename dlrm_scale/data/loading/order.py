"""The order of training rows: a function of (dataset, seed, epoch, streams, window) alone, never of the ranks.

One epoch of N rows, V streams:

```
pieces of record batches in file order     a b c d e f g h
permuted by Philox(seed, epoch)            f b h a | d g c e          the sequence of N rows
cut into V equal streams of rows           0 ......... | 1 .........  stream v: rows [v·N//V, (v+1)·N//V)
cut into windows of whole pieces           [f b][h a|][d g][c e]
rows permuted inside a window              by Philox(seed, epoch, stream, window)
global batch s                             rows [s·b, (s+1)·b) of every stream, b = batch size / V
rank r of W                                streams [r·V//W, (r+1)·V//W) of each global batch
```
Streams differ by at most one row, so every global batch is full but the last. Any position is computed, never
replayed: at 4.4 billion rows an epoch's permutation takes 0.02 s and a window is a binary search.

Random numbers are the raw 64-bit outputs of Philox4x64 (Salmon et al., 2011), which numpy keeps the same for ever,
unlike `Generator.permutation` (NEP 19): a run can be resumed under another numpy.
"""

import threading
from collections.abc import Iterator
from dataclasses import dataclass

import numba
import numpy as np
import numpy.typing as npt

from dlrm_scale.data.loading.pieces import Pieces

__all__ = [
    "EpochOrder",
    "Int64s",
    "Order",
    "Share",
    "UInt32s",
    "Window",
    "stream_bounds",
]

Int64s = npt.NDArray[np.int64]
UInt32s = npt.NDArray[np.uint32]

_PIECES, _WINDOWS = 0, 1
"""What random numbers are for: the highest word of Philox's counter, so that no two uses share a number."""


@dataclass(frozen=True, kw_only=True)
class Window:
    """Rows `[start, end)` of an epoch's sequence that are permuted together; all belong to one stream.

    Attributes:
        stream: the stream.
        number: number of the window in the epoch.
        start: first position in the sequence.
        end: position after the last.
    """

    stream: int
    number: int
    start: int
    end: int

    @property
    def rows(self) -> int:
        """Rows of the window."""
        return self.end - self.start


@dataclass(frozen=True, kw_only=True)
class Share:
    """One rank's share of one global batch.

    Attributes:
        stream_rows: `[S]` rows of each of its streams.
        rows: rows of its batch with padding, the same on all ranks: the largest number of true rows.
        true_rows: its rows.
        rows_global: rows of all ranks.
    """

    stream_rows: Int64s
    rows: int
    true_rows: int
    rows_global: int


class EpochOrder:
    """The order of one epoch."""

    def __init__(self, pieces: Pieces, *, seed: int, epoch: int, streams: int, window_rows: int) -> None:
        self._pieces = pieces
        self._seed = seed
        self.epoch = epoch
        self._sequence = _permutation(len(pieces), _philox(seed, epoch, _PIECES, 0, 0))
        self._piece_ends = np.cumsum(pieces.rows[self._sequence])
        self._bounds = stream_bounds(pieces.total_rows, streams)
        # A window ends with the piece that reaches the next multiple of window_rows: no record batch is read for two
        # windows of a stream, and windows keep their size when parts are small.
        reached = self._piece_ends // window_rows
        is_end = np.diff(reached, prepend=0) > 0
        is_end[-1:] = True
        self._window_starts = np.concatenate([[0], self._piece_ends[is_end]])

    def window_at(self, stream: int, offset: int) -> Window:
        """Return the window that holds row `offset` of a stream."""
        first, last = int(self._bounds[stream]), int(self._bounds[stream + 1])
        assert first <= first + offset < last
        number = int(np.searchsorted(self._window_starts, first + offset, side="right")) - 1
        return Window(
            stream=stream,
            number=number,
            start=max(first, int(self._window_starts[number])),
            end=min(last, int(self._window_starts[number + 1])),
        )

    def stream_offset(self, window: Window) -> int:
        """Return which row of its stream a window starts with."""
        return window.start - int(self._bounds[window.stream])

    def pieces_of(self, window: Window) -> Iterator[tuple[int, int, int, int, int]]:
        """Yield the pieces of a window in sequence: part, record batch, skipped rows, rows, number of the first."""
        position = window.start
        k = int(np.searchsorted(self._piece_ends, position, side="right"))
        pieces = self._pieces
        while position < window.end:
            piece, end = int(self._sequence[k]), int(self._piece_ends[k])
            before = position - (end - int(pieces.rows[piece]))
            rows = min(end, window.end) - position
            yield (
                int(pieces.part[piece]),
                int(pieces.record_batch[piece]),
                int(pieces.skip[piece]) + before,
                rows,
                int(pieces.start_global[piece]) + before,
            )
            position += rows
            k += 1

    def places(self, window: Window) -> UInt32s:
        """Return where each row of a window, in sequence, stands after the permutation: `[rows]`."""
        return _permutation(window.rows, _philox(self._seed, self.epoch, _WINDOWS, window.stream, window.number))

    def row_numbers(self, window: Window) -> Int64s:
        """Return the numbers in the dataset of a window's rows, permuted: `[rows]`."""
        numbers = np.concatenate([np.arange(start, start + n) for *_, n, start in self.pieces_of(window)])
        permuted = np.empty_like(numbers)
        permuted[self.places(window)] = numbers
        return permuted


class Order:
    """The order of a whole run.

    Args:
        pieces: of the training split; at least one row.
        seed: in `[0, 2^64)`.
        streams: V; divides the batch size.
        window_rows: rows are permuted inside windows of about this size, made of whole pieces.
        batch_size: global batch size in rows.
        drop_last: leave out an epoch's last batch when it isn't full.

    Attributes:
        rows: training rows, N.
        rows_per_step: rows of each stream in a full global batch, b.
        steps_per_epoch: global batches of an epoch.
        dropped_rows: rows of each epoch that aren't used; 0 without `drop_last`.
    """

    def __init__(
        self, pieces: Pieces, *, seed: int, streams: int, window_rows: int, batch_size: int, drop_last: bool = False
    ) -> None:
        assert batch_size % streams == 0
        assert 0 <= seed < 1 << 64
        self.rows = pieces.total_rows
        self.streams = streams
        self.window_rows = window_rows
        self.batch_size = batch_size
        self.rows_per_step = batch_size // streams
        self.stream_rows = np.diff(stream_bounds(self.rows, streams))
        self.steps_per_epoch = self.rows // batch_size if drop_last else -(-self.rows // batch_size)
        self.dropped_rows = self.rows - self.steps_per_epoch * batch_size if drop_last else 0
        self._pieces = pieces
        self._seed = seed
        self._latest: EpochOrder | None = None
        self._lock = threading.Lock()

    def epoch(self, epoch: int) -> EpochOrder:
        """Return the order of an epoch; the latest is kept. Threads may share it."""
        with self._lock:
            latest = self._latest
            if latest is None or latest.epoch != epoch:
                latest = EpochOrder(
                    self._pieces, seed=self._seed, epoch=epoch, streams=self.streams, window_rows=self.window_rows
                )
                self._latest = latest
            return latest

    @property
    def largest_window_rows(self) -> int:
        """No window of any epoch has more rows."""
        largest_piece = int(self._pieces.rows.max())
        return min(self.window_rows + largest_piece - 1, int(self.stream_rows.max()))

    @property
    def full_steps(self) -> int:
        """Global batches of an epoch that are full; at most one more isn't."""
        return self.rows // self.batch_size

    def share(self, step: int, rank: int, ranks: int) -> Share:
        """Return a rank's share of global batch `step` of an epoch."""
        per_stream = self.step_rows_per_stream(step)
        per_rank = self.step_rows_per_rank(step, ranks)
        streams = self.rank_streams(rank, ranks)
        return Share(
            stream_rows=per_stream[streams.start : streams.stop],
            rows=int(per_rank.max()),
            true_rows=int(per_rank[rank]),
            rows_global=int(per_rank.sum()),
        )

    def step_rows_per_stream(self, step: int) -> Int64s:
        """Return how many rows each stream gives to global batch `step` of an epoch: `[V]`."""
        rows: Int64s = np.clip(self.stream_rows - step * self.rows_per_step, 0, self.rows_per_step)
        return rows

    def rank_streams(self, rank: int, ranks: int) -> range:
        """Return the streams that a rank owns."""
        return range(rank * self.streams // ranks, (rank + 1) * self.streams // ranks)

    def step_rows_per_rank(self, step: int, ranks: int) -> Int64s:
        """Return how many rows each rank has in global batch `step` of an epoch: `[W]`."""
        before = np.concatenate([[0], np.cumsum(self.step_rows_per_stream(step))])
        per_rank: Int64s = np.diff(before[[rank * self.streams // ranks for rank in range(ranks + 1)]])
        return per_rank

    def row_numbers(self, epoch: int, step: int, rank: int = 0, ranks: int = 1) -> Int64s:
        """Return the numbers in the dataset of a rank's rows of one global batch, in the batch's order."""
        order, counts, numbers = self.epoch(epoch), self.step_rows_per_stream(step), [np.empty(0, np.int64)]
        for stream in self.rank_streams(rank, ranks):
            offset, missing = step * self.rows_per_step, int(counts[stream])
            while missing:
                window = order.window_at(stream, offset)
                begin = offset - order.stream_offset(window)
                taken = order.row_numbers(window)[begin : begin + missing]
                numbers.append(taken)
                offset += len(taken)
                missing -= len(taken)
        return np.concatenate(numbers)


def stream_bounds(rows: int, streams: int) -> Int64s:
    """Return where the streams start in an epoch's sequence, and where the last ends: `[V + 1]`."""
    return np.array([v * rows // streams for v in range(streams + 1)], np.int64)


def _philox(seed: int, epoch: int, purpose: int, stream: int, number: int) -> np.random.Philox:
    """Return a generator of its own: the lowest word counts, the others say what the numbers are for."""
    return np.random.Philox(
        key=np.array([seed, epoch], np.uint64), counter=np.array([0, number, stream, purpose], np.uint64)
    )


def _permutation(n: int, bits: np.random.Philox) -> UInt32s:
    values = np.arange(n, dtype=np.uint32)
    _shuffle(values, bits.random_raw(n))
    return values


@numba.njit(cache=True, nogil=True)
def _shuffle(values: UInt32s, raw: npt.NDArray[np.uint64]) -> None:
    """Shuffle in place (Fisher-Yates); raw numbers become fractions with 53 bits, so the bias is below n / 2^53."""
    for i in range(len(values) - 1, 0, -1):
        j = int(float(raw[i] >> np.uint64(11)) * (1.0 / 9007199254740992.0) * (i + 1))
        values[i], values[j] = values[j], values[i]
