"""A benchmark's folder: results.jsonl, the page, and every plan as a file that the trainer takes. All of it or none."""

import json
import os
import platform
import shutil
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path

from dlrm_scale.errors import ConfigError
from dlrm_scale.planning.measuring.bench_summary import BenchSummary
from dlrm_scale.planning.measuring.plan_bench import BenchRequest
from dlrm_scale.planning.measuring.plan_rounds import RoundsResult
from dlrm_scale.planning.measuring.plan_steps import predicted_plan_file
from dlrm_scale.sharding.plan_file import format_plan, package_versions

__all__ = ["bench_files", "check_folder", "result_lines", "write_folder"]

_PACKAGES = ("torch", "torchrec", "fbgemm-gpu-cpu", "fbgemm-gpu", "numpy")
RESULTS = "results.jsonl"


def check_folder(folder: Path, *, force: bool) -> None:
    """Refuse, before long work, a folder that couldn't be written after it.

    Raises:
        ConfigError: it exists, what it is in doesn't, or no folder can be made there.
    """
    if os.path.lexists(folder):
        if not force:
            raise ConfigError(f"{folder} exists already", remedy="name another folder, or replace it with --force")
        if not (folder / RESULTS).is_file():
            raise ConfigError(
                f"{folder} exists and holds no {RESULTS}: --force replaces only the folder of a benchmark",
                remedy="name another folder",
            )
    if not folder.absolute().parent.is_dir():
        raise ConfigError(f"the folder {folder.absolute().parent} doesn't exist", remedy="make it first")
    probe = _beside(folder, "tmp")
    try:
        probe.mkdir()
        probe.rmdir()
    except OSError as error:
        raise ConfigError(
            f"{folder} can't be written: {error.strerror}", remedy="name a folder where one can be made"
        ) from None


def result_lines(request: BenchRequest, result: RoundsResult, summary: BenchSummary) -> Iterator[dict[str, object]]:
    """What results.jsonl has, a line each: a header, a line a plan, a line a plan and round, the summary."""
    planned = request.planned
    yield {
        "kind": "header",
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        "versions": package_versions(_PACKAGES) | {"python": platform.python_version()},
        "machine": platform.platform(),
        "device": request.device,
        "ranks": planned.ranks,
        "ranks_per_host": planned.ranks_per_host,
        "batch_size_per_rank": planned.batch_size_per_rank,
        "tables": planned.tables.name,
        "tables_fingerprint": planned.tables.fingerprint(),
        "cluster": planned.cluster.name,
        "cluster_fingerprint": planned.cluster_fingerprint(),
        "space": planned.space,
        "dataset": request.workload.dataset,
        "batches": request.workload.batches,
        "seed": request.seed,
        "rounds": request.rounds,
        "clock": request.clock,
        "cores": summary.cores,
        "load_average": summary.loads,
        "busy": summary.busy,
        "stopped": result.stopped,
    }
    for row, values in zip(summary.rows, _plans(summary), strict=True):
        yield {"kind": "plan", **values, "losses": list(result.losses.get(row.name, ()))}
    for turn in result.turns:
        yield {"kind": "round", **asdict(turn)}
    rest = {name: value for name, value in summary.as_dict().items() if name != "plans"}
    yield {"kind": "summary", **rest}


def bench_files(request: BenchRequest, result: RoundsResult, summary: BenchSummary, page: str) -> dict[str, str]:
    """Texts by path in the folder."""
    lines = result_lines(request, result, summary)
    found = {RESULTS: "".join(json.dumps(line) + "\n" for line in lines), "index.html": page}
    measured = {row.name for row in summary.rows if row.time is not None}
    for plan in request.plans:
        if plan.shapes is None or plan.same_as or plan.name not in measured:
            continue
        load = request.predictions[plan.name].ours
        file = predicted_plan_file(request.planned, plan.shapes, load)
        found[f"plans/{plan.name}.json"] = format_plan(file)
    return found


def write_folder(folder: Path, files: Mapping[str, str], *, force: bool) -> None:
    """Write a folder beside its place and move it there when it is complete and durable.

    Raises:
        ConfigError: as `check_folder`, or it can't be written.
    """
    check_folder(folder, force=force)
    temporary, replaced = _beside(folder, "tmp"), _beside(folder, "old")
    try:
        for name, text in files.items():
            path = temporary / name
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("w") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
        if os.path.lexists(folder):
            os.rename(folder, replaced)
        os.rename(temporary, folder)
    except OSError as error:
        if replaced.exists() and not folder.exists():
            os.rename(replaced, folder)
        raise ConfigError(f"{folder} can't be written: {error.strerror}", remedy="check the disk") from error
    finally:
        for path in (temporary, replaced):
            with suppress(OSError):
                shutil.rmtree(path)


def _beside(folder: Path, kind: str) -> Path:
    return folder.with_name(f".{folder.name}-{os.getpid()}.{kind}")


def _plans(summary: BenchSummary) -> Iterable[dict[str, object]]:
    plans = summary.as_dict()["plans"]
    assert isinstance(plans, list)
    return plans
