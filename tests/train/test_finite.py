"""A loss that isn't finite is traced to its table, row, input or dense part; spoiled weights are never committed."""

import math
from pathlib import Path

import pytest
import torch

from dlrm_scale.batch import Batch
from dlrm_scale.checkpoint import find_chain
from dlrm_scale.data.loading.loader import TrainLoader
from dlrm_scale.errors import TrainingError
from dlrm_scale.train.finite_cause import FiniteCause
from dlrm_scale.train.loop import TrainingLoop
from dlrm_scale.train.run_folder import resolve_run
from dlrm_scale.train.stop import StopRequest
from dlrm_scale.train.trainer import train_rank
from tests.support.datasets import make_dataset, row_numbers
from tests.support.rank_runner import run_ranks
from tests.support.training import SMALL_MODEL, log_records

TYPES = (
    "table_wise",
    "row_wise",
    "column_wise",
    "table_row_wise",
    "table_column_wise",
    "grid_shard",
    "data_parallel",
)

_BAD_ROW = 123


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("data") / "dataset"
    make_dataset(
        path, 400, table_rows=[9000, 40, 10, 2, *[40] * 22], split={"train": [(0, 320)], "validation": [(320, 400)]}
    )
    return path


def _train(run: str, dataset: str, settings: list[str], spoil: str, at_step: int, deferred: bool) -> None:
    """Train with something spoiled before a step: `C3:1:5` (row, column), `dense:NAME`, `input:3` or `update`."""
    rate = TrainingLoop._set_learning_rates
    begin = FiniteCause.__init__
    take = TrainLoader.__next__

    def spoiled_input(self: TrainLoader) -> Batch:
        batch = take(self)
        rows = torch.from_numpy(row_numbers(batch.dense_features[: batch.rows_local])) == _BAD_ROW
        batch.dense_features[: batch.rows_local][rows, int(spoil.split(":")[1])] = math.nan
        return batch

    def watched(self: TrainingLoop) -> None:
        rate(self)
        if self.step + 1 != at_step:
            return
        kind, *where = spoil.split(":")
        if kind == "dense":
            name = next(n for n in self.sharded.dense_parameters if where[0] in n)
            self.sharded.dense_parameters[name].data.view(-1)[0] = math.inf
        for index, shard in enumerate(self.sharded.local_shards):
            region = shard.region
            if region.table != kind or not region.row_start <= int(where[0]) < region.row_end:
                continue
            if region.column_start <= int(where[1]) < region.column_end:
                row = int(where[0]) - region.row_start
                shard.weight[row, int(where[1]) - region.column_start] = math.nan
                if "marked" in where:
                    self.saver.touched.mark(index, torch.tensor([row]))

    TrainingLoop._set_learning_rates = watched
    if spoil.startswith("input"):
        TrainLoader.__next__ = spoiled_input
    if deferred:
        FiniteCause.__init__ = lambda self, *args: begin(self, *args, deferred=True)
    try:
        overrides = [f"run.path={run}", f"data.path={dataset}", *SMALL_MODEL, *settings]
        train_rank(resolve_run("sample", overrides), StopRequest())
    finally:
        TrainingLoop._set_learning_rates, FiniteCause.__init__, TrainLoader.__next__ = rate, begin, take


def _spoiled_run(
    run: Path, dataset: Path, spoil: str, *settings: str, ranks: int = 2, at_step: int = 5, deferred: bool = False
) -> str:
    with pytest.raises(TrainingError) as error:
        run_ranks(ranks, _train, str(run), str(dataset), list(settings), spoil, at_step, deferred)
    return str(error.value)


@pytest.mark.parametrize("kind", TYPES)
def test_a_bad_row_is_named_under_every_sharding_type(kind: str, dataset: Path, tmp_path: Path) -> None:
    settings = [f"sharding.kind={kind}", "sharding.allow_split_row_state=true"]
    # row 0 is the hottest: both ranks meet it in every batch
    pipeline = "plain" if TYPES.index(kind) % 2 else "sparse_dist"
    text = _spoiled_run(tmp_path / "run", dataset, "C3:0:5", *settings, f"train.pipeline={pipeline}")
    assert "step 5: the loss on rank" in text
    assert "table C3: row 0" in text
    assert "not finite" in text
    assert "C1:" not in text
    assert "C2:" not in text
    assert "predictions that aren't finite: row " in text
    assert "of the dataset" in text
    chain = find_chain(tmp_path / "run" / "checkpoints")
    assert chain is not None
    assert chain.step == 3


def test_the_column_is_named_where_the_row_is_on_that_rank(dataset: Path, tmp_path: Path) -> None:
    text = _spoiled_run(tmp_path / "run", dataset, "C3:0:5", "sharding.kind=table_wise", ranks=1)
    assert "table C3: row 0 (column 5 is nan) is not finite" in text


def test_flags_that_are_read_late_name_the_same_row(dataset: Path, tmp_path: Path) -> None:
    for ranks in (1, 2):
        settings = ["sharding.kind=row_wise", "checkpoint.every_steps=0"]
        text = _spoiled_run(tmp_path / f"run{ranks}", dataset, "C3:0:5", *settings, ranks=ranks, deferred=True)
        assert "step 5: the loss on rank" in text
        assert "table C3: row 0" in text
        assert "C1:" not in text


def test_a_bad_dense_parameter_is_named(dataset: Path, tmp_path: Path) -> None:
    text = _spoiled_run(tmp_path / "run", dataset, "dense:over_arch")
    assert "dense parameters that aren't finite: dlrm.over_arch" in text
    assert "table" not in text.split("remedy")[0]


def test_a_bad_input_is_named_with_its_column_and_rows(dataset: Path, tmp_path: Path) -> None:
    text = _spoiled_run(tmp_path / "run", dataset, "input:7")
    assert f"the input is not finite: I8 is nan in row {_BAD_ROW} of the dataset" in text
    assert f"predictions that aren't finite: row {_BAD_ROW} of the dataset" in text


def test_an_overflow_of_finite_values_is_told_apart(dataset: Path, tmp_path: Path) -> None:
    text = _spoiled_run(tmp_path / "run", dataset, "nothing", "dense_optimizer.learning_rate=1e30", ranks=1, at_step=99)
    assert "the forward pass overflowed" in text or "dense parameters that aren't finite" in text


def test_a_finite_step_that_spoils_a_row_is_not_committed(dataset: Path, tmp_path: Path) -> None:
    # C1's last row is never looked up: no loss ever tells
    for ranks in (1, 2):
        run = tmp_path / f"run{ranks}"
        text = _spoiled_run(run, dataset, "C1:8999:5:marked", "sharding.kind=row_wise", ranks=ranks)
        assert "the checkpoint of step 6 is refused" in text
        assert "table C1: weight of row 8999, column 5, is nan" in text
        chain = find_chain(run / "checkpoints")
        assert chain is not None
        assert chain.step == 3
        saves = log_records(run, "checkpoint")
        assert [(r["step"], r["committed"]) for r in saves][:2] == [(3, True), (6, False)]
