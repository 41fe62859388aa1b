"""`dlrm-scale diagnose`."""

import json
import os
import sys
from typing import Annotated

import typer

__all__ = ["diagnose"]


def diagnose(
    config: Annotated[str, typer.Argument(help="A recipe's name or a TOML file.")],
    overrides: Annotated[
        list[str] | None, typer.Option("--set", metavar="SECTION.KEY=VALUE", help="Override a setting; repeatable.")
    ] = None,
    nproc: Annotated[
        int | None, typer.Option(help="Ranks on this host. Default: one a GPU, or one on CPU.", min=1)
    ] = None,
    steps: Annotated[int, typer.Option(help="Timed steps of a round.", min=1)] = 30,
    rounds: Annotated[int, typer.Option(help="Rounds of each kind.", min=1)] = 5,
    what_if: Annotated[
        bool, typer.Option("--what-if/--no-what-if", help="Try settings that may help, and measure what they gain.")
    ] = True,
    time_limit: Annotated[
        float, typer.Option(metavar="SECONDS", help="Begin no round or trial after this time.", min=1)
    ] = 600.0,
    json_output: Annotated[bool, typer.Option("--json", help="Print everything as JSON.")] = False,
) -> None:
    """Find out what holds training back, and which setting helps.

    Times the steps of a config with batches in memory, with files in the page cache and with files from storage, in
    turn. The differences are what data preparation and storage cost. Settings that may help are tried, and only what
    was measured to be better is recommended. Files are dropped from this host's page cache. Nothing is written: no
    run folder, no checkpoint.
    """
    from dataclasses import asdict

    from dlrm_scale.install import check_install

    check_install()
    from dlrm_scale.diagnose.diagnose import diagnose_rank, resolve_request
    from dlrm_scale.diagnose.report import describe_diagnosis
    from dlrm_scale.train.launch import default_local_ranks, launch

    request = resolve_request(
        config, overrides or [], steps=steps, rounds=rounds, what_if=what_if, time_limit_seconds=time_limit
    )
    local_ranks = nproc if nproc is not None else default_local_ranks(request.config.train.device)
    result = launch(diagnose_rank, request, local_ranks, request.config.run.shutdown_seconds)
    if os.environ.get("RANK", "0") != "0":
        return
    if json_output:
        json.dump(asdict(result), sys.stdout)
        sys.stdout.write("\n")
    else:
        typer.echo(describe_diagnosis(result))
