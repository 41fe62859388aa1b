"""Which checkpoint a start takes: what it knew of then, and what an outage is."""

import errno
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from dlrm_scale.checkpoint import find_chain
from dlrm_scale.checkpoint.storage.local_storage import LocalStorage
from dlrm_scale.errors import SaveError, StorageError
from dlrm_scale.train.chain_choice import agree_on_chain
from dlrm_scale.train.starting_values import _next_best
from tests.checkpoint.merging import go_on, merge, start
from tests.checkpoint.simulated_run import Run, make_layout

ALONE = cast(Any, SimpleNamespace(rank=0, ranks=1))


def test_a_place_that_can_not_be_read_is_no_damage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = start(tmp_path / "ck")
    go_on(run, range(2))
    size_bytes = LocalStorage.size_bytes

    def refuse(storage: LocalStorage, name: str) -> int:
        if name.startswith("data/"):
            raise PermissionError(errno.EACCES, "Permission denied", name)
        return size_bytes(storage, name)

    monkeypatch.setattr(LocalStorage, "size_bytes", refuse)
    with pytest.raises(StorageError, match=r"can't be read: .*Permission denied") as caught:
        agree_on_chain(tmp_path / "ck", ALONE)
    assert caught.value.exit_code == 1


def test_going_back_by_other_files_leaves_nothing_behind_that_came_meanwhile(tmp_path: Path) -> None:
    root = tmp_path / "ck"
    before = start(root)
    go_on(before, range(3))
    merge(root, "baseline", step=1)
    request = cast(Any, SimpleNamespace(checkpoints=str(root), resume_step=1))
    chosen = agree_on_chain(root, ALONE, 1)
    assert chosen is not None
    chosen.release()
    go_on(before, range(3, 4))
    damaged = {file.name: f"{file.name} is damaged" for file in chosen.tip.files}
    instead = _next_best(chosen, None, request, True, ALONE, damaged)
    assert instead is not None
    instead.release()
    assert (instead.step, instead.tip.files == chosen.tip.files) == (1, False)
    with pytest.raises(SaveError, match=r"has committed step 3 .* chosen to go on from step 1"):
        Run(root, make_layout("row_wise", 2), before.truth, resumed_from=instead)
    found = find_chain(root)
    assert found is not None
    assert found.step == 3
