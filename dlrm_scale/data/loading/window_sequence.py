"""In which order the batches of a rank need the windows of its streams.

Batches take the same number of rows of every stream, so windows end now here, now there, and which one is needed next
follows from the order alone. Threads that read ahead rely on it.
"""

import heapq
from collections.abc import Iterator
from dataclasses import dataclass

from dlrm_scale.data.loading.order import EpochOrder, Order, Window

__all__ = ["WantedWindow", "window_sequence"]


@dataclass(frozen=True, kw_only=True)
class WantedWindow:
    """A window that batches will take rows of.

    Attributes:
        order: of the window's epoch.
        window: which rows.
        stream_index: its stream, as an index into the rank's streams.
        skip: rows at its start, as permuted, that an earlier run took.
    """

    order: EpochOrder
    window: Window
    stream_index: int
    skip: int


def window_sequence(
    order: Order, streams: range, *, first_epoch: int, epochs: int, first_step: int
) -> Iterator[WantedWindow]:
    """Yield windows in the order in which a rank's batches ask for them; reads nothing.

    Args:
        order: of the run.
        streams: the rank's.
        first_epoch: epoch of the first batch.
        epochs: epochs of the run, those before included.
        first_step: the first batch's number in its epoch.
    """
    for epoch in range(first_epoch, epochs):
        yield from _of_epoch(order, order.epoch(epoch), streams, first_step if epoch == first_epoch else 0)


def _of_epoch(order: Order, of_epoch: EpochOrder, streams: range, first_step: int) -> Iterator[WantedWindow]:
    step_rows = order.rows_per_step
    offset = first_step * step_rows
    # (step that needs the next row, stream's index, that row's offset in the stream): a batch goes through the streams
    # in turn, so the least of these is the next window that it asks for
    needed = [
        (first_step, index, offset) for index, stream in enumerate(streams) if offset < int(order.stream_rows[stream])
    ]
    while needed:
        _, index, offset = needed[0]
        window = of_epoch.window_at(streams[index], offset)
        skip = offset - of_epoch.stream_offset(window)
        yield WantedWindow(order=of_epoch, window=window, stream_index=index, skip=skip)
        end = offset - skip + window.rows
        if end < int(order.stream_rows[streams[index]]) and end // step_rows < order.steps_per_epoch:
            heapq.heapreplace(needed, (end // step_rows, index, end))
        else:
            heapq.heappop(needed)
