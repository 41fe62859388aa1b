"""`dlrm-scale checkpoint ls | show | verify`: which checkpoints a run has and whether they are sound."""

import json
import time
from dataclasses import asdict
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from dlrm_scale.checkpoint.manifest import Manifest

__all__ = ["Level", "app", "ls", "show", "verify"]

app = typer.Typer(help="List, show and verify the checkpoints of a run.", no_args_is_help=True)

_Run = Annotated[str, typer.Argument(help="Folder of a run or of checkpoints, or their URL.", metavar="RUN")]
_AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]


class Level(StrEnum):
    """How much `verify` reads."""

    manifest = "manifest"
    size = "size"
    full = "full"


@app.command()
def ls(run: _Run, as_json: _AsJson = False) -> None:
    """List checkpoints, oldest first, and mark the best one. Exits with 4 if one is damaged."""
    from dlrm_scale.checkpoint.verify import list_checkpoints
    from dlrm_scale.recipes import find_checkpoints

    root = find_checkpoints(run)
    rows = list_checkpoints(root)
    best = _best(run, root)
    damaged = any(row.state != "ok" for row in rows)
    if as_json:
        _print_json([{**asdict(row), "best": row.name == best} for row in rows])
        raise typer.Exit(_DAMAGED if damaged else 0)
    from rich.console import Console
    from rich.table import Table

    from dlrm_scale.units import format_bytes, format_count

    table = Table("seq", "kind", "step", "rows", "size", "time", "state")
    for column in table.columns[:1] + table.columns[2:5]:
        column.justify = "right"
    for row in rows:
        table.add_row(
            str(row.seq),
            row.kind,
            "?" if row.step is None else format_count(row.step),
            format_count(row.rows),
            format_bytes(row.bytes),
            _local_time(row.created_unix_seconds),
            row.state + (", best" if row.name == best else ""),
        )
    Console().print(table)
    raise typer.Exit(_DAMAGED if damaged else 0)


@app.command()
def show(
    run: _Run,
    seq: Annotated[int, typer.Argument(help="Sequence number, as `ls` lists it.", metavar="SEQ")],
    as_json: _AsJson = False,
) -> None:
    """Show one checkpoint: what it holds of each table, its files, cursor and versions."""
    from dlrm_scale.checkpoint.verify import read_checkpoint
    from dlrm_scale.recipes import find_checkpoints

    manifest = read_checkpoint(find_checkpoints(run), seq)
    summary = _summary(manifest)
    if as_json:
        _print_json(summary)
        return
    from rich.console import Console
    from rich.table import Table

    from dlrm_scale.units import format_bytes, format_count

    typer.echo(
        f"{manifest.name}: {manifest.kind} of step {manifest.step}, {format_bytes(manifest.size_bytes)}, "
        f"{manifest.ranks} ranks, optimizer {manifest.optimizer}, {_local_time(manifest.created_unix_seconds)}"
    )
    typer.echo(f"follows {manifest.parent.name if manifest.parent else 'nothing'}")
    table = Table("table", "rows", "dim", "rows here", "share", "size", "state")
    for column in table.columns[1:6]:
        column.justify = "right"
    for found in summary["tables"]:
        table.add_row(
            found["name"],
            format_count(found["rows"]),
            str(found["dim"]),
            format_count(found["rows_written"]),
            f"{100 * found['rows_written'] / found['rows']:.1f} %",
            format_bytes(found["bytes"]),
            ", ".join(found["state"]),
        )
    Console().print(table)
    for file in summary["files"]:
        typer.echo(f"{file['name']}  {format_bytes(file['bytes'])}  xxh3-128 {file['xxh3_128']}")
    typer.echo(f"cursor {json.dumps(manifest.cursor)}")
    typer.echo(f"extra {json.dumps(manifest.extra)}")
    typer.echo(", ".join(f"{name} {version}" for name, version in manifest.versions.items()))


@app.command()
def verify(
    run: _Run,
    level: Annotated[
        Level, typer.Option(help="manifest: manifests and links; size: and that files are there; full: every byte.")
    ] = Level.full,
    as_json: _AsJson = False,
) -> None:
    """Check all checkpoints; exits with 4 and names the damaged files if there are any."""
    from dlrm_scale.checkpoint.verify import list_checkpoints
    from dlrm_scale.checkpoint.verify import verify as find_problems
    from dlrm_scale.errors import CheckpointError
    from dlrm_scale.recipes import find_checkpoints

    problems = find_problems(find_checkpoints(run), level.value)
    if not list_checkpoints(find_checkpoints(run)):
        raise CheckpointError(f"{run} holds no checkpoint", remedy="name a run that has saved one")
    if as_json:
        _print_json({"ok": not problems, "level": level.value, "problems": [asdict(problem) for problem in problems]})
        raise typer.Exit(_DAMAGED if problems else 0)
    if problems:
        lines = [f"{p.file} {p.reason}; it breaks {', '.join(p.breaks)}" for p in problems]
        raise CheckpointError(
            "damaged files:\n  " + "\n  ".join(lines),
            remedy="put them back from a copy; training resumes from the newest checkpoint that isn't broken",
        )
    typer.echo(f"{run}: ok ({level.value})")


_DAMAGED = 4


def _best(run: str, root: str) -> str | None:
    """Manifest of the best checkpoint; None where best.json is absent or damaged, which doesn't damage the others."""
    folder = Path(run) if run != root else Path(root).parent
    try:
        # not by `train`, whose imports take seconds
        found = json.loads((folder / "best.json").read_bytes())["manifest"]
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return str(found)


def _summary(manifest: "Manifest") -> dict[str, Any]:
    tables = []
    for table in manifest.tables:
        entries = [e for f in manifest.files for e in f.entries if e.table == table.name]
        cells = sum(e.rows * (e.column_end - e.column_start) for e in entries)
        tables.append(
            {
                "name": table.name,
                "rows": table.rows,
                "dim": table.dim,
                "rows_written": round(cells / table.dim),
                "bytes": sum(t.size_bytes for e in entries for t in e.tensors.values()),
                "state": sorted(table.state),
            }
        )
    files = [
        {"name": f.name, "rank": f.rank, "role": f.role, "bytes": f.size_bytes, "xxh3_128": f.xxh3_128}
        for f in manifest.files
    ]
    kept = manifest.model_dump(mode="json", exclude={"tables", "files"})
    return {**kept, "name": manifest.name, "bytes": manifest.size_bytes, "tables": tables, "files": files}


def _local_time(unix_seconds: float | None) -> str:
    return "?" if unix_seconds is None else time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(unix_seconds))


def _print_json(value: object) -> None:
    typer.echo(json.dumps(value, indent=2))
