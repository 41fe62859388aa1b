"""One background thread that keeps a few items of an iterator ready."""

import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

from dlrm_scale.errors import TrainingError

__all__ = ["Prefetcher"]

T = TypeVar("T")
_CLOSE_SECONDS = 10.0
_CHECK_SECONDS = 1.0


class Prefetcher(Generic[T]):
    """Iterates over `source` in a thread, at most `depth` items ahead; order and items are the source's.

    One thread beats worker processes here (3.3 against 0.65 Mrow per CPU-second): the gather holds no GIL and nothing
    is copied between processes. The thread starts at the first `next`. It ends when the source does, on `close()`,
    when the prefetcher is garbage collected and at exit; `source` must not refer to the prefetcher's owner, or it never
    is collected.

    An exception of the source reaches the consumer with its traceback, after the items before it, and again at
    every later `next`.

    Args:
        source: used in the thread alone.
        depth: items that wait at most; one more may be in the making.
        name: of the thread.
        now: the clock, in seconds.

    Attributes:
        wait_seconds: how long the consumer has waited for items so far.
    """

    def __init__(
        self, source: Iterator[T], *, depth: int, name: str = "prefetch", now: Callable[[], float] = time.perf_counter
    ) -> None:
        assert depth >= 1
        self.wait_seconds = 0.0
        self._now = now
        self._shared: _Shared[T] = _Shared()
        # The target holds only the shared state: a reference to self would keep the prefetcher alive for ever.
        self._thread = threading.Thread(target=_run, args=(source, self._shared, depth), name=name, daemon=True)
        self._started = False
        self._finalizer = weakref.finalize(self, _stop, self._shared, self._thread)

    @property
    def making_seconds(self) -> float:
        """How long the thread has been making items so far, without waiting for room."""
        return self._shared.making_seconds

    def __iter__(self) -> Iterator[T]:
        return self

    def start(self) -> None:
        """Begin to read ahead now and not at the first `next`."""
        with self._shared.changed:
            self._start_locked()

    def __next__(self) -> T:
        """Return the next item, waiting for it if need be.

        Raises:
            StopIteration: the source has ended, or `close()` was called.
            BaseException: whatever the source raised.
            TrainingError: the thread died without a word.
        """
        shared = self._shared
        with shared.changed:
            self._start_locked()
            if not shared.items and not shared.ended and not shared.stopping:
                start = self._now()
                try:
                    self._wait()
                finally:
                    self.wait_seconds += self._now() - start
            if shared.items and not shared.stopping:
                item = shared.items.popleft()
                shared.changed.notify_all()
                return item
            if shared.error is not None:
                raise shared.error
            raise StopIteration

    def stop(self) -> None:
        """Drop what is ready and ask the thread to end, without waiting for that."""
        self._shared.stop()

    def close(self, timeout_seconds: float = _CLOSE_SECONDS) -> None:
        """Drop what is ready and end the thread; may be called again.

        Raises:
            TrainingError: the thread is still busy after the timeout, as when storage doesn't answer.
        """
        self._shared.stop()
        if self._started and self._thread is not threading.current_thread():
            self._thread.join(timeout_seconds)
            if self._thread.is_alive():
                raise TrainingError(
                    f"thread {self._thread.name} didn't end within {timeout_seconds} s",
                    remedy="check that the dataset's storage answers",
                )
        self._finalizer.detach()

    def _start_locked(self) -> None:
        if not self._started and not self._shared.stopping:
            self._started = True
            self._thread.start()

    def _wait(self) -> None:
        shared = self._shared
        while not shared.items and not shared.ended and not shared.stopping:
            if not shared.changed.wait(_CHECK_SECONDS) and not self._thread.is_alive() and not shared.ended:
                raise TrainingError(f"thread {self._thread.name} died without an error")


class _Shared(Generic[T]):
    """What the thread and the consumer share; `changed` guards all of it."""

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.items: deque[T] = deque()
        self.error: BaseException | None = None
        self.ended = False
        self.stopping = False
        self.making_seconds = 0.0

    def stop(self) -> None:
        with self.changed:
            self.stopping = True
            self.items.clear()
            self.changed.notify_all()

    def put(self, item: T, depth: int) -> bool:
        """Add an item when there is room; False when the consumer wants no more."""
        with self.changed:
            while len(self.items) >= depth and not self.stopping:
                self.changed.wait()
            if not self.stopping:
                self.items.append(item)
                self.changed.notify_all()
            return not self.stopping


def _run(source: Iterator[T], shared: _Shared[T], depth: int) -> None:
    error: BaseException | None = None
    try:
        start = time.perf_counter()
        for item in source:
            shared.making_seconds += time.perf_counter() - start
            if not shared.put(item, depth):
                break
            start = time.perf_counter()
        close = getattr(source, "close", None)
        if close is not None:
            close()
    except BaseException as caught:  # an exit or interrupt raised by the source is the consumer's to handle too
        error = caught
    with shared.changed:
        shared.error = error
        shared.ended = True
        shared.changed.notify_all()


def _stop(shared: _Shared[T], thread: threading.Thread) -> None:
    """End the thread of a collected prefetcher. Collection may happen in the thread itself: then don't wait."""
    shared.stop()
    if thread.ident is not None and thread is not threading.current_thread():
        thread.join(_CLOSE_SECONDS)
