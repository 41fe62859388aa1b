"""Several threads that make the items of one sequence in turn."""

from collections.abc import Iterator, Sequence
from contextlib import suppress
from typing import Generic, TypeVar

from dlrm_scale.data.loading.prefetch import Prefetcher
from dlrm_scale.errors import TrainingError

__all__ = ["ITEMS_A_READER", "Readers"]

T = TypeVar("T")

ITEMS_A_READER = 2
"""Items that a thread holds at most: one that waits to be taken, and one in the making."""


class Readers(Generic[T]):
    """Iterates over a sequence whose items are made side by side: thread i of N makes items i, i + N, i + 2N and so on.

    Items come in the order of the sequence whatever the number of threads, and an exception comes where its item would
    have; what a thread made beyond it is dropped. Each thread ends as a `Prefetcher`'s does.

    Args:
        sources: for each thread an iterator over its items, used in that thread alone.
        name: of the threads; they are numbered.
    """

    def __init__(self, sources: Sequence[Iterator[T]], *, name: str) -> None:
        self._threads = [
            Prefetcher(source, depth=ITEMS_A_READER - 1, name=f"{name}-{number}")
            for number, source in enumerate(sources)
        ]
        self._taken = 0

    @property
    def wait_seconds(self) -> float:
        """How long the consumer has waited for items so far."""
        return sum(thread.wait_seconds for thread in self._threads)

    @property
    def making_seconds(self) -> float:
        """How long all threads together have been making items so far."""
        return sum(thread.making_seconds for thread in self._threads)

    def start(self) -> None:
        """Begin to read in all threads."""
        for thread in self._threads:
            thread.start()

    def __iter__(self) -> Iterator[T]:
        return self

    def __next__(self) -> T:
        """Return the next item, waiting for it if need be.

        Raises:
            StopIteration: the sequence has ended.
            BaseException: whatever making it raised.
        """
        item = next(self._threads[self._taken % len(self._threads)])
        self._taken += 1
        return item

    def close(self) -> None:
        """End the threads; items that nobody took are dropped. May be called again.

        A thread that storage keeps waiting is given up without a word: whoever waits for the consumer's own thread
        hears of it there.
        """
        for thread in self._threads:
            thread.stop()
        for thread in self._threads:
            with suppress(TrainingError):
                thread.close()
