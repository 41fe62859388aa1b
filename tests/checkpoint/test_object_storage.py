"""Object stores: exclusive creates, lost answers, retries, ranges, and uploads that appear whole or not at all."""

import errno
import gc
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pytest

from dlrm_scale.checkpoint.storage.object_storage import ObjectStorage
from dlrm_scale.checkpoint.storage.storage import open_storage
from dlrm_scale.checkpoint.storage.store_calls import Retries, UncertainWriteError
from dlrm_scale.errors import ConfigError
from tests.checkpoint.faulty_bucket import (
    Bucket,
    Clock,
    bucket_storage,
    empty_memory,
    fail_first,
    folder_storage,
    hide_store_packages,
)


def _throttled() -> OSError:
    return OSError(errno.EBUSY, "Please reduce your request rate.")


def _denied() -> OSError:
    return PermissionError("Access Denied")


class _HttpError(Exception):
    """As a library raises it that isn't an OSError."""

    def __init__(self, code: int) -> None:
        super().__init__(f"status {code}")
        self.code = code


@pytest.fixture
def bucket() -> Bucket:
    return Bucket()


@pytest.fixture(params=["bucket", "memory", "folder"])
def storage(request: pytest.FixtureRequest, tmp_path: Path) -> ObjectStorage:
    """One of three stores."""
    empty_memory()
    if request.param == "folder":
        return folder_storage(tmp_path / "bucket")
    if request.param == "memory":
        opened = open_storage("memory://bucket/run")
        assert isinstance(opened, ObjectStorage)
        return opened
    return bucket_storage(Bucket())


def test_files_are_made_once_read_in_ranges_listed_and_removed(storage: ObjectStorage) -> None:
    storage.make_folders("data", "manifests")
    assert storage.list_names("data") == []
    assert not storage.exists("data/a")
    with storage.create("data/a") as file:
        file.write(memoryview(b"0123"))
        file.write(memoryview(b"456789"))
        file.sync()
    storage.write_durably("data/b", b"b")
    assert storage.list_names("data") == ["data/a", "data/b"]
    assert storage.size_bytes("data/a") == 10
    buffer = bytearray(4)
    with storage.open("data/a") as opened:
        opened.read_into(memoryview(buffer), 3)
        assert bytes(buffer) == b"3456"
        with pytest.raises(EOFError, match="data/a ends before byte 12"):
            opened.read_into(memoryview(buffer), 8)
    with pytest.raises(ValueError, match="data/a has 10 bytes, more than 9"):
        storage.read("data/a", 9)
    with pytest.raises(FileExistsError):
        storage.write_durably("data/a", b"other")
    with pytest.raises(FileExistsError), storage.create("data/a") as file:
        file.write(memoryview(b"another"))
    storage.link("data/a", "manifests/m")
    assert storage.read("manifests/m", 10) == b"0123456789"
    with pytest.raises(FileExistsError):
        storage.link("data/b", "manifests/m")
    assert storage.read("manifests/m", 10) == b"0123456789"
    storage.remove("data/a")
    storage.remove("data/a")
    assert storage.list_names("data") == ["data/b"]
    with pytest.raises(FileNotFoundError):
        storage.size_bytes("data/a")
    with pytest.raises(FileNotFoundError), storage.open("data/a"):
        pass


def test_a_file_whose_writer_fails_is_never_there(storage: ObjectStorage) -> None:
    for size in (3, 40):
        storage._part_bytes = 16
        with suppress(ZeroDivisionError), storage.create("data/a") as file:
            file.write(memoryview(bytes(size)))
            1 / 0  # noqa: B018
        gc.collect()
        assert not storage.exists("data/a")
        assert storage.list_names("data") == []


def test_a_large_file_goes_up_in_parts_of_bounded_size(bucket: Bucket) -> None:
    storage = bucket_storage(bucket, part_bytes=16)
    with storage.create("data/a") as file:
        for start in range(0, 100, 10):
            file.write(memoryview(bytes(range(start, start + 10))))
        assert bucket.objects == {}
    assert bucket.objects == {"b/run/data/a": bytes(range(100))}
    assert [kind for kind, _ in bucket.requests] == ["begin", *["part"] * 7, "end"]
    assert (bucket.largest_part, bucket.uploads) == (16, 0)


@pytest.mark.parametrize("error", [_throttled, ConnectionResetError, TimeoutError, lambda: _HttpError(503)])
@pytest.mark.parametrize("kind", ["put", "get", "head", "list", "delete", "begin", "part"])
def test_what_fails_for_the_moment_is_tried_again(
    kind: str, error: Callable[[], BaseException], bucket: Bucket
) -> None:
    clock = Clock()
    storage = bucket_storage(bucket, clock, part_bytes=16)
    bucket.before = fail_first(3, kind, error)
    storage.write_durably("data/a", b"a")
    with storage.create("data/b") as file:
        file.write(memoryview(bytes(range(40))))
    assert storage.read("data/a", 1) == b"a"
    assert storage.read("data/b", 40) == bytes(range(40))
    storage.remove("data/a")
    assert storage.list_names("data") == ["data/b"]
    assert clock.pauses == [0.5, 1.0, 2.0]


def test_a_store_that_throttles_for_long_is_waited_for_within_bounds(bucket: Bucket) -> None:
    clock = Clock()
    storage = bucket_storage(bucket, clock)
    bucket.before = fail_first(10**6, "get", _throttled)
    bucket.objects["b/run/data/a"] = b"a"
    with pytest.raises(OSError, match=r"read data/a: .*reduce your request rate") as caught:
        storage.read("data/a", 1)
    assert caught.value.errno == errno.EBUSY
    assert clock.pauses == [0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 16.0]
    assert caught.value.__notes__ == ["after 8 attempts"]


def test_no_attempt_begins_after_the_time_to_give_up(bucket: Bucket) -> None:
    clock = Clock()
    storage = ObjectStorage(bucket, "b/run", address="s3://b/run", retries=clock.retries(give_up_seconds=6.0))
    bucket.before = fail_first(10**6, "head", _throttled)
    with pytest.raises(OSError, match="reduce"):
        storage.exists("data/a")
    assert clock.pauses == [0.5, 1.0, 2.0]


@pytest.mark.parametrize("error", [_denied, lambda: _HttpError(403), lambda: OSError(errno.ENOSPC, "quota")])
def test_what_fails_for_good_is_said_at_once(error: Callable[[], BaseException], bucket: Bucket) -> None:
    clock = Clock()
    storage = bucket_storage(bucket, clock, part_bytes=16)
    bucket.before = fail_first(1, "put", error)
    with pytest.raises(OSError, match="create data/a: "):
        storage.write_durably("data/a", b"a")
    bucket.before = fail_first(1, "part", error)
    with pytest.raises(OSError, match="upload data/a: "), storage.create("data/a") as file:
        file.write(memoryview(bytes(40)))
    assert clock.pauses == []
    assert (bucket.objects, bucket.uploads) == ({}, 0)


def test_a_read_that_sends_too_little_is_repeated(bucket: Bucket) -> None:
    clock = Clock()
    storage = bucket_storage(bucket, clock)
    storage.write_durably("data/a", b"0123456789")
    bucket.short_by = 3
    assert storage.read("data/a", 10) == b"0123456789"
    assert clock.pauses == [0.5]


@pytest.mark.parametrize("error", [ConnectionResetError, _denied])
def test_a_create_whose_answer_is_lost_counts_if_the_bytes_are_ours(
    error: Callable[[], BaseException], bucket: Bucket
) -> None:
    storage = bucket_storage(bucket)
    bucket.after = fail_first(1, "put", error)
    storage.write_durably("manifests/m", b"mine")
    assert bucket.objects == {"b/run/manifests/m": b"mine"}
    bucket.after = fail_first(1, "put", error)
    storage.link("manifests/m", "manifests/n")
    assert bucket.objects["b/run/manifests/n"] == b"mine"


def test_a_create_whose_answer_is_lost_does_not_take_anothers_name(bucket: Bucket) -> None:
    storage = bucket_storage(bucket)

    def rival(kind: str, name: str) -> None:
        if kind == "put":
            bucket.objects["b/run/manifests/m"] = b"his"
            raise ConnectionResetError

    bucket.before = rival
    with pytest.raises(OSError, match="manifests/m"):
        storage.write_durably("manifests/m", b"mine")
    assert bucket.objects == {"b/run/manifests/m": b"his"}


def test_an_upload_whose_last_answer_is_lost_counts_if_it_is_whole(bucket: Bucket) -> None:
    storage = bucket_storage(bucket, part_bytes=16)
    bucket.after = fail_first(1, "end", ConnectionResetError)
    with storage.create("data/a") as file:
        file.write(memoryview(bytes(range(40))))
    assert bucket.objects == {"b/run/data/a": bytes(range(40))}
    bucket.before = fail_first(1, "end", ConnectionResetError)
    with (
        pytest.raises(OSError, match="data/b: ConnectionResetError"),
        storage.create("data/b") as file,
    ):
        file.write(memoryview(bytes(40)))
    assert "b/run/data/b" not in bucket.objects


def test_a_call_that_never_answers_ends_and_leaves_the_write_uncertain(bucket: Bucket) -> None:
    repaired = threading.Event()
    landed = threading.Event()

    def hang(kind: str, name: str) -> None:
        if kind == "put":
            assert repaired.wait(60)

    bucket.before = hang
    bucket.after = lambda kind, name: landed.set() if kind == "put" else None
    storage = ObjectStorage(
        bucket, "b/run", address="s3://b/run", retries=Retries(attempts=1, call_timeout_seconds=0.05)
    )
    with pytest.raises(UncertainWriteError, match=r"create manifests/m: no answer within 0\.05 s"):
        storage.write_durably("manifests/m", b"mine")
    assert bucket.objects == {}
    repaired.set()
    assert landed.wait(30)
    assert bucket.objects == {"b/run/manifests/m": b"mine"}  # what was uncertain has happened


@pytest.mark.parametrize("error", [ConnectionResetError, TimeoutError, lambda: OSError(errno.EREMOTEIO, "internal")])
@pytest.mark.parametrize("cut_off", [1, 8])
def test_a_write_whose_connections_break_is_uncertain_and_one_that_is_refused_is_not(
    error: Callable[[], BaseException], cut_off: int, bucket: Bucket
) -> None:
    storage = bucket_storage(bucket, Clock())
    cut = fail_first(cut_off, "put", error)

    def fail(kind: str, name: str) -> None:
        cut(kind, name)
        if kind == "put":
            raise _throttled()

    bucket.before = fail
    with pytest.raises(UncertainWriteError, match="create manifests/m"):
        storage.write_durably("manifests/m", b"mine")
    bucket.before = fail_first(8, "put", _throttled)
    with pytest.raises(OSError, match="create manifests/m") as caught:
        storage.write_durably("manifests/m", b"mine")
    assert not isinstance(caught.value, UncertainWriteError)


def test_a_store_that_ignores_the_condition_is_found_out(bucket: Bucket) -> None:
    storage = bucket_storage(bucket)
    storage.make_folders("data")
    assert storage.warnings == ()
    requests = len(bucket.requests)
    storage.make_folders("leases")
    assert len(bucket.requests) == requests
    bucket.knows_conditions = False
    storage = bucket_storage(bucket)
    storage.make_folders("data")
    (warning,) = storage.warnings
    assert warning.startswith("s3://b/run: the store doesn't create files exclusively")
    assert bucket.objects == {}


def test_folders_and_files_open_as_folders(tmp_path: Path) -> None:
    for location in (tmp_path, str(tmp_path), f"file://{tmp_path}"):
        assert open_storage(location).address == str(tmp_path)
        assert open_storage(location).warnings == ()


@pytest.mark.parametrize(
    ("url", "message"),
    [
        ("s3://bucket/run", r"s3:// can't be opened: Install s3fs.*\n.*remedy: .*dlrm-scale\[s3\]"),
        ("gs://bucket/run", r"gs:// can't be opened: .*\n.*dlrm-scale\[gcs\]"),
        ("nonsense://bucket", "nonsense://bucket can't be opened"),
        ("simplecache::memory://bucket", "chained"),
        ("s3://key:secret@bucket/run", r"^a s3:// URL holds a user or password"),
    ],
)
def test_a_url_that_cannot_be_opened_is_refused_with_what_to_do(
    url: str, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    hide_store_packages(monkeypatch)
    with pytest.raises(ConfigError, match=message):
        open_storage(url)
