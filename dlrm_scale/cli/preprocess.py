"""`dlrm-scale preprocess`: raw Criteo rows to a dataset."""

import json
import sys
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

__all__ = ["Delimiter", "VocabularyMethod", "preprocess"]


class VocabularyMethod(StrEnum):
    """How ids become table rows."""

    FREQUENCY = "frequency"
    HASH = "hash"
    MODULO = "modulo"
    GIVEN = "given"


class Delimiter(StrEnum):
    """What stands between the fields of a row."""

    TAB = "tab"
    COMMA = "comma"


def preprocess(
    inputs: Annotated[
        list[Path],
        typer.Argument(
            help="Text (plain, gzip or zstd), .npy trios as day_0_{dense,sparse,labels}.npy, or Parquet; or folders of "
            "such files. - is standard input.",
            metavar="INPUT",
        ),
    ],
    out: Annotated[Path, typer.Option(help="Folder of the dataset.")],
    vocabulary: Annotated[
        VocabularyMethod | None,
        typer.Option(
            help="frequency (default): a row for each frequent id; hash, modulo: a fixed number of rows; given "
            "(default for .npy): ids are table rows already."
        ),
    ] = None,
    threshold: Annotated[
        int | None,
        typer.Option(help="frequency: occurrences in training rows that an id needs for its own row (default 2)."),
    ] = None,
    max_rows_per_table: Annotated[
        int | None, typer.Option(help="Rows of a table, at most (frequency) or exactly (others).", metavar="N")
    ] = None,
    max_rows: Annotated[
        list[str] | None,
        typer.Option(help="Rows of one column's table, as in C3=5000. Repeatable.", metavar="COLUMN=N"),
    ] = None,
    vocabulary_from: Annotated[
        Path | None,
        typer.Option(
            help="Map ids as this dataset does, for evaluation or new days. The same folder as --out: add the new "
            "days to it.",
            metavar="DATASET",
        ),
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
        int | None,
        typer.Option(help="Threads at a time, over files and within them. Default: one a core.", metavar="N"),
    ] = None,
    memory_limit: Annotated[
        str | None,
        typer.Option(help="What the process may use, as in 1GiB; counts beyond it go to disk.", metavar="SIZE"),
    ] = None,
    delimiter: Annotated[Delimiter, typer.Option(help="Text: what stands between fields.")] = Delimiter.TAB,
    header: Annotated[bool, typer.Option("--header", help="Text: the first line of each file names columns.")] = False,
    id_column: Annotated[
        bool, typer.Option("--id-column", help="Text: rows begin with an id of their own, which is left out.")
    ] = False,
    unlabeled: Annotated[
        bool, typer.Option("--unlabeled", help="Text: rows have no label; they become the test split.")
    ] = False,
    decimal_ids: Annotated[
        bool, typer.Option("--decimal-ids", help="Text: category ids are decimal numbers, not hexadecimal.")
    ] = False,
    multi_hot: Annotated[
        str | None,
        typer.Option(
            help="Text: columns whose fields may hold several ids joined by commas, as in C3,C20, or all.",
            metavar="COLUMNS",
        ),
    ] = None,
    column: Annotated[
        list[str] | None,
        typer.Option(
            help="Parquet: which column of the file is one of ours, as in label=clicked or C1=user_id. Repeatable.",
            metavar="NAME=SOURCE",
        ),
    ] = None,
    force: Annotated[
        bool, typer.Option("--force", help="Replace a dataset that was made from something else.")
    ] = False,
    as_json: Annotated[bool, typer.Option("--json", help="Print the summary as JSON.")] = False,
) -> None:
    """Turn raw Criteo rows into a dataset that `train` reads.

    Run again with the same input and options it says `up to date`; after an interruption it goes on.
    """
    from dlrm_scale.cli.column_words import parse_columns, parse_mapping
    from dlrm_scale.cli.dataset import print_summary, summary_json
    from dlrm_scale.cli.preprocess_progress import PassBars
    from dlrm_scale.data.preprocess.options import PreprocessOptions
    from dlrm_scale.data.preprocess.preprocess import preprocess as run
    from dlrm_scale.data.source.text_layout import TextLayout
    from dlrm_scale.host_cores import usable_cores
    from dlrm_scale.units import parse_bytes

    options = PreprocessOptions(
        vocabulary=vocabulary.value if vocabulary is not None else None,
        threshold=threshold,
        max_rows_per_table=max_rows_per_table,
        max_rows=_rows_by_column(parse_mapping("--max-rows", max_rows or [], "C3=5000")),
        vocabulary_from=vocabulary_from,
        validation=validation,
        layout=TextLayout(
            delimiter=delimiter.value,
            header=header,
            id_column=id_column,
            labeled=not unlabeled,
            decimal_ids=decimal_ids,
            multi_hot=parse_columns(multi_hot),
            pad_short_rows=pad_short_rows,
        ),
        columns=parse_mapping("--column", column or [], "C1=user_id"),
        max_bad_rows=max_bad_rows,
        jobs=jobs if jobs is not None else usable_cores(),
        memory_limit_bytes=parse_bytes(memory_limit) if memory_limit is not None else None,
        force=force,
    )
    try:
        with PassBars() as bars:
            result = run(inputs, out, options, on_progress=bars.update)
    except KeyboardInterrupt:
        typer.echo("interrupted; the same command goes on with the files that aren't finished", err=True)
        raise
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


def _rows_by_column(texts: dict[str, str]) -> dict[str, int]:
    from dlrm_scale.errors import ConfigError

    for name, text in texts.items():
        if not text.isdecimal():
            raise ConfigError(f"--max-rows {name}={text} is no number of rows", remedy="write it as --max-rows C3=5000")
    return {name: int(text) for name, text in texts.items()}
