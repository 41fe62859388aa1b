"""Saves to an object store: what its failures do to a commit, and that none of them loses or doubles a row."""

import errno
import threading
from collections.abc import Callable
from pathlib import Path

import pytest

from dlrm_scale.checkpoint import find_chain, verify
from dlrm_scale.checkpoint.storage.object_storage import ObjectStorage
from dlrm_scale.checkpoint.storage.store_calls import Retries
from dlrm_scale.errors import CheckpointError
from tests.checkpoint.faulty_bucket import Bucket, Clock, bucket_storage, fail_first
from tests.checkpoint.simulated_run import TABLES, Run, load_chain, make_layout, make_truth

NEVER = Path("never-used")


class _Saves:
    """Two ranks with a committed step 1 and a changed row."""

    def __init__(self, **storage: int) -> None:
        self.bucket = Bucket()
        self.clock = Clock()
        self.storages = [bucket_storage(self.bucket, self.clock, **storage) for _ in range(2)]
        self.run = Run(NEVER, make_layout("row_wise", 2), make_truth(TABLES, ["row"]), storages=self.storages)
        assert self.run.save(1).committed
        self.run.change("C1", [0, 96], 1.0)

    def assert_restores(self, step: int) -> None:
        storage = bucket_storage(self.bucket)
        chain = find_chain(storage, verify="full")
        assert chain is not None
        assert chain.step == step
        assert load_chain(chain, make_layout("table_wise", 1), self.run.truth, optimizer="rowwise_adagrad").equals(
            self.run.truth
        )
        assert verify(storage) == []


@pytest.fixture
def saves() -> _Saves:
    return _Saves()


def _throttled() -> OSError:
    return OSError(errno.EBUSY, "SlowDown")


@pytest.mark.parametrize("kind", ["put", "get", "head", "list", "delete"])
def test_a_throttled_save_is_committed(kind: str, saves: _Saves) -> None:
    saves.bucket.before = fail_first(2, kind, _throttled)
    assert saves.run.save(2).committed
    assert len(saves.clock.pauses) == 2
    saves.bucket.before = lambda kind, name: None
    saves.assert_restores(2)


def test_large_files_go_up_in_parts_and_restore() -> None:
    saves = _Saves(part_bytes=256)
    saves.bucket.before = fail_first(3, "part", _throttled)
    assert saves.run.save(2).committed
    assert saves.bucket.largest_part == 256
    assert saves.bucket.uploads == 0
    saves.assert_restores(2)


@pytest.mark.parametrize("name", ["data/", "manifests/00000002", "manifests/.00000002"])
def test_a_save_whose_answers_are_lost_is_committed(name: str, saves: _Saves) -> None:
    saves.bucket.after = fail_first(1, "put", ConnectionResetError, name)
    assert saves.run.save(2).committed
    saves.assert_restores(2)


@pytest.mark.parametrize("name", ["data/", "manifests/00000002", "manifests/.00000002"])
@pytest.mark.parametrize("error", [lambda: PermissionError("denied"), lambda: OSError(errno.ENOSPC, "quota")])
def test_a_save_that_is_refused_keeps_its_rows_for_the_next(
    name: str, error: Callable[[], OSError], saves: _Saves
) -> None:
    saves.bucket.before = fail_first(10**6, "put", error, name)
    outcome = saves.run.save(2)
    assert not outcome.committed
    assert "create" in str(outcome.error)
    assert not [key for key in saves.bucket.objects if "00000002" in key]
    saves.bucket.before = lambda kind, name: None
    outcome = saves.run.save(3)
    assert (outcome.committed, outcome.kind, outcome.rows) == (True, "delta", 2)
    saves.assert_restores(3)


def test_a_manifest_whose_fate_is_unknown_keeps_its_data(saves: _Saves) -> None:
    """The store takes the manifest, answers nothing for as long as it is asked, and shows it only later."""
    repaired, landed = threading.Event(), threading.Event()

    def hang(kind: str, name: str) -> None:
        if kind == "put" and name == "manifests/00000002-s1.json":
            assert repaired.wait(60)

    saves.bucket.before = hang
    saves.bucket.after = lambda kind, name: landed.set() if repaired.is_set() else None
    impatient = Retries(attempts=1, call_timeout_seconds=0.2)
    storage = ObjectStorage(saves.bucket, "b/run", address="s3://b/run", retries=impatient)
    saves.run.engines[0]._writer.storage = storage
    outcome = saves.run.save(2)
    assert not outcome.committed
    assert "manifests/00000002-s1.json may or may not be there" in str(outcome.error)
    assert "manifests/00000002-s1.json" not in {key.removeprefix("b/run/") for key in saves.bucket.objects}
    assert len([key for key in saves.bucket.objects if "data/00000002" in key]) == 3
    repaired.set()
    assert landed.wait(30)
    saves.bucket.after = lambda kind, name: None
    saves.assert_restores(2)
    assert saves.run.save(3).rows == 2
    saves.assert_restores(3)


def test_a_second_trainer_takes_over_and_the_first_one_is_refused(saves: _Saves) -> None:
    chain = find_chain(saves.storages[0])
    second = Run(
        NEVER,
        make_layout("row_wise", 2),
        saves.run.truth,
        storages=[bucket_storage(saves.bucket) for _ in range(2)],
        resumed_from=chain,
    )
    for engine in saves.run.engines:
        engine.save(step=2, cursor={}, dense={}, rank_state={}, extra={})
    with pytest.raises(CheckpointError, match=r"start 2 has taken over s3://b/run; this is start 1"):
        saves.run.engines[0].wait()
    second.change("C1", [0, 96], 1.0)
    assert second.save(2).committed
    saves.assert_restores(2)
