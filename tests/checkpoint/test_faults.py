"""Faults and the tests that inject them, by file and name; those that have no other place are here.

| fault | file | tests |
|---|---|---|
| SIGKILL of a rank at a named point | test_kills | each_rank_killed_at_every_point |
| SIGKILL of a rank before any operation | test_kills | each_rank_killed_before_operations |
| SIGKILL of all ranks at random moments | test_kills | many_kills_at_random_moments |
| SIGKILL of the real trainer | ../train/test_killed_runs | a_run_killed_again_and_again |
| power loss: unsynced writes and names dropped, torn, reordered | test_crash_states | no_crash_state_of_a_whole_life |
| … under every policy, of encoded deltas, of changed tables | test_crash_states | no_sampled_crash_state_of_a_special |
| … in random lives of all these | test_crash_states | no_crash_state_of_more_random_lives |
| … of two programs at once | test_crash_races | no_crash_state_of_two_programs_at_once |
| … with a removal between a commit's link and its sync | test_crash_races | no_checkpoint_is_removed_for_one |
| the harness with one sync left out | test_mutants | a_missing_sync_is_noticed |
| the harness with rows released early, a check left out | test_mutants | rows_released_before, a_skipped_validation |
| full disk at any operation, in the stall or a thread | test_failed_saves | a_full_disk_at_any_operation |
| full disk at any byte of any file, in the stall or a thread | test_faults | a_disk_that_is_full_at_a_byte_of_a_file |
| full disk at a byte beside a sync in the background | test_local_storage | a_disk_that_is_full_at_a_byte_names |
| EIO of a sync in the background | test_local_storage | a_save_with_an_error_of_a_sync_in_the_background |
| EIO, quota, read-only, too many files, at any kind of operation | test_faults | an_error_of_an_operation_on_a_rank |
| EIO of write, fsync and close themselves | test_faults | an_error_of_a_file_names_it |
| a start that can't write | test_faults | a_start_that_can_not_be_written |
| full disk in a merge, at any operation | test_merge | a_merge_that_fails_at_any_operation |
| full disk for leases | test_collect_garbage | on_a_full_disk_a_restore_in_progress |
| short write | test_faults | short_writes_are_continued |
| a sync that isn't one | test_faults | every_promise_of_durability_is_an_fsync |
| slow storage | test_ballot | a_rank_that_moves_on_may_vote_long_after |
| hung storage | test_hung_storage | wait_gives_up, save_gives_up, close_reports |
| storage that doesn't answer a resume | test_outage | no_older_checkpoint_is_taken |
| a rank dies while it writes, and another lives | test_kills | a_rank_that_dies_while_it_saves |
| a rank dies before and after its vote and the outcome | test_kills | each_rank_killed_at_every_point |
| a rank doesn't vote | test_failed_saves | a_missing_vote_fails_the_save |
| a rank votes no | test_failed_saves | on_failure_stop_raises_on_every_rank |
| an outcome is missed | test_failed_saves | a_rank_that_misses_the_outcome |
| the store of the votes breaks | test_failed_saves | a_store_that_breaks_after_the_commit |
| ranks disagree on the step | test_failed_saves | ranks_that_disagree_on_the_step |
| ranks disagree on the plan | test_faults | ranks_that_disagree_on_the_plan |
| two trainers on one root | test_failed_saves | a_trainer_that_was_replaced, commits_of_a_later_start_win |
| a trainer starts while the one before commits | test_overlapping_starts | whenever_a_successor_claims |
| two runs in one folder | test_overlapping_starts | of_two_runs_that_begin_in_one_folder |
| merge, gc, save, restore and pin racing | test_races | at_every_operation_of_one_program_another_runs |
| … as processes | test_races | trainer_merge_gc_and_restores_run_beside |
| a restore that begins within a removal | test_races | a_restore_that_begins_within_a_removal |
| retention beside the next save | test_retention | a_slow_removal_on_rank_0 |
| a merge that is killed | test_races | a_killed_merge_leaves_the_chain |
| a merge whose files are swept | test_merge | a_merge_whose_files_are_swept |
| flipped, zeroed, truncated, extended, emptied, deleted files | test_damage | whatever_file_is_damaged |
| swapped files | test_damage | two_swapped_data_files |
| a link in place of a file | test_damage | a_link_in_place_of_a_data_file |
| a stale file | test_faults | a_stale_file_in_place_of_a_newer_one |
| hostile manifest: other folders, huge sizes, cycle, newer major | test_damage | a_hostile_manifest_with_a_right_hash |
| missing delta in the middle | test_damage | whatever_file_is_damaged |
| damage that real ranks resume from | ../train/test_damaged_resume | a_flipped_bit_in_any_file_of_the_chain |
| failed commit followed by a good one | test_failed_saves | a_full_disk_at_any_operation |
| an interval without touched rows | test_deltas | an_interval_without_any_touched_row |
| a shard touched in all rows | test_deltas | a_shard_touched_in_nine_tenths |
| one-row tables and empty shards | test_restore | three_rows_on_four_ranks |
| duplicate names | test_faults | two_tables_of_one_name |
| resized and new tables | test_schema | grown_shrunk_and_new_tables, after_a_resize |
| NaN and infinity | test_finite_values | a_bad_value_anywhere, a_save_with_a_bad_row |
| NaN in an encoded delta | test_quantize | a_value_that_is_not_finite |
| huge and tiny rows in codecs | test_quantize | rows_that_int8_would_spoil, state_that_bf16_would_make_zero |
| restore cut anywhere and repeated | test_faults | a_restore_that_was_cut_anywhere |
| every rank count and sharding type | test_restore | state_by_element_restores_exactly, row_wise_state_restores |
| … of the real trainer | ../train/test_resume | rows_and_state_survive_other_ranks_and_plans |
| clock going back | test_faults | a_clock_that_goes_back |
| SIGTERM while a save is written | ../train/test_killed_runs | a_signal_while_a_save_is_written |
| older versions | test_golden | a_checkpoint_of_format_1_0, an_encoded_delta_of_format_1_1 |
| newer versions | test_faults, test_damage | a_newer_minor_version, a_folder_of_a_newer_format |
| an object store: a crash at any request | test_crash_buckets | no_state_that_a_crash_leaves_of_a_life |
| … whose requests are carried out late | test_crash_buckets | a_manifest_of_a_dead_trainer_that_comes_late |
| … that throttles, or whose answers get lost | test_object_saves | a_throttled_save, a_save_whose_answers_are_lost |
| … in a merge and a removal | test_object_upkeep | any_request_or_answer_may_get_lost |
| … that replaces objects | test_object_storage | a_store_that_ignores_the_condition |
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
    rows = [[cell.strip() for cell in line.split("|")[1:4]] for line in str(__doc__).splitlines() if "|" in line][2:]
    assert len(rows) > 60
    for fault, files, names in rows:
        texts = [(HERE / f"{file}.py").read_text() for file in files.split(", ")]
        for name in names.split(", "):
            found = [re.findall(rf"^def test_{name}\w*\(", text, re.MULTILINE) for text in texts]
            assert sum(map(len, found)) == 1, f"{fault}: {files} has no test_{name}, or several"


@pytest.mark.parametrize("staging_limit_bytes", [0, 1 << 20])
@pytest.mark.parametrize("part", ["-r0.", "-r1.", "-dense.", ".tmp"])
def test_a_disk_that_is_full_at_a_byte_of_a_file_fails_the_save_and_loses_nothing(
    part: str, staging_limit_bytes: int
) -> None:
    whole = Life(baseline_ratio=100)
    whole.start(staging_limit_bytes=staging_limit_bytes)
    assert all([whole.save() for _ in range(2)])
    written = "manifests/00000002" if part == ".tmp" else f"data/00000002-s1a2{part}safetensors"
    (size,) = (len(data) for name, data in whole.storage.files.items() if name.startswith(written))
    # A manifest's size depends on the time in it, by some digits.
    for room in (0, 1, 8, 9, size // 2, size - (64 if part == ".tmp" else 1)):
        life = Life(baseline_ratio=100)
        life.start(staging_limit_bytes=staging_limit_bytes)
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
