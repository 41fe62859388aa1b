"""`dlrm-scale demo`: the main job from raw rows to a resumed run, on generated data."""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Annotated, Any

import typer

from dlrm_scale.errors import TrainingError

__all__ = ["demo"]

_KILL_SHARE = 0.5
"""The second run is killed once a delta past this share of its steps is committed."""


def demo(
    out: Annotated[Path, typer.Option(help="Folder for data and runs.")] = Path("data/demo"),
    rows: Annotated[int, typer.Option(help="Rows to generate.", min=20_000)] = 1_000_000,
    days: Annotated[int, typer.Option(help="Day files; the last is for validation.", min=2)] = 4,
    seed: Annotated[int, typer.Option(help="Seed of the generated rows.")] = 1,
    nproc: Annotated[int | None, typer.Option(help="Ranks. Default: up to two GPUs, or two on CPU.", min=1)] = None,
) -> None:
    """Generate, preprocess, train with checkpoints, evaluate, kill a second run and resume it.

    Data that is already there is used again; the runs of an earlier demo are replaced.
    """
    started = time.perf_counter()
    raw, dataset, runs = out / f"raw-{rows}-{days}-{seed}", out / f"dataset-{rows}-{days}-{seed}", out / "runs"
    _command("generate", "synth", str(raw), "--rows", str(rows), "--days", str(days), "--seed", str(seed), "--force")
    days_files = [str(raw / f"day_{day}.tsv") for day in range(days)]
    _command("preprocess", "preprocess", *days_files, "--out", str(dataset))
    shutil.rmtree(runs, ignore_errors=True)

    ranks = ["--nproc", str(nproc or _default_ranks())]
    steps = _steps(dataset)
    _command("train", *_train(dataset, runs / "straight", steps), *ranks)
    _announce("train again and kill every process in the middle (SIGKILL)")
    killed_at = _train_and_kill([*_train(dataset, runs / "killed", steps), *ranks], runs / "killed", steps)
    _command("resume", "train", "--resume", "auto", "--set", f"run.path={runs / 'killed'}", *ranks)
    _command("evaluate", "evaluate", str(runs / "straight"), "--data", str(dataset), *ranks)
    _command("verify", "checkpoint", "verify", str(runs / "killed"), "--level", "full")
    typer.echo("\n" + _table(raw, runs, killed_at, time.perf_counter() - started))
    if not _equal_results(runs):
        raise TrainingError("the resumed run differs from the one that was not killed")


def _steps(dataset: Path) -> int:
    from dlrm_scale.data.dataset.dataset import Dataset
    from dlrm_scale.recipes import load_config

    return -(-Dataset.open(dataset).split_rows("train") // load_config("sample").data.batch_size)


def _train(dataset: Path, run: Path, steps: int) -> list[str]:
    # one baseline, then deltas alone, so that a short run too is killed between a delta and its end
    settings = [
        f"data.path={dataset}",
        f"run.path={run}",
        f"checkpoint.every_steps={max(1, steps // 7)}",
        "checkpoint.baseline_ratio=100.0",
    ]
    return ["train", "sample", *(part for setting in settings for part in ("--set", setting))]


def _default_ranks() -> int:
    import torch

    return min(2, torch.cuda.device_count()) or 2


def _announce(text: str) -> None:
    typer.secho(f"\n== {text}", bold=True)


def _command(what: str, *arguments: str) -> None:
    _announce(f"{what}: dlrm-scale {' '.join(arguments)}")
    ended = subprocess.run([sys.executable, "-m", "dlrm_scale", *arguments], check=False)
    if ended.returncode:
        raise TrainingError(f"dlrm-scale {arguments[0]} ended with exit code {ended.returncode}")


def _train_and_kill(arguments: list[str], run: Path, steps: int) -> int:
    """Start a run and SIGKILL its launcher and ranks after a delta past the middle; return its step."""
    process = subprocess.Popen(
        [sys.executable, "-m", "dlrm_scale", *arguments], start_new_session=True, stderr=subprocess.DEVNULL
    )
    try:
        while process.poll() is None:
            committed = _committed_delta(run)
            if committed >= steps * _KILL_SHARE:
                typer.echo(f"killed after the delta of step {committed} of {steps}")
                return committed
            time.sleep(0.05)
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    raise TrainingError("the run that was to be killed ended by itself")


def _committed_delta(run: Path) -> int:
    """Step of the newest committed checkpoint if it is a delta, else 0."""
    log = run / "log.jsonl"
    if not log.is_file():
        return 0
    # the last line may be half written
    records = [json.loads(line) for line in log.read_text().split("\n")[:-1]]
    saved = [record for record in records if record["event"] == "checkpoint" and record["committed"]]
    return int(saved[-1]["step"]) if saved and saved[-1]["kind"] == "delta" else 0


def _records(run: Path, event: str) -> list[dict[str, Any]]:
    lines = (run / "log.jsonl").read_text().splitlines()
    return [record for record in map(json.loads, lines) if record["event"] == event]


def _result(run: Path) -> dict[str, Any]:
    result: dict[str, Any] = json.loads((run / "result.json").read_text())
    return result


def _equal_results(runs: Path) -> bool:
    """Bit for bit: every loss after the resume and the validation of both runs."""
    straight, killed = _result(runs / "straight"), _result(runs / "killed")
    losses = {r["step"]: r["loss"] for r in _records(runs / "straight", "train")}
    resumed = [r for r in _records(runs / "killed", "train") if r["step"] > killed["start_step"]]
    # the first window after a resume is shorter than the uninterrupted run's
    return straight["validation"] == killed["validation"] and all(r["loss"] == losses[r["step"]] for r in resumed[1:])


def _table(raw: Path, runs: Path, killed_at: int, seconds: float) -> str:
    from dlrm_scale.train.summary import text_table
    from dlrm_scale.units import format_bytes, format_count, format_seconds

    known = json.loads((raw / "synthetic.json").read_text())
    result = _result(runs / "straight")
    attainable, reached = known["validation"]["attainable"], result["validation"]
    resumed = _result(runs / "killed")
    rows = [
        ("rows trained / validated", f"{format_count(result['rows'])} / {format_count(reached['rows'])}"),
        ("ranks", str(result["ranks"])),
        ("samples/s", format_count(result["samples_per_second"])),
        ("waiting for data", f"{result['data_wait_share']:.2%} of the time"),
        ("stalled by checkpoints", f"{result['checkpoints']['stall_share']:.2%} of the training time"),
        ("AUC on the last day", f"{reached['auc']:.4f} (attainable {attainable['auc']:.4f})"),
        ("logloss on the last day", f"{reached['logloss']:.4f} (attainable {attainable['logloss']:.4f})"),
        ("bytes of a full checkpoint", format_bytes(result["baseline_bytes"])),
        ("bytes of a delta (mean)", format_bytes(result["delta_bytes"])),
        ("killed after the delta of step", f"{killed_at}; resumed at step {resumed['start_step']}"),
        ("resumed run", "equals the uninterrupted one bit for bit" if _equal_results(runs) else "DIFFERS"),
        ("time of this demo, without the install", format_seconds(seconds)),
    ]
    return text_table(rows)
