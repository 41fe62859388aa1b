"""Who may create a run, and what a half-made one is."""

import os
from collections.abc import Callable
from pathlib import Path

import pytest

from dlrm_scale.errors import ConfigError
from dlrm_scale.recipes import load_config
from dlrm_scale.train.run_folder import RunFolder, resolve_run
from dlrm_scale.train.warm_start import WarmStart

_SETTINGS = ["data.path=somewhere"]


def _claimed(path: Path, warm_start: WarmStart | None = None) -> RunFolder:
    folder = RunFolder(path=path)
    folder.claim(load_config("sample", [*_SETTINGS, f"run.path={path}"]), "sample", warm_start)
    return folder


def test_a_claimed_folder_is_a_run_with_its_config_and_origin(tmp_path: Path) -> None:
    warm_start = WarmStart(run="/another", allow_new_tables=True)
    folder = _claimed(tmp_path / "run", warm_start)
    assert folder.exists()
    assert folder.started_from() == ("sample", warm_start)
    request = resolve_run(None, [f"run.path={folder.path}"], resume=True)
    assert (request.resume, request.warm_start, request.source) == (True, warm_start, "sample")
    assert sorted(p.name for p in folder.path.iterdir()) == ["config.toml", "run.json"]


def test_a_folder_that_a_crash_left_half_made_can_be_claimed(tmp_path: Path) -> None:
    (tmp_path / "run.json").write_text("{}")
    (tmp_path / ".config-1.toml").write_text("[run]")
    assert not RunFolder(path=tmp_path).exists()
    request = resolve_run("sample", [*_SETTINGS, f"run.path={tmp_path}"], resume=True)
    assert not request.resume
    _claimed(tmp_path)
    assert RunFolder(path=tmp_path).exists()


def test_only_one_of_two_trainers_gets_a_folder(tmp_path: Path) -> None:
    _claimed(tmp_path)
    before = (tmp_path / "config.toml").read_bytes()
    with pytest.raises(ConfigError, match="another run is here already"):
        _claimed(tmp_path)
    assert (tmp_path / "config.toml").read_bytes() == before


def test_a_run_without_its_record_is_named(tmp_path: Path) -> None:
    folder = _claimed(tmp_path)
    (tmp_path / "run.json").unlink()
    with pytest.raises(ConfigError, match=r"run\.json can't be read"):
        resolve_run(None, [f"run.path={folder.path}"], resume=True)


def test_what_a_resume_needs_is_durable_before_anything_is_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[str] = []

    def note(handle: int, sync: Callable[[int], None] = os.fsync) -> None:
        synced.append(str(Path(os.readlink(f"/proc/self/fd/{handle}")).relative_to(tmp_path)))
        sync(handle)

    monkeypatch.setattr(os, "fsync", note)
    pid = os.getpid()
    folder = _claimed(tmp_path / "runs" / "a")
    # the folder's own name too: a folder of checkpoints in it is lost without
    assert sorted(synced[:2]) == [".", "runs"]
    assert synced[2:] == [f"runs/a/.config-{pid}.toml", f"runs/a/.run.json-{pid}", "runs/a", "runs/a"]
    synced.clear()
    folder.save_config(load_config(folder.config))
    assert synced == [f"runs/a/.config-{pid}.toml", "runs/a"]
    synced.clear()
    # of a run from before runs had ids: checkpoints in another place know it by its id
    (folder.path / "run.json").write_text('{"source": "sample", "init_from": ""}')
    assert folder.give_id().id
    assert synced == [f"runs/a/.run.json-{pid}", "runs/a"]


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="file/run"):
        _claimed(tmp_path / "file" / "run")
