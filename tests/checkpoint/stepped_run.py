"""A run whose tables are a function of the step alone, so that whatever was saved can be judged without its history.

Tables may be other ones from some step on: what a row holds at a step doesn't depend on how many rows its table has, so
a table that has grown, shrunk or is new holds at each step what it would if it had always been so.
"""

import random
from collections.abc import Sequence

import torch

from dlrm_scale.schema import TableSpec
from tests.checkpoint.simulated_run import Run, Truth

__all__ = ["OPTIMIZER", "RESIZED", "TABLES", "touched_rows", "train_step", "truth_of"]

TABLES = (TableSpec(name="C1", rows=61, dim=8), TableSpec(name="C2", rows=3, dim=4))
OPTIMIZER = "rowwise_adagrad"

RESIZED = (
    TableSpec(name="C1", rows=75, dim=8),  # grown
    TableSpec(name="C2", rows=2, dim=4),  # shrunk
    TableSpec(name="C3", rows=9, dim=4),  # new
)

_WILD_ROWS = (5, 33)
"""Hold a value that drowns the others of the row, so that no codec may take them."""


def touched_rows(step: int, tables: Sequence[TableSpec] = TABLES) -> dict[str, list[int]]:
    """Rows that a step changes."""
    chosen = random.Random(step)
    picked = {spec.name: chosen.sample(range(spec.rows), min(spec.rows, 5)) for spec in TABLES}
    first = {spec.name: spec.rows for spec in TABLES}
    for spec in tables:
        added = random.Random(f"{step} {spec.name}")
        more = [row for row in range(first.get(spec.name, 0), spec.rows) if added.random() < 0.2]
        picked[spec.name] = [row for row in picked.get(spec.name, []) if row < spec.rows] + more
    return {spec.name: picked[spec.name] for spec in tables}


def truth_of(step: int, tables: Sequence[TableSpec] = TABLES) -> Truth:
    """The tables after a step."""
    truth = Truth(
        weight={s.name: _first_weight(s) for s in tables},
        state={s.name: {"momentum1": torch.zeros(s.rows)} for s in tables},
    )
    for done in range(1, step + 1):
        for table, ids in touched_rows(done, tables).items():
            truth.weight[table][ids] += done
            truth.state[table]["momentum1"][ids] += done + len("momentum1")
    return truth


def _first_weight(spec: TableSpec) -> torch.Tensor:
    # No two rows alike, and none that a codec keeps as it is.
    rows, columns = torch.arange(spec.rows)[:, None], torch.arange(spec.dim)[None, :]
    weight = torch.sin(rows * 0.7 + columns * columns * 0.3 + len(spec.name))
    for row in _WILD_ROWS:
        if row < spec.rows:
            weight[row, 1] = 1e30
    return weight


def train_step(run: Run, step: int) -> None:
    """Change the rows of a step on all ranks."""
    for table, ids in touched_rows(step, [table.spec for table in run.layout.tables]).items():
        run.change(table, ids, float(step))
