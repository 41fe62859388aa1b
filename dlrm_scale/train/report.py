"""What a run tells while it trains: progress bar or lines, JSON lines, TensorBoard. Rank 0 only."""

import json
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from dlrm_scale.train.run_folder import RunFolder
from dlrm_scale.train.running_trainer import hold_log

__all__ = ["RunReport", "cut_torn_line"]


class RunReport:
    """Takes records and shows them. A context manager: the bar and the files end with it.

    Args:
        folder: where `log.jsonl` and `tensorboard/` go.
        total_steps: for the bar's time left.
        start_step: 0, or the step a resumed run starts from; later TensorBoard points are dropped.
        quiet: nothing on the terminal.
        console: where to show; stderr by default.
    """

    def __init__(
        self,
        folder: RunFolder,
        total_steps: int,
        start_step: int,
        *,
        quiet: bool = False,
        console: Console | None = None,
    ) -> None:
        # the import costs 0.5 s and only rank 0 needs it
        from torch.utils.tensorboard import SummaryWriter

        self._console = console or Console(file=sys.stderr, quiet=quiet)
        cut_torn_line(folder.log)
        self._log = folder.log.open("a")
        hold_log(self._log)
        self._board = SummaryWriter(str(folder.tensorboard), purge_step=start_step + 1 if start_step else None)
        self.lost_records = 0
        """Records that could not be written, as on a full disk: training goes on without them."""
        self._bar: Progress | None = None
        if self._console.is_terminal and not quiet:
            self._bar = Progress(
                TextColumn("training"),
                BarColumn(),
                TextColumn("{task.completed}/{task.total} steps"),
                TimeElapsedColumn(),
                TimeRemainingColumn(),
                TextColumn("{task.fields[note]}"),
                console=self._console,
            )
            self._task = self._bar.add_task("training", total=total_steps, completed=start_step, note="")
        self._total_steps = total_steps

    def __enter__(self) -> "RunReport":
        """Start the bar."""
        if self._bar:
            self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        """Stop the bar and close the files."""
        if self._bar:
            self._bar.stop()
        for end in (self._board.close, self._log.close):
            with self._surviving():
                end()

    def say(self, text: str) -> None:
        """Show a line above the bar."""
        self._console.print(text, highlight=False, markup=False, soft_wrap=True)

    def advance(self, step: int) -> None:
        """Move the bar."""
        if self._bar:
            self._bar.update(self._task, completed=step)

    def record(self, event: str, step: int, values: Mapping[str, object]) -> None:
        """Write one JSON line, and numbers to TensorBoard under `event/name`.

        Args:
            event: `train`, `validation`, `checkpoint`, `start` or `end`.
            step: completed steps.
            values: JSON-ready; None for undefined. `interval_seconds` and `gpu_seconds`, mappings,
                give one curve a key.
        """
        line = json.dumps({"event": event, "step": step, **values}, allow_nan=False)
        with self._surviving():
            self._log.write(line + "\n")
            self._log.flush()
            for name, value in _numbers(values):
                self._board.add_scalar(f"{event}/{name}", value, step)

    def save_result(self, folder: RunFolder, values: Mapping[str, object]) -> None:
        """Write `result.json`."""
        with self._surviving():
            folder.save_result(values)

    @contextmanager
    def _surviving(self) -> Iterator[None]:
        """Count and tell what the disk refuses; a lost log line must not end a run that can still checkpoint."""
        try:
            yield
        except OSError as error:
            self.lost_records += 1
            if self.lost_records == 1:
                self.say(f"warning: the run's log can't be written: {error}; training goes on without it")

    def show_step(self, step: int, values: Mapping[str, object]) -> None:
        """Show a train record in the bar, or as a line where there is no terminal."""
        auc = values.get("auc")
        note = (
            f"{values['samples_per_second']:,.0f} samples/s  loss {values['loss']:.4f}  "
            f"AUC {'-' if auc is None else format(auc, '.4f')}  data wait {values['data_wait_share']:.1%}"
        )
        if values.get("partial_window"):
            note += f"  (of {values['window_steps']} steps)"
        if self._bar:
            self._bar.update(self._task, completed=step, note=note)
        else:
            self.say(f"step {step}/{self._total_steps}  {note}")


def _numbers(values: Mapping[str, object]) -> Iterator[tuple[str, float]]:
    for name, value in values.items():
        if isinstance(value, Mapping) and name in ("interval_seconds", "gpu_seconds"):
            yield from ((f"{name}/{key}", number) for key, number in _numbers(value))
        elif isinstance(value, int | float) and not isinstance(value, bool):
            yield name, value


def cut_torn_line(log: Path) -> None:
    """Remove a last line that a crash left unfinished, so that every line is JSON again."""
    if not log.is_file():
        return
    content = log.read_bytes()
    whole = content.rfind(b"\n") + 1
    if whole != len(content):
        os.truncate(log, whole)
