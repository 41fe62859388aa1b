"""A lease whose process has ended on this host is over at once, and only where that is certain."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from dlrm_scale.checkpoint.chain import holders
from dlrm_scale.checkpoint.chain.chain import find_chain
from dlrm_scale.checkpoint.chain.holders import has_ended, process_record, writes_end_with_process
from dlrm_scale.checkpoint.chain.leases import Lease, expired_leases, hold_chain, read_leases
from dlrm_scale.checkpoint.storage.local_storage import LocalStorage
from dlrm_scale.checkpoint.upkeep.collect_garbage import collect_garbage
from tests.checkpoint.merging import go_on, merge, start
from tests.checkpoint.simulated_run import make_layout


@pytest.fixture(scope="module")
def dead() -> dict[str, object]:
    """The record of a process that has ended; its parent has asked for its exit code."""
    program = (
        "import json\n"
        "from dlrm_scale.checkpoint.chain.holders import process_record\n"
        "print(json.dumps(process_record()))\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=True)
    record: dict[str, object] = json.loads(done.stdout)
    return record


def _leave(root: Path, kind: Any, record: dict[str, object], *, token: str = "5", **more: object) -> str:
    """A lease as a process left it that was killed just now."""
    lease = Lease(LocalStorage(root), kind, token=token)
    lease.take(["manifests/00000001-s1.json"])
    (path,) = root.glob(f"leases/{kind}-{token}-*")
    found = json.loads(path.read_bytes())
    kept = {key: value for key, value in found.items() if key in ("holds", "created_unix_seconds", "for_others")}
    path.write_text(json.dumps(kept | record | more))
    lease.leave()
    return f"leases/{path.name}"


def test_a_process_that_runs_has_not_ended_and_one_that_is_gone_has(dead: dict[str, object]) -> None:
    assert not has_ended(process_record())
    assert not has_ended(process_record() | {"pid": os.getppid(), "start_ticks": holders._start_ticks(os.getppid())})
    assert has_ended(dead)


def test_a_pid_that_was_given_out_again_is_not_taken_for_the_process_before(dead: dict[str, object]) -> None:
    assert has_ended(dead | {"pid": os.getpid()})


def test_a_zombie_has_ended() -> None:
    with subprocess.Popen(["sleep", "60"]) as process:
        record = process_record() | {"pid": process.pid, "start_ticks": holders._start_ticks(process.pid)}
        assert not has_ended(record)
        process.kill()
        until = time.monotonic() + 20
        while holders._stat(process.pid)[0] != "Z":
            assert time.monotonic() < until
        assert has_ended(record)


@pytest.mark.parametrize(
    "other",
    [
        {"host": "another"},
        {"boot_id": "another"},
        {"namespaces": ["pid:[1]"]},
        {"start_ticks": None},
        {"boot_id": None},
        {"pid": "7"},
    ],
)
def test_of_a_process_that_cannot_be_looked_for_nothing_is_said(
    dead: dict[str, object], other: dict[str, object]
) -> None:
    assert not has_ended(dead | other)


def test_a_process_that_proc_hides_is_there_all_the_same(
    dead: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    def hidden(pid: int) -> list[str]:
        raise FileNotFoundError(pid)

    monkeypatch.setattr(holders, "_stat", hidden)
    monkeypatch.setattr(os, "kill", lambda pid, number: None)
    assert not has_ended(dead)


def test_what_a_server_was_sent_may_still_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mounts = tmp_path / "mountinfo"
    monkeypatch.setattr(holders, "_MOUNTS", mounts)
    number = f"{os.major(tmp_path.stat().st_dev)}:{os.minor(tmp_path.stat().st_dev)}"
    for kind, ends in (("ext4", True), ("xfs", True), ("nfs4", False), ("fuse.s3fs", False)):
        mounts.write_text(f"1 0 0:1 / /proc rw - proc proc rw\n36 35 {number} / /mnt rw shared:1 - {kind} x rw\n")
        assert writes_end_with_process(LocalStorage(tmp_path)) is ends
    mounts.write_text("1 0 0:1 / /proc rw - proc proc rw\n")
    assert not writes_end_with_process(LocalStorage(tmp_path))


def test_a_merge_and_gc_go_on_at_once_after_one_that_was_killed_on_this_host(
    tmp_path: Path, dead: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dlrm_scale.checkpoint.chain.leases.writes_end_with_process", lambda storage: True)
    root = tmp_path / "ck"
    go_on(start(root, make_layout("row_wise", 1)), range(3))
    left = [_leave(root, kind, dead) for kind in ("merge", "restore", "removal")]
    half = root / "data" / "00000003-s1m5-r0.safetensors"
    half.write_bytes(b"half")
    assert read_leases(LocalStorage(root), now=time.time()) == []
    assert sorted(expired_leases(LocalStorage(root), now=time.time())) == sorted(left)
    (merged,) = merge(root, "baseline")
    assert merged.manifest.step == 2
    assert not half.exists()
    garbage = collect_garbage(LocalStorage(root), keep_baselines=2, dry_run=False)
    assert garbage.users == ()
    assert set(garbage.removed) == set(left)


def test_where_writes_may_appear_later_a_killed_merge_keeps_its_files_and_nobody_waits(
    tmp_path: Path, dead: dict[str, object], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("dlrm_scale.checkpoint.chain.leases.writes_end_with_process", lambda storage: False)
    root = tmp_path / "ck"
    go_on(start(root, make_layout("row_wise", 1)), range(3))
    for kind in ("merge", "restore", "removal"):
        _leave(root, kind, dead)
    half = root / "data" / "00000003-s1m5-r0.safetensors"
    half.write_bytes(b"half")
    assert {lease.kind for lease in read_leases(LocalStorage(root), now=time.time())} == {"merge", "removal"}
    (root / "leases").joinpath(*[p.name for p in root.glob("leases/removal-*")]).unlink()
    assert merge(root, "baseline")[0].manifest.step == 2
    collect_garbage(LocalStorage(root), keep_baselines=2, dry_run=False)
    assert half.exists()
    assert len(list(root.glob("leases/merge-*"))) == 1


def test_a_lease_for_other_processes_outlives_the_one_that_took_it(tmp_path: Path, dead: dict[str, object]) -> None:
    root = tmp_path / "ck"
    go_on(start(root, make_layout("row_wise", 1)), range(1))
    with hold_chain(LocalStorage(root), lambda: find_chain(root), for_others=True):
        (path,) = root.glob("leases/restore-*")
        assert json.loads(path.read_bytes())["for_others"] is True
    _leave(root, "restore", dead, for_others=True)
    assert [lease.kind for lease in read_leases(LocalStorage(root), now=time.time())] == ["restore"]


def test_a_lease_from_before_that_names_no_start_lasts_as_long_as_it_says(
    tmp_path: Path, dead: dict[str, object]
) -> None:
    record = {key: value for key, value in dead.items() if key in ("host", "pid")}
    _leave(tmp_path, "merge", record)
    assert [lease.kind for lease in read_leases(LocalStorage(tmp_path), now=time.time())] == ["merge"]
