"""`dlrm-scale evaluate`."""

import json
import os
import sys
from pathlib import Path
from typing import Annotated

import typer

__all__ = ["evaluate"]


def evaluate(
    run: Annotated[str, typer.Argument(help="Folder of the run.")],
    data: Annotated[str, typer.Option(help="Dataset folder. Default: the one that the run was trained on.")] = "",
    split: Annotated[str, typer.Option(help="validation, test or train.")] = "validation",
    step: Annotated[int | None, typer.Option(help="Checkpoint of this step. Default: the newest.")] = None,
    nproc: Annotated[
        int | None, typer.Option(help="Ranks on this host. Default: one a GPU, or one on CPU.", min=1)
    ] = None,
    overrides: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="SECTION.KEY=VALUE", help="Override a setting, as in sharding.kind=row_wise."),
    ] = None,
    json_output: Annotated[bool, typer.Option("--json", help="Print the metrics as JSON.")] = False,
) -> None:
    """Evaluate a run's checkpoint on a split of a dataset, over exactly its rows."""
    from dlrm_scale.errors import ConfigError
    from dlrm_scale.install import check_install
    from dlrm_scale.recipes import load_config
    from dlrm_scale.train.run_folder import RunFolder, check_config

    check_install()
    if split not in ("validation", "test", "train"):
        raise ConfigError(f"--split {split} is not allowed (allowed: validation, test, train)")
    folder = RunFolder(path=Path(run))
    if not folder.exists():
        raise ConfigError(f"{run}: there is no run", remedy="name the folder given as run.path")
    config = load_config(folder.config, overrides or [])
    check_config(config)
    # torchrec takes seconds to import: mistakes are found before it
    from dlrm_scale.train.evaluate_run import EvaluationRequest, evaluate_rank
    from dlrm_scale.train.launch import default_local_ranks, launch
    from dlrm_scale.train.summary import metric_rows, text_table

    request = EvaluationRequest(config=config, run=run, data=data or config.data.path, split=split, step=step)
    local_ranks = nproc if nproc is not None else default_local_ranks(config.train.device)
    result = launch(evaluate_rank, request, local_ranks, config.run.shutdown_seconds)
    if os.environ.get("RANK", "0") != "0":
        return
    if json_output:
        values = {"run": run, "data": request.data, "split": split, "step": result.step, "notes": result.notes}
        json.dump({**values, **result.metrics.as_dict()}, sys.stdout)
        sys.stdout.write("\n")
        return
    for note in result.notes:
        typer.echo(note, err=True)
    head = [("run", run), ("split", f"{split} of {request.data}"), ("checkpoint", f"step {result.step}")]
    typer.echo(text_table(head + metric_rows(result.metrics.as_dict())))
