"""Programs for tests of processes: a trainer, restores until its last step is there, and a merge that is killed."""

import sys
from pathlib import Path

import torch

from dlrm_scale.checkpoint import find_chain
from dlrm_scale.checkpoint.chain.leases import hold_chain
from dlrm_scale.checkpoint.storage.local_storage import LocalStorage
from tests.checkpoint.faulty_storage import Trace, TracedStorage, kill_at
from tests.checkpoint.merging import ADAGRAD, go_on, merge, start, truth_of
from tests.checkpoint.simulated_run import load_chain, make_layout


def train(root: Path, stop: Path) -> None:
    """Save until the file `stop` is there, saying each step once it is found."""
    run = start(root, make_layout("row_wise", 1))
    step = 0
    while step == 0 or not stop.exists():
        go_on(run, range(step, step + 1))
        chain = find_chain(root, verify="full")
        assert chain is not None
        assert chain.step == step, "a step that was acknowledged is lost"
        sys.stdout.write(f"{step}\n")
        sys.stdout.flush()
        step += 1


def restore_until(root: Path, stop: Path) -> None:
    """Restore again and again, checking all rows, until the file `stop` names a last step; say how often."""
    restores, step = 0, -1
    while not (stop.exists() and step >= int(stop.read_text() or 10**9)):
        with hold_chain(LocalStorage(root), lambda: find_chain(root)) as chain:
            assert chain is not None
            assert chain.step >= step, "a step that was there is lost"
            step = chain.step
            like = truth_of(step)
            assert load_chain(chain, make_layout("row_wise", 1), like, optimizer=ADAGRAD).equals(like)
            restores += 1
    sys.stdout.write(f"{restores}\n")


def merge_and_die(root: Path, at: str) -> None:
    """Merge, and be killed before the first operation that begins like `at`."""
    trace = Trace()

    def act(index: int, operation: str, name: str) -> None:
        if f"{operation} {name}".startswith(at):
            kill_at(index)(index, operation, name)

    trace.act = act
    merge(TracedStorage(root, trace), "baseline")


if __name__ == "__main__":
    torch.set_num_threads(1)
    what, where, word = sys.argv[1], Path(sys.argv[2]), sys.argv[3]
    if what == "train":
        train(where, Path(word))
    elif what == "restore":
        restore_until(where, Path(word))
    else:
        merge_and_die(where, word)
