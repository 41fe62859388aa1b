"""One place, one run: whose checkpoints may lie where, and what ranks must share."""

import errno
import json
import os
from pathlib import Path
from typing import Any

import pytest

from dlrm_scale.errors import ConfigError
from dlrm_scale.train.checkpoint_place import unwritable_folder
from dlrm_scale.train.run_folder import RunFolder, resolve_run
from tests.support.datasets import make_dataset
from tests.support.training import log_records, run_training

SETTINGS = ["sharding.kind=row_wise", "train.max_steps=2"]


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("data") / "dataset"
    make_dataset(path, 150, table_rows=[3, 4, 10, 2, *[40] * 22])
    return path


def _starts(root: Path) -> list[dict[str, object]]:
    return [json.loads(path.read_text()) for path in sorted((root / "starts").iterdir())]


def test_a_run_is_refused_the_place_of_another_by_its_name(dataset: Path, tmp_path: Path) -> None:
    first, second, place = tmp_path / "first", tmp_path / "second", tmp_path / "place"
    shared = f"checkpoint.path={place}"
    run_training(2, first, dataset, [*SETTINGS, shared])
    run_training(2, second, dataset, SETTINGS)
    identity = RunFolder(path=first).identity()
    assert [(start["run_id"], start["run_path"]) for start in _starts(place)] == [(identity.id, str(first))]
    says = rf"belongs to another run, {first} \(id {identity.id}.*holds its checkpoints"
    with pytest.raises(ConfigError, match=says):
        run_training(2, tmp_path / "third", dataset, [*SETTINGS, shared])
    # a resumed run too, which would go on from the other's rows
    with pytest.raises(ConfigError, match=says) as caught:
        run_training(2, second, dataset, ["train.max_steps=4", shared], resume=True)
    assert "--init-from" in str(caught.value.remedy)
    assert not (tmp_path / "third").exists()
    assert len(_starts(place)) == 1
    # wherever its folder is moved to, the run itself goes on
    moved = tmp_path / "moved"
    first.rename(moved)
    assert run_training(2, moved, dataset, ["train.max_steps=4"], resume=True)[0].result.start_step == 2


def test_a_run_from_before_runs_had_an_id_goes_on_and_gets_one(dataset: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    run_training(1, run, dataset, SETTINGS)
    for path, names in (
        (run / "run.json", ["id"]),
        (run / "checkpoints" / "starts" / "1.json", ["run_id", "run_path"]),
    ):
        record = json.loads(path.read_text())
        path.write_text(json.dumps({name: value for name, value in record.items() if name not in names}))
    assert RunFolder(path=run).identity().id == ""
    assert run_training(1, run, dataset, ["train.max_steps=3"], resume=True)[0].result.start_step == 2
    identity = RunFolder(path=run).identity()
    assert len(identity.id) == 16
    assert _starts(run / "checkpoints")[1]["run_id"] == identity.id
    assert run_training(1, run, dataset, ["train.max_steps=4"], resume=True)[0].result.start_step == 3
    assert RunFolder(path=run).identity() == identity
    assert [record["step"] for record in log_records(run, "train")] == [1, 2, 3, 4]


def test_ranks_that_do_not_share_a_memory_are_refused_a_place_in_it(dataset: Path, tmp_path: Path) -> None:
    settings = [*SETTINGS, "checkpoint.path=memory://bucket/run"]
    with pytest.raises(ConfigError, match="with 2 ranks: memory:// is each process's own memory") as caught:
        run_training(2, tmp_path / "run", dataset, settings)
    assert "that all ranks share" in str(caught.value.remedy)
    assert not (tmp_path / "run").exists()
    assert run_training(1, tmp_path / "run", dataset, settings)[0].result.checkpoints_committed == 1


@pytest.mark.parametrize("policy", ["one_shot", "intermittent"])
def test_a_merger_beside_deltas_that_replace_one_another_is_refused(policy: str, tmp_path: Path) -> None:
    settings = [f"run.path={tmp_path}/run", "data.path=somewhere", "checkpoint.merger=true"]
    says = rf"checkpoint\.merger = true with checkpoint\.policy = {policy}"
    with pytest.raises(ConfigError, match=says) as caught:
        resolve_run("sample", [*settings, f"checkpoint.policy={policy}"])
    assert caught.value.remedy == "set checkpoint.policy=consecutive, or checkpoint.merger=false"
    assert resolve_run("sample", settings).config.checkpoint.merger


def test_a_folder_that_can_not_be_written_is_found_without_a_trace(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    assert unwritable_folder(tmp_path / "a" / "b") is None
    assert unwritable_folder(tmp_path / "file" / "b") == f"{tmp_path / 'file'} is a file"
    assert str(unwritable_folder(Path("/proc/none"))).startswith("/proc can't be written: ")
    assert [path.name for path in tmp_path.iterdir()] == ["file"]


def test_a_folder_below_one_that_may_not_be_looked_into_can_not_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    secret, stat = tmp_path / "secret", os.stat

    def refuse(path: Any, **options: Any) -> os.stat_result:
        if isinstance(path, (str, Path)) and secret in Path(path).parents:
            raise PermissionError(errno.EACCES, "Permission denied", str(path))
        return stat(path, **options)

    def no_folder(prefix: str, dir: Path) -> str:
        assert dir == secret
        raise PermissionError(errno.EACCES, "Permission denied", str(dir))

    secret.mkdir()
    with monkeypatch.context() as patch:
        patch.setattr(os, "stat", refuse)
        patch.setattr("tempfile.mkdtemp", no_folder)
        said = unwritable_folder(secret / "run")
    assert said == f"{secret} can't be written: Permission denied"
