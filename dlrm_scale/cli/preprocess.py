"""`dlrm-scale preprocess`: raw Criteo rows to a dataset."""

import json
import os
import sys
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

__all__ = ["VocabularyMethod", "preprocess"]


class VocabularyMethod(StrEnum):
    """How ids become table rows."""

    FREQUENCY = "frequency"
    HASH = "hash"
    MODULO = "modulo"


def preprocess(
    inputs: Annotated[
        list[Path],
        typer.Argument(help="Raw files (plain, gzip or zstd), or folders of day_N files.", metavar="INPUT"),
    ],
    out: Annotated[Path, typer.Option(help="Folder of the dataset.")],
    vocabulary: Annotated[
        VocabularyMethod | None,
        typer.Option(help="frequency (default): a row for each frequent id; hash, modulo: a fixed number of rows."),
    ] = None,
    threshold: Annotated[
        int | None,
        typer.Option(help="frequency: occurrences in training rows that an id needs for its own row (default 2)."),
    ] = None,
    max_rows_per_table: Annotated[
        int | None, typer.Option(help="Rows of a table, at most (frequency) or exactly (hash, modulo).", metavar="N")
    ] = None,
    vocabulary_from: Annotated[
        Path | None, typer.Option(help="Map ids as this dataset does, for evaluation or new days.", metavar="DATASET")
    ] = None,
    validation: Annotated[
        str | None,
        typer.Option(
            help="last-file, a fraction of the last lines as in 0.1 or 1/7, or none. "
            "Default: last-file for several files, 1/7 for one.",
            metavar="RULE",
        ),
    ] = None,
    pad_short_rows: Annotated[
        bool, typer.Option("--pad-short-rows", help="Read fields that are absent at the end of a row as missing.")
    ] = False,
    max_bad_rows: Annotated[
        int, typer.Option(help="Bad rows that are left out, into rejected.tsv, before it is an error.", metavar="N")
    ] = 0,
    jobs: Annotated[
        int | None, typer.Option(help="Files worked on at a time. Default: one a core.", metavar="N")
    ] = None,
    force: Annotated[
        bool, typer.Option("--force", help="Replace a dataset that was made from something else.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the summary as JSON.")] = False,
) -> None:
    """Turn raw Criteo rows into a dataset that `train` reads.

    Run again with the same input and options it says `up to date`; after an interruption it goes on.
    """
    from dlrm_scale.cli.dataset import print_summary, summary_json
    from dlrm_scale.cli.preprocess_progress import PassBars
    from dlrm_scale.data.preprocess import PreprocessOptions
    from dlrm_scale.data.preprocess import preprocess as run

    options = PreprocessOptions(
        vocabulary=vocabulary.value if vocabulary is not None else None,
        threshold=threshold,
        max_rows_per_table=max_rows_per_table,
        vocabulary_from=vocabulary_from,
        validation=validation,
        pad_short_rows=pad_short_rows,
        max_bad_rows=max_bad_rows,
        jobs=jobs if jobs is not None else len(os.sched_getaffinity(0)),
        force=force,
    )
    with PassBars() as bars:
        result = run(inputs, out, options, on_progress=bars.update)
    for note in result.notes:
        typer.echo(f"note: {note}", err=True)
    if as_json:
        about = {"up_to_date": result.up_to_date, "seconds": round(result.seconds, 3), "notes": list(result.notes)}
        json.dump({**about, **summary_json(out, result.manifest)}, sys.stdout, indent=1)
        typer.echo()
        return
    if not result.up_to_date:
        print_summary(out, result.manifest)
    rows = result.manifest.rows
    typer.echo(
        f"{out}: up to date, {rows:,} rows"
        if result.up_to_date
        else f"{out}: {rows:,} rows in {result.seconds:.1f} s ({rows / result.seconds:,.0f} rows/s)"
    )
