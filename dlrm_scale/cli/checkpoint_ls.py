"""`dlrm-scale checkpoint ls`: which checkpoints a run has."""

from collections.abc import Collection
from dataclasses import asdict

import typer

from dlrm_scale.cli.checkpoint_words import AsJson, Run, best_of, local_time, print_json, short_name

__all__ = ["ls"]

_DAMAGED = 4


def ls(run: Run, as_json: AsJson = False) -> None:
    """List checkpoints, oldest first; mark the best one, and those that a start from an older one has left behind.

    Exits with 4 if one is damaged.
    """
    from dlrm_scale.checkpoint.verify import list_checkpoints
    from dlrm_scale.recipes import find_checkpoints

    root = find_checkpoints(run)
    rows = list_checkpoints(root)
    best = _standing_for(best_of(run), [row.name for row in rows])
    damaged = any(row.state != "ok" for row in rows)
    if as_json:
        print_json([{**asdict(row), "best": row.name in best} for row in rows])
        raise typer.Exit(_DAMAGED if damaged else 0)
    from rich.box import SIMPLE_HEAD
    from rich.console import Console
    from rich.table import Table

    from dlrm_scale.units import format_bytes, format_count

    table = Table("name", "kind", "step", "rows", "size", "time", "state", box=SIMPLE_HEAD, pad_edge=False)
    for column in table.columns[2:5]:
        column.justify = "right"
    table.columns[0].overflow = "fold"  # whole, as it can be given to `show`
    table.columns[5].no_wrap = True
    for row in rows:
        table.add_row(
            short_name(row.name),
            row.kind,
            "?" if row.step is None else format_count(row.step),
            format_count(row.rows),
            format_bytes(row.bytes),
            local_time(row.created_unix_seconds),
            ", ".join(
                [row.state]
                + (["best"] if row.name in best else [])
                + (["dead branch"] if row.dead_branch is not None else [])
            ),
        )
    Console().print(table)
    for left in dict.fromkeys(row.dead_branch for row in rows if row.dead_branch is not None):
        steps = [row.step for row in rows if row.dead_branch == left and row.step is not None]
        typer.echo(f"{left}, not from steps {min(steps, default='?')} to {max(steps, default='?')}")
    raise typer.Exit(_DAMAGED if damaged else 0)


def _standing_for(best: str | None, names: Collection[str]) -> set[str]:
    """The best checkpoint's manifest, or all merges that are equal to it where that is gone."""
    from dlrm_scale.checkpoint.files.file_names import checkpoint_name

    if best is None or best in names:
        return {best} & set(names) if best is not None else set()
    return {name for name in names if checkpoint_name(name) == best}
