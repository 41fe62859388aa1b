"""Progress bars of `dlrm-scale preprocess`, one a pass over the input; silent where stderr is no terminal."""

from types import TracebackType
from typing import TYPE_CHECKING, Self

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

if TYPE_CHECKING:
    from dlrm_scale.data.passes import ProgressReport

__all__ = ["PassBars"]

_TITLES = {"lines": "counting lines", "count": "counting ids", "write": "writing rows"}


class PassBars:
    """Shows bytes done, rows/s, bad rows and time left of the running pass."""

    def __init__(self) -> None:
        console = Console(stderr=True)
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.percentage:>3.0f}%"),
            TextColumn("{task.fields[speed]}"),
            TimeRemainingColumn(),
            console=console,
            disable=not console.is_terminal,
        )
        self._tasks: dict[str, TaskID] = {}

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._progress.stop()

    def update(self, report: "ProgressReport") -> None:
        """Show a report."""
        if report.name not in self._tasks:
            title = f"{report.step}/{report.steps} {_TITLES[report.name]}"
            self._tasks[report.name] = self._progress.add_task(title, total=report.total_bytes, speed="")
        task = self._tasks[report.name]
        elapsed = self._progress.tasks[task].elapsed or 0.0
        speed = f"{report.rows / elapsed:,.0f} rows/s" if elapsed > 0 and report.rows else ""
        if report.bad_rows:
            speed += f", {report.bad_rows:,} bad"
        self._progress.update(task, completed=report.done_bytes, speed=speed)
