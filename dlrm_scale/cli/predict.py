"""`dlrm-scale predict`: scores of rows, with or without labels."""

import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from dlrm_scale.cli.preprocess import Delimiter

if TYPE_CHECKING:
    from dlrm_scale.data.preprocess.passes import OnProgress
    from dlrm_scale.scoring.predict import Prediction

__all__ = ["predict"]


def predict(
    run: Annotated[str, typer.Argument(help="Folder of the run.")],
    inputs: Annotated[
        list[Path],
        typer.Argument(
            help="A dataset folder; or raw rows as `preprocess` reads them: text (plain, gzip or zstd), .npy trios, "
            "Parquet, folders of such files, or - for standard input.",
            metavar="INPUT",
        ),
    ],
    out: Annotated[Path, typer.Option(help="File of the scores; it ends in .parquet or .csv.")],
    step: Annotated[
        str | None,
        typer.Option(help="Checkpoint of this step, or best. Default: the newest.", metavar="STEP|best"),
    ] = None,
    split: Annotated[str, typer.Option(help="Of a dataset: all, validation, test or train.")] = "all",
    vocabulary_from: Annotated[
        Path | None,
        typer.Option(
            help="Raw rows: map ids as this dataset does. Default: the one that the run was trained on.",
            metavar="DATASET",
        ),
    ] = None,
    delimiter: Annotated[Delimiter, typer.Option(help="Text: what stands between fields.")] = Delimiter.TAB,
    header: Annotated[bool, typer.Option("--header", help="Text: the first line of each file names columns.")] = False,
    id_column: Annotated[
        bool, typer.Option("--id-column", help="Text: rows begin with an id of their own, which is left out.")
    ] = False,
    unlabeled: Annotated[bool, typer.Option("--unlabeled", help="Text: rows have no label.")] = False,
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
    pad_short_rows: Annotated[
        bool, typer.Option("--pad-short-rows", help="Read fields that are absent at the end of a row as missing.")
    ] = False,
    column: Annotated[
        list[str] | None,
        typer.Option(
            help="Parquet: which column of the file is one of ours, as in label=clicked or C1=user_id. Repeatable.",
            metavar="NAME=SOURCE",
        ),
    ] = None,
    max_bad_rows: Annotated[
        int, typer.Option(help="Bad rows that are left out, into OUT.rejected.tsv, before it is an error.", metavar="N")
    ] = 0,
    jobs: Annotated[
        int | None, typer.Option(help="Threads that read raw rows. Default: one a core.", metavar="N")
    ] = None,
    memory_limit: Annotated[
        str | None, typer.Option(help="What reading raw rows may use, as in 1GiB.", metavar="SIZE")
    ] = None,
    nproc: Annotated[
        int | None, typer.Option(help="Ranks on this host. Default: one a GPU, or one on CPU.", min=1)
    ] = None,
    overrides: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="SECTION.KEY=VALUE", help="Override a setting, as in sharding.kind=row_wise."),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace the file of scores.")] = False,
    json_output: Annotated[bool, typer.Option("--json", help="Print the summary as JSON.")] = False,
) -> None:
    """Score rows with a run's checkpoint, into Parquet or CSV, in the order of the rows.

    Columns: row, source, line, label (where there are labels), logit, probability. Raw rows become a dataset beside
    OUT meanwhile, some 160 bytes a row.
    """
    from dlrm_scale.cli.column_words import parse_columns, parse_mapping
    from dlrm_scale.cli.evaluate import find_step
    from dlrm_scale.data.preprocess.options import PreprocessOptions
    from dlrm_scale.data.source.text_layout import TextLayout
    from dlrm_scale.errors import ConfigError
    from dlrm_scale.host_cores import usable_cores
    from dlrm_scale.install import check_install
    from dlrm_scale.recipes import load_config
    from dlrm_scale.train.run_folder import RunFolder, check_config
    from dlrm_scale.units import parse_bytes

    check_install()
    if split not in ("all", "validation", "test", "train"):
        raise ConfigError(f"--split {split} is not allowed (allowed: all, validation, test, train)")
    folder = RunFolder(path=Path(run))
    if not folder.exists():
        raise ConfigError(f"{run}: there is no run", remedy="name the folder given as run.path")
    config = load_config(folder.config, overrides or [])
    check_config(config)
    options = PreprocessOptions(
        vocabulary_from=vocabulary_from or Path(config.data.path),
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
    )
    # torchrec takes seconds to import: mistakes are found before it
    from dlrm_scale.scoring.predict import PredictJob
    from dlrm_scale.scoring.predict import predict as run_job

    number, manifest = find_step(step, run)
    job = PredictJob(
        config=config,
        run=run,
        step=number,
        manifest=manifest,
        inputs=tuple(inputs),
        split=split,
        options=options,
        out=out,
        force=force,
        local_ranks=nproc,
    )
    prediction = run_job(job, _reading())
    if os.environ.get("RANK", "0") != "0":
        return
    chosen = "best" if manifest else "named" if number is not None else "newest"
    if json_output:
        about = {"run": run, "out": str(out), "checkpoint": chosen}
        rejected = str(prediction.rejected) if prediction.rejected is not None else None
        notes = {"notes": [*prediction.notes, *prediction.result.notes], "rejected": rejected}
        json.dump({**about, **asdict(prediction.result), **notes}, sys.stdout)
        sys.stdout.write("\n")
        return
    _print_summary(run, out, chosen, prediction)


@contextmanager
def _reading() -> "Iterator[OnProgress]":
    from dlrm_scale.cli.preprocess_progress import PassBars

    with PassBars() as bars:
        yield bars.update


def _print_summary(run: str, out: Path, chosen: str, prediction: "Prediction") -> None:
    from dlrm_scale.train.summary import metric_rows, text_table
    from dlrm_scale.units import format_bytes, format_count, format_seconds

    result = prediction.result
    for note in (*prediction.notes, *result.notes):
        typer.echo(f"note: {note}", err=True)
    if result.nonfinite:
        typer.echo(f"warning: {result.nonfinite:,} scores are not finite", err=True)
    speed = format_count(result.rows / result.seconds) if result.seconds else "-"
    mean = "undefined" if result.mean_prediction is None else f"{result.mean_prediction:.5f}"
    rows = [
        ("run", run),
        ("checkpoint", f"step {result.step}" + (f" ({chosen})" if chosen != "named" else "")),
        ("scores", f"{out} ({format_bytes(out.stat().st_size)})"),
        ("rows scored", format_count(result.rows)),
        ("time", f"{format_seconds(result.seconds)} ({speed} rows/s)"),
        ("mean probability", mean),
    ]
    if result.metrics is not None:
        rows += metric_rows(result.metrics.as_dict())
    typer.echo(text_table(rows))
