"""`dlrm-scale synth`: write synthetic Criteo day files."""

import json
import shlex
import sys
import time
from pathlib import Path
from typing import Annotated, Any

import typer

__all__ = ["synth"]


def synth(
    out: Annotated[Path, typer.Argument(help="Folder for the day files and synthetic.json.")],
    rows: Annotated[int, typer.Option(help="Rows of all days together.")] = 1_000_000,
    days: Annotated[int, typer.Option(help="Number of day files; the last is the validation day.")] = 4,
    seed: Annotated[int, typer.Option(help="Selects the sample; the planted model stays the same.")] = 0,
    preset: Annotated[str, typer.Option(help="kaggle (click rate 0.256) or terabyte (0.033).")] = "kaggle",
    scale: Annotated[
        float | None,
        typer.Option(
            help="Cardinalities over the published ones, for columns of more than 1,000 ids.",
            show_default="rows over the published rows, from 0.001 to 1",
        ),
    ] = None,
    multi_hot: Annotated[
        str | None,
        typer.Option(
            help="Columns that hold bags of ids: mlperf (the published 214 ids a row), or columns with their mean, "
            "as in C3=5,C20=12.",
            metavar="COLUMNS",
        ),
    ] = None,
    gzip: Annotated[bool, typer.Option("--gzip", help="Write day_*.tsv.gz.")] = False,
    force: Annotated[
        bool, typer.Option("--force", help="Replace other rows, or write beside files of other making.")
    ] = False,
    json_output: Annotated[bool, typer.Option("--json", help="Print the summary as one line of JSON.")] = False,
) -> None:
    """Write Criteo-format rows whose attainable AUC and logloss are known.

    The files depend on the arguments alone. A folder that already holds exactly these files is left as it is.
    """
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeElapsedColumn,
        TimeRemainingColumn,
    )

    from dlrm_scale.data.synthetic.bags import parse_multi_hot
    from dlrm_scale.data.synthetic.synthetic import SyntheticParameters, generate

    parameters = SyntheticParameters(
        preset=preset,
        rows=rows,
        days=days,
        seed=seed,
        scale=scale,
        gzip=gzip,
        multi_hot=parse_multi_hot(multi_hot),
    )
    start = time.monotonic()
    columns = (
        TextColumn("rows"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[speed]} rows/s"),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(stderr=True), disable=not sys.stderr.isatty(), transient=True) as progress:
        task = progress.add_task("rows", total=rows, speed="?")

        def advance(count: int) -> None:
            progress.advance(task, count)
            progress.update(task, speed=f"{progress.tasks[0].completed / (time.monotonic() - start):,.0f}")

        document, written = generate(out, parameters, force=force, on_rows=advance)
    seconds = time.monotonic() - start
    if json_output:
        typer.echo(json.dumps({"out": str(out), "written": written, "seconds": round(seconds, 3), **document}))
    else:
        _print_summary(out, document, written, seconds)


def _print_summary(out: Path, document: dict[str, Any], written: bool, seconds: float) -> None:
    from rich.console import Console
    from rich.table import Table

    from dlrm_scale.units import format_bytes, format_seconds

    table = Table()
    table.add_column("file")
    for heading in ("rows", "size", "click rate", "attainable AUC", "attainable logloss"):
        table.add_column(heading, justify="right")
    size_bytes = sum(entry["size_bytes"] for entry in document["files"])
    whole = {"file": "all days", "size_bytes": size_bytes, **document["all_days"]}
    for entry in (*document["files"], whole):
        if entry is whole:
            table.add_section()
        scores = (entry["click_rate"], entry["attainable"]["auc"], entry["attainable"]["logloss"])
        table.add_row(
            entry["file"],
            f"{entry['rows']:,}",
            format_bytes(entry["size_bytes"]),
            *("undefined" if score is None else f"{score:.4f}" for score in scores),
        )
    Console().print(table)
    rows = document["all_days"]["rows"]
    if written:
        typer.echo(f"wrote {rows:,} rows to {out} in {format_seconds(seconds)} ({rows / seconds:,.0f} rows/s)")
    else:
        typer.echo(f"{out} already holds these files; nothing written")
    flag = document.get("preprocess_flag")
    typer.echo(f"next: dlrm-scale preprocess {shlex.quote(str(out))}{f' {flag}' if flag else ''} --out DATASET")
