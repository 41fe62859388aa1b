"""A dry run tells what a run would do, refuses what it would refuse, and leaves no trace."""

import json
import shutil
import subprocess
import sys
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
        (["run.path=/proc/run"], 2, "run.path /proc/run: /proc can't be written"),
        (["checkpoint.path=/proc/ck"], 2, "checkpoint.path: rank 0 can't write to /proc/ck: /proc can't be written"),
        (
            ["checkpoint.merger=true", "checkpoint.policy=one_shot"],
            2,
            "checkpoint.merger = true with checkpoint.policy",
        ),
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


def test_a_place_that_is_not_written_to_is_told(
    dataset: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    found = run_json(capsys, *_words(tmp_path / "run", dataset, "checkpoint.path=memory://bucket/run"))
    assert found["notes"][0].startswith("checkpoint.path = memory://bucket/run: looked at, not written to")


def _small(path: Path, table_rows: list[int], rows: int = 150) -> Path:
    make_dataset(path, rows, table_rows=table_rows)
    return path


ROWS = [3, 4, 10, 2, *[40] * 22]


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with a baseline of step 2 and deltas of steps 4 and 5, with its dataset beside it."""
    base = tmp_path_factory.mktemp("trained")
    settings = ["sharding.kind=row_wise", "train.max_steps=5", "checkpoint.every_steps=2"]
    run_training(1, base / "run", _small(base / "dataset", ROWS), settings)
    return base / "run"


@pytest.mark.parametrize(
    ("rows", "settings", "flags", "code", "says"),
    [
        ([5, *ROWS[1:]], [], [], 4, "table C1 is 3 x 16 in the checkpoint, 5 x 16 in the model"),
        ([5, *ROWS[1:]], [], ["--allow-resized-tables"], 0, "table C1 has grown from 3 to 5 rows"),
        (ROWS, ["sparse_optimizer.kind=sgd"], [], 2, "sparse_optimizer.kind is sgd, there rowwise_adagrad"),
        (ROWS, ["dense_optimizer.kind=sgd"], [], 2, "dense_optimizer.kind is sgd, there adam"),
        (ROWS, ["dense_optimizer.kind=sgd"], ["--tables-only"], 0, "checkpoint of step 5 of"),
    ],
)
def test_what_another_run_would_be_refused_is_refused_as_the_run_would(
    trained: Path,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    rows: list[int],
    settings: list[str],
    flags: list[str],
    code: int,
    says: str,
) -> None:
    dataset = _small(tmp_path / "dataset", rows) if rows != ROWS else trained.parent / "dataset"
    words = [*_words(tmp_path / "run", dataset, "train.max_steps=1", *settings), "--init-from", str(trained), *flags]
    assert run_command(*words) == code
    told = capfd.readouterr()
    assert says in told.out + told.err
    assert not (tmp_path / "run").exists()
    words.remove("--dry-run")
    assert run_command(*words) == code
    if code:
        assert says in capfd.readouterr().err


def test_state_of_other_column_splits_is_refused_as_by_the_run(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    split = ["sharding.kind=column_wise", "sharding.allow_split_row_state=true", "train.max_steps=1"]
    run_training(1, run, trained.parent / "dataset", split)
    words = ["train", "--resume", "auto", "--nproc", "1", "--set", f"run.path={run}", "--set", "sharding.kind=row_wise"]
    words += ["--set", "sharding.allow_split_row_state=false", "--dry-run"]
    for _ in range(2):
        assert run_command(*words) == 4
        assert "row-wise optimizer state can't be carried over" in capsys.readouterr().err
        words = [word for word in words if word != "--dry-run"]


@pytest.mark.parametrize(("damage", "says"), [("short", "has 100 bytes"), ("missing", "is missing")])
def test_a_resume_names_the_damage_and_the_steps_that_it_would_lose(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], damage: str, says: str
) -> None:
    run = tmp_path / "run"
    shutil.copytree(trained, run)
    [file] = (run / "checkpoints" / "data").glob("00000003-*-r0.safetensors")
    file.write_bytes(b"x" * 100) if damage == "short" else file.unlink()
    found = run_json(capsys, "train", "--resume", "auto", "--set", f"run.path={run}", "--dry-run")
    told = "\n".join(found["notes"])
    assert f"skipped a newer checkpoint, manifests/00000003-s1.json (step 5): data/{file.name}" in told
    assert says in told
    assert "1 steps are lost: step 4 is the newest that can be restored" in told
    assert found["start_step"] == 4


@pytest.mark.parametrize("teller", ["log.jsonl", "an old log.jsonl", "best.json"])
def test_a_missing_newest_manifest_is_named_with_the_steps_that_it_costs(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], teller: str
) -> None:
    run = tmp_path / "run"
    shutil.copytree(trained, run)
    (run / "checkpoints" / "manifests" / "00000003-s1.json").unlink()
    if teller == "best.json":
        (run / "log.jsonl").unlink()
        best = {"metric": "auc", "value": 0.5, "rows": 9, "step": 5, "manifest": "manifests/00000003-s1.json"}
        (run / "best.json").write_text(json.dumps(best))
    elif teller == "an old log.jsonl":
        logged = map(json.loads, (run / "log.jsonl").read_text().splitlines())
        records = [{key: value for key, value in record.items() if key != "manifest"} for record in logged]
        (run / "log.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
    found = run_json(capsys, "train", "--resume", "auto", "--set", f"run.path={run}", "--dry-run")
    told = "\n".join(found["notes"])
    name = "a checkpoint" if teller.startswith("an old") else "manifests/00000003-s1.json"
    said = f"{name} (step 5): it is missing, and {teller.removeprefix('an old ')} tells that it was committed"
    assert f"skipped a newer checkpoint, {said}" in told
    assert "1 steps are lost: step 4 is the newest that can be restored" in told
    assert found["start_step"] == 4
    on_purpose = run_json(capsys, "train", "--resume", "4", "--set", f"run.path={run}", "--dry-run")
    assert not [note for note in on_purpose["notes"] if "lost" in note or "missing" in note]


def test_an_unreadable_newest_manifest_costs_steps_that_the_log_tells(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    shutil.copytree(trained, run)
    (run / "checkpoints" / "manifests" / "00000003-s1.json").write_text("garbage")
    found = run_json(capsys, "train", "--resume", "auto", "--set", f"run.path={run}", "--dry-run")
    told = "\n".join(found["notes"])
    assert "skipped a newer checkpoint, manifests/00000003-s1.json (step 5): manifests/00000003-s1.json" in told
    assert told.count("skipped") == 1
    assert "1 steps are lost: step 4 is the newest that can be restored" in told


def test_the_data_of_a_missing_manifest_outlives_the_next_start_and_not_its_first_save(
    trained: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    shutil.copytree(trained, run)
    checkpoints = run / "checkpoints"
    (checkpoints / "manifests" / "00000003-s1.json").unlink()
    data = {path.name for path in (checkpoints / "data").glob("00000003-s1*")}
    dataset = trained.parent / "dataset"
    run_training(1, run, dataset, ["train.max_steps=4"], resume=True)
    assert data
    assert {path.name for path in (checkpoints / "data").glob("00000003-s1*")} == data
    run_training(1, run, dataset, ["train.max_steps=6"], resume=True)
    run_training(1, run, dataset, ["train.max_steps=7"], resume=True)
    assert not list((checkpoints / "data").glob("00000003-s1*"))


def test_a_second_trainer_is_refused_while_the_first_is_alive_on_this_host(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dlrm_scale.train.running_trainer._GRACE_SECONDS", 0.2)
    run = tmp_path / "run"
    shutil.copytree(trained, run)
    start = run / "checkpoints" / "starts" / "1.json"
    words = ["train", "--resume", "auto", "--nproc", "1", "--set", f"run.path={run}"]
    hold = (
        "import fcntl, sys; log = open(sys.argv[1], 'a'); fcntl.flock(log, fcntl.LOCK_EX); print(flush=True); input()"
    )
    hold += "; log.close(); print(flush=True); input()"
    command = [sys.executable, "-c", hold, str(run / "log.jsonl")]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as first:
        assert first.stdin is not None
        assert first.stdout is not None
        first.stdout.readline()
        alive = {"pid": first.pid, "start_ticks": int(Path(f"/proc/{first.pid}/stat").read_text().split()[21])}
        record = json.loads(start.read_text())
        start.write_text(json.dumps(record | alive))
        config = (run / "config.toml").read_bytes()
        for more in ([], ["--dry-run"]):
            assert run_command(*words, *more) == 2
            told = capsys.readouterr().err
            assert f"is being trained already: process {first.pid} on this host, start 1, since 20" in told
            assert f"stop it with `kill {first.pid}`" in told
        assert [path.name for path in start.parent.iterdir()] == ["1.json"]
        assert (run / "config.toml").read_bytes() == config
        for other in ({"start_ticks": alive["start_ticks"] - 1}, {"boot_id": "another"}, {"host": "another"}):
            start.write_text(json.dumps(record | alive | other))
            assert run_command(*words, "--dry-run") == 0
        # its trainer has ended, and the process lives on
        start.write_text(json.dumps(record | alive))
        first.stdin.write("\n")
        first.stdin.flush()
        first.stdout.readline()
        assert run_command(*words, "--dry-run") == 0
        first.kill()


def test_a_start_record_that_can_not_be_read_is_told(
    trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = tmp_path / "run"
    shutil.copytree(trained, run)
    (run / "checkpoints" / "starts" / "1.json").write_text("garbage")
    found = run_json(capsys, "train", "--resume", "auto", "--set", f"run.path={run}", "--dry-run")
    assert "starts/1.json can't be read: its number still counts" in "\n".join(found["notes"])


def test_going_back_on_purpose_is_told(trained: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = run_json(capsys, "train", "--resume", "2", "--set", f"run.path={trained}", "--dry-run")
    assert "going back to step 2: what was saved after it, up to manifests/00000003-s1.json, is left" in str(
        found["notes"]
    )
