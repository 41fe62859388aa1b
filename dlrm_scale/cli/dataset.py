"""`dlrm-scale dataset show | verify | export`: what a dataset holds, whether it is whole, and other formats of it."""

import json
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

if TYPE_CHECKING:
    from rich.table import Table

    from dlrm_scale.data.dataset.dataset import DatasetManifest

__all__ = ["ExportFormat", "Split", "app", "export", "print_summary", "show", "summary_json", "verify"]

app = typer.Typer(help="Show, verify and export preprocessed datasets.", no_args_is_help=True)

_Folder = Annotated[Path, typer.Argument(help="Folder that `dlrm-scale preprocess` wrote.", metavar="DATASET")]
_AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]


class ExportFormat(StrEnum):
    """What a dataset can be exported to."""

    PARQUET = "parquet"
    NPY = "npy"


class Split(StrEnum):
    """A part of a dataset's rows."""

    TRAIN = "train"
    VALIDATION = "validation"
    TEST = "test"


@app.command()
def show(dataset: _Folder, as_json: _AsJson = False) -> None:
    """Show rows, splits and the facts about each column."""
    from dlrm_scale.data.dataset.dataset import Dataset

    opened = Dataset.open(dataset)
    if as_json:
        _print_json(summary_json(dataset, opened.manifest))
    else:
        print_summary(dataset, opened.manifest)


@app.command()
def verify(dataset: _Folder, as_json: _AsJson = False) -> None:
    """Read every byte, compare checksums and check the vocabularies; exits with 1 and names what is damaged."""
    from dlrm_scale.data.dataset.dataset import Dataset
    from dlrm_scale.data.vocabulary.vocabulary_file import load_vocabularies
    from dlrm_scale.errors import DatasetError

    try:
        opened = Dataset.open(dataset)
        opened.verify()
        load_vocabularies(opened.path, opened.manifest.transforms)
    except DatasetError as error:
        if as_json:
            _print_json({"path": str(dataset), "ok": False, "error": error.message, "remedy": error.remedy})
        raise
    size_bytes = sum(part.size_bytes for part in opened.manifest.parts)
    if as_json:
        _print_json({"path": str(dataset), "ok": True, "parts": len(opened.manifest.parts), "size_bytes": size_bytes})
    else:
        from dlrm_scale.units import format_bytes

        typer.echo(f"{dataset}: ok, {len(opened.manifest.parts)} parts, {format_bytes(size_bytes)}")


@app.command()
def export(
    dataset: _Folder,
    to: Annotated[
        ExportFormat,
        typer.Option(help="parquet: the same columns and types; npy: the day_N_*.npy files of torchrec and MLPerf."),
    ],
    out: Annotated[Path, typer.Option(help="New or empty folder for the files.", metavar="FOLDER")],
    split: Annotated[Split | None, typer.Option(help="Only the rows of this split.", show_default="all rows")] = None,
    jobs: Annotated[
        int | None,
        typer.Option(help="Files worked on at a time.", metavar="N", show_default="one a core, at most 8"),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace another export in FOLDER.")] = False,
    as_json: _AsJson = False,
) -> None:
    """Write the rows in a format that other programs read.

    The files get their names when all are complete. A folder that already holds exactly this export is left as it is.
    """
    from dlrm_scale.data.dataset.dataset import Dataset
    from dlrm_scale.data.export.export import export_dataset
    from dlrm_scale.host_cores import usable_cores
    from dlrm_scale.units import format_bytes

    opened = Dataset.open(dataset)
    start = time.monotonic()
    with _row_bar(f"exporting to {to.value}") as advance:
        result = export_dataset(
            opened,
            out,
            to=to.value,
            split=None if split is None else split.value,
            force=force,
            jobs=min(8, usable_cores()) if jobs is None else jobs,
            on_progress=advance,
        )
    seconds = time.monotonic() - start
    content = result.content
    if as_json:
        about = {"out": str(out), "up_to_date": result.up_to_date, "seconds": round(seconds, 3)}
        _print_json({**about, **content})
        return
    size_bytes = sum(entry["size_bytes"] for entry in content["files"])
    files = len(content["files"])
    what = f"{content['rows']:,} rows ({content['split'] or 'all splits'}) in {files:,} file{'s' * (files > 1)}"
    vocabularies = f" and {len(content['vocabularies'])} vocabularies" if content["vocabularies"] else ""
    speed = f" in {seconds:.1f} s ({content['rows'] / seconds:,.0f} rows/s)"
    typer.echo(
        f"{out}: {'up to date, ' * result.up_to_date}{what}{vocabularies}, {format_bytes(size_bytes)}"
        + speed * (not result.up_to_date)
    )


@contextmanager
def _row_bar(title: str) -> Iterator[Callable[[int, int], None]]:
    """Show rows done, rows/s and time left on a terminal."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[speed]}"))
    with Progress(
        *columns, TimeRemainingColumn(), console=console, disable=not console.is_terminal, transient=True
    ) as bar:
        task = bar.add_task(title, total=None, speed="")

        def update(done: int, total: int) -> None:
            elapsed = bar.tasks[0].elapsed or 0.0
            bar.update(task, completed=done, total=total, speed=f"{done / elapsed:,.0f} rows/s" if elapsed else "")

        yield update


def summary_json(path: Path, manifest: "DatasetManifest") -> dict[str, Any]:
    """Return the manifest JSON-ready, with the path and the rows of each split."""
    splits = {name: sum(r.end - r.start for r in ranges) for name, ranges in manifest.split.items()}
    return {"path": str(path), "rows": manifest.rows, "split_rows": splits, **asdict(manifest)}


def print_summary(path: Path, manifest: "DatasetManifest") -> None:
    """Print rows, splits and one line a category column."""
    from rich.console import Console

    from dlrm_scale.units import format_bytes

    console = Console()
    splits = summary_json(path, manifest)["split_rows"]
    size_bytes = sum(part.size_bytes for part in manifest.parts)
    console.print(
        f"{path}: {manifest.rows:,} rows in {len(manifest.parts)} parts, {format_bytes(size_bytes)}; "
        + ", ".join(f"{name} {rows:,}" for name, rows in splits.items()),
        highlight=False,
        soft_wrap=True,
    )
    for name in ("train", "held_out"):
        rate = cast(dict[str, Any], manifest.statistics.get(name, {})).get("positive_rate")
        if rate is not None:
            console.print(f"  {name.replace('_', ' ')}: positive labels {rate:.4f}", highlight=False)
    console.print(_column_table(manifest))


def _column_table(manifest: "DatasetManifest") -> "Table":
    from rich import box
    from rich.table import Table

    # Columns that say something only about some datasets stand only where they do.
    headings = ["table\nrows", "missing\n%", "unique\nids", "kept\nids", "covered\n%", "held-out\nOOV %"]
    headings += ["hottest\n1 % of\nrows"]
    pooled = any(info.multi_hot for info in manifest.columns)
    collided = any(info.statistics.get("colliding_ids") is not None for info in manifest.columns)
    headings += ["ids a\nrow"] * pooled + ["colliding\nids", "%"] * collided
    # Narrow enough for tables of 40,000,000 rows in a terminal of 80 columns.
    table = Table("", box=box.SIMPLE_HEAD, padding=0, show_edge=False)
    for heading in headings:
        table.add_column(heading, justify="right", no_wrap=True)
    for info in manifest.columns:
        facts = cast(dict[str, Any], info.statistics)
        cells = [
            info.name,
            f"{info.table_rows:,}",
            _percent(facts.get("missing_rate")),
            _number(facts.get("unique_ids")),
            _number(facts.get("kept_ids")),
            _percent(facts.get("coverage")),
            _percent(facts.get("held_out_out_of_vocabulary_rate")),
            _percent(facts.get("hot_row_curve", {}).get("0.01")),
        ]
        if pooled:
            cells.append(_pooling(facts.get("pooling")) if info.multi_hot else "1")
        if collided:
            cells += [_number(facts.get("colliding_ids")), _percent(facts.get("collision_rate"))]
        table.add_row(*cells)
    return table


def _pooling(pooling: float | None) -> str:
    return "–" if pooling is None else f"{pooling:.1f}"  # noqa: RUF001


def _percent(rate: float | None) -> str:
    return "–" if rate is None else f"{100 * rate:.1f}"  # noqa: RUF001


def _number(count: int | None) -> str:
    return "–" if count is None else f"{count:,}"  # noqa: RUF001


def _print_json(content: dict[str, Any]) -> None:
    json.dump(content, sys.stdout, indent=1)
    typer.echo()
