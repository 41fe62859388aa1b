"""`dlrm-scale checkpoint ls | show | verify`: which checkpoints a run has and whether they are sound."""

import json
import time
from dataclasses import asdict
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

if TYPE_CHECKING:
    from dlrm_scale.checkpoint.files.manifest import Manifest
    from dlrm_scale.checkpoint.storage.storage import Storage
    from dlrm_scale.checkpoint.verify import VerifyLevel

__all__ = ["Level", "app", "ls", "show", "verify"]

app = typer.Typer(help="List, show and verify the checkpoints of a run.", no_args_is_help=True)

_Run = Annotated[str, typer.Argument(help="Folder of a run or of checkpoints, or their URL.", metavar="RUN")]
_AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]


class Level(StrEnum):
    """How much `verify` reads."""

    manifest = "manifest"
    size = "size"
    full = "full"
    restore = "restore"


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
    later: Annotated[
        int | None, typer.Argument(help="Of a later checkpoint: show what changed between the two.", metavar="[SEQ]")
    ] = None,
    as_json: _AsJson = False,
) -> None:
    """Show one checkpoint (each table, files, cursor, versions), or what changed between two: rows, bytes and files."""
    from dlrm_scale.checkpoint.verify import read_checkpoint
    from dlrm_scale.recipes import find_checkpoints

    if later is not None:
        _show_changes(find_checkpoints(run), seq, later, as_json)
        return
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
    table = Table("table", "rows", "dim", "rows here", "share", "size", "state", *(["error"] if manifest.lossy else []))
    for column in table.columns[1:6]:
        column.justify = "right"
    for found in summary["tables"]:
        errors = [
            f"{name} {e['codec']}: {e['max_error']:.2g} at most, {e['mean_error']:.2g} on average, "
            f"{format_count(e['exact_rows'])} rows exact"
            for name, e in found["encoded"].items()
        ]
        table.add_row(
            found["name"],
            format_count(found["rows"]),
            str(found["dim"]),
            format_count(found["rows_written"]),
            f"{100 * found['rows_written'] / found['rows']:.1f} %",
            format_bytes(found["bytes"]),
            ", ".join(found["state"]),
            *(["\n".join(errors)] if manifest.lossy else []),
        )
    Console().print(table)
    if manifest.lossy or manifest.lossy_restores:
        typer.echo(f"lossy restores before it: {manifest.lossy_restores}")
    for file in summary["files"]:
        typer.echo(f"{file['name']}  {format_bytes(file['bytes'])}  xxh3-128 {file['xxh3_128']}")
    typer.echo(f"cursor {json.dumps(manifest.cursor)}")
    typer.echo(f"extra {json.dumps(manifest.extra)}")
    typer.echo(", ".join(f"{name} {version}" for name, version in manifest.versions.items()))


def _show_changes(root: str, seq: int, later: int, as_json: bool) -> None:
    from dlrm_scale.checkpoint.chain.chain import open_chain
    from dlrm_scale.checkpoint.chain.changes import find_changes
    from dlrm_scale.checkpoint.chain.leases import hold_chain
    from dlrm_scale.checkpoint.storage.storage import open_storage
    from dlrm_scale.checkpoint.verify import read_checkpoint
    from dlrm_scale.cli.byte_progress import ByteProgress

    storage = open_storage(root)
    names = [read_checkpoint(storage, number).name for number in (seq, later)]
    with (
        hold_chain(storage, lambda: open_chain(storage, names[0])) as first,
        hold_chain(storage, lambda: open_chain(storage, names[1])) as second,
    ):
        assert first is not None
        assert second is not None
        with ByteProgress("comparing", first.size_bytes + second.size_bytes) as bar:
            changes = find_changes(first, second, progress=bar.advance)
    tables = [{**asdict(table), "share": table.rows_changed / table.rows} for table in changes.tables]
    files = [{"name": file.name, "bytes": file.size_bytes} for file in changes.files]
    if as_json:
        kept = {name: value for name, value in vars(changes).items() if name not in ("tables", "files")}
        _print_json({**kept, "tables": tables, "files": files})
        return
    from rich.console import Console
    from rich.table import Table

    from dlrm_scale.units import format_bytes, format_count

    how = {"ids": "rows that were saved again", "values": "rows whose weight or state differs"}[changes.by]
    typer.echo(f"from step {changes.first_step} to step {changes.second_step}: {how}")
    table = Table("table", "rows", "changed", "share", "size")
    for column in table.columns[1:]:
        column.justify = "right"
    for found in changes.tables:
        table.add_row(
            found.name,
            format_count(found.rows),
            format_count(found.rows_changed),
            f"{100 * found.rows_changed / found.rows:.1f} %",
            format_bytes(found.bytes),
        )
    Console().print(table)
    for file in changes.files:
        typer.echo(f"{file.name}  {format_bytes(file.size_bytes)}")


@app.command()
def verify(
    run: _Run,
    level: Annotated[
        Level,
        typer.Option(
            help="manifest: manifests and links; size: and that files are there; full: and every byte; restore: and "
            "a checkpoint put together row by row, each row there and finite."
        ),
    ] = Level.full,
    step: Annotated[
        int | None, typer.Option(help="Which checkpoint --level restore puts together. Default: the newest.")
    ] = None,
    as_json: _AsJson = False,
) -> None:
    """Check all checkpoints; exits with 4 and names the damaged files if there are any."""
    from dlrm_scale.checkpoint.storage.storage import open_storage
    from dlrm_scale.checkpoint.verify import data_bytes
    from dlrm_scale.checkpoint.verify import verify as find_problems
    from dlrm_scale.cli.byte_progress import ByteProgress
    from dlrm_scale.errors import CheckpointError, ConfigError
    from dlrm_scale.recipes import find_checkpoints

    if step is not None and level is not Level.restore:
        raise ConfigError("--step goes with --level restore")
    storage = open_storage(find_checkpoints(run))
    total_bytes = data_bytes(storage)
    reads = level in (Level.full, Level.restore)
    began = time.perf_counter()
    with ByteProgress("checking files", total_bytes if reads else 0) as bar:
        files_level = cast("VerifyLevel", "full" if level is Level.restore else level.value)
        problems = find_problems(storage, files_level, progress=bar.advance if reads else _ignore)
    if not total_bytes and not problems:
        raise CheckpointError(f"{run} holds no checkpoint", remedy="name a run that has saved one")
    seconds = time.perf_counter() - began
    result: dict[str, Any] = {
        "ok": not problems,
        "level": level.value,
        "bytes": total_bytes if reads else 0,
        "seconds": seconds,
        "problems": [asdict(problem) for problem in problems],
    }
    lines = [f"{p.file} {p.reason}" + (f"; it breaks {', '.join(p.breaks)}" if p.breaks else "") for p in problems]
    if level is Level.restore:
        result["restore"] = restored = _check_restore(storage, step)
        result["ok"] = result["ok"] and not restored["faults"]
        known = {problem.file for problem in problems}
        lines += [f"{file}: {reason}" for file, reason in restored["faults"] if file not in known]
    if as_json:
        _print_json(result)
        raise typer.Exit(0 if result["ok"] else _DAMAGED)
    if lines:
        raise CheckpointError(
            "damaged files:\n  " + "\n  ".join(lines),
            remedy="put them back from a copy; training resumes from the newest checkpoint that isn't broken",
        )
    from dlrm_scale.units import format_bytes, format_count, format_seconds

    if level is Level.restore:
        typer.echo(
            f"step {restored['step']} put together: {format_count(restored['rows'])} rows of {restored['tables']} "
            f"tables from {restored['manifests']} manifests, {format_bytes(restored['bytes_read'])} in "
            f"{format_seconds(restored['seconds'])}"
        )
    read = f", {format_bytes(total_bytes)} in {format_seconds(seconds)}" if reads else ""
    typer.echo(f"{run}: ok ({level.value}{read})")


def _check_restore(storage: "Storage", step: int | None) -> dict[str, Any]:
    from dlrm_scale.checkpoint.chain.leases import hold_chain
    from dlrm_scale.checkpoint.restoring.restore_check import check_restore
    from dlrm_scale.checkpoint.verify import chain_of_step
    from dlrm_scale.cli.byte_progress import ByteProgress

    with hold_chain(storage, lambda: chain_of_step(storage, step)) as chain:
        assert chain is not None
        with ByteProgress("restoring", chain.size_bytes) as bar:
            return asdict(check_restore(chain, progress=bar.advance))


def _ignore(size_bytes: int) -> None:
    pass


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
    from dlrm_scale.checkpoint.chain.lossy import encoded_tensors

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
                "encoded": encoded_tensors(manifest, table.name),
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
