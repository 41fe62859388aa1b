"""Rows are written in the order of the input whatever the ranks, batches and pieces."""

import errno
import os
import signal
from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from dlrm_scale.data.dataset.dataset import Dataset
from dlrm_scale.errors import CheckpointError, DatasetError, TrainingError
from dlrm_scale.recipes import load_config
from dlrm_scale.scoring import predict_run
from dlrm_scale.scoring.predict_input import dataset_sources
from dlrm_scale.scoring.predict_run import PredictRequest, PredictResult, predict_rank, scored_ranges
from dlrm_scale.scoring.score_file import RowPlaces, ScoreWriter, SourceLines
from dlrm_scale.train.evaluate import ScoredRows
from dlrm_scale.train.stop import StopRequest
from tests.support.datasets import make_dataset
from tests.support.rank_runner import run_ranks
from tests.support.training import run_training


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("predict")
    split = {"train": [(0, 100)], "validation": [(100, 130), (140, 177)], "test": [(130, 140)]}
    make_dataset(path / "dataset", (90, 87), split=split)
    run_training(1, path / "run", path / "dataset", ["train.max_steps=2", "sharding.kind=table_wise"])
    return path


def _predict(folder: str, file: str, split: str, batch_size: int, told: int | None = None) -> PredictResult:
    predict_run._ROWS_AT_ONCE = 50
    stop = StopRequest()
    if told == int(os.environ["RANK"]):
        stop.handle(signal.SIGTERM)
    root = Path(folder)
    dataset = Dataset.open(root / "dataset")
    request = PredictRequest(
        config=load_config(root / "run" / "config.toml", [f"train.validation_batch_size={batch_size}"]),
        run=str(root / "run"),
        step=None,
        manifest="",
        data=str(root / "dataset"),
        places=RowPlaces(sources=dataset_sources(dataset), ranges=scored_ranges(dataset, split)),
        file=file,
        format="parquet",
    )
    return predict_rank(request, stop)


def _predict_on_a_full_disk(folder: str, file: str) -> None:
    def full(self: ScoreWriter, logits: np.ndarray, labels: np.ndarray) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    write = ScoreWriter.write
    ScoreWriter.write = full
    try:
        _predict(folder, file, "all", 30)
    finally:
        ScoreWriter.write = write


def test_one_two_and_three_ranks_write_the_same_rows(folder: Path, tmp_path: Path) -> None:
    tables, results = [], []
    for ranks, batch_size in ((1, 177), (1, 8), (2, 7), (3, 10), (3, 2)):
        file = tmp_path / f"{ranks}-{batch_size}.parquet"
        results.append(run_ranks(ranks, _predict, str(folder), str(file), "all", batch_size)[0])
        tables.append(pq.read_table(file))
    expected = tables[0]
    assert expected.column("row").to_pylist() == list(range(177))
    assert expected.column("line").to_pylist() == [*range(1, 91), *range(1, 88)]
    assert expected.column("source").to_pylist() == [*["day_0"] * 90, *["day_1"] * 87]
    for table in tables[1:]:
        assert table.drop_columns(["logit", "probability"]).equals(expected.drop_columns(["logit", "probability"]))
        # matrices of other numbers of rows may round differently
        np.testing.assert_allclose(table.column("logit"), expected.column("logit"), atol=1e-6)
    for result in results:
        assert result.rows == 177
        assert result.metrics is not None
        assert result.metrics.logloss == pytest.approx(results[0].metrics.logloss, abs=1e-6)


def test_a_split_of_several_ranges_keeps_the_rows_numbers(folder: Path, tmp_path: Path) -> None:
    run_ranks(2, _predict, str(folder), str(tmp_path / "all"), "all", 9)
    run_ranks(2, _predict, str(folder), str(tmp_path / "part"), "validation", 9)
    rows = [*range(100, 130), *range(140, 177)]
    part, whole = pq.read_table(tmp_path / "part"), pq.read_table(tmp_path / "all").take(rows)
    assert part.column("row").to_pylist() == rows
    assert part.column("line").to_pylist() == whole.column("line").to_pylist()
    assert part.column("label").to_pylist() == whole.column("label").to_pylist()
    np.testing.assert_allclose(part.column("logit"), whole.column("logit"), atol=1e-6)


def test_a_signal_to_one_rank_ends_the_scoring_on_all(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(TrainingError, match="stopped by"):
        run_ranks(2, _predict, str(folder), str(tmp_path / "scores"), "all", 30, told=1)


def test_scores_of_an_older_checkpoint_than_the_log_tells_of_say_so_and_of_none_are_refused(
    folder: Path, tmp_path: Path
) -> None:
    run_training(1, tmp_path / "run", folder / "dataset", ["train.max_steps=2", "checkpoint.every_steps=1"])
    (tmp_path / "dataset").symlink_to(folder / "dataset")
    older, newest = sorted((tmp_path / "run/checkpoints/manifests").iterdir())
    newest.unlink()
    (result,) = run_ranks(1, _predict, str(tmp_path), str(tmp_path / "scores"), "all", 30)
    assert result.step == 1
    assert any(f"{newest.name} (step 2): it is missing, and log.jsonl tells" in note for note in result.notes)
    older.unlink()
    with pytest.raises(CheckpointError, match=r"log\.jsonl tells of committed checkpoints, and .* has none"):
        run_ranks(1, _predict, str(tmp_path), str(tmp_path / "again"), "all", 30)


def test_a_full_disk_is_told_as_such(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(DatasetError, match=r"the scores can't be written: .*No space left on device"):
        run_ranks(2, _predict_on_a_full_disk, str(folder), str(tmp_path / "scores"))


def test_rows_by_rank_and_batch_become_rows_by_batch() -> None:
    # two batches of 5 and 2 rows on 3 ranks: shares 1, 2, 2 and 0, 1, 1
    by_rank = np.array([0, 1, 2, 5, 3, 4, 6], np.float32)
    ordered = predict_run._in_order(ScoredRows(logits=by_rank, labels=by_rank.astype(np.uint8)), [5, 2], 3)
    assert ordered.logits.tolist() == ordered.labels.tolist() == list(range(7))


def test_lines_step_over_headers_and_bad_rows() -> None:
    source = SourceLines(name="a", rows=5, lines_before=1, rejected=np.array([2, 4, 5, 9]))
    # lines 1 to 9: header, bad, row, bad, bad, row, row, row, bad, row
    assert source.lines(np.arange(5)).tolist() == [3, 6, 7, 8, 10]
    assert SourceLines(name="b", rows=3).lines(np.arange(3)).tolist() == [1, 2, 3]
