"""Progress of `dlrm-scale preprocess`: a bar for each pass, or a line twice a minute where stderr is no terminal."""

import time
from collections.abc import Callable
from types import TracebackType
from typing import TYPE_CHECKING, Self

import typer
from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn

from dlrm_scale.units import format_seconds

if TYPE_CHECKING:
    from dlrm_scale.data.preprocess.passes import ProgressReport

__all__ = ["PassBars"]

_TITLES = {"lines": "counting lines", "count": "counting ids", "write": "writing rows"}
_LOG_SECONDS = 30.0


class PassBars:
    """Shows bytes done, rows/s, bad rows and time left of the running pass.

    Files that an earlier process finished count as done, and not as something that took no time.

    Args:
        now: the clock, in seconds.
    """

    def __init__(self, now: Callable[[], float] = time.monotonic) -> None:
        console = Console(stderr=True)
        self._terminal = console.is_terminal
        self._now = now
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.percentage:>3.0f}%"),
            TextColumn("{task.fields[speed]}"),
            TextColumn("{task.fields[left]}"),
            console=console,
            disable=not console.is_terminal,
        )
        self._tasks: dict[str, TaskID] = {}
        self._started: dict[str, float] = {}
        self._logged = now()

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.stop()

    def update(self, report: "ProgressReport") -> None:
        """Show a report."""
        title = f"{report.step}/{report.steps} {_TITLES[report.name]}"
        now = self._now()
        elapsed = now - self._started.setdefault(report.name, now)
        rows, done_bytes = report.rows - report.earlier_rows, report.done_bytes - report.earlier_bytes
        speed = f"{rows / elapsed:,.0f} rows/s" if elapsed > 0 and rows else ""
        if report.bad_rows:
            speed += f", {report.bad_rows:,} bad rows"
        left_bytes = report.total_bytes - report.done_bytes
        left = f"{format_seconds(elapsed * left_bytes / done_bytes)} left" if elapsed > 0 and done_bytes > 0 else ""
        if not self._terminal:
            self._log(report, title, speed, left, now)
            return
        if report.name not in self._tasks:
            self._tasks[report.name] = self._progress.add_task(title, total=report.total_bytes, speed="", left="")
        self._progress.update(self._tasks[report.name], completed=report.done_bytes, speed=speed, left=left)

    def _log(self, report: "ProgressReport", title: str, speed: str, left: str, now: float) -> None:
        if now - self._logged < _LOG_SECONDS:
            return
        self._logged = now
        share = report.done_bytes / report.total_bytes if report.total_bytes else 1.0
        shown = [f"{100 * share:.0f} %", speed or "reading", *([left] if left else [])]
        typer.echo(f"{title}: {', '.join(shown)}", err=True)
