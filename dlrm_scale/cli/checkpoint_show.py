"""`dlrm-scale checkpoint show`: what is in a checkpoint, or what changed between two."""

import json
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated, Any

import typer

from dlrm_scale.cli.checkpoint_words import AsJson, Run, counted, find_step, local_time, print_json

if TYPE_CHECKING:
    from dlrm_scale.checkpoint.files.manifest import Manifest

__all__ = ["show"]


def show(
    run: Run,
    step: Annotated[
        str,
        typer.Argument(
            help="Step of a checkpoint as `ls` lists it, its newest if there are several; latest, previous or "
            "best; or the checkpoint's name as `ls` has it.",
            metavar="STEP",
        ),
    ] = "latest",
    later: Annotated[
        str | None, typer.Argument(help="Of a later checkpoint: show what changed between the two.", metavar="LATER")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Show one checkpoint (each table, files, cursor, versions), or what changed between two: rows, bytes and files.

    Exits with 2 where there is no such checkpoint, and with 4 where it is damaged.
    """
    from dlrm_scale.checkpoint.verify import read_checkpoint
    from dlrm_scale.recipes import find_checkpoints

    root = find_checkpoints(run)
    if later is not None:
        _show_changes(run, root, step, later, as_json)
        return
    manifest = read_checkpoint(root, _word(run, step))
    summary = _summary(manifest)
    if as_json:
        print_json(summary)
        return
    from rich.console import Console
    from rich.table import Table

    from dlrm_scale.units import format_bytes, format_count

    typer.echo(
        f"{manifest.name}: {manifest.kind} of step {manifest.step}, {format_bytes(manifest.size_bytes)}, "
        f"{counted(manifest.ranks, 'rank')}, optimizer {manifest.optimizer}, "
        f"{local_time(manifest.created_unix_seconds)}"
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


def _word(run: str, step: str) -> str:
    return str(find_step(run, step)) if step == "best" else step


def _show_changes(run: str, root: str, step: str, later: str, as_json: bool) -> None:
    from dlrm_scale.checkpoint.chain.chain import open_chain
    from dlrm_scale.checkpoint.chain.changes import find_changes
    from dlrm_scale.checkpoint.chain.leases import hold_chain
    from dlrm_scale.checkpoint.storage.storage import open_storage
    from dlrm_scale.checkpoint.verify import read_checkpoint
    from dlrm_scale.cli.byte_progress import ByteProgress
    from dlrm_scale.errors import ConfigError

    storage = open_storage(root)
    manifests = [read_checkpoint(storage, _word(run, word)) for word in (step, later)]
    if manifests[0].step > manifests[1].step:
        raise ConfigError(
            f"{later} (step {manifests[1].step}) is earlier than {step} (step {manifests[0].step}): "
            "changes are shown from an earlier checkpoint to a later one",
            remedy=f"swap them: `dlrm-scale checkpoint show {run} {later} {step}`",
        )
    names = [manifest.name for manifest in manifests]
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
        print_json({**kept, "tables": tables, "files": files})
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
