"""4 GiB of tables on two ranks: no rank holds more than its part, and the rows move between rank counts."""

import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from dlrm_scale.data.dataset.dataset import ROWS_PER_RECORD_BATCH
from dlrm_scale.layout import ShardRegion
from dlrm_scale.models.initial_rows import fill_initial_rows
from dlrm_scale.schema import TableSpec
from dlrm_scale.units import GIB
from tests.support.datasets import make_dataset
from tests.support.training import SMALL_MODEL, read_tables

_ROWS = 16 * 1024 * 1024
_DIM = 64


def _train(ranks: int, *arguments: str) -> dict[str, object]:
    command = [sys.executable, "-m", "dlrm_scale", "train", *arguments, "--nproc", str(ranks), "--json"]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=1200, check=False)
    assert ended.returncode == 0, ended.stderr
    result: dict[str, object] = json.loads(ended.stdout)
    return result


@pytest.mark.slow
@pytest.mark.timeout(3000)
def test_four_gib_of_tables_train_save_and_move_within_their_memory(tmp_path: Path) -> None:
    dataset, run = tmp_path / "dataset", tmp_path / "run"
    rows = make_dataset(dataset, 2000, table_rows=[_ROWS, *[100] * 25])
    settings = [
        *SMALL_MODEL,
        f"model.dim={_DIM}",
        f"model.dense_layers=[{_DIM}]",
        "sharding.kind=row_wise",
        f"run.path={run}",
        f"data.path={dataset}",
    ]
    start = ["sample", *(part for setting in settings for part in ("--set", setting))]
    weights_and_state_bytes = _ROWS * (_DIM + 1) * 4
    assert weights_and_state_bytes > 4 * GIB
    for index, (ranks, steps) in enumerate([(2, 6), (4, 9), (2, 12)]):
        resume = ["--resume", "auto", "--set", f"run.path={run}"]
        result = _train(ranks, *(resume if index else start), "--set", f"train.max_steps={steps}")
        assert result["step"] == steps
        peak = result["peak_memory_bytes"]
        assert isinstance(peak, int)
        assert peak <= weights_and_state_bytes / ranks + GIB, f"{ranks} ranks: {peak / GIB:.2f} GiB"
    # every row that no batch looked up is still the initial one, in its place, after moving 2 -> 4 -> 2
    spec = TableSpec(name="C1", rows=_ROWS, dim=_DIM)
    whole = ShardRegion(table="C1", row_start=0, row_end=_ROWS, column_start=0, column_end=_DIM, rank=0)
    initial = torch.empty(_ROWS, _DIM)
    fill_initial_rows(initial, spec, whole, 0)
    trained = torch.from_numpy(read_tables(run)["C1.weight"])
    changed = (trained != initial).any(dim=1).nonzero().squeeze(1).numpy()
    looked_up = np.concatenate([rows.read(0, index)[2][0] for index in range(-(-2000 // ROWS_PER_RECORD_BATCH))])
    assert 100 < len(changed) <= 12 * 32
    assert np.isin(changed, looked_up).all()
    # the deltas of both later starts went on from the first baseline
    assert len(list((run / "checkpoints" / "manifests").iterdir())) == 4
