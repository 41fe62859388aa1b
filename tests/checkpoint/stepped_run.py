"""A run whose tables are a function of the step alone, so that whatever was saved can be judged without its history."""

import random

import torch

from dlrm_scale.schema import TableSpec
from tests.checkpoint.simulated_run import Run, Truth

__all__ = ["OPTIMIZER", "TABLES", "touched_rows", "train_step", "truth_of"]

TABLES = (TableSpec(name="C1", rows=61, dim=8), TableSpec(name="C2", rows=3, dim=4))
OPTIMIZER = "rowwise_adagrad"


def touched_rows(step: int) -> dict[str, list[int]]:
    """Rows that a step changes."""
    chosen = random.Random(step)
    return {spec.name: chosen.sample(range(spec.rows), min(spec.rows, 5)) for spec in TABLES}


def truth_of(step: int) -> Truth:
    """The tables after a step."""
    truth = Truth(
        weight={s.name: torch.zeros(s.rows, s.dim) for s in TABLES},
        state={s.name: {"momentum1": torch.zeros(s.rows)} for s in TABLES},
    )
    for done in range(1, step + 1):
        for table, ids in touched_rows(done).items():
            truth.weight[table][ids] += done
            truth.state[table]["momentum1"][ids] += done + len("momentum1")
    return truth


def train_step(run: Run, step: int) -> None:
    """Change the rows of a step on all ranks."""
    for table, ids in touched_rows(step).items():
        run.change(table, ids, float(step))
