"""`dlrm-scale dataset show | verify`: what a dataset holds and whether it is whole."""

import json
import sys
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

if TYPE_CHECKING:
    from dlrm_scale.data.dataset import DatasetManifest

__all__ = ["app", "print_summary", "show", "summary_json", "verify"]

app = typer.Typer(help="Show and verify preprocessed datasets.", no_args_is_help=True)

_Folder = Annotated[Path, typer.Argument(help="Folder that `dlrm-scale preprocess` wrote.", metavar="DATASET")]
_AsJson = Annotated[bool, typer.Option("--json", help="Print JSON.")]


@app.command()
def show(dataset: _Folder, as_json: _AsJson = False) -> None:
    """Show rows, splits and the facts about each column."""
    from dlrm_scale.data.dataset import Dataset

    opened = Dataset.open(dataset)
    if as_json:
        _print_json(summary_json(dataset, opened.manifest))
    else:
        print_summary(dataset, opened.manifest)


@app.command()
def verify(dataset: _Folder, as_json: _AsJson = False) -> None:
    """Read every byte, compare checksums and check the vocabularies; exits with 1 and names what is damaged."""
    from dlrm_scale.data.dataset import Dataset
    from dlrm_scale.data.vocabulary import load_vocabularies

    opened = Dataset.open(dataset)
    opened.verify()
    load_vocabularies(opened.path, opened.manifest.transforms)
    size_bytes = sum(part.size_bytes for part in opened.manifest.parts)
    if as_json:
        _print_json({"path": str(dataset), "ok": True, "parts": len(opened.manifest.parts), "size_bytes": size_bytes})
    else:
        from dlrm_scale.units import format_bytes

        typer.echo(f"{dataset}: ok, {len(opened.manifest.parts)} parts, {format_bytes(size_bytes)}")


def summary_json(path: Path, manifest: "DatasetManifest") -> dict[str, Any]:
    """Return the manifest JSON-ready, with the path and the rows of each split."""
    splits = {name: sum(r.end - r.start for r in ranges) for name, ranges in manifest.split.items()}
    return {"path": str(path), "rows": manifest.rows, "split_rows": splits, **asdict(manifest)}


def print_summary(path: Path, manifest: "DatasetManifest") -> None:
    """Print rows, splits and one line a category column."""
    from rich.console import Console
    from rich.table import Table

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
    table = Table("column", *("rows", "missing", "unique", "kept", "coverage", "held-out OOV", "hottest 1 %"))
    for column in table.columns[1:]:
        column.justify = "right"
    for info in manifest.columns:
        facts = cast(dict[str, Any], info.statistics)
        table.add_row(
            info.name,
            f"{info.table_rows:,}",
            _percent(facts.get("missing_rate")),
            _number(facts.get("unique_ids")),
            _number(facts.get("kept_ids")),
            _percent(facts.get("coverage")),
            _percent(facts.get("held_out_out_of_vocabulary_rate")),
            _percent(facts.get("hot_row_curve", {}).get("0.01")),
        )
    console.print(table)


def _percent(rate: float | None) -> str:
    return "–" if rate is None else f"{100 * rate:.1f} %"  # noqa: RUF001


def _number(count: int | None) -> str:
    return "–" if count is None else f"{count:,}"  # noqa: RUF001


def _print_json(content: dict[str, Any]) -> None:
    json.dump(content, sys.stdout, indent=1)
    typer.echo()
