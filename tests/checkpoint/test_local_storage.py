"""Big files in a folder: synced in the background while they are written, never with too much un-synced."""

import errno
import itertools
import os
import re
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

from dlrm_scale.checkpoint import find_chain, verify
from dlrm_scale.checkpoint.storage import local_storage
from dlrm_scale.checkpoint.storage.local_storage import LocalStorage
from dlrm_scale.checkpoint.storage.store_calls import UncertainWriteError
from tests.checkpoint.simulated_run import TABLES, Run, load, make_layout, make_truth

PIECE, MOST = 1000, 3000
NAME = "data/a"
WAIT_SECONDS = 30


class Disk:
    """Stands for `os.fdatasync` and `os.fsync` of files: says when one may end, how it ends, what it made durable.

    Attributes:
        durable: size of the file at the end of each sync.
        running: syncs under way, and the most that were so at a time.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.durable: list[int] = []
        self.begun = threading.Semaphore(0)
        self.may_end = threading.Event()
        self.may_end.set()
        self.error: OSError | None = None
        self.running = self.most_running = 0
        self.final_syncs = 0
        self._lock = threading.Lock()
        monkeypatch.setattr(os, "fdatasync", self._sync)
        fsync = os.fsync

        def final(descriptor: int) -> None:
            self.final_syncs += 1
            fsync(descriptor)
            self._sync(descriptor)

        monkeypatch.setattr(os, "fsync", final)

    def _sync(self, descriptor: int) -> None:
        size = os.fstat(descriptor).st_size
        with self._lock:
            self.running += 1
            self.most_running = max(self.most_running, self.running)
        self.begun.release()
        assert self.may_end.wait(WAIT_SECONDS)
        with self._lock:
            self.running -= 1
        if self.error is not None:
            raise self.error
        self.durable.append(size)


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Disk:
    monkeypatch.setattr(local_storage, "PIECE_BYTES", PIECE)
    monkeypatch.setattr(local_storage, "MOST_UNSYNCED_BYTES", MOST)
    return Disk(monkeypatch)


@pytest.fixture
def storage(tmp_path: Path, disk: Disk) -> Iterator[LocalStorage]:
    """With a folder; afterwards no thread of a file may be left."""
    made = LocalStorage(tmp_path)
    (tmp_path / "data").mkdir()
    yield made
    assert _sync_threads() == []


def _sync_threads() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("sync ")]


def _content(size: int) -> bytes:
    return bytes(i % 251 for i in range(size))


def test_a_big_file_is_synced_while_it_is_written_and_last_of_all(
    tmp_path: Path, storage: LocalStorage, disk: Disk
) -> None:
    data = _content(20 * PIECE + 7)
    with storage.create(NAME) as file:
        for start in range(0, len(data), 300):
            file.write(memoryview(data)[start : start + 300])
        assert disk.durable or disk.begun.acquire(timeout=WAIT_SECONDS)
        assert disk.final_syncs == 0
        file.sync()
        assert _sync_threads() == []
    assert (tmp_path / NAME).read_bytes() == data
    assert disk.durable == sorted(disk.durable)
    assert disk.durable[-1] == len(data)
    assert disk.final_syncs == 1
    assert disk.most_running == 1
    assert max(b - a for a, b in zip([0, *disk.durable], disk.durable, strict=False)) <= MOST
    assert 20 * PIECE // MOST <= len(disk.durable) <= 21


@pytest.mark.skipif(not hasattr(os, "posix_fadvise"), reason="the system takes no advice on its page cache")
def test_a_large_file_leaves_the_page_cache_when_it_is_durable_and_not_before(
    storage: LocalStorage, disk: Disk, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(local_storage, "MOST_CACHED_BYTES", 10 * PIECE)
    dropped: list[tuple[int, int]] = []

    def advise(_: int, start: int, size: int, advice: int) -> None:
        assert advice == os.POSIX_FADV_DONTNEED
        assert start + size <= disk.durable[-1]
        dropped.append((start, start + size))

    monkeypatch.setattr(os, "posix_fadvise", advise)
    for size in (10 * PIECE, 10 * PIECE + 1):
        data = _content(size)
        with storage.create(f"data/{size}", size) as file:
            for start in range(0, size, 300):
                file.write(memoryview(data)[start : start + 300])
            file.sync()
    # Of the smaller one nothing; of the larger one each piece, and at the end all once more.
    assert dropped[-1] == (0, 10 * PIECE + 1)
    pieces = dropped[:-1]
    assert pieces[0][0] == 0
    assert all(before[1] == after[0] for before, after in itertools.pairwise(pieces))


def test_a_small_file_has_no_thread_and_one_sync(storage: LocalStorage, disk: Disk) -> None:
    with storage.create(NAME) as file:
        file.write(memoryview(_content(PIECE - 1)))
        assert _sync_threads() == []
        file.sync()
    assert disk.durable == [PIECE - 1]


def test_a_writer_waits_for_the_disk_rather_than_have_more_than_the_bound_un_synced(
    tmp_path: Path, storage: LocalStorage, disk: Disk
) -> None:
    disk.may_end.clear()
    data = _content(10 * MOST)
    with storage.create(NAME) as file:
        writer = threading.Thread(target=lambda: file.write(memoryview(data)))
        writer.start()
        assert disk.begun.acquire(timeout=WAIT_SECONDS)
        # One write of ten times the bound: it stops where the next piece would exceed it.
        writer.join(0.2)
        assert writer.is_alive()
        assert MOST - PIECE < (tmp_path / NAME).stat().st_size <= MOST
        assert disk.durable == []
        disk.may_end.set()
        writer.join(WAIT_SECONDS)
        assert not writer.is_alive()
        file.sync()
    assert (tmp_path / NAME).read_bytes() == data
    assert max(b - a for a, b in zip([0, *disk.durable], disk.durable, strict=False)) <= MOST


@pytest.mark.parametrize("told_by", ["write", "sync", "close"])
def test_an_error_of_a_sync_in_the_background_is_raised_by_what_is_done_next(
    tmp_path: Path, storage: LocalStorage, disk: Disk, told_by: str
) -> None:
    disk.may_end.clear()
    disk.error = OSError(errno.EIO, "Input/output error")

    def use() -> None:
        with storage.create(NAME) as file:
            file.write(memoryview(_content(PIECE)))
            assert disk.begun.acquire(timeout=WAIT_SECONDS)
            disk.may_end.set()
            if told_by == "write":
                _write_until_told(file)
            if told_by == "sync":
                file.sync()

    with pytest.raises(OSError, match=re.escape(str(tmp_path / NAME))) as caught:
        use()
    assert caught.value.errno == errno.EIO
    # The kernel has told of it once: another sync would succeed without the bytes.
    assert disk.durable == []
    assert disk.final_syncs == 0


def _write_until_told(file: local_storage.LocalWritableFile) -> None:
    for _ in range(1000):
        threading.Event().wait(0.001)
        file.write(memoryview(b"1"))
    raise AssertionError("nobody told of the error")


def test_a_file_whose_sync_failed_is_never_synced_again(storage: LocalStorage, disk: Disk) -> None:
    with storage.create(NAME) as file:
        file.write(memoryview(b"1"))
        disk.error = OSError(errno.EIO, "Input/output error")
        with pytest.raises(OSError, match="Input/output error"):
            file.sync()
        disk.error = None
        for call in (file.sync, lambda: file.write(memoryview(b"2"))):
            with pytest.raises(OSError, match="Input/output error"):
                call()
    assert disk.final_syncs == 1
    assert disk.durable == []


def test_what_ended_the_block_goes_before_an_error_of_a_sync(storage: LocalStorage, disk: Disk) -> None:
    disk.may_end.clear()
    disk.error = OSError(errno.EIO, "Input/output error")

    def use() -> None:
        with storage.create(NAME) as file:
            file.write(memoryview(_content(PIECE)))
            assert disk.begun.acquire(timeout=WAIT_SECONDS)
            disk.may_end.set()
            raise ValueError("not finite")

    with pytest.raises(ValueError, match="not finite"):
        use()


def test_a_disk_that_is_full_at_a_byte_names_the_file_after_syncs_in_the_background(
    tmp_path: Path, storage: LocalStorage, disk: Disk, monkeypatch: pytest.MonkeyPatch
) -> None:
    room, write = 7 * PIECE + 13, os.write

    def limited(descriptor: int, data: memoryview) -> int:
        left = room - os.fstat(descriptor).st_size
        if not left:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(descriptor, data[:left])

    monkeypatch.setattr(os, "write", limited)
    with pytest.raises(OSError, match=re.escape(str(tmp_path / NAME))) as caught, storage.create(NAME) as file:
        file.write(memoryview(_content(10 * PIECE)))
    assert caught.value.errno == errno.ENOSPC
    assert (tmp_path / NAME).stat().st_size == room
    assert disk.final_syncs == 0


def test_a_save_with_an_error_of_a_sync_in_the_background_fails_and_the_next_one_holds_its_rows(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = tmp_path / "ck"
    run = Run(root, make_layout("row_wise", 1), make_truth(TABLES, ["row"]), baseline_ratio=100.0)
    assert run.save(1).committed
    monkeypatch.setattr(local_storage, "PIECE_BYTES", 64)
    monkeypatch.setattr(local_storage, "MOST_UNSYNCED_BYTES", 128)  # so that the third piece waits for a sync
    failed: list[int] = []

    def broken(descriptor: int) -> None:
        failed.append(os.fstat(descriptor).st_ino)
        raise OSError(errno.EIO, "Input/output error")

    with monkeypatch.context() as broken_disk:
        broken_disk.setattr(os, "fdatasync", broken)
        run.change("C1", [1], 5.0)
        outcome = run.save(2)
    assert failed
    assert not outcome.committed
    assert "Input/output error" in str(outcome.error)
    assert "data/00000002" in str(outcome.error)
    chain = find_chain(root)
    assert chain is not None
    assert chain.step == 1
    run.change("C1", [2], 1.0)
    assert run.save(3).committed
    assert verify(root) == []
    assert load(root, make_layout("row_wise", 1), run.truth).equals(run.truth)
    assert _sync_threads() == []


def test_a_link_whose_answer_is_lost_counts_and_one_that_is_never_answered_is_uncertain(
    storage: LocalStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    link = os.link
    storage.write_durably("data/a", b"a")
    storage.write_durably("data/b", b"b")

    def tried_twice(source: Path, target: Path) -> None:
        link(source, target)
        link(source, target)

    monkeypatch.setattr(os, "link", tried_twice)
    storage.link("data/a", "data/c")
    assert storage.read("data/c", 1) == b"a"
    with pytest.raises(FileExistsError):
        storage.link("data/b", "data/c")
    assert storage.read("data/c", 1) == b"a"

    def unanswered(source: Path, target: Path) -> None:
        link(source, target)
        raise TimeoutError(errno.ETIMEDOUT, "Connection timed out")

    monkeypatch.setattr(os, "link", unanswered)
    with pytest.raises(UncertainWriteError, match=r"timed out.*data/d"):
        storage.link("data/a", "data/d")
