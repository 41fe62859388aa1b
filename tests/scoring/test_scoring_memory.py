"""What evaluation and prediction take is predicted before tables are allocated, and refused if it isn't there."""

from pathlib import Path
from typing import Any

import pytest

from dlrm_scale.errors import PlanError
from dlrm_scale.host_memory import HostMemory
from dlrm_scale.recipes import load_config
from dlrm_scale.scoring.evaluate_run import EvaluationRequest, EvaluationResult, evaluate_rank
from dlrm_scale.scoring.predict_run import PredictRequest, predict_rank
from dlrm_scale.scoring.score_file import RowPlaces, SourceLines
from dlrm_scale.train.memory import memory_check
from dlrm_scale.train.run_folder import RunFolder
from dlrm_scale.train.stop import StopRequest
from dlrm_scale.units import GIB, MIB
from tests.support.datasets import make_dataset
from tests.support.rank_runner import run_ranks
from tests.support.training import run_training

LARGE = 1_000_000
_SPLIT = {"train": [(0, 600)], "validation": [(600, 8600)]}


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("data") / "dataset"
    make_dataset(path, 8600, table_rows=[LARGE, *[50] * 25], split=_SPLIT)
    return path


@pytest.fixture(scope="module")
def run(dataset: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("runs") / "run"
    settings = ["train.max_steps=1", "model.dim=32", "model.dense_layers=[512, 32]", "model.over_layers=[512, 1]"]
    run_training(1, path, dataset, settings)
    return path


def _evaluate(run: str, overrides: list[str]) -> EvaluationResult:
    config = load_config(RunFolder(path=Path(run)).config, overrides)
    request = EvaluationRequest(config=config, run=run, data=config.data.path, split="validation", step=None)
    return evaluate_rank(request, StopRequest())


def _evaluate_in(run: str, overrides: list[str], free_bytes: int) -> EvaluationResult:
    """Evaluate on a host that has so much memory left."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(memory_check, "host_memory", lambda: _host(free_bytes))
        return _evaluate(run, overrides)


def _host(free_bytes: int) -> HostMemory:
    return HostMemory(total_bytes=GIB, free_bytes=free_bytes, limited=True)


@pytest.mark.parametrize(
    ("ranks", "settings"),
    [
        (1, ["train.validation_batch_size=8000"]),
        pytest.param(2, ["sharding.kind=row_wise"], marks=pytest.mark.slow),
        pytest.param(2, ["sharding.kind=data_parallel"], marks=pytest.mark.slow),
    ],
    ids=["large batches", "row_wise", "data_parallel"],
)
def test_the_prediction_is_close_to_what_a_fresh_process_takes(ranks: int, settings: list[str], run: Path) -> None:
    results = run_ranks(ranks, _evaluate, str(run), settings, fresh=True)
    assert [result.metrics.rows for result in results] == [8000] * ranks
    use: Any = results[0].memory["ranks"]
    assert [rank["rank"] for rank in use] == list(range(ranks))
    for rank in use:
        predicted, peak, held = rank["predicted_bytes"], rank["peak_bytes"], rank["held_bytes"]
        assert 0.8 * peak <= predicted <= 1.25 * peak, (rank, results[0].memory["items"])
        assert 0.8 * (peak - held) - 40 * MIB <= predicted - held <= 1.25 * (peak - held) + 40 * MIB, rank


def test_scoring_that_can_not_fit_is_refused_before_tables_are_allocated(run: Path) -> None:
    with pytest.raises(PlanError, match=r"not enough memory: the host of rank 0 has 10\.0 MiB left") as error:
        run_ranks(1, _evaluate_in, str(run), [], 10 * MIB)
    assert "tables 122." in str(error.value)
    [result] = run_ranks(1, _evaluate_in, str(run), ["train.memory_check=warn"], 10 * MIB)
    assert "not enough memory" in result.notes[0]


def _predict(run: str, out: str, free_bytes: int) -> None:
    config = load_config(RunFolder(path=Path(run)).config, [])
    places = RowPlaces(sources=(SourceLines(name="a", rows=8600),), ranges=((0, 8600),))
    request = PredictRequest(
        config=config,
        run=run,
        step=None,
        manifest="",
        data=config.data.path,
        places=places,
        file=out,
        format="csv",
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(memory_check, "host_memory", lambda: _host(free_bytes))
        predict_rank(request, StopRequest())


def test_prediction_is_refused_alike(run: Path, tmp_path: Path) -> None:
    with pytest.raises(PlanError, match=r"not enough memory: [^\n]*\n  rank 0: .*tables 122\."):
        run_ranks(1, _predict, str(run), str(tmp_path / "scores.csv"), 10 * MIB)
    assert not (tmp_path / "scores.csv").exists()
