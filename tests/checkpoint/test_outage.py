"""A storage that doesn't answer isn't a damaged one: nothing goes back to older steps for it."""

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch

from dlrm_scale.checkpoint import DamagedFileError, find_chain, restore, verify
from dlrm_scale.checkpoint.saving.resumed_rows import mark_rows_of_deltas
from dlrm_scale.checkpoint.storage.local_storage import LocalReadableFile, LocalStorage
from dlrm_scale.checkpoint.storage.store_calls import StoreTimeoutError
from dlrm_scale.errors import CheckpointError, StorageError
from tests.checkpoint.merging import ADAGRAD, go_on, start
from tests.checkpoint.simulated_run import Run, shards_of

OUTAGES = (
    StoreTimeoutError(errno.ETIMEDOUT, "no answer within 60 s"),
    OSError(errno.ECONNREFUSED, "Connection refused"),
    OSError(errno.EBUSY, "SlowDown"),
)


class _Failing(LocalStorage):
    """Fails at one call for names that contain something."""

    def __init__(self, root: Path) -> None:
        super().__init__(root)
        self.call, self.what, self.error = "", "", OSError()

    def _ask(self, call: str, name: str) -> None:
        if call == self.call and self.what in name:
            raise self.error

    def size_bytes(self, name: str) -> int:
        self._ask("size", name)
        return super().size_bytes(name)

    @contextmanager
    def open(self, name: str) -> Iterator[LocalReadableFile]:
        self._ask("open", name)
        with super().open(name) as file:
            yield file


@pytest.fixture
def saved(tmp_path: Path) -> tuple[_Failing, Run]:
    """Steps 0 to 3; the storage fails once it is told how."""
    run = start(tmp_path / "ck")
    go_on(run, range(4))
    return _Failing(tmp_path / "ck"), run


@pytest.mark.parametrize("error", OUTAGES, ids=lambda error: errno.errorcode[error.errno])
@pytest.mark.parametrize("what", ["manifests/00000004", "data/00000004"])
def test_no_older_checkpoint_is_taken_for_one_that_can_not_be_looked_at(
    saved: tuple[_Failing, Run], what: str, error: OSError
) -> None:
    storage, _ = saved
    storage.call, storage.what, storage.error = "size", what, error
    with pytest.raises(OSError, match=error.strerror):
        find_chain(storage)
    with pytest.raises(OSError, match=error.strerror):
        verify(storage, "size")
    storage.error = OSError(errno.EIO, "Input/output error")
    chain = find_chain(storage)
    assert chain is not None
    assert chain.step == 2
    assert "Input/output error" in chain.skipped[0].reason


@pytest.mark.parametrize("error", OUTAGES, ids=lambda error: errno.errorcode[error.errno])
def test_a_restore_that_gets_no_answer_names_the_file_and_does_not_call_it_damaged(
    saved: tuple[_Failing, Run], error: OSError
) -> None:
    storage, run = saved
    chain = find_chain(storage)
    assert chain is not None
    storage.call, storage.what = "open", "data/00000003"
    for storage.error, damaged in ((error, False), (OSError(errno.EIO, "Input/output error"), True)):
        shards = shards_of(run.layout, run.truth, 0, blank=True)
        with pytest.raises(CheckpointError, match=r"can't open data/00000003") as caught:
            restore(chain, layout=run.layout, shards=shards, rank=0, ranks=2, optimizer=ADAGRAD)
        assert isinstance(caught.value, DamagedFileError) == damaged
        if not damaged:
            assert caught.value.remedy is not None
            assert "try again" in caught.value.remedy


@pytest.mark.parametrize("error", OUTAGES, ids=lambda error: errno.errorcode[error.errno])
def test_a_start_that_can_not_read_the_ids_of_its_deltas_calls_that_an_outage_too(
    saved: tuple[_Failing, Run], error: OSError
) -> None:
    storage, run = saved
    chain = find_chain(storage)
    assert chain is not None
    storage.call, storage.what = "open", "data/00000003"
    shards = shards_of(run.layout, run.truth, 0)
    maps = [torch.zeros(shard.region.rows, dtype=torch.uint8) for shard in shards]
    for storage.error, kind in ((error, StorageError), (OSError(errno.EIO, "Input/output error"), DamagedFileError)):
        with pytest.raises(kind, match=r"can't open data/00000003"):
            mark_rows_of_deltas(chain, shards, maps)
