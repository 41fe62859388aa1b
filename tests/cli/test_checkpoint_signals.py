"""A command that is stopped by a signal gives back what it holds, so that it holds nobody up."""

import os
import signal
from collections.abc import Callable
from pathlib import Path

import pytest

from dlrm_scale.checkpoint.storage.local_storage import LocalStorage
from tests.checkpoint.merging import files_of, go_on, merge, start
from tests.checkpoint.simulated_run import make_layout
from tests.support.command_line import run_command

COMMANDS = {
    "export": (("--to", "parquet", "--out", "OUT"), "open", "data/00000005"),
    "verify": (("--level", "restore"), "restore", ""),
    "show": (("0", "4"), "open", "data/00000005"),
    "merge": (("--to", "baseline"), "create", "data/"),
    "gc": ((), "remove", "data/"),
}


@pytest.fixture
def root(tmp_path: Path) -> Path:
    """Three chains, so that gc has something to remove."""
    root = tmp_path / "run" / "checkpoints"
    go_on(start(root, make_layout("row_wise", 1)), range(5))
    for step in (1, 2, 3):
        merge(root, "baseline", step=step)
    return root


def _signal_at(patch: pytest.MonkeyPatch, operation: str, what: str, signum: int, seen: list[int]) -> None:
    """Send a signal when the command is at an operation, with its lease taken."""

    def stop(leases: int) -> None:
        if not seen:
            seen.append(leases)
            os.kill(os.getpid(), signum)

    def meet(original: Callable[..., object]) -> Callable[..., object]:
        def met(storage: LocalStorage, name: str, *arguments: object) -> object:
            if what in name:
                stop(len(storage.list_names("leases")))
            return original(storage, name, *arguments)

        return met

    if operation == "restore":

        def check(chain: object, **options: object) -> None:
            stop(len(chain.storage.list_names("leases")))  # type: ignore[attr-defined]

        patch.setattr("dlrm_scale.checkpoint.restoring.restore_check.check_restore", check)
        return
    patch.setattr(LocalStorage, operation, meet(getattr(LocalStorage, operation)))


@pytest.mark.parametrize(
    ("command", "signum"),
    [(command, signal.SIGTERM) for command in COMMANDS] + [("export", signal.SIGINT), ("export", signal.SIGHUP)],
)
def test_a_command_that_is_stopped_leaves_no_lease_and_no_part_of_a_file(
    root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, command: str, signum: int
) -> None:
    words, operation, what = COMMANDS[command]
    before = files_of(root)
    seen: list[int] = []
    with monkeypatch.context() as patch:
        _signal_at(patch, operation, what, signum, seen)
        arguments = [str(tmp_path / "out") if word == "OUT" else word for word in words]
        assert run_command("checkpoint", command, root.parent, *arguments) == 130
    assert seen
    assert seen[0] > 0
    assert not list(root.glob("leases/*"))
    assert [path.name for path in tmp_path.iterdir()] == ["run"]
    if command != "gc":
        assert files_of(root) == before
    assert signal.getsignal(signal.SIGTERM) is signal.SIG_DFL
    # whoever comes next isn't held up
    assert run_command("checkpoint", "gc", root.parent) == 0


def test_a_hang_up_that_is_ignored_stays_ignored(root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        _signal_at(monkeypatch, "open", "data/", signal.SIGHUP, [])
        assert run_command("checkpoint", "export", root.parent, "--to", "parquet", "--out", tmp_path / "out") == 0
    finally:
        signal.signal(signal.SIGHUP, before)
    assert len(list((tmp_path / "out").iterdir())) == 4
