"""Progress of a command that reads a known number of bytes: a bar, or a line twice a minute without a terminal."""

import time
from collections.abc import Callable
from types import TracebackType
from typing import Self

import typer
from rich.console import Console
from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn, TransferSpeedColumn

from dlrm_scale.units import format_bytes

__all__ = ["ByteProgress"]

_LOG_SECONDS = 30.0


class ByteProgress:
    """Shows bytes done, speed and time left, on stderr.

    Args:
        title: what is being done.
        total_bytes: when it is done; reading some twice goes beyond.
        now: the clock, in seconds.
    """

    def __init__(self, title: str, total_bytes: int, now: Callable[[], float] = time.monotonic) -> None:
        console = Console(stderr=True)
        self._title = title
        self._terminal = console.is_terminal
        self._total_bytes = total_bytes
        self._done_bytes = 0
        self._now = now
        self._logged = now()
        columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn())
        self._progress = Progress(*columns, TimeRemainingColumn(), console=console, disable=not self._terminal)
        self._task = self._progress.add_task(title, total=total_bytes)

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.stop()

    def advance(self, size_bytes: int) -> None:
        """Count bytes as done."""
        self._done_bytes += size_bytes
        if self._terminal:
            self._progress.update(self._task, completed=min(self._done_bytes, self._total_bytes))
        elif self._now() - self._logged >= _LOG_SECONDS:
            self._logged = self._now()
            typer.echo(
                f"{self._title}: {format_bytes(self._done_bytes)} of {format_bytes(self._total_bytes)}", err=True
            )
