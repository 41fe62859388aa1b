"""The thread that reads ahead."""

import gc
import threading
import traceback
import weakref
from collections.abc import Iterator

import pytest

from dlrm_scale.data.loading.prefetch import Prefetcher
from dlrm_scale.errors import TrainingError


def _thread_of(name: str) -> threading.Thread:
    return next(thread for thread in threading.enumerate() if thread.name == name)


def test_items_come_in_order_and_end() -> None:
    prefetcher = Prefetcher(iter(range(100)), depth=4)
    assert list(prefetcher) == list(range(100))
    with pytest.raises(StopIteration):
        next(prefetcher)


def test_at_most_depth_items_wait() -> None:
    made: list[int] = []
    third = threading.Event()

    def source() -> Iterator[int]:
        for i in range(10):
            made.append(i)
            if i == 3:
                third.set()
            yield i

    prefetcher = Prefetcher(source(), depth=2)
    assert next(prefetcher) == 0
    # Item 0 was taken, 1 and 2 wait, 3 is made and finds no room.
    assert third.wait(10)
    assert made == [0, 1, 2, 3]
    assert list(prefetcher) == list(range(1, 10))


def test_an_exception_arrives_after_the_items_before_it_with_its_traceback() -> None:
    def failing_source() -> Iterator[int]:
        yield 1
        yield 2
        raise OSError("disk is gone")

    prefetcher = Prefetcher(failing_source(), depth=4)
    assert [next(prefetcher), next(prefetcher)] == [1, 2]
    for _ in range(2):  # It doesn't turn into an orderly end.
        with pytest.raises(OSError, match="disk is gone") as caught:
            next(prefetcher)
        frames = traceback.extract_tb(caught.value.__traceback__)
        assert "failing_source" in [frame.name for frame in frames]


def test_an_interrupt_inside_the_thread_reaches_the_consumer() -> None:
    def source() -> Iterator[int]:
        raise KeyboardInterrupt
        yield 1

    with pytest.raises(KeyboardInterrupt):
        next(Prefetcher(source(), depth=1))


def test_close_ends_a_thread_that_waits_for_room_and_closes_the_source() -> None:
    closed = threading.Event()

    def source() -> Iterator[int]:
        try:
            while True:
                yield 0
        finally:
            closed.set()

    prefetcher = Prefetcher(source(), depth=2, name="endless")
    next(prefetcher)
    thread = _thread_of("endless")
    prefetcher.close()
    assert not thread.is_alive()
    assert closed.is_set()
    with pytest.raises(StopIteration):
        next(prefetcher)
    prefetcher.close()


def test_close_before_the_first_item_starts_no_thread() -> None:
    prefetcher = Prefetcher(iter([1]), depth=1, name="unused")
    prefetcher.close()
    assert list(prefetcher) == []
    assert all(thread.name != "unused" for thread in threading.enumerate())


def test_close_gives_up_on_a_stuck_source_and_names_the_thread() -> None:
    release = threading.Event()

    def source() -> Iterator[int]:
        yield 0
        release.wait(60)

    prefetcher = Prefetcher(source(), depth=1, name="stuck")
    next(prefetcher)
    with pytest.raises(TrainingError, match="thread stuck didn't end within"):
        prefetcher.close(timeout_seconds=0.01)
    release.set()
    prefetcher.close()


def test_a_collected_prefetcher_ends_its_thread() -> None:
    def source() -> Iterator[int]:
        while True:
            yield 0

    prefetcher = Prefetcher(source(), depth=1, name="collected")
    next(prefetcher)
    thread, alive = _thread_of("collected"), weakref.ref(prefetcher)
    del prefetcher
    gc.collect()
    assert alive() is None
    thread.join(10)
    assert not thread.is_alive()


def test_a_consumer_that_waits_is_woken_by_close() -> None:
    started, release = threading.Event(), threading.Event()

    def source() -> Iterator[int]:
        started.set()
        release.wait(60)
        yield 0

    prefetcher = Prefetcher(source(), depth=1)
    outcome: list[list[int]] = []
    consumer = threading.Thread(target=lambda: outcome.append(list(prefetcher)))
    consumer.start()
    assert started.wait(10)
    with pytest.raises(TrainingError):
        prefetcher.close(timeout_seconds=0.01)
    consumer.join(10)
    assert outcome == [[]]
    release.set()
    prefetcher.close()


def test_waiting_is_measured_only_while_nothing_is_ready() -> None:
    seconds = iter(range(100))
    allowed = threading.Semaphore(0)
    ready = threading.Semaphore(0)

    def source() -> Iterator[int]:
        for i in range(2):
            allowed.acquire()
            yield i
            ready.release()

    def now() -> float:
        """A second later; item 0 is made only once the consumer waits, item 1 when it has it."""
        allowed.release()
        return next(seconds)

    prefetcher = Prefetcher(source(), depth=4, now=now)
    next(prefetcher)
    assert prefetcher.wait_seconds == 1
    ready.acquire()
    ready.acquire()
    next(prefetcher)
    assert prefetcher.wait_seconds == 1


def test_a_started_prefetcher_reads_ahead_before_the_first_next() -> None:
    taken = threading.Event()

    def source() -> Iterator[int]:
        taken.set()
        yield 7

    prefetcher = Prefetcher(source(), depth=1)
    prefetcher.start()
    assert taken.wait(10)
    assert list(prefetcher) == [7]


def test_the_time_that_the_thread_makes_items_is_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    class Clock:
        now = 0.0

        def perf_counter(self) -> float:
            return self.now

    clock = Clock()
    monkeypatch.setattr("dlrm_scale.data.loading.prefetch.time", clock)

    def source() -> Iterator[int]:
        for number in range(6):
            clock.now += 2
            yield number

    prefetcher = Prefetcher(source(), depth=1, now=lambda: 0.0)
    for number in range(6):
        assert next(prefetcher) == number
    assert list(prefetcher) == []
    assert prefetcher.making_seconds == 12
