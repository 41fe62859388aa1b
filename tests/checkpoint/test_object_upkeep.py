"""Merges, removals and restores on an object store, whatever becomes of its answers."""

import errno
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from dlrm_scale.checkpoint import Storage, find_chain, open_storage, verify
from dlrm_scale.checkpoint.chain.leases import LEASE_SECONDS, hold_chain, read_leases
from dlrm_scale.checkpoint.chain.pins import pin_step, read_pins, unpin_step
from dlrm_scale.checkpoint.files.manifest import Manifest
from dlrm_scale.checkpoint.files.manifest_files import read_manifests
from dlrm_scale.checkpoint.storage.object_storage import ObjectStorage
from dlrm_scale.checkpoint.storage.store_calls import Retries, UncertainWriteError
from dlrm_scale.checkpoint.upkeep.collect_garbage import collect_garbage
from dlrm_scale.checkpoint.upkeep.merge_plan import MergeTarget
from dlrm_scale.errors import StorageError
from tests.checkpoint.faulty_bucket import Bucket, bucket_storage, empty_memory
from tests.checkpoint.merging import go_on, merge, start
from tests.checkpoint.simulated_run import Truth, load, load_chain, make_layout
from tests.support.command_line import run_command, run_json

FAR = LEASE_SECONDS * 10.0
NEVER = Path("never-used")


@pytest.fixture(params=["memory", "bucket"])
def storage(request: pytest.FixtureRequest) -> Iterator[Storage]:
    empty_memory()
    yield open_storage("memory://b/run") if request.param == "memory" else bucket_storage(Bucket())
    empty_memory()


def _names(storage: Storage) -> set[str]:
    return {name for folder in ("data", "manifests", "leases", "fences") for name in storage.list_names(folder)}


def _saved(storage: Storage, steps: int = 4) -> Truth:
    run = start(NEVER, storages=[storage, storage])
    go_on(run, range(steps))
    return run.truth


def _restored(storage: Storage, truth: Truth) -> bool:
    return load(storage, make_layout("table_wise", 1), truth).equals(truth)  # type: ignore[arg-type]


@pytest.mark.parametrize("to", ["delta", "baseline"])
def test_a_merge_restores_the_same_rows(storage: Storage, to: MergeTarget) -> None:
    truth = _saved(storage)
    before = _names(storage)
    (merged,) = merge(storage, to)
    chain = find_chain(storage, verify="full")
    assert chain is not None
    assert chain.tip.name == merged.manifest.name
    assert _restored(storage, truth)
    assert verify(storage) == []
    assert _names(storage) - before == {merged.manifest.name, *(file.name for file in merged.manifest.files)}


def test_old_chains_leftovers_and_dead_merges_are_removed_and_pins_and_readers_kept(storage: Storage) -> None:
    truth = _saved(storage, 6)
    for step in (1, 3, 5):
        merge(storage, "baseline", step=step)
    left = {"data/00000001-s1a9-r0.safetensors", "data/00000003-s1m77-r0.safetensors", "manifests/.00000003-s1m77.tmp"}
    for name in left:
        storage.write_durably(name, b"x")
    assert pin_step(storage, 2) == "manifests/00000003-s1.json"
    with hold_chain(storage, lambda: find_chain(storage)):
        assert [lease.kind for lease in read_leases(storage, now=time.time())] == ["restore"]
        removed = set(collect_garbage(storage, keep_baselines=2, dry_run=False).removed)
    assert left < removed
    own = {int(name[10:18]) for name in removed if name.startswith("manifests/0")}
    assert own == {1, 2, 4}  # 3 is pinned, over the merge of step 1; the second chain is that of step 3 with 5 and 6
    assert verify(storage) == []
    assert _restored(storage, truth)
    assert not [name for name in _names(storage) if name.startswith(("leases/", "fences/"))]
    unpin_step(storage, 2)
    assert read_pins(storage) == set()


def test_the_commands_merge_and_clean_up_by_url(capsys: pytest.CaptureFixture[str]) -> None:
    empty_memory()
    url = "memory://b/run"
    truth = _saved(open_storage(url), 6)
    for step in (1, 3, 5):
        assert len(run_json(capsys, "checkpoint", "merge", url, "--to", "baseline", "--step", step)["merged"]) == 1
    found = run_json(capsys, "checkpoint", "gc", url)
    assert [chain["step"] for chain in found["kept"]] == [5, 5]
    assert found["removed"]
    assert run_command("checkpoint", "verify", url, "--level", "restore") == 0
    assert _restored(open_storage(url), truth)
    empty_memory()


class _Nth:
    """Acts on the n-th request from now on, once, or on all from it on."""

    def __init__(self, number: int, error: Callable[[], BaseException], *, forever: bool = False) -> None:
        self.left = number
        self.error = error
        self.forever = forever

    def __call__(self, kind: str, name: str) -> None:
        self.left -= 1
        if self.left == -1 or (self.forever and self.left < 0):
            raise self.error()


_SAVED: list[tuple[Bucket, Truth]] = []


def _saved_bucket() -> tuple[Bucket, Truth]:
    """Steps 0 to 3, two merged baselines and leftovers of a dead merge."""
    if not _SAVED:
        bucket = Bucket()
        storage = bucket_storage(bucket)
        truth = _saved(storage)
        for step in (1, 2):
            merge(storage, "baseline", step=step, number=step)
        storage.write_durably("data/00000003-s1m77-r0.safetensors", b"x")
        _SAVED.append((bucket, truth))
    return _SAVED[0]


def _copy_of(saved: tuple[Bucket, Truth]) -> tuple[Bucket, Truth]:
    bucket = Bucket()
    bucket.objects = dict(saved[0].objects)
    return bucket, saved[1]


def _merge(bucket: Bucket) -> object:
    return merge(bucket_storage(bucket, part_bytes=2000), "baseline", number=9)


def _gc(bucket: Bucket) -> object:
    return collect_garbage(bucket_storage(bucket), keep_baselines=2, dry_run=False)


@pytest.mark.parametrize("work", [_merge, _gc])
@pytest.mark.parametrize("stride", [17, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("lost", ["request", "answer"])
def test_any_request_or_answer_may_get_lost(work: Callable[[Bucket], object], stride: int, lost: str) -> None:
    bucket, truth = _copy_of(_saved_bucket())
    before = set(bucket.objects)
    work(bucket)
    expected = {name for name in bucket.objects if not name.startswith("b/run/leases/")}
    failed = 0
    for number in range(0, len(bucket.requests), stride):
        one, _ = _copy_of(_saved_bucket())
        setattr(one, "before" if lost == "request" else "after", _Nth(number, ConnectionResetError))
        end_is_lost = False
        try:
            work(one)
        except ConnectionError as error:
            end_is_lost = "end the upload of data/" in str(error)
            if not end_is_lost:
                raise
        if end_is_lost:
            # The last part and the end of an upload aren't sent twice: nothing is left, and the next merge does it.
            assert not [name for name in one.objects if "s1m9" in name or name not in before], number
            assert _restored(bucket_storage(one), truth)
            failed += 1
            continue
        one.before = one.after = lambda kind, name: None
        assert {name for name in one.objects if not name.startswith("b/run/leases/")} == expected, number
        assert not [name for name in one.objects if name.startswith("b/run/leases/")], number
        assert one.uploads == 0
        assert verify(bucket_storage(one)) == []
        assert _restored(bucket_storage(one), truth)
    assert failed <= 4  # of two files, each with a last part and an end


@pytest.mark.parametrize("work", [_merge, _gc])
@pytest.mark.parametrize("stride", [17, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("lost", ["request", "answer"])
def test_a_store_that_is_down_from_any_request_on_leaves_what_the_next_one_sweeps(
    work: Callable[[Bucket], object], stride: int, lost: str
) -> None:
    whole, truth = _copy_of(_saved_bucket())
    work(whole)
    ended = 0
    for number in range(0, len(whole.requests), stride):
        one, _ = _copy_of(_saved_bucket())
        setattr(one, "before" if lost == "request" else "after", _Nth(number, ConnectionRefusedError, forever=True))
        try:
            work(one)
        except (OSError, StorageError):
            ended += 1
        one.before = one.after = lambda kind, name: None
        storage = bucket_storage(one)
        assert verify(storage) == [], number
        assert _restored(storage, truth), number
        later = time.time() + FAR
        collect_garbage(storage, keep_baselines=2, dry_run=False, now=lambda later=later: later)  # type: ignore[misc]
        left = {name.removeprefix("b/run/") for name in one.objects}
        assert not [name for name in left if name.startswith(("leases/", "fences/", "manifests/."))], number
        named = {file.name for row in _manifests(storage) for file in row.files}
        assert {name for name in left if name.startswith("data/")} == named, number
        assert _restored(storage, truth), number
    assert ended > 0.8 * len(range(0, len(whole.requests), stride))


def _manifests(storage: Storage) -> list[Manifest]:
    return [file.manifest for file in read_manifests(storage) if file.manifest is not None]


def test_a_merge_whose_manifest_appears_late_keeps_its_data_until_its_lease_is_over() -> None:
    """The store takes the manifest, answers nothing for as long as it is asked, and shows it only later."""
    bucket, truth = _copy_of(_saved_bucket())
    repaired, landed = threading.Event(), threading.Event()
    name = "manifests/00000004-s1m9.json"

    def hang(kind: str, target: str) -> None:
        if kind == "put" and target == name:
            assert repaired.wait(60)

    bucket.before = hang
    bucket.after = lambda kind, target: landed.set() if target == name and kind == "put" else None
    impatient = Retries(attempts=1, call_timeout_seconds=0.3)
    storage = ObjectStorage(bucket, "b/run", address="s3://b/run", retries=impatient)
    with pytest.raises(UncertainWriteError, match=name):
        merge(storage, "baseline", number=9)
    patient = bucket_storage(bucket)
    assert collect_garbage(patient, keep_baselines=2, dry_run=False).users
    assert len([key for key in bucket.objects if "s1m9-" in key]) == 3
    repaired.set()
    assert landed.wait(30)
    bucket.before = bucket.after = lambda kind, target: None
    chain = find_chain(patient, verify="full")
    assert chain is not None
    assert chain.tip.name == name
    assert verify(patient) == []
    assert load_chain(chain, make_layout("row_wise", 2), truth, optimizer="rowwise_adagrad").equals(truth)


def test_a_merge_that_is_interrupted_while_its_manifest_is_on_its_way_keeps_its_data(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A signal ends the wait for the answer, and not the request."""
    bucket, truth = _copy_of(_saved_bucket())
    name = "manifests/00000004-s1m9.json"
    storage = bucket_storage(bucket)
    late: list[Callable[[], None]] = []

    def interrupted(target: str, data: bytes) -> None:
        late.append(lambda: bucket.objects.update({f"b/run/{target}": data}))
        raise KeyboardInterrupt

    put = storage.put
    monkeypatch.setattr(storage, "put", lambda target, data: (interrupted if target == name else put)(target, data))
    with pytest.raises(KeyboardInterrupt):
        merge(storage, "baseline", number=9)
    collect_garbage(bucket_storage(bucket), keep_baselines=2, dry_run=False)
    late[0]()
    assert verify(bucket_storage(bucket)) == []
    chain = find_chain(bucket_storage(bucket), verify="full")
    assert chain is not None
    assert chain.tip.name == name
    assert load_chain(chain, make_layout("row_wise", 2), truth, optimizer="rowwise_adagrad").equals(truth)


def test_a_merge_that_may_not_write_says_so_and_leaves_nothing() -> None:
    bucket, truth = _copy_of(_saved_bucket())
    before = dict(bucket.objects)

    def refuse(kind: str, name: str) -> None:
        if kind in ("put", "begin") and name.startswith("data/"):
            raise PermissionError(errno.EACCES, "Access Denied")

    bucket.before = refuse
    with pytest.raises(PermissionError, match="Access Denied"):
        _merge(bucket)
    bucket.before = lambda kind, name: None
    assert {k for k in bucket.objects if "m77" not in k} == {k for k in before if "m77" not in k}
    assert _restored(bucket_storage(bucket), truth)
