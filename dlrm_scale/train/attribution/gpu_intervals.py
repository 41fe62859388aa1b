"""The intervals of a step on a GPU's own timeline, without ever waiting for it.

The main thread only queues work, so its intervals say little there. An event is queued at each switch of the clock; at
log steps, after the loss has been fetched, the events before it have passed and the times between them are read.
"""

from collections import defaultdict, deque

import torch

__all__ = ["GpuIntervals"]


class GpuIntervals:
    """A listener of a `StepClock`. Make it where the stream that computes is the current one.

    The main thread may switch while it queues work into another stream: the SparseDist pipeline takes batches inside
    that of its copies. Events go into the stream that computes all the same, since times between events of two streams
    mean nothing: what the one had not reached yet would count as negative time.

    Attributes:
        seconds: by interval, so far as they were read. An exchange's part that runs under other work isn't in them:
            its interval has what the compute stream waited.
    """

    def __init__(self) -> None:
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self._stream = torch.cuda.current_stream()
        self._queued: deque[tuple[str, torch.cuda.Event]] = deque()
        self._free: list[torch.cuda.Event] = []

    def mark(self, name: str) -> None:
        """Queue an event where the interval `name` begins; none where it goes on, as inside an evaluation."""
        if self._queued and self._queued[-1][0] == name:
            return
        event = self._free.pop() if self._free else torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(self._stream)
        self._queued.append((name, event))

    def read(self) -> None:
        """Add up what has passed."""
        queued = self._queued
        while len(queued) > 1 and queued[1][1].query():  # type: ignore[no-untyped-call]
            name, begun = queued.popleft()
            self.seconds[name] += begun.elapsed_time(queued[0][1]) / 1000
            self._free.append(begun)
