"""What ends preprocessing in the middle: a full disk, SIGKILL at any point, and a second process in the folder."""

import contextlib
import json
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dlrm_scale.data.dataset.dataset import MANIFEST_FILE, Dataset
from dlrm_scale.data.preprocess.preprocess import PreprocessOptions, preprocess
from dlrm_scale.errors import DataError, DatasetError
from tests.support.raw_rows import make_rows, write_rows

MIB = 1024 * 1024
ROOT = Path(__file__).resolve().parents[3]

METHODS: dict[str, dict[str, Any]] = {
    "frequency": {"vocabulary": "frequency"},
    "hash": {"vocabulary": "hash", "max_rows_per_table": 1000},
}


def _run(inputs: list[Path], out: Path, **options: Any) -> None:
    preprocess(inputs, out, PreprocessOptions(**options))


def _files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir()) if path.is_file()}


def _inputs(folder: Path, *, files: int, copies: int) -> list[Path]:
    """Write `files` files, each with the same 500 rows `copies` times."""
    return [write_rows(folder / f"day_{i}.tsv", make_rows(500, seed=i) * copies) for i in range(files)]


def _worker(inputs: list[Path], out: Path, options: dict[str, Any], *, at: int, action: str) -> subprocess.Popen[str]:
    request = {"inputs": [str(path) for path in inputs], "out": str(out), "options": options}
    command = [
        sys.executable,
        "-m",
        "tests.support.preprocess_worker",
        json.dumps({**request, "at": at, "action": action}),
    ]
    pipes: Any = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    return subprocess.Popen(command, cwd=ROOT, text=True, **pipes)


def _kill_at(inputs: list[Path], out: Path, options: dict[str, Any], at: int) -> int | None:
    """Run until event `at`; return None if it was killed there, else how many events there were."""
    process = _worker(inputs, out, options, at=at, action="kill")
    printed, errors = process.communicate(timeout=120)
    if process.returncode == -signal.SIGKILL:
        return None
    assert process.returncode == 0, errors
    return int(printed)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 1 MiB in memory, to be resized; skips where mounting isn't permitted."""
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = shutil.which("mount") and _mount("-t", "tmpfs", "-o", "size=1m", "tmpfs", str(folder))
    if not mounted:
        pytest.skip("a file system can't be mounted here")
    try:
        yield folder
    finally:
        subprocess.run(["umount", str(folder)], check=True)


def _mount(*arguments: str) -> bool:
    return subprocess.run(["mount", *arguments], capture_output=True, check=False).returncode == 0


def _resize(disk: Path, size_bytes: int) -> None:
    assert _mount("-o", f"remount,size={size_bytes}", str(disk))


@pytest.mark.parametrize("method", METHODS)
def test_a_disk_that_fills_up_anywhere_leaves_nothing_and_a_rerun_with_space_is_byte_identical(
    tmp_path: Path, small_disk: Path, method: str
) -> None:
    inputs = _inputs(tmp_path, files=2, copies=30)
    _run(inputs, tmp_path / "reference", **METHODS[method])
    reference = _files(tmp_path / "reference")
    whole_bytes = sum(map(len, reference.values()))
    failures = 0
    for percent in (1, 3, 6, 20, 40, 60, 80, 95):
        _resize(small_disk, whole_bytes * percent // 100)
        out = small_disk / str(percent)
        with pytest.raises(DatasetError, match="No space left on device") as caught:
            _run(inputs, out, jobs=2, **METHODS[method])
        failures += 1
        assert "free space" in caught.value.remedy
        # What is finished waits for the rerun; nothing of it has a final name.
        assert not out.exists() or _files(out) == {}
        _resize(small_disk, 4 * whole_bytes)
        _run(inputs, out, **METHODS[method])
        assert _files(out) == reference
        assert [path.name for path in out.iterdir() if path.is_dir()] == []
        shutil.rmtree(out)
    assert failures == 8


def test_a_write_that_fails_is_one_message_and_exit_code_1(tmp_path: Path) -> None:
    inputs = _inputs(tmp_path, files=1, copies=30)
    _run(inputs, tmp_path / "reference")
    command = [sys.executable, "-m", "dlrm_scale", "preprocess", str(inputs[0]), "--out", str(tmp_path / "out")]

    def run(limit_bytes: int) -> subprocess.CompletedProcess[str]:
        def limit() -> None:
            resource.setrlimit(resource.RLIMIT_FSIZE, (limit_bytes, resource.RLIM_INFINITY))

        return subprocess.run(command, capture_output=True, text=True, timeout=120, preexec_fn=limit, check=False)

    for limit_bytes in (100, MIB):
        done = run(limit_bytes)
        assert done.returncode == 1, done.stderr
        assert done.stderr.count("error: ") == 1
        assert "File too large" in done.stderr
        assert "Traceback" not in done.stderr
        assert not (tmp_path / "out").exists() or _files(tmp_path / "out") == {}
    # The same request, so that it goes on where the command ended.
    _run(inputs, tmp_path / "out")
    assert _files(tmp_path / "out") == _files(tmp_path / "reference")


def _kept(out: Path) -> dict[str, tuple[int, int]]:
    """Inode and time of what is finished: each note in the staging folder and the data that it is about."""
    kept = {}
    for note in (out / ".building").glob("*.json"):
        # Data whose note is there may have its final name already.
        for path in (note, note.with_suffix(""), out / note.stem):
            with contextlib.suppress(FileNotFoundError):
                kept[path.name] = (path.stat().st_ino, path.stat().st_mtime_ns)
    return kept


def _check_kills(tmp_path: Path, *, files: int, copies: int, options: dict[str, Any], kills: int, seed: int) -> None:
    inputs = _inputs(tmp_path, files=files, copies=copies)
    _run(inputs, tmp_path / "reference", **options)
    reference = _files(tmp_path / "reference")
    events = _kill_at(inputs, tmp_path / "unbroken", {**options, "jobs": 2}, -1)
    assert events is not None
    assert _files(tmp_path / "unbroken") == reference
    points = random.Random(seed)
    killed = kept_over_a_kill = 0
    while killed < kills:
        out = tmp_path / f"out{killed}"
        kept: dict[str, tuple[int, int]] = {}
        # Killed once or twice, then left to finish.
        for _ in range(points.randint(1, 2)):
            if _kill_at(inputs, out, {**options, "jobs": 2}, points.randint(1, events)) is not None:
                break
            killed += 1
            if (out / MANIFEST_FILE).exists():
                Dataset.open(out).verify()
                break
            still = _kept(out)
            if still:
                # A second run leaves alone what the first had finished.
                assert {name: still.get(name) for name in kept} == kept
                kept_over_a_kill += len(kept)
            kept = still
        _run(inputs, out, **options)
        assert _files(out) == reference
        assert not (out / ".building").exists()
        shutil.rmtree(out)
    assert kept_over_a_kill > 0 or kills < 10


def test_a_run_that_is_killed_goes_on_to_a_byte_identical_dataset(tmp_path: Path) -> None:
    _check_kills(tmp_path, files=3, copies=8, options=METHODS["frequency"], kills=2, seed=0)


def test_what_a_run_leaves_that_is_killed_after_its_manifest_goes_with_the_next_run(tmp_path: Path) -> None:
    inputs = _inputs(tmp_path, files=1, copies=1)
    events = _kill_at(inputs, tmp_path / "unbroken", {}, -1)
    assert events is not None
    # The last event is the removal of the staging folder.
    assert _kill_at(inputs, tmp_path / "out", {}, events) is None
    Dataset.open(tmp_path / "out").verify()
    assert (tmp_path / "out" / ".building").exists()
    _run(inputs, tmp_path / "out")
    assert not (tmp_path / "out" / ".building").exists()


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize(("files", "copies"), [(5, 20), (1, 200)])
def test_a_run_that_is_killed_anywhere_goes_on_to_a_byte_identical_dataset(
    tmp_path: Path, method: str, files: int, copies: int
) -> None:
    _check_kills(tmp_path, files=files, copies=copies, options=METHODS[method], kills=16, seed=copies)


@pytest.mark.parametrize("zeros", [1, 512, 300_000])
@pytest.mark.parametrize("cut", [0, 60], ids=["after a row", "within a row"])
def test_zero_bytes_at_the_end_are_an_error_and_no_bad_row(tmp_path: Path, zeros: int, cut: int) -> None:
    data = b"\n".join(make_rows(50)) + b"\n"
    file = tmp_path / "x.tsv"
    # What a download leaves that was given its full size beforehand.
    file.write_bytes(data[: len(data) - cut] + bytes(zeros))
    for method in METHODS.values():
        with pytest.raises(DataError, match=rf"x\.tsv ends in zero bytes after line {49 if cut else 50}"):
            _run([file], tmp_path / "out", max_bad_rows=10, **method)
        assert not (tmp_path / "out").exists()


def test_two_runs_into_one_folder_are_not_mixed(tmp_path: Path) -> None:
    inputs = _inputs(tmp_path, files=2, copies=2)
    others = [write_rows(tmp_path / "other.tsv", make_rows(50, seed=9))]
    _run(inputs, tmp_path / "reference")
    out = tmp_path / "out"
    with _worker(inputs, out, {}, at=10, action="pause") as first:
        assert first.stdout is not None
        assert first.stdout.readline() == "paused\n"
        for paths in (inputs, others):
            command = [sys.executable, "-m", "dlrm_scale", "preprocess", *map(str, paths), "--out", str(out)]
            second = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
            assert second.returncode == 1
            assert f"another process is writing a dataset into {out}" in second.stderr
        _, errors = first.communicate("go on\n", timeout=120)
        assert first.returncode == 0, errors
    assert _files(out) == _files(tmp_path / "reference")


def test_a_process_that_died_holds_no_lock(tmp_path: Path) -> None:
    inputs = _inputs(tmp_path, files=1, copies=1)
    out = tmp_path / "out"
    process = _worker(inputs, out, {}, at=10, action="pause")
    assert process.stdout is not None
    assert process.stdout.readline() == "paused\n"
    os.kill(process.pid, signal.SIGKILL)
    process.communicate()
    _run(inputs, out)
    Dataset.open(out).verify()
