"""Batches of datasets whose columns have bags of ids."""

import json
import os
from collections.abc import Collection, Mapping
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from dlrm_scale.batch import Batch
from dlrm_scale.config import DataConfig
from dlrm_scale.data.dataset.dataset import Dataset
from dlrm_scale.data.loading.loader import TrainLoader
from dlrm_scale.data.loading.ragged_rows import BagColumns, RaggedRows, with_room
from dlrm_scale.errors import ConfigError, DatasetError
from dlrm_scale.schema import CATEGORY_COLUMNS
from tests.support.datasets import bags_of, make_dataset
from tests.support.loader_steps import Step, check_step, evaluate, rows_global, rows_of

MULTI_HOT = {"C1": 3, "C3": 9, "C17": 1, "C26": 40}
TRAINING_ROWS = np.concatenate([np.arange(5, 9_000), np.arange(11_000, 20_001)])


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    """Uneven parts, one empty; four of the columns are multi-hot."""
    return make_dataset(
        tmp_path_factory.mktemp("dataset"),
        [10_000, 0, 1_137, 10_000],
        split={"train": [(5, 9_000), (11_000, 20_001)], "validation": [(9_100, 10_500)]},
        multi_hot=MULTI_HOT,
    )


@pytest.fixture(scope="module")
def bags(dataset: Dataset) -> list[list[list[int]]]:
    """Ids of every column and row of the dataset."""
    return _slow_bags(dataset)


def _slow_bags(dataset: Dataset) -> list[list[list[int]]]:
    """Ids of every column and row of the dataset."""
    bags: list[list[list[int]]] = [[] for _ in CATEGORY_COLUMNS]
    for p, part in enumerate(dataset.manifest.parts):
        for b in range(-(-part.rows // 8192)):
            rows = dataset.read(p, b)
            for k, name in enumerate(CATEGORY_COLUMNS):
                bags[k] += bags_of(rows.bags[name]) if name in rows.bags else [[i] for i in rows.ids[k].tolist()]
    return bags


def _check_bags(batch: Batch, bags: list[list[list[int]]]) -> None:
    """The batch's bags are its rows' bags, and all cached fields are what torchrec computes from the ids alone."""
    rows = rows_of(batch)
    padding = [[]] * (len(batch.labels) - len(rows))
    expected = [[bags[k][row] for row in rows] + padding for k in range(26)]
    features = batch.sparse_features
    computed = KeyedJaggedTensor(
        keys=list(CATEGORY_COLUMNS),
        values=torch.tensor([i for column in expected for bag in column for i in bag], dtype=torch.int64),
        lengths=torch.tensor([len(bag) for column in expected for bag in column], dtype=torch.int32),
    )
    for field in ("values", "lengths", "offsets"):
        got, wanted = getattr(features, field)(), getattr(computed, field)()
        assert got.dtype == wanted.dtype
        assert torch.equal(got, wanted)
    for field in ("keys", "stride", "stride_per_key", "length_per_key", "offset_per_key", "lengths_offset_per_key"):
        assert getattr(features, field)() == getattr(computed, field)()
    assert all(features[key].values().tolist() == computed[key].values().tolist() for key in ("C1", "C2", "C26"))


def _train(
    dataset: Dataset,
    config: DataConfig,
    ranks: int = 1,
    epochs: int = 1,
    cursor: Mapping[str, object] | None = None,
) -> list[Step]:
    loaders = [TrainLoader(dataset, config, rank=r, ranks=ranks, epochs=epochs, cursor=cursor) for r in range(ranks)]
    return [list(step) for step in zip(*loaders, strict=True)]


def _check_epoch(steps: list[Step], bags: list[list[list[int]]], multi_hot: Collection[str]) -> None:
    for step in steps:
        check_step(step, multi_hot)
        for batch in step:
            _check_bags(batch, bags)


@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize(("batch_size", "window_rows"), [(1_024, 16_384), (4_000, 3_000), (32_768, 500)])
def test_every_row_is_used_once_an_epoch_with_its_own_bags(
    dataset: Dataset, bags: list[list[list[int]]], ranks: int, batch_size: int, window_rows: int
) -> None:
    steps = _train(dataset, DataConfig(batch_size=batch_size, window_rows=window_rows, seed=5), ranks)
    assert np.array_equal(np.sort(np.concatenate([rows_global(step) for step in steps])), TRAINING_ROWS)
    _check_epoch(steps, bags, MULTI_HOT)


def test_the_order_is_that_of_the_same_dataset_without_bags(dataset: Dataset, tmp_path: Path) -> None:
    one_hot = make_dataset(
        tmp_path, [10_000, 0, 1_137, 10_000], split={"train": [(5, 9_000), (11_000, 20_001)], "validation": []}
    )
    config = DataConfig(batch_size=1_000, window_rows=5_000)
    for a, b in zip(_train(dataset, config, 2), _train(one_hot, config, 1), strict=True):
        assert np.array_equal(rows_global(a), rows_global(b))


@given(
    part_rows=st.lists(st.integers(0, 40), min_size=1, max_size=3).filter(lambda rows: sum(rows) > 0),
    multi_hot=st.dictionaries(st.sampled_from(CATEGORY_COLUMNS), st.integers(0, 30), min_size=1),
    batch_per_stream=st.integers(1, 5),
    streams=st.sampled_from([1, 4]),
    ranks=st.integers(1, 3),
    window_rows=st.integers(1, 60),
    resume_at=st.integers(0, 30),
)
@settings(max_examples=25, deadline=None)
def test_any_small_dataset_keeps_its_bags_and_can_be_resumed_anywhere(
    tmp_path_factory: pytest.TempPathFactory,
    part_rows: list[int],
    multi_hot: dict[str, int],
    batch_per_stream: int,
    streams: int,
    ranks: int,
    window_rows: int,
    resume_at: int,
) -> None:
    dataset = make_dataset(tmp_path_factory.mktemp("small"), part_rows, table_rows=3, multi_hot=multi_hot)
    config = DataConfig(batch_size=batch_per_stream * streams, streams=streams, window_rows=window_rows)
    bags = _slow_bags(dataset)
    steps = _train(dataset, config, min(ranks, streams), epochs=2)
    _check_epoch(steps, bags, multi_hot)
    rows = [rows_global(step) for step in steps]
    assert np.array_equal(np.sort(np.concatenate(rows)), np.repeat(np.arange(sum(part_rows)), 2))
    at = resume_at % len(steps)
    resumed = _train(dataset, config, 1, epochs=2, cursor=steps[at][0].cursor)
    _check_epoch(resumed, bags, multi_hot)
    assert all(np.array_equal(a, rows_global(b)) for a, b in zip(rows[at + 1 :], resumed, strict=True))


def test_resuming_after_any_step_equals_the_uninterrupted_run_bit_for_bit(dataset: Dataset) -> None:
    config = DataConfig(batch_size=4_096, window_rows=2_000, seed=1)
    straight = _train(dataset, config, 3, epochs=2)
    for at in range(len(straight)):
        resumed = _train(dataset, config, 3, epochs=2, cursor=json.loads(json.dumps(straight[at][0].cursor)))
        assert len(resumed) == len(straight) - at - 1
        for a, b in zip(straight[at + 1 :], resumed, strict=True):
            for x, y in zip(a, b, strict=True):
                assert x.cursor == y.cursor
                assert torch.equal(x.dense_features, y.dense_features)
                assert torch.equal(x.labels, y.labels)
                assert torch.equal(x.sparse_features.values(), y.sparse_features.values())
                assert torch.equal(x.sparse_features.lengths(), y.sparse_features.lengths())


@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize("batch_size", [97, 5_000])
def test_evaluation_has_every_row_with_its_bags_in_file_order(
    dataset: Dataset, bags: list[list[list[int]]], ranks: int, batch_size: int
) -> None:
    steps = evaluate(dataset, ranks, split="validation", batch_size=batch_size)
    assert np.array_equal(np.concatenate([rows_global(step) for step in steps]), np.arange(9_100, 10_500))
    _check_epoch(steps, bags, MULTI_HOT)


def test_a_column_of_empty_bags_and_a_huge_bag_are_loaded(tmp_path: Path) -> None:
    dataset = make_dataset(tmp_path, 300, multi_hot={"C2": 0, "C3": 20_000})
    for step in _train(dataset, DataConfig(batch_size=64), 2):
        check_step(step, dataset.multi_hot)
        assert step[0].sparse_features["C2"].values().numel() == 0
    _check_epoch(_train(dataset, DataConfig(batch_size=128)), _slow_bags(dataset), dataset.multi_hot)


def test_a_file_truncated_during_training_reaches_the_trainer(tmp_path: Path) -> None:
    dataset = make_dataset(tmp_path, [60_000, 60_000], multi_hot={"C3": 4})
    loader = TrainLoader(dataset, DataConfig(batch_size=4_096), rank=0, ranks=1, epochs=50)
    next(loader)
    os.truncate(tmp_path / "part-00001.arrow", 100_000)
    with pytest.raises(DatasetError, match=r"part-00001\.arrow was changed or replaced"):
        for _ in loader:
            pass
    loader.close()


def test_more_ids_than_int32_counts_are_refused_with_the_setting_that_helps() -> None:
    pools = np.empty((4, 10), np.int32)
    assert with_room(pools, 10) is pools
    with pytest.raises(ConfigError, match=r"2,147,483,648 ids(.|\n)*data\.window_rows"):
        with_room(pools, 1 << 31)
    rows = RaggedRows(BagColumns(["C1", "C2"]))
    rows.begin(2)
    rows.words[:] = 1 << 29
    with pytest.raises(ConfigError, match=r"2 rows has 2,147,483,696 ids(.|\n)*batch size"):
        rows.count()


@pytest.mark.gpu
def test_pinned_bags_reach_the_gpu_with_the_same_content(dataset: Dataset, bags: list[list[list[int]]]) -> None:
    copies = []
    loader = TrainLoader(dataset, DataConfig(batch_size=2_048), rank=0, ranks=3, epochs=1, pin_memory=True)
    for batch in loader:  # Host buffers are used again while copies are still under way.
        features = batch.sparse_features
        assert all(t.is_pinned() for t in (features.values(), features.lengths(), features.offsets()))
        copies.append(batch.to(torch.device("cuda"), non_blocking=True))
    torch.cuda.synchronize()
    for copy in copies:
        _check_bags(copy.to(torch.device("cpu")), bags)
