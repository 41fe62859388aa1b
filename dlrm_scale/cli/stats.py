"""`dlrm-scale stats`: the tables of a dataset, a benchmark or a generator, and how their rows are looked up."""

import json
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from dlrm_scale.planning.tables.table_set import TableSet

__all__ = ["Generator", "Optimizer", "stats"]

_LOG_SECONDS = 30.0


class Generator(StrEnum):
    """Kinds of generated table sets."""

    PRODUCTION = "production"
    PRODUCTION_2021 = "production-2021"
    SYNTHETIC = "synthetic"


class Optimizer(StrEnum):
    """Optimizers of tables."""

    ROWWISE_ADAGRAD = "rowwise_adagrad"
    SGD = "sgd"
    ADAM = "adam"


def stats(
    source: Annotated[
        str | None,
        typer.Argument(
            help="A dataset, a run, a recipe or config with its dataset, a tables file, or one of mlperf_dcnv2, "
            "criteo_kaggle, criteo_terabyte, criteo_terabyte_uncapped."
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option("--out", "-o", metavar="FILE", help="Write a tables file, .toml or .json, for `dlrm-scale plan`."),
    ] = None,
    overrides: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="SECTION.KEY=VALUE", help="Override a setting of the config; repeatable."),
    ] = None,
    dim: Annotated[
        int | None,
        typer.Option(help="Columns of all tables; needed with a dataset alone.", show_default="the source's"),
    ] = None,
    optimizer: Annotated[
        Optimizer | None, typer.Option(help="Of the tables.", show_default="the source's, or rowwise_adagrad")
    ] = None,
    batch_size: Annotated[
        list[int] | None,
        typer.Option(
            help="Global batch size to measure distinct rows at, and to show; repeatable.",
            min=1,
            show_default="64 to 65536",
        ),
    ] = None,
    samples: Annotated[
        int | None,
        typer.Option(
            help="Training rows of a dataset to look at, in whole batches of the largest size.",
            min=1,
            show_default="262144",
        ),
    ] = None,
    generate: Annotated[
        Generator | None,
        typer.Option(
            help="Make tables in place of SOURCE: production reuses rows as Meta's published lookups of 2022 (or 2021) "
            "do, synthetic has the same sizes and even lookups."
        ),
    ] = None,
    tables: Annotated[
        int | None, typer.Option(help="With --generate: how many.", min=1, max=100_000, show_default="800")
    ] = None,
    seed: Annotated[int | None, typer.Option(help="With --generate: of the sizes.", min=0, show_default="0")] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace FILE.")] = False,
    json_output: Annotated[bool, typer.Option("--json", help="Print the tables as JSON.")] = False,
) -> None:
    """Describe tables for planning: rows, columns, pooling, distinct rows by batch size, hot rows.

    What is measured depends on the dataset and the flags alone. A file that exists is kept without --force.
    """
    from dlrm_scale.errors import ConfigError
    from dlrm_scale.planning.tables.tables_file import FORMATS, format_tables, save_tables
    from dlrm_scale.planning.text_file import check_new

    if (source is None) == (generate is None):
        raise ConfigError("give SOURCE or --generate, one of them", remedy="see `dlrm-scale stats --help`")
    if generate is None:
        _refuse("--generate", {"--tables": tables, "--seed": seed})
    else:
        _refuse("SOURCE", {"--set": overrides, "--samples": samples})
    if out is not None:
        if out.suffix not in FORMATS:
            raise ConfigError(f"{out}: a tables file ends in .toml or .json", remedy=f"name it {out.stem}.toml")
        check_new(out, force=force)
    if generate is not None:
        found = _generated(generate, tables or 800, seed or 0, dim, optimizer)
    else:
        found = _loaded(str(source), overrides or [], dim, optimizer, tuple(batch_size or ()), samples)
    if out is not None:
        save_tables(found, out, force=force)
    if json_output:
        sys.stdout.write(json.dumps(json.loads(format_tables(found, ".json"))) + "\n")
    else:
        from dlrm_scale.cli.stats_summary import print_summary

        print_summary(found, tuple(batch_size or (65_536,)))
        if out is not None:
            typer.echo(f"wrote {len(found.tables)} tables to {out}")


def _refuse(lacking: str, given: Mapping[str, object]) -> None:
    from dlrm_scale.errors import ConfigError

    for option, value in given.items():
        if value is not None and value != []:
            raise ConfigError(f"{option} changes nothing without {lacking}", remedy="leave it out")


def _generated(kind: Generator, tables: int, seed: int, dim: int | None, optimizer: Optimizer | None) -> "TableSet":
    from dlrm_scale.errors import ConfigError
    from dlrm_scale.planning.tables.generate import generate_tables
    from dlrm_scale.planning.tables.table_set import check_dim

    if dim is not None and (wrong := check_dim(dim)) is not None:
        raise ConfigError(f"--dim {dim}: {wrong}", remedy="all tables get it; without it they have 64 or 128")
    return generate_tables(
        kind.value,
        tables=tables,
        seed=seed,
        dims=(64, 128) if dim is None else (dim,),
        optimizer="rowwise_adagrad" if optimizer is None else optimizer.value,
    )


def _loaded(
    source: str,
    overrides: list[str],
    dim: int | None,
    optimizer: Optimizer | None,
    batch_sizes: tuple[int, ...],
    samples: int | None,
) -> "TableSet":
    from dlrm_scale.planning.tables.load import load_tables
    from dlrm_scale.planning.tables.measure import SAMPLES, Sampling
    from dlrm_scale.sharding.third_party_logs import silence_known_warnings

    silence_known_warnings()
    with _progress() as advance:
        return load_tables(
            source,
            overrides=overrides,
            dim=dim,
            optimizer=None if optimizer is None else optimizer.value,
            sampling=Sampling(samples=samples or SAMPLES, batch_sizes=batch_sizes),
            on_progress=advance,
        )


@contextmanager
def _progress() -> Iterator[Callable[[str, int, int], None]]:
    """Show a bar for each part of the work, or a line twice a minute where stderr is no terminal."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    logged = time.monotonic()
    with Progress(*columns, console=console, disable=not console.is_terminal, transient=True) as bar:
        tasks: dict[str, TaskID] = {}

        def advance(what: str, done: int, total: int) -> None:
            nonlocal logged
            if console.is_terminal:
                if what not in tasks:
                    tasks[what] = bar.add_task(what, total=total)
                bar.update(tasks[what], completed=done)
            elif time.monotonic() - logged >= _LOG_SECONDS:
                logged = time.monotonic()
                typer.echo(f"{what}: {done:,} of {total:,}", err=True)

        yield advance
