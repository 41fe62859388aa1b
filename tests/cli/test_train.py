"""`dlrm-scale train` as a user runs it: processes, signals, exit codes, messages."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from dlrm_scale.checkpoint import find_chain
from dlrm_scale.cli import main
from tests.support.datasets import make_dataset
from tests.support.training import SMALL_MODEL, log_records, losses, read_tables, same_tables

_LIMIT_SECONDS = 120.0
_ROWS = 20_000


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("data") / "dataset"
    make_dataset(path, (_ROWS, 100), split={"train": [(0, _ROWS)], "validation": [(_ROWS, _ROWS + 100)]})
    return path


def _arguments(run: Path, dataset: Path, *overrides: str) -> list[str]:
    settings = [f"run.path={run}", f"data.path={dataset}", *SMALL_MODEL, "sharding.kind=row_wise", *overrides]
    return ["train", "sample", "--nproc", "2", *(part for setting in settings for part in ("--set", setting))]


def _start(*arguments: str) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, "-m", "dlrm_scale", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def _finish(process: "subprocess.Popen[str]") -> tuple[int, str, str]:
    try:
        out, err = process.communicate(timeout=_LIMIT_SECONDS)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        raise
    return process.returncode, out, err


def _wait_until(condition: Callable[[], bool], process: "subprocess.Popen[str]") -> None:
    end = time.monotonic() + _LIMIT_SECONDS
    while not condition():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < end
        time.sleep(0.02)


def _steps(run: Path, event: str) -> int:
    """Newest logged step; the last line may be half written."""
    if not (run / "log.jsonl").exists():
        return 0
    lines = (run / "log.jsonl").read_text().split("\n")[:-1]
    return max((r["step"] for r in map(json.loads, lines) if r["event"] == event), default=0)


@pytest.fixture(scope="module")
def straight(dataset: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of 120 steps that nothing interrupts."""
    run = tmp_path_factory.mktemp("runs") / "straight"
    code, out, err = _finish(_start(*_arguments(run, dataset, "train.max_steps=120"), "--json"))
    assert code == 0, err
    assert json.loads(out)["step"] == 120
    return run


@pytest.mark.parametrize("pipeline", ["plain", "sparse_dist"])
def test_a_run_killed_in_the_middle_resumes_bit_for_bit(
    pipeline: str, straight: Path, dataset: Path, tmp_path: Path
) -> None:
    killed = tmp_path / "killed"
    process = _start(*_arguments(killed, dataset, "train.max_steps=120", f"train.pipeline={pipeline}"))
    _wait_until(lambda: _steps(killed, "checkpoint") >= 12, process)
    os.killpg(process.pid, signal.SIGKILL)
    assert _finish(process)[0] == -signal.SIGKILL
    code, out, err = _finish(
        _start("train", "--resume", "auto", "--set", f"run.path={killed}", "--nproc", "2", "--json")
    )
    assert code == 0, err
    result = json.loads(out)
    assert 12 <= result["start_step"] < 120
    assert result["step"] == 120
    assert losses(killed) == losses(straight)
    assert same_tables(read_tables(killed), read_tables(straight))


def test_ranks_of_torchrun_join_and_only_one_reports(dataset: Path, tmp_path: Path) -> None:
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", "-m", "dlrm_scale"]
    arguments = _arguments(tmp_path / "run", dataset, "train.max_steps=6")
    without_nproc = [argument for argument in arguments if argument not in ("--nproc", "2")]
    ended = subprocess.run(
        [*command, *without_nproc, "--json"], capture_output=True, text=True, timeout=_LIMIT_SECONDS, check=False
    )
    assert ended.returncode == 0, ended.stderr
    result = json.loads(ended.stdout)
    assert (result["ranks"], result["step"], result["state"]) == (2, 6, "finished")


def test_a_signal_before_the_ranks_have_started_is_not_lost(dataset: Path, tmp_path: Path) -> None:
    process = _start(*_arguments(tmp_path / "run", dataset, "run.shutdown_seconds=60"))
    _wait_until(lambda: bool(_ranks_of(process.pid)), process)
    os.killpg(process.pid, signal.SIGINT)
    code, out, err = _finish(process)
    assert code == 0, err
    assert "stopped: continue with --resume auto" in out
    assert "Traceback" not in err


def test_ranks_end_when_their_launcher_is_killed(dataset: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    process = _start(*_arguments(run, dataset))
    _wait_until(lambda: _steps(run, "train") >= 5, process)
    ranks = _ranks_of(process.pid)
    assert len(ranks) == 2
    process.kill()
    end = time.monotonic() + 30
    while any(_runs(pid) for pid in ranks) and time.monotonic() < end:
        time.sleep(0.05)
    assert not any(_runs(pid) for pid in ranks)
    _finish(process)


def test_a_signal_finishes_the_step_commits_and_exits_with_zero(dataset: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    process = _start(*_arguments(run, dataset, "checkpoint.every_steps=0"))
    _wait_until(lambda: _steps(run, "train") >= 5, process)
    # a terminal's Ctrl-C reaches every process, and an impatient user presses it twice
    os.killpg(process.pid, signal.SIGINT)
    os.killpg(process.pid, signal.SIGINT)
    code, out, err = _finish(process)
    assert code == 0, err
    assert "stopped: continue with --resume auto" in out
    assert "Traceback" not in err
    saved = log_records(run, "checkpoint")
    assert [r["committed"] for r in saved] == [True]
    assert saved[0]["step"] == _steps(run, "train") < _ROWS // 32


def test_the_message_names_the_rank_that_was_killed(dataset: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    process = _start(*_arguments(run, dataset))
    _wait_until(lambda: _steps(run, "train") >= 5, process)
    os.kill(_ranks_of(process.pid)[-1], signal.SIGKILL)
    code, _, err = _finish(process)
    assert code == 1
    assert re.search(r"error: rank [01]: ended without a word: killed from outside", err)
    assert "Traceback" not in err
    assert "closed by peer" not in err


def _runs(pid: int) -> bool:
    """Whether a process is there and not only waits to be reaped."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


def _ranks_of(launcher: int) -> list[int]:
    children = Path(f"/proc/{launcher}/task/{launcher}/children").read_text().split()
    return [int(pid) for pid in children if b"spawn_main" in Path(f"/proc/{pid}/cmdline").read_bytes()]


def test_a_loss_that_is_not_finite_stops_the_run_and_keeps_the_checkpoints(dataset: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    wild = ["sparse_optimizer.learning_rate=1e30", "dense_optimizer.kind=sgd", "schedule.warmup_steps=1000000000"]
    code, _, err = _finish(_start(*_arguments(run, dataset, *wild, "dense_optimizer.learning_rate=1e38")))
    assert code == 1
    found = re.search(r"error: rank \d: step (\d+): the loss on rank \d is not finite", err)
    assert found, err
    assert "Traceback" not in err
    # nothing after the last finite loss was logged or committed
    steps = [int(str(r["step"])) for r in log_records(run, "train")]
    assert steps == list(range(1, int(found[1])))
    chain = find_chain(run / "checkpoints", verify="full")
    assert (chain.step if chain else 0) < int(found[1])


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["sample"], "run.path is not set"),
        (["sampel", "--set", "run.path={}"], "did you mean 'sample'"),
        (["sample", "--set", "run.path={}"], "data.path is not set"),
        (["--resume", "auto", "--set", "run.path={}"], "no run in"),
        (["sample", "--resume", "latest", "--set", "run.path={}"], "allowed: auto, or the step"),
        (["sample", "--resume", "soon", "--set", "run.path={}"], "remedy: --resume auto goes on from the newest"),
        (["sample", "--set", "run.path={}", "--set", "data.path=d", "--set", "model.dim=6"], "model.dim"),
        (["sample", "--set", "run.path={}", "--set", "data.path=d", "--set", "data.streams=3"], "data.streams"),
        (["sample", "--nproc", "0"], "greater than or equal to 1"),
    ],
)
def test_a_users_mistake_gets_a_message_and_exit_code_two(
    arguments: list[str], says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    with pytest.raises(SystemExit) as exit_:
        main(["train", *(a.format(run) for a in arguments)])
    assert exit_.value.code == 2
    assert says in capsys.readouterr().err
    assert not run.exists()
