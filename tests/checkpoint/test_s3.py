"""s3fs against a local S3 server. Runs where both are installed: `pip install s3fs 'moto[server]'`."""

import gc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from dlrm_scale.checkpoint import find_chain, verify
from dlrm_scale.checkpoint.chain.leases import hold_chain
from dlrm_scale.checkpoint.storage.object_storage import ObjectStorage
from dlrm_scale.checkpoint.storage.storage import open_storage
from dlrm_scale.units import MIB
from tests.checkpoint.merging import go_on, start
from tests.checkpoint.simulated_run import TABLES, Run, load, make_layout, make_truth
from tests.support.command_line import run_json

s3fs = pytest.importorskip("s3fs")
moto_server = pytest.importorskip("moto.server")

# what the server and botocore warn about is theirs
pytestmark = pytest.mark.filterwarnings("default")


@pytest.fixture(scope="module")
def filesystem() -> Iterator[Any]:
    server = moto_server.ThreadedMotoServer(ip_address="127.0.0.1", port=0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("AWS_ACCESS_KEY_ID", "x")
        patch.setenv("AWS_SECRET_ACCESS_KEY", "y")
        patch.setenv("AWS_DEFAULT_REGION", "us-east-1")
        patch.setenv("AWS_ENDPOINT_URL", f"http://{host}:{port}")
        made = s3fs.S3FileSystem()
        made.mkdir("bucket")
        yield made
    server.stop()


@pytest.fixture
def storage(filesystem: Any) -> ObjectStorage:
    opened = open_storage("s3://bucket/storage")
    assert isinstance(opened, ObjectStorage)
    opened._part_bytes = 5 * MIB  # the least that S3 takes
    return opened


@pytest.mark.parametrize("size", [0, 10, 12 * MIB])
def test_an_object_is_created_once_and_read_in_ranges(size: int, storage: ObjectStorage) -> None:
    name = f"data/{size}"
    data = bytes(range(256)) * (size // 256) + bytes(size % 256)
    with storage.create(name) as file:
        file.write(memoryview(data))
    assert storage.read(name, size) == data
    with pytest.raises(FileExistsError), storage.create(name) as file:
        file.write(memoryview(bytes(size + 1)))
    with pytest.raises(FileExistsError):
        storage.write_durably(name, b"other")
    assert storage.read(name, size) == data
    with storage.open(name) as opened, pytest.raises(EOFError):
        opened.read_into(memoryview(bytearray(1)), size)


def test_an_upload_that_fails_leaves_neither_an_object_nor_parts(filesystem: Any, storage: ObjectStorage) -> None:
    with pytest.raises(ZeroDivisionError), storage.create("data/cut") as file:
        file.write(memoryview(bytes([1 // len(storage.list_names("nothing"))])))
    upload = storage.create("data/cut")
    file = upload.__enter__()
    file.write(memoryview(bytes(11 * MIB)))
    assert filesystem.call_s3("list_multipart_uploads", Bucket="bucket")["Uploads"]
    assert not upload.__exit__(RuntimeError, RuntimeError(), None)
    gc.collect()
    assert not storage.exists("data/cut")
    assert not filesystem.call_s3("list_multipart_uploads", Bucket="bucket").get("Uploads")


def test_the_store_is_found_to_create_exclusively(storage: ObjectStorage) -> None:
    storage.make_folders("data")
    assert storage.warnings == ()


def test_saves_are_committed_restored_and_fenced(filesystem: Any) -> None:
    url, layout, truth = "s3://bucket/run", make_layout("row_wise", 2), make_truth(TABLES, ["row"])
    run = Run(url, layout, truth)  # type: ignore[arg-type]
    for step in (1, 2, 3):
        run.change("C1", [step, 96], 1.0)
        assert run.save(step).committed
    assert verify(url) == []
    assert load(url, make_layout("table_wise", 1), truth).equals(truth)  # type: ignore[arg-type]
    second = Run(url, layout, truth, resumed_from=find_chain(url))  # type: ignore[arg-type]
    second.change("C1", [7], 1.0)
    assert second.save(4).seq == 4
    for engine in run.engines:
        engine.save(step=5, cursor={}, dense={}, rank_state={}, extra={})
    for engine in run.engines:
        engine.close()
    assert "start 2 has taken over s3://bucket/run" in str(run.engines[0].poll()[0].error)


def test_merges_and_removals_keep_what_is_restored(capsys: pytest.CaptureFixture[str]) -> None:
    url = "s3://bucket/merged"
    storage = open_storage(url)
    run = start(Path("never-used"), storages=[storage, storage])
    go_on(run, range(6))
    for step in (1, 3, 5):
        assert len(run_json(capsys, "checkpoint", "merge", url, "--to", "baseline", "--step", step)["merged"]) == 1
    with hold_chain(storage, lambda: find_chain(storage)) as chain:
        assert chain is not None
        found = run_json(capsys, "checkpoint", "gc", url)
        assert found["users"]
        assert [kept["step"] for kept in found["kept"]] == [5, 5]
        assert found["removed_bytes"] > 0
    assert storage.list_names("leases") == []
    assert run_json(capsys, "checkpoint", "verify", url, "--level", "restore")["ok"]
    assert load(url, make_layout("table_wise", 1), run.truth).equals(run.truth)  # type: ignore[arg-type]
