"""Progress of scoring: a bar, or a line twice a minute where stderr is no terminal."""

import time
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

from dlrm_scale.units import format_count

__all__ = ["ScoreProgress"]

_LOG_SECONDS = 30.0


class ScoreProgress:
    """Shows rows done and rows/s on stderr; a context manager.

    Args:
        rows: rows in all.
        shown: False shows nothing, as on all ranks but the first.
    """

    def __init__(self, rows: int, *, shown: bool) -> None:
        self._console = Console(stderr=True, quiet=not shown)
        self._rows = rows
        self._done = 0
        self._started = self._told = time.monotonic()
        self._bar = Progress(
            TextColumn("scoring"),
            BarColumn(),
            TextColumn("{task.percentage:>3.0f}%"),
            TextColumn("{task.fields[speed]}"),
            TimeRemainingColumn(),
            console=self._console,
            disable=not (shown and self._console.is_terminal),
        )
        self._task = self._bar.add_task("scoring", total=rows, speed="")

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.stop()

    def add(self, rows: int) -> None:
        """Count rows that were just written."""
        self._done += rows
        now = time.monotonic()
        speed = f"{format_count(self._done / max(now - self._started, 1e-9))} rows/s"
        self._bar.update(self._task, completed=self._done, speed=speed)
        if not self._console.is_terminal and now - self._told >= _LOG_SECONDS:
            self._told = now
            self._console.print(f"scoring: {100 * self._done / self._rows:.0f} %, {speed}", highlight=False)
