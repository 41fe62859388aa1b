"""Merges, restores and removals as other processes would do them, on the roots of simulated runs."""

from pathlib import Path
from typing import Any

from dlrm_scale.checkpoint import Chain, find_chain, open_storage
from dlrm_scale.checkpoint.chain.chain import open_step
from dlrm_scale.checkpoint.storage.storage import Storage
from dlrm_scale.checkpoint.upkeep.merge import Merged, merge_chain
from dlrm_scale.checkpoint.upkeep.merge_plan import MergeTarget
from dlrm_scale.layout import ShardLayout
from tests.checkpoint.simulated_run import TABLES, Run, Truth, make_layout, make_truth

ADAGRAD = "rowwise_adagrad"


def merge(location: Path | Storage, to: MergeTarget, step: int | None = None, **options: Any) -> list[Merged]:
    """Merge the newest chain, or that of a step."""
    storage = open_storage(location)

    def choose() -> Chain | None:
        return find_chain(storage) if step is None else open_step(storage, step)

    return merge_chain(storage, choose, to, **options)


def start(root: Path, layout: ShardLayout | None = None, truth: Truth | None = None, **options: Any) -> Run:
    """A trainer that writes deltas only after its first baseline."""
    layout = layout if layout is not None else make_layout("row_wise", 2)
    truth = truth if truth is not None else make_truth(TABLES, ["row"])
    return Run(root, layout, truth, **{"merger": True, **options})


def go_on(run: Run, steps: range) -> None:
    """Change some rows and save, once for each step; neighbours share rows, and some rows are never touched."""
    for step in steps:
        for table, ids, value in _changes(step):
            run.change(table, ids, value)
        outcome = run.save(step)
        assert outcome.committed, outcome.error


def truth_of(step: int) -> Truth:
    """What `start` and `go_on` from step 0 to this one make."""
    truth = make_truth(TABLES, ["row"])
    for done in range(step + 1):
        for table, ids, value in _changes(done):
            rows = sorted(set(ids))
            truth.weight[table][rows] += value
            truth.state[table]["momentum1"][rows] += abs(value) + len("momentum1")
    return truth


def _changes(step: int) -> list[tuple[str, list[int], float]]:
    changes = [("C1", [step % 97, (step + 1) % 97, 5, 96], 1.0 + step), ("C3", [(7 * step) % 40], 0.5)]
    return [*changes, ("C4", [0], 1.0)] if step % 3 == 0 else changes


def files_of(root: Path) -> set[str]:
    """Names of all data files, manifests and leases."""
    return {str(p.relative_to(root)) for f in ("data", "manifests", "leases") for p in (root / f).glob("*")}
