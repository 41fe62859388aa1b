"""`dlrm-scale evaluate`."""

import json
import os
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from dlrm_scale.train.metrics.metrics import ClickMetrics

__all__ = ["evaluate", "find_step"]


def evaluate(
    run: Annotated[str, typer.Argument(help="Folder of the run.")],
    data: Annotated[str, typer.Option(help="Dataset folder. Default: the one that the run was trained on.")] = "",
    split: Annotated[str, typer.Option(help="validation, test or train.")] = "validation",
    step: Annotated[
        str | None,
        typer.Option(help="Checkpoint of this step, or best. Default: the newest.", metavar="STEP|best"),
    ] = None,
    by: Annotated[
        str,
        typer.Option(
            help="Also metrics of each day (raw file); of the most frequent values of a category column, which must "
            "have one id a row; or of an integer column's powers of two (1, 2 to 3, 4 to 7 ...; missing integers and "
            "those below 1 are one slice, as a dataset has the same feature for them).",
            metavar="day|C1…C26|I1…I13",
        ),
    ] = "",
    top: Annotated[int, typer.Option(help="Values of the category column that --by names.", metavar="N", min=1)] = 10,
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
    from dlrm_scale.scoring.evaluate_run import EvaluationRequest, evaluate_rank
    from dlrm_scale.train.launch import default_local_ranks, launch
    from dlrm_scale.train.summary import metric_rows, text_table

    number, manifest = find_step(step, run)
    request = EvaluationRequest(
        config=config,
        run=run,
        data=data or config.data.path,
        split=split,
        step=number,
        manifest=manifest,
        by=by,
        top=top,
    )
    local_ranks = nproc if nproc is not None else default_local_ranks(config.train.device)
    result = launch(evaluate_rank, request, local_ranks, config.run.shutdown_seconds)
    if os.environ.get("RANK", "0") != "0":
        return
    chosen = "best" if manifest else "named" if number is not None else "newest"
    if json_output:
        values = {"run": run, "data": request.data, "split": split, "step": result.step, "checkpoint": chosen}
        slices = {"by": by, "slices": {name: m.as_dict() for name, m in result.slices.items()}} if by else {}
        about = {"notes": result.notes, "memory": result.memory}
        json.dump({**values, **about, **result.metrics.as_dict(), **slices}, sys.stdout)
        sys.stdout.write("\n")
        return
    for note in result.notes:
        typer.echo(note, err=True)
    step_shown = f"step {result.step}" + (f" ({chosen})" if chosen != "named" else "")
    head = [("run", run), ("split", f"{split} of {request.data}"), ("checkpoint", step_shown)]
    typer.echo(text_table(head + metric_rows(result.metrics.as_dict())))
    if by:
        _print_slices(by, result.slices)


def find_step(step: str | None, run: str) -> tuple[int | None, str]:
    """Read `--step`: a step, or the manifest of the best checkpoint.

    Raises:
        ConfigError: it is neither.
        CheckpointError: there is no best checkpoint.
    """
    from dlrm_scale.errors import ConfigError
    from dlrm_scale.train.best_checkpoint import best_manifest
    from dlrm_scale.train.run_folder import RunFolder

    if step is None:
        return None, ""
    if step == "best":
        return None, best_manifest(RunFolder(path=Path(run)).best)
    if not step.isdecimal():
        raise ConfigError(f"--step {step} is not allowed (allowed: best, or the step of a checkpoint)")
    return int(step), ""


def _print_slices(by: str, slices: "Mapping[str, ClickMetrics]") -> None:
    from rich.console import Console
    from rich.table import Table

    from dlrm_scale.units import format_count

    table = Table(by, "rows", "positives", "AUC", "logloss", "base rate", "calibration", box=None)
    for column in table.columns[1:]:
        column.justify = "right"
    for name, metrics in slices.items():
        values = (metrics.auc, metrics.logloss, metrics.base_rate_logloss, metrics.calibration)
        shown = ["-" if value is None else f"{value:.5f}" for value in values]
        table.add_row(name, format_count(metrics.rows), format_count(metrics.positives), *shown)
    typer.echo()
    Console(width=None if sys.stdout.isatty() else 160).print(table)
