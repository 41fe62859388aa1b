"""Training that is killed at any moment, or told to end while it saves, goes on as if it had not been."""

import os
import random
import signal
import sys
from pathlib import Path

import pytest

from dlrm_scale.checkpoint import find_chain
from dlrm_scale.checkpoint.storage.local_storage import LocalStorage
from dlrm_scale.train.run_folder import resolve_run
from dlrm_scale.train.run_result import RunResult
from dlrm_scale.train.stop import StopRequest
from dlrm_scale.train.trainer import train_rank
from tests.support.datasets import make_dataset
from tests.support.rank_runner import RankDied, run_ranks
from tests.support.training import SMALL_MODEL, losses, read_tables, run_training, same_tables

STEPS = 60


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("data") / "dataset"
    make_dataset(path, 32 * STEPS)
    return path


@pytest.fixture(scope="module")
def straight(dataset: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that nothing interrupts."""
    run = tmp_path_factory.mktemp("runs") / "straight"
    run_training(2, run, dataset, ["sharding.kind=row_wise"])
    return run


def _train(run: str, dataset: str, strike_rank: int, strike_at: int, kind: str) -> RunResult:
    """Train, or go on; a rank gets a signal before one of the operations of its storage."""
    resume = Path(run, "checkpoints").exists()
    settings = [f"run.path={run}"]
    if not resume:
        settings += [f"data.path={dataset}", *SMALL_MODEL, "sharding.kind=row_wise", "checkpoint.keep_baselines=1"]
        settings += ["checkpoint.baseline_ratio=0.3"]
    request = resolve_run(None if resume else "sample", settings, resume=resume)
    if int(os.environ["RANK"]) == strike_rank:
        _strike_before_operation(strike_at, signal.Signals[kind])
    stop = StopRequest()
    stop.install()
    return train_rank(request, stop)


def _strike_before_operation(number: int, kind: signal.Signals) -> None:
    left = number

    def wrap(name: str) -> None:
        plain = getattr(LocalStorage, name)

        def struck(self: LocalStorage, *arguments: str) -> object:
            nonlocal left
            left -= 1
            if left == 0:
                os.kill(os.getpid(), kind)
            return plain(self, *arguments)

        setattr(LocalStorage, name, struck)

    # The process ends, or does nothing else after this, so they stay.
    for name in ("create", "link", "remove", "sync_folder", "list_names"):
        wrap(name)


def _kill_and_resume(run: Path, dataset: Path, kills: int) -> int:
    """Go on and on from kills at random operations; returns how many there were before the run had ended."""
    chance = random.Random(kills)
    newest = 0
    for kill in range(kills):
        rank = chance.randrange(2)
        try:
            run_ranks(2, _train, str(run), str(dataset), rank, chance.randint(2, 20 if rank else 60), "SIGKILL")
        except RankDied:
            chain = find_chain(run / "checkpoints", verify="full") if (run / "checkpoints").exists() else None
            assert (chain.step if chain else 0) >= newest
            newest = chain.step if chain else 0
            continue
        return kill
    run_ranks(2, _train, str(run), str(dataset), 0, 0, "SIGKILL", fresh=True)
    return kills


@pytest.mark.slow
@pytest.mark.parametrize("kills", [4, 5, 6])
def test_a_run_killed_again_and_again_equals_one_that_was_not(
    kills: int, straight: Path, dataset: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    done = _kill_and_resume(tmp_path / "run", dataset, kills)
    with capsys.disabled():
        sys.stdout.write(f"\n{done} kills of a trainer, no row lost, repeated or changed\n")
    assert done >= 2
    assert losses(tmp_path / "run") == losses(straight)
    assert same_tables(read_tables(tmp_path / "run"), read_tables(straight))


@pytest.mark.slow
def test_a_signal_while_a_save_is_written_ends_the_run_with_a_checkpoint_of_its_last_step(
    straight: Path, dataset: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    results = run_ranks(2, _train, str(run), str(dataset), 0, 30, "SIGTERM", fresh=True)
    assert results[0].state == "stopped"
    chain = find_chain(run / "checkpoints", verify="full")
    assert chain is not None
    assert 0 < chain.step == results[0].step < STEPS
    run_training(2, run, dataset, resume=True)
    assert losses(run) == losses(straight)
    assert same_tables(read_tables(run), read_tables(straight))
