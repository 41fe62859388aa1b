"""Opened files that threads take, use alone and give back."""

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

from dlrm_scale.data.recently_opened import most_open_files

__all__ = ["IdleFiles"]

T = TypeVar("T")


class IdleFiles(Generic[T]):
    """Keeps the most recently used of files that nobody uses at the moment open; several of one key if need be.

    Threads may share it. A file that was taken belongs to its taker alone: nothing closes it meanwhile, and two threads
    that want the same file at a time have one each, so that neither waits for the other's storage.

    Args:
        close: closes one.
        most: how many may lie idle; by default as `most_open_files`.
    """

    def __init__(self, close: Callable[[T], None], *, most: int | None = None) -> None:
        self._close = close
        self._most = most_open_files() if most is None else most
        self._lock = threading.Lock()
        self._idle: OrderedDict[Hashable, list[T]] = OrderedDict()
        self._count = 0

    def take(self, key: Hashable) -> T | None:
        """Return an opened file, or None: then open one."""
        with self._lock:
            files = self._idle.get(key)
            if not files:
                return None
            self._count -= 1
            file = files.pop()
            if not files:
                del self._idle[key]
            return file

    def give(self, key: Hashable, file: T) -> None:
        """Give back what was taken or opened; the least recently used file is closed where there are too many."""
        with self._lock:
            self._idle.setdefault(key, []).append(file)
            self._idle.move_to_end(key)
            self._count += 1
            if self._count <= self._most:
                return
            oldest = next(iter(self._idle))
            surplus = self._idle[oldest].pop(0)
            self._count -= 1
            if not self._idle[oldest]:
                del self._idle[oldest]
        self._close(surplus)
