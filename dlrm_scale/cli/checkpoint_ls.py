"""`dlrm-scale checkpoint ls`: which checkpoints a run has."""

from collections.abc import Collection, Sequence
from dataclasses import asdict
from typing import TYPE_CHECKING

import typer

from dlrm_scale.cli.checkpoint_words import AsJson, Run, best_of, local_time, newest_told_of, print_json, short_name

if TYPE_CHECKING:
    from dlrm_scale.checkpoint.verify import CheckpointRow

__all__ = ["ls"]

_DAMAGED = 4

_DROPPED_FIRST = ("time", "rows", "size", "kind")
"""On a terminal that is too narrow; all are in --json."""

_STATE_COLUMNS = 20
"""Of a terminal, at least: what is wrong with a file takes several lines of it."""

_GAP = 3


def ls(run: Run, as_json: AsJson = False) -> None:
    """List checkpoints, oldest first; mark the best one, and those that a start from an older one has left behind.

    Exits with 4 if one is damaged, or the newest that the run's log tells of is missing.
    """
    from dlrm_scale.checkpoint.files.manifest_files import checkpoint_age
    from dlrm_scale.checkpoint.verify import list_checkpoints
    from dlrm_scale.recipes import find_checkpoints
    from dlrm_scale.train.told_checkpoints import lost_note

    root = find_checkpoints(run)
    told = newest_told_of(run)
    rows = list_checkpoints(root)
    best = _standing_for(best_of(run), [row.name for row in rows])
    newest = max(rows, key=lambda row: checkpoint_age(row.name), default=None)
    lost = lost_note(told, newest.name, newest.step) if newest is not None else None
    damaged = any(row.state != "ok" for row in rows) or lost is not None
    if as_json:
        if lost is not None:
            typer.echo(f"error: {lost}", err=True)
        print_json([{**asdict(row), "best": row.name in best} for row in rows])
        raise typer.Exit(_DAMAGED if damaged else 0)
    _print_table(rows, best)
    for left in dict.fromkeys(row.dead_branch for row in rows if row.dead_branch is not None):
        steps = [row.step for row in rows if row.dead_branch == left and row.step is not None]
        typer.echo(f"{left}, not from steps {min(steps, default='?')} to {max(steps, default='?')}")
    if lost is not None:
        typer.echo(f"error: {lost}", err=True)
    raise typer.Exit(_DAMAGED if damaged else 0)


def _print_table(rows: "Sequence[CheckpointRow]", best: Collection[str]) -> None:
    """Names are whole on one line, as they are copied; a terminal that is too narrow lacks other columns instead."""
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from dlrm_scale.units import format_bytes, format_count

    cells = {
        "name": [short_name(row.name) for row in rows],
        "kind": [row.kind for row in rows],
        "step": ["?" if row.step is None else format_count(row.step) for row in rows],
        "rows": [format_count(row.rows) for row in rows],
        "size": [format_bytes(row.bytes) for row in rows],
        "time": [local_time(row.created_unix_seconds) for row in rows],
        "state": [_state(row, best) for row in rows],
    }
    widths = {title: max(map(len, (title, *found))) for title, found in cells.items()}
    console = Console()
    # A script's lines are never folded; on a terminal the state may be.
    folds = console.is_terminal
    if folds:
        widths["state"] = min(widths["state"], _STATE_COLUMNS)
    for title in _DROPPED_FIRST:
        if folds and sum(widths.values()) + _GAP * len(widths) > console.width:
            del widths[title], cells[title]
    needed = sum(widths.values()) + _GAP * len(widths)
    if not folds or needed > console.width:
        console = Console(width=needed)
    table = Table(box=SIMPLE_HEAD, pad_edge=False)
    for title in cells:
        right = title in ("step", "rows", "size")
        table.add_column(title, justify="right" if right else "left", no_wrap=title != "state", overflow="fold")
        table.columns[-1].min_width = widths[title]
    for found in zip(*cells.values(), strict=True):
        table.add_row(*map(Text, found))
    console.print(table)


def _state(row: "CheckpointRow", best: Collection[str]) -> str:
    marks = (["best"] if row.name in best else []) + (["dead branch"] if row.dead_branch is not None else [])
    return ", ".join([row.state, *marks])


def _standing_for(best: str | None, names: Collection[str]) -> set[str]:
    """The best checkpoint's manifest, or all merges that are equal to it where that is gone."""
    from dlrm_scale.checkpoint.files.file_names import checkpoint_name

    if best is None or best in names:
        return {best} & set(names) if best is not None else set()
    return {name for name in names if checkpoint_name(name) == best}
