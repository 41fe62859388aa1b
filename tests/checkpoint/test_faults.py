"""Faults and the tests that inject them; those that have no other place are here.

| fault | test |
|---|---|
| SIGKILL of a rank at a named point, before an operation, at random | test_kills.py |
| SIGKILL of the real trainer | ../train/test_killed_runs.py |
| loss of power: unsynced writes and names dropped, torn, reordered | test_crash_states.py |
| the harness with a sync left out and other broken promises | test_mutants.py |
| full disk at any operation | test_failed_saves.py |
| full disk at any byte of any file | test_a_disk_that_is_full_at_a_byte_of_a_file |
| EIO, quota, too many files, read-only, at any kind of operation | test_an_error_of_an_operation_on_a_rank |
| a start that can't write | test_a_start_that_can_not_be_written |
| EIO of a sync beside the writes, a full disk then | test_local_storage.py |
| short write | test_short_writes_are_continued |
| a sync that isn't one | test_every_promise_of_durability_is_an_fsync |
| slow storage | test_ballot.py |
| hung storage | test_hung_storage.py |
| a rank dies before, during, after the vote | test_kills.py |
| a rank votes no, or not at all; the store breaks; an outcome is missed | test_failed_saves.py |
| ranks disagree on the step | test_failed_saves.py |
| ranks disagree on the plan | test_ranks_that_disagree_on_the_plan |
| two trainers on one root | test_failed_saves.py, test_mutants.py |
| retention beside the next save | test_retention.py |
| a merge beside a trainer that saves, and removal after it | test_crash_states.py, test_merge.py |
| flipped, zeroed, truncated, extended, swapped, deleted, linked files | test_damage.py |
| a stale file | test_a_stale_file_in_place_of_a_newer_one |
| hostile manifest: other folders, huge sizes, cycle, newer major | test_damage.py |
| missing middle delta | test_damage.py |
| failed commit followed by a good one | test_failed_saves.py |
| empty interval, full, one-row and empty shards | test_deltas.py, test_restore.py |
| duplicate names | test_two_tables_of_one_name |
| NaN and infinity | test_finite_values.py |
| huge and tiny rows in codecs | test_quantize.py |
| restore cut and repeated | test_a_restore_that_was_cut_anywhere |
| every rank count and sharding type | test_restore.py |
| clock going back | test_a_clock_that_goes_back |
| SIGTERM while a save is written | ../train/test_killed_runs.py |
| version skew | test_golden.py, test_a_newer_minor_version |
"""

import errno
import hashlib
import json
import os
import re
import stat
from pathlib import Path

import pytest
import torch

from dlrm_scale.checkpoint import find_chain, restore, verify
from dlrm_scale.checkpoint.storage.local_storage import LocalReadableFile, LocalStorage
from dlrm_scale.errors import CheckpointError
from dlrm_scale.layout import ShardLayout
from tests.checkpoint.crash_judge import judge
from tests.checkpoint.crash_life import Life, Meets
from tests.checkpoint.faulty_storage import Trace, TracedStorage
from tests.checkpoint.memory_storage import MemoryStorage
from tests.checkpoint.simulated_run import TABLES, Run, load, make_layout, make_truth, shards_of

HERE = Path(__file__).parent


def test_every_test_of_the_table_is_there() -> None:
    own = Path(__file__).read_text()
    for line in str(__doc__).splitlines()[4:]:
        for name in line.split("|")[2].split(",") if line.startswith("|") else ():
            if name.strip().endswith(".py"):
                assert (HERE / name.strip()).exists(), name
            else:
                assert f"def {name.strip()}" in own, name


@pytest.mark.parametrize("part", ["-r0.", "-r1.", "-dense.", ".tmp"])
def test_a_disk_that_is_full_at_a_byte_of_a_file_fails_the_save_and_loses_nothing(part: str) -> None:
    whole = Life(baseline_ratio=100)
    whole.start()
    assert all([whole.save() for _ in range(2)])
    written = "manifests/00000002" if part == ".tmp" else f"data/00000002-s1a2{part}safetensors"
    (size,) = (len(data) for name, data in whole.storage.files.items() if name.startswith(written))
    for room in (0, 1, 8, 9, size // 2, size - 1):
        life = Life(baseline_ratio=100)
        life.start()
        assert life.save()
        life.trace.room_of, life.trace.room_bytes = part, room
        assert not life.save()
        assert judge(life.storage) == (1, [])
        life.trace.room_bytes = None
        assert life.save()
        assert judge(life.storage) == (3, [])


@pytest.mark.parametrize("code", [errno.EIO, errno.EDQUOT, errno.EMFILE, errno.EROFS, errno.EACCES])
def test_an_error_of_an_operation_on_a_rank_fails_the_save_and_loses_nothing(code: int) -> None:
    life = Life(baseline_ratio=100)
    life.start()
    assert life.save()
    for operation, part in (
        ("create", "-r1."),
        ("write", "-dense."),
        ("sync", "-r0."),
        ("close", "-r1."),
        ("sync_folder", "data"),
        ("create", ".tmp"),
        ("close", ".tmp"),
        ("link", "manifests"),
    ):
        before = life.acknowledged
        assert not life.save(fail=Meets(operation, part), error=code), (operation, part)
        assert judge(life.storage) == (before, []), (operation, part)
        assert life.save()
        assert judge(life.storage) == (life.step, [])


@pytest.mark.parametrize("operation", ["create", "write", "sync", "sync_folder"])
def test_a_start_that_can_not_be_written_is_an_error_on_every_rank_and_hurts_nothing(operation: str) -> None:
    life = Life()
    life.start()
    assert life.save()
    trace = Trace()
    meets = Meets(operation, "starts")

    def act(index: int, now: str, name: str) -> None:
        if meets(now, name):
            raise OSError(errno.EROFS, "Read-only file system")

    trace.act = act
    with pytest.raises(CheckpointError, match="Read-only file system"):
        Run(
            Path("unused"),
            make_layout("row_wise", 2),
            make_truth(TABLES, ["row"]),
            storages=[TracedStorage(life.storage, trace) for _ in range(2)],
        )
    assert judge(life.storage) == (1, [])
    assert life.start()
    assert life.save()
    assert judge(life.storage) == (2, [])


def test_short_writes_are_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write = os.write
    monkeypatch.setattr(os, "write", lambda descriptor, data: write(descriptor, data[:1000]))
    run = Run(tmp_path / "ck", make_layout("row_wise", 2), make_truth(TABLES, ["row"]))
    assert run.save(1).committed
    assert verify(tmp_path / "ck") == []
    assert load(tmp_path / "ck", make_layout("table_wise", 1), run.truth).equals(run.truth)


@pytest.mark.parametrize("call", ["write", "fsync", "close"])
def test_an_error_of_a_file_names_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str) -> None:
    storage = LocalStorage(tmp_path)
    storage.make_folders("data")
    original = getattr(os, call)

    def full(descriptor: int, *arguments: object) -> None:
        monkeypatch.setattr(os, call, original)
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(os, call, full)
    with pytest.raises(OSError, match=re.escape(str(tmp_path / "data/a"))):
        storage.write_durably("data/a", b"bytes")


def test_every_promise_of_durability_is_an_fsync(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[str] = []
    fsync = os.fsync

    def noted(descriptor: int) -> None:
        kind = "folder" if stat.S_ISDIR(os.fstat(descriptor).st_mode) else "file"
        path = os.readlink(f"/proc/self/fd/{descriptor}")
        synced.append(f"{kind} {os.path.relpath(path, tmp_path)}")
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", noted)
    storage = LocalStorage(tmp_path / "run" / "ck")
    storage.make_folders("data")
    assert {"folder .", "folder run", "folder run/ck"} <= set(synced)
    synced.clear()
    with storage.create("data/x") as file:
        file.write(memoryview(b"1"))
        assert synced == []
        file.sync()
        assert synced == ["file run/ck/data/x"]
    storage.write_durably("data/y", b"2")
    assert synced[1:] == ["file run/ck/data/y"]
    storage.sync_folder("data")
    assert synced[2:] == ["folder run/ck/data"]


def test_ranks_that_disagree_on_the_plan_commit_nothing(tmp_path: Path) -> None:
    run = Run(tmp_path / "ck", make_layout("row_wise", 2), make_truth(TABLES, ["row"]))
    run.engines[1]._layout_fingerprint = make_layout("table_wise", 2).fingerprint()
    outcomes = run.save_all(1)
    assert [outcome.committed for outcome in outcomes] == [False, False]
    assert "ranks disagree" in str(outcomes[0].error)
    assert find_chain(tmp_path / "ck") is None


def test_a_stale_file_in_place_of_a_newer_one_is_noticed() -> None:
    life = Life(baseline_ratio=100)
    life.start()
    assert all([life.save() for _ in range(3)])
    names = sorted(name for name in life.storage.files if name.endswith("-r1.safetensors"))
    files = {name: bytes(data) for name, data in life.storage.files.items()}
    stale = MemoryStorage(files | {names[2]: files[names[1]]}, life.storage.folders)
    step, problems = judge(stale)
    assert step == 2
    assert all(names[2] in problem for problem in problems)
    assert problems


def test_two_tables_of_one_name_are_refused(tmp_path: Path) -> None:
    layout = make_layout("table_wise", 1, TABLES[:1])
    twice = ShardLayout(ranks=1, tables=layout.tables * 2)
    run = Run(tmp_path / "ck", twice, make_truth(TABLES[:1], ["row"]))
    outcome = run.save(1)
    assert not outcome.committed
    assert re.search(r"the same name|twice", str(outcome.error))
    assert find_chain(tmp_path / "ck") is None


def test_a_restore_that_was_cut_anywhere_is_exact_when_it_is_repeated(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = Run(tmp_path / "ck", make_layout("row_wise", 2), make_truth(TABLES, ["row"]))
    run.save(1)
    run.change("C1", range(0, 97, 3), 1.0)
    run.save(2)
    chain = find_chain(tmp_path / "ck", verify="full")
    assert chain is not None
    layout = make_layout("table_wise", 1)
    shards = shards_of(layout, run.truth, 0, blank=True)
    read_into = LocalReadableFile.read_into
    reads, cut_at = 0, 0

    def cut(file: LocalReadableFile, buffer: memoryview, offset_bytes: int) -> None:
        nonlocal reads
        reads += 1
        if reads == cut_at:
            raise KeyboardInterrupt
        read_into(file, buffer, offset_bytes)

    monkeypatch.setattr(LocalReadableFile, "read_into", cut)
    cuts = 0
    while True:
        reads, cut_at = 0, cut_at + 1
        try:
            restore(chain, layout=layout, shards=shards, rank=0, ranks=1, optimizer="rowwise_adagrad")
        except KeyboardInterrupt:
            cuts += 1
            continue
        break
    assert cuts > 10
    for shard, right in zip(shards, shards_of(layout, run.truth, 0), strict=True):
        assert torch.equal(shard.weight, right.weight)
        assert torch.equal(shard.state["momentum1"], right.state["momentum1"])


def test_a_clock_that_goes_back_changes_neither_the_newest_nor_what_is_old() -> None:
    life = Life(baseline_ratio=1e-9, keep_baselines=1)
    for start in range(2):
        life.start(1)
        assert life.run is not None
        for save in range(3):
            life.run.engines[0]._writer.now = lambda day=10 * start + save: 1e9 - 86_400.0 * day
            assert life.save()
            assert judge(life.storage) == (life.step, [])
    manifests = [name for name in life.storage.files if name.startswith("manifests/")]
    assert len(manifests) <= 3


def test_a_newer_minor_version_with_unknown_keys_is_read() -> None:
    life = Life()
    life.start()
    assert life.save()
    (name,) = (name for name in life.storage.files if name.startswith("manifests/"))
    inner = json.loads(bytes(life.storage.files[name]))["manifest"] | {"minor": 99, "colour": {"of": "sky"}}
    body = json.dumps(inner, sort_keys=True, separators=(",", ":")).encode()
    text = json.dumps({"manifest": inner, "sha256": hashlib.sha256(body).hexdigest()})
    files = {name: bytes(data) for name, data in life.storage.files.items()} | {name: text.encode()}
    assert judge(MemoryStorage(files, life.storage.folders)) == (1, [])
