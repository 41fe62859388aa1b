"""Keeps the most recently used of many files open: a process may have 1,024 at a time, and inputs come in thousands."""

import resource
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

__all__ = ["RecentlyOpened", "most_open_files"]

T = TypeVar("T")

_LEAST, _MOST = 8, 256


class RecentlyOpened(Generic[T]):
    """Opened files by key; the least recently used one is closed where there would be too many. One thread at a time.

    Args:
        close: closes one.
        most: how many may be open; by default a quarter of what the process may have, 8 to 256.
    """

    def __init__(self, close: Callable[[T], None], *, most: int | None = None) -> None:
        self._close = close
        self._most = most if most is not None else most_open_files()
        self._opened: OrderedDict[Hashable, T] = OrderedDict()

    def get(self, key: Hashable, open: Callable[[], T]) -> T:
        """Return the opened file of a key, which holds until the next call.

        Args:
            key: which file.
            open: opens it; its errors are passed on.
        """
        if key in self._opened:
            self._opened.move_to_end(key)
            return self._opened[key]
        while len(self._opened) >= self._most:
            self._close(self._opened.popitem(last=False)[1])
        self._opened[key] = opened = open()
        return opened

    def close(self) -> None:
        """Close all; they are opened again when they are asked for."""
        while self._opened:
            self._close(self._opened.popitem()[1])


def most_open_files() -> int:
    """Return how many files one holder may keep open: a quarter of what the process may have, 8 to 256."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return _MOST if soft == resource.RLIM_INFINITY else max(_LEAST, min(_MOST, soft // 4))
