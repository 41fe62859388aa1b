"""`dlrm-scale calibrate`."""

import json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

if TYPE_CHECKING:
    from dlrm_scale.planning.measuring.calibration import Calibration

__all__ = ["calibrate"]

_SHUTDOWN_SECONDS = 30


def calibrate(
    out: Annotated[
        str, typer.Option("--out", "-o", metavar="FILE", help="The cluster file to write.")
    ] = "cluster.toml",
    ranks: Annotated[
        int | None,
        typer.Option(help="Ranks on this host. Default: one a GPU; on CPU one a core, at least 2, at most 8.", min=2),
    ] = None,
    ranks_per_host: Annotated[
        int | None, typer.Option(help="Ranks that count as one host.", min=1, show_default="all of this host")
    ] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="Fewer shapes and repeats: shows that it works, for rough constants.")
    ] = False,
    allow_noise: Annotated[
        bool, typer.Option("--allow-noise", help="Write what would mislead too, with the reasons in the file.")
    ] = False,
    processor_time: Annotated[
        bool,
        typer.Option(
            "--processor-time",
            help="Measure processor time in place of elapsed time: for a CPU that others use too. Misses the network.",
        ),
    ] = False,
    force: Annotated[bool, typer.Option("--force", help="Replace FILE if it exists.")] = False,
    json_output: Annotated[bool, typer.Option("--json", help="Print the summary as JSON.")] = False,
) -> None:
    """Measure lookups, updates and collectives on the ranks at hand, and write a cluster file for `plan`.

    Takes two to three minutes on two ranks, which should have the machine to themselves. Measurements that mislead
    are refused: repeats of a part that spread by more than half, ranks that waited for a core for 30 % of the time, a
    fit that is 50 % off (to whole steps 30 %), or a sharding type's constant that takes half a step or that the steps
    don't bear out. What is worth less without misleading is written with the reason. Under torchrun it measures all
    hosts.
    """
    from dlrm_scale.errors import ConfigError
    from dlrm_scale.install import check_install
    from dlrm_scale.planning.cluster.cluster_file import check_cluster_path, save_cluster

    path = Path(out)
    check_cluster_path(path, force=force)
    check_install()
    import torch

    from dlrm_scale.host_cores import usable_cores
    from dlrm_scale.planning.measuring.calibration import CalibrationRequest, calibrate_rank
    from dlrm_scale.train.launch import launch, under_torchrun

    gpus = torch.cuda.device_count()
    if under_torchrun():
        local_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", os.environ["WORLD_SIZE"]))
    elif ranks is not None:
        local_ranks = ranks
    else:
        # ranks of a CPU share its memory bandwidth: more than eight teach nothing new
        local_ranks = gpus if gpus > 1 else min(8, max(2, usable_cores()))
    device: Literal["cpu", "cuda"] = "cuda" if gpus >= local_ranks else "cpu"
    if processor_time and device == "cuda":
        raise ConfigError("--processor-time doesn't see what GPUs do", remedy="leave it out")
    request = CalibrationRequest(
        name=path.stem,
        device=device,
        quick=quick,
        allow_noise=allow_noise,
        clock="processor" if processor_time else "elapsed",
        ranks_per_host=ranks_per_host,
    )
    result = launch(calibrate_rank, request, local_ranks, _SHUTDOWN_SECONDS)
    if os.environ.get("RANK", "0") != "0":
        return
    save_cluster(result.cluster, path, force=force)
    if json_output:
        json.dump(_summary(result, out), sys.stdout)
        sys.stdout.write("\n")
    else:
        typer.echo(_table(result, out))


def _summary(result: "Calibration", out: str) -> dict[str, object]:
    cluster, noise = result.cluster, result.noise
    return {
        "cluster": out,
        "ranks": cluster.hosts * cluster.ranks_per_host,
        "device": cluster.device,
        "seconds": round(result.seconds, 1),
        "fit_error": cluster.fit_error,
        "type_ms": {kind: constant.value for kind, constant in cluster.type_ms.items()},
        "noise": {
            "busy": noise.busy,
            "load_average": noise.load_average,
            "cores": noise.cores,
            "spread": noise.spread,
            "delay_share": noise.delay_share,
            "warnings": list(noise.warnings),
            "faults": list(noise.faults),
        },
    }


def _table(result: "Calibration", out: str) -> str:
    cluster = result.cluster
    lines = [f"wrote {out}: {cluster.notes}", "", "error of each fit:"]
    if cluster.noise:
        lines.insert(1, f"warning: {cluster.noise}")
    lines += [f"  {name:12} {error:6.1%}" for name, error in cluster.fit_error.items()]
    lines += ["a step pays for each sharding type in use:"]
    lines += [f"  {kind:18} {constant.value:7.2f} ms" for kind, constant in cluster.type_ms.items()]
    lines += ["", f"took {result.seconds:.0f} s; plan with --cluster {out}"]
    return "\n".join(lines)
