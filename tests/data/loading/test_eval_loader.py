"""Evaluation covers a split exactly."""

from pathlib import Path

import numpy as np
import pytest

from dlrm_scale.data.dataset.dataset import Dataset
from dlrm_scale.data.loading.loader import EvalLoader
from tests.support.datasets import make_dataset
from tests.support.loader_steps import check_step, evaluate, rows_global, rows_of


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    """1,400 validation rows and one test row."""
    split = {"validation": [(9_100, 10_500)], "test": [(30_001, 30_002)]}
    return make_dataset(tmp_path_factory.mktemp("dataset"), [10_000, 0, 1_137, 20_000], split=split)


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
@pytest.mark.parametrize("batch_size", [1, 4, 97, 1_400, 5_000])
def test_evaluation_covers_exactly_the_split_in_file_order(tmp_path: Path, ranks: int, batch_size: int) -> None:
    # Across the end of a record batch and of a part.
    ranges = [(8_180, 8_200), (8_990, 9_010 if batch_size == 1 else 10_370)]
    dataset = make_dataset(tmp_path, [9_000, 3_000], split={"validation": ranges})
    rows = dataset.split_rows("validation")
    assert rows == (40 if batch_size == 1 else 1_400)
    expected = np.concatenate([np.arange(a, z) for a, z in ranges])
    steps = evaluate(dataset, ranks, split="validation", batch_size=batch_size)
    assert len(steps) == -(-rows // batch_size)
    for step in steps:
        check_step(step)
    assert np.array_equal(np.concatenate([rows_global(step) for step in steps]), expected)
    labels = np.concatenate([b.labels[: b.rows_local] for step in steps for b in step])
    parts = [dataset.read(0, 0), dataset.read(0, 1), dataset.read(1, 0)]
    assert np.array_equal(labels, np.concatenate([p[0] for p in parts])[expected])
    last = steps[-1][-1]
    if last.rows_local:
        ids = np.concatenate([p[2] for p in parts], axis=1)[:, expected[-1]]
        assert np.array_equal(last.sparse_features.values().view(26, -1)[:, -1], ids)


@pytest.mark.parametrize("ranks", [1, 3])
def test_an_empty_split_has_no_batches(dataset: Dataset, tmp_path: Path, ranks: int) -> None:
    empty = make_dataset(tmp_path, 10)
    assert EvalLoader(empty, split="validation", batch_size=4, rank=0, ranks=ranks).rows == 0
    assert evaluate(empty, ranks, split="validation", batch_size=4) == []
    assert [rows_global(s).tolist() for s in evaluate(dataset, ranks, split="test", batch_size=4)] == [[30_001]]


def test_evaluation_stops_at_the_limit_and_starts_again_each_time(dataset: Dataset) -> None:
    loader = EvalLoader(dataset, split="validation", batch_size=64, rank=0, ranks=1, limit_rows=100)
    assert (loader.rows, loader.steps) == (100, 2)
    for _ in range(2):
        assert np.concatenate([rows_of(b) for b in loader]).tolist() == list(range(9_100, 9_200))
    everything = EvalLoader(dataset, split="validation", batch_size=64, rank=0, ranks=1, limit_rows=5_000)
    assert everything.rows == 1_400
