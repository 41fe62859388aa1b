"""A dry run tells what a run would do, refuses what it would refuse, and leaves no trace."""

import json
from pathlib import Path

import pytest

from dlrm_scale.train.dry_run import DryRun, describe_dry_run, dry_run_rank
from dlrm_scale.train.run_folder import resolve_run
from dlrm_scale.train.stop import StopRequest
from dlrm_scale.units import MIB
from tests.support.command_line import run_command, run_json
from tests.support.datasets import make_dataset
from tests.support.rank_runner import run_ranks
from tests.support.training import SMALL_MODEL, log_records, run_training

_TOO_LARGE = (
    "sharding.kind=row_wise",
    "sharding.device_memory=900000GiB",
    "model.dim=65536",
    "model.dense_layers=[65536]",
)


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("data") / "dataset"
    split = {"train": [(0, 1800)], "validation": [(1800, 2000)]}
    make_dataset(path, 2000, table_rows=[1_500_000, *[50] * 25], split=split)
    return path


def _words(run: Path, dataset: Path, *settings: str) -> list[str]:
    values = [f"run.path={run}", f"data.path={dataset}", *SMALL_MODEL, *settings]
    return ["train", "sample", "--nproc", "1", *(word for value in values for word in ("--set", value)), "--dry-run"]


def test_it_tells_rows_steps_plan_and_memory(dataset: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = tmp_path / "runs" / "a"
    words = _words(run, dataset, "train.epochs=3", "train.max_steps=100", "data.batch_size=64", "data.drop_last=true")
    found = run_json(capsys, *words)
    assert (found["training_rows"], found["validation_rows"], found["dropped_rows"]) == (1800, 200, 8)
    assert (found["steps_per_epoch"], found["start_step"], found["last_step"]) == (28, 0, 84)
    assert [row["rows"] for row in found["plan"]] == [1_500_000, *[50] * 25]
    assert found["refusal"] is None
    [memory] = found["memory"]
    assert memory["items"]["tables"] >= 1_500_000 * 16 * 4
    assert sum(memory["items"].values()) == memory["needed_bytes"] < memory["free_bytes"]
    assert run_command(*words) == 0
    text = capsys.readouterr().out
    assert "steps to do      1 to 84" in text
    assert "C26" in text
    assert not (tmp_path / "runs").exists()


def test_readers_are_in_the_memory(dataset: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Two windows each, of up to 1,800 rows and 160 bytes a row, and what a thread holds while it reads."""
    windows = [
        run_json(capsys, *_words(tmp_path / "run", dataset, "data.streams=1", f"data.readers={readers}"))["memory"][0][
            "items"
        ]["windows of the loader"]
        for readers in (1, 4)
    ]
    assert windows[1] - windows[0] == 4 * (2 * 1800 * 160 + 4 * MIB)


def test_what_does_not_fit_is_told_with_its_plan_and_exits_as_the_run_would(
    dataset: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = _words(tmp_path / "run", dataset, *_TOO_LARGE)
    codes, messages = [], []
    for dry in (True, False):
        codes.append(run_command(*(words if dry else words[:-1])))
        captured = capsys.readouterr()
        messages.append(captured.err.split(" GiB left")[0].split("has ")[0])
        assert ("row_wise" in captured.out) == dry
    assert codes == [3, 3]
    assert messages == ["error: not enough memory: the host of rank 0 "] * 2
    assert not (tmp_path / "run").exists()
    assert run_command(*words, "--json") == 3
    assert "not enough memory" in json.loads(capsys.readouterr().out)["refusal"]
    # as the run would: with a warning
    assert run_command(*words, "--set", "train.memory_check=warn") == 0
    assert "warning: train.memory_check = warn: not enough memory" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("settings", "code", "message"),
    [
        (["data.batch_size=0"], 2, "data.batch_size"),
        (["data.path=/nowhere"], 1, "/nowhere"),
        (["sharding.kind=grid_shard", "model.pooling=mean"], 3, "grid"),
        (["run.path=/proc/version/run"], 2, "/proc/version is a file"),
    ],
)
def test_mistakes_are_refused(
    dataset: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], settings: list[str], code: int, message: str
) -> None:
    assert run_command(*_words(tmp_path / "run", dataset, *settings)) == code
    assert message in capsys.readouterr().err


def _files(run: Path) -> dict[Path, tuple[int, bytes]]:
    return {path: (path.stat().st_mtime_ns, path.read_bytes()) for path in run.rglob("*") if path.is_file()}


def _rehearse(run: str, overrides: list[str], resume: bool) -> DryRun:
    request = resolve_run(None if resume else "sample", [f"run.path={run}", *overrides], resume=resume)
    return dry_run_rank(request, StopRequest())


def test_a_run_that_goes_on_is_rehearsed_from_its_checkpoint_and_left_as_it_is(dataset: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    run_training(2, run, dataset, ["train.max_steps=4"])
    files = _files(run)
    found = run_ranks(2, _rehearse, str(run), ["train.max_steps=7"], True)
    assert [(f.ranks, f.start_step, f.last_step, f.start) for f in found] == [(2, 4, 7, "checkpoint of step 4")] * 2
    assert [need.estimate.rank for need in found[0].needs] == [0, 1]
    assert found[0].notes[0] == "changed by --set: train.max_steps from 4 to 7"
    assert "steps to do      5 to 7" in describe_dry_run(found[0])
    assert _files(run) == files
    done = run_ranks(2, _rehearse, str(run), [], True)[0]
    assert "none: 4 are done already" in describe_dry_run(done)
    # and it does go on there
    run_training(2, run, dataset, ["train.max_steps=7"], resume=True)
    assert [record["step"] for record in log_records(run, "train")] == list(range(1, 8))
