"""`dlrm-scale bench`."""

import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

from dlrm_scale.cli.announce import announce
from dlrm_scale.cli.stats import Optimizer

if TYPE_CHECKING:
    from dlrm_scale.planning.measuring.plan_bench import BenchRequest
    from dlrm_scale.planning.measuring.plan_rounds import RoundsResult

__all__ = ["bench"]

_SHUTDOWN_SECONDS = 60
_ROUNDS, _QUICK_ROUNDS = 30, 6


def bench(
    tables: Annotated[
        str | None,
        typer.Option(help="Measure on batches drawn for these tables: a name of `dlrm-scale stats` or a tables file."),
    ] = None,
    data: Annotated[
        str | None,
        typer.Option(
            metavar="CONFIG", help="Measure a run's model on real batches: a run, or a recipe or config with --set."
        ),
    ] = None,
    cluster: Annotated[
        str | None, typer.Option(metavar="FILE", help="Costs of these ranks, by `dlrm-scale calibrate`.")
    ] = None,
    out: Annotated[
        Path | None, typer.Option("--out", "-o", metavar="FOLDER", help="Write results.jsonl, index.html and plans.")
    ] = None,
    ranks: Annotated[int, typer.Option(help="Ranks on this host.", min=2)] = 2,
    ranks_per_host: Annotated[
        int | None, typer.Option(help="Ranks that count as one host.", min=1, show_default="all")
    ] = None,
    batch_size_per_rank: Annotated[
        int | None,
        typer.Option(metavar="B", help="Rows of a batch a rank.", min=1, show_default="512, or the config's"),
    ] = None,
    overrides: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="SECTION.KEY=VALUE", help="Override a setting of the config; repeatable."),
    ] = None,
    plans: Annotated[
        str | None, typer.Option(metavar="NAME,…", help="Generated plans.", show_default="all that there are")
    ] = None,
    plan: Annotated[
        list[Path] | None, typer.Option(metavar="FILE", help="Measure this plan file too; repeatable.")
    ] = None,
    dim: Annotated[int | None, typer.Option(help="Columns of all tables.", show_default="the tables'")] = None,
    optimizer: Annotated[Optimizer | None, typer.Option(help="Of the tables.", show_default="the tables'")] = None,
    allow_split_row_state: Annotated[
        bool,
        typer.Option(
            "--allow-split-row-state",
            help="Measure types that cut columns too: row-wise Adagrad then keeps a state for each column shard.",
        ),
    ] = False,
    rounds: Annotated[int | None, typer.Option(help="Rounds, each in another order.", min=4, show_default="30")] = None,
    quick: Annotated[bool, typer.Option("--quick", help="6 rounds: shows that it works, and no more.")] = False,
    seed: Annotated[int, typer.Option(help="Of drawn batches and of the order.", min=0)] = 0,
    memory: Annotated[
        str | None,
        typer.Option(metavar="SIZE", help="Of the host, for all plans together.", show_default="70 % of what is free"),
    ] = None,
    processor_time: Annotated[
        bool,
        typer.Option(
            "--processor-time", help="Compare processor time in place of elapsed time: for a CPU that others use too."
        ),
    ] = False,
    force: Annotated[bool, typer.Option("--force", help="Replace the folder of an older benchmark.")] = False,
    json_output: Annotated[bool, typer.Option("--json", help="Print the summary as JSON.")] = False,
) -> None:
    """Measure sharding plans on the ranks at hand, beside what is predicted of them.

    All plans train the same model on the same batches in turns, in rounds of shuffled order. Prints medians with 95 %
    intervals, what was predicted, Kendall's tau, errors and regret of our costs and of TorchRec's, and how far two
    halves of the rounds agree with each other. Plans that can't be used here are listed with the reason; it fails with
    3 only where none can. SIGINT ends it after the round and keeps what there is.
    """
    from dlrm_scale.errors import ConfigError
    from dlrm_scale.install import check_install
    from dlrm_scale.planning.measuring.bench_folder import check_folder

    if (tables is None) == (data is None):
        raise ConfigError(
            "name either --tables or --data",
            remedy="--tables mlperf_dcnv2 draws batches, --data criteo_kaggle --set data.path=DATASET takes real ones",
        )
    if out is not None:
        check_folder(out, force=force)
    if rounds is not None and quick:
        raise ConfigError("--rounds and --quick contradict each other", remedy="leave one of them out")
    check_install()
    request = _request(
        tables=tables,
        data=data,
        cluster=cluster,
        ranks=ranks,
        ranks_per_host=ranks_per_host,
        batch_size_per_rank=batch_size_per_rank,
        overrides=overrides or [],
        names=[name.strip() for name in plans.split(",")] if plans else [],
        files=plan or [],
        dim=dim,
        optimizer=optimizer,
        wide=allow_split_row_state,
        rounds=rounds if rounds is not None else _QUICK_ROUNDS if quick else _ROUNDS,
        seed=seed,
        memory=memory,
        processor_time=processor_time,
    )
    from dlrm_scale.planning.measuring.plan_bench import bench_rank
    from dlrm_scale.train.launch import launch

    result = launch(bench_rank, request, ranks, _SHUTDOWN_SECONDS)
    if os.environ.get("RANK", "0") == "0":
        _deliver(request, result, out, force, json_output)


def _request(
    *,
    tables: str | None,
    data: str | None,
    cluster: str | None,
    ranks: int,
    ranks_per_host: int | None,
    batch_size_per_rank: int | None,
    overrides: list[str],
    names: list[str],
    files: list[Path],
    dim: int | None,
    optimizer: Optimizer | None,
    wide: bool,
    rounds: int,
    seed: int,
    memory: str | None,
    processor_time: bool,
) -> "BenchRequest":
    import torch

    from dlrm_scale.errors import ConfigError
    from dlrm_scale.planning.cluster.cluster_file import load_cluster
    from dlrm_scale.planning.measuring.bench_setup import prepare_bench
    from dlrm_scale.planning.tables.load import config_of, load_tables
    from dlrm_scale.units import parse_bytes

    if cluster is None:
        raise ConfigError(
            "--cluster is missing", remedy="measure these ranks with `dlrm-scale calibrate -o FILE` and name the file"
        )
    described = load_cluster(cluster)
    source = data if data is not None else str(tables)
    config = config_of(source, overrides=overrides) if data is not None else None
    if data is not None and config is None:
        raise ConfigError(
            f"--data {data} names no config", remedy="name a run, or a recipe with --set data.path=DATASET"
        )
    if data is not None and (dim is not None or optimizer is not None):
        raise ConfigError("--dim and --optimizer are the config's with --data", remedy="use --set model.dim=…")
    found = load_tables(source, overrides=overrides, dim=dim, optimizer=None if optimizer is None else optimizer.value)
    total = int(os.environ.get("WORLD_SIZE", str(ranks)))
    device: Literal["cpu", "cuda"] = "cuda" if torch.cuda.device_count() >= ranks else "cpu"
    if processor_time and device == "cuda":
        raise ConfigError("--processor-time doesn't see what GPUs do", remedy="leave it out")
    rows = batch_size_per_rank
    if rows is None:
        rows = 512 if config is None else max(1, config.data.batch_size // total)
    return prepare_bench(
        found,
        described,
        ranks=total,
        device=device,
        batch_size_per_rank=rows,
        ranks_per_host=ranks_per_host or (ranks if total > ranks else None),
        config=config,
        wide=wide,
        names=names,
        files=files,
        rounds=rounds,
        seed=seed,
        clock="processor" if processor_time else "elapsed",
        memory_bytes=None if memory is None else parse_bytes(memory),
        say=announce,
    )


def _deliver(request: "BenchRequest", result: "RoundsResult", out: Path | None, force: bool, json_output: bool) -> None:
    from dlrm_scale.host_cores import usable_cores
    from dlrm_scale.planning.measuring.bench_folder import bench_files, write_folder
    from dlrm_scale.planning.measuring.bench_summary import summarize
    from dlrm_scale.planning.report.bench_page import bench_page
    from dlrm_scale.planning.report.bench_text import describe_bench
    from dlrm_scale.planning.report.plan_text import describe_request

    summary = summarize(request, result, usable_cores())
    about = describe_request(request.planned)
    if out is not None:
        page = bench_page(summary, f"Plans measured: {request.planned.tables.name}", about)
        write_folder(out, bench_files(request, result, summary, page), force=force)
    if json_output:
        json.dump(summary.as_dict() | {"folder": None if out is None else str(out)}, sys.stdout)
        sys.stdout.write("\n")
        return
    typer.echo(describe_bench(summary, about) + (f"\n\nwritten: {out}" if out is not None else ""))
