"""What a run tells while it trains: progress bar or lines, JSON lines, TensorBoard. Rank 0 only."""

import json
import sys
from collections.abc import Mapping
from types import TracebackType

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from dlrm_scale.train.run_folder import RunFolder

__all__ = ["RunReport"]


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
        self._log = folder.log.open("a")
        self._board = SummaryWriter(str(folder.tensorboard), purge_step=start_step + 1 if start_step else None)
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
        self._board.close()
        self._log.close()

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
            values: JSON-ready; None for undefined.
        """
        self._log.write(json.dumps({"event": event, "step": step, **values}) + "\n")
        self._log.flush()
        for name, value in values.items():
            if isinstance(value, int | float) and not isinstance(value, bool):
                self._board.add_scalar(f"{event}/{name}", value, step)

    def show_step(self, step: int, values: Mapping[str, object]) -> None:
        """Show a train record in the bar, or as a line where there is no terminal."""
        auc = values.get("auc")
        note = (
            f"{values['samples_per_second']:,.0f} samples/s  loss {values['loss']:.4f}  "
            f"AUC {'-' if auc is None else format(auc, '.4f')}  data wait {values['data_wait_share']:.1%}"
        )
        if self._bar:
            self._bar.update(self._task, completed=step, note=note)
        else:
            self.say(f"step {step}/{self._total_steps}  {note}")
