"""`dlrm-scale train`."""

import json
import os
import sys
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from dlrm_scale.train.run_folder import RunRequest

__all__ = ["train"]


def train(
    config: Annotated[
        str | None, typer.Argument(help="A recipe's name or a TOML file; optional with --resume.")
    ] = None,
    overrides: Annotated[
        list[str] | None, typer.Option("--set", metavar="SECTION.KEY=VALUE", help="Override a setting; repeatable.")
    ] = None,
    nproc: Annotated[
        int | None, typer.Option(help="Ranks on this host. Default: one a GPU, or one on CPU.", min=1)
    ] = None,
    resume: Annotated[
        str | None,
        typer.Option(
            metavar="auto|STEP", help="Continue the run in run.path from its newest checkpoint, or an older one."
        ),
    ] = None,
    init_from: Annotated[
        str, typer.Option(metavar="RUN", help="Start a new run with the weights and optimizer state of another.")
    ] = "",
    tables_only: Annotated[
        bool, typer.Option("--tables-only", help="With --init-from: take the tables alone; the dense part begins anew.")
    ] = False,
    allow_new_tables: Annotated[
        bool,
        typer.Option("--allow-new-tables", help="With --init-from: give tables that RUN hasn't their initial rows."),
    ] = False,
    allow_resized_tables: Annotated[
        bool,
        typer.Option(
            "--allow-resized-tables",
            help="With --init-from: add initial rows to grown tables, cut the last ones of shrunk tables. The ids of "
            "rows that stay must still mean the same.",
        ),
    ] = False,
    dry_run: Annotated[
        bool,
        typer.Option(
            "--dry-run",
            help="Check config, dataset, plan, memory and the checkpoint to begin with, tell what the run would do, "
            "and leave nothing behind. Exits as the run would: 3 where it doesn't fit. Of checkpoints the tables and "
            "the files' sizes are compared; what is in the files isn't read.",
        ),
    ] = False,
    json_output: Annotated[bool, typer.Option("--json", help="Print the summary as JSON.")] = False,
) -> None:
    """Train a model on a preprocessed dataset.

    Run folder and dataset are settings: --set run.path=FOLDER --set data.path=DATASET. SIGINT and SIGTERM finish
    the step, commit a checkpoint and exit 0.
    """
    from dataclasses import asdict

    from dlrm_scale.errors import ConfigError
    from dlrm_scale.install import check_install
    from dlrm_scale.train.run_folder import resolve_run
    from dlrm_scale.train.warm_start import make_warm_start

    if resume is not None and resume != "auto" and not resume.isdecimal():
        raise ConfigError(
            f"--resume {resume} is not allowed (allowed: auto, or the step of a checkpoint)",
            remedy="--resume auto goes on from the newest checkpoint, --resume 500 from that of step 500; "
            "`dlrm-scale checkpoint ls RUN` lists them",
        )
    check_install()
    step = int(resume) if resume is not None and resume.isdecimal() else None
    warm_start = make_warm_start(
        init_from,
        tables_only=tables_only,
        allow_new_tables=allow_new_tables,
        allow_resized_tables=allow_resized_tables,
    )
    request = resolve_run(config, overrides or [], resume=resume is not None, step=step, warm_start=warm_start)
    if resume and not request.resume:
        typer.echo(f"no run in {request.config.run.path} yet: starting one", err=True)
    # torchrec takes seconds to import: mistakes are found before it
    from dlrm_scale.train.launch import default_local_ranks, launch
    from dlrm_scale.train.summary import summary_table
    from dlrm_scale.train.trainer import train_rank

    local_ranks = nproc if nproc is not None else default_local_ranks(request.config.train.device)
    if dry_run:
        _dry_run(request, local_ranks, json_output)
        return
    result = launch(train_rank, request, local_ranks, request.config.run.shutdown_seconds)
    if os.environ.get("RANK", "0") != "0":
        return
    if json_output:
        json.dump(asdict(result), sys.stdout)
        sys.stdout.write("\n")
    else:
        typer.echo(summary_table(result, request.config.run.path))


def _dry_run(request: "RunRequest", local_ranks: int, json_output: bool) -> None:
    from dlrm_scale.train.dry_run import describe_dry_run, dry_run_rank
    from dlrm_scale.train.launch import launch

    found = launch(dry_run_rank, request, local_ranks, request.config.run.shutdown_seconds)
    if os.environ.get("RANK", "0") == "0":
        typer.echo(json.dumps(found.as_dict()) if json_output else describe_dry_run(found))
    if found.refusal is not None:
        raise found.refusal
