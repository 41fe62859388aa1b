"""Sizes of batches are known before a batch is."""

from dataclasses import replace
from pathlib import Path

import pytest

from dlrm_scale.data.dataset.dataset import Dataset
from dlrm_scale.train.memory.batch_memory import mean_ids
from tests.support.datasets import make_dataset


def test_the_mean_bag_is_the_manifests_and_else_that_of_sampled_rows(tmp_path: Path) -> None:
    dataset = make_dataset(tmp_path, [9_000, 0, 70_000], multi_hot={"C2": 6, "C26": 40})
    sampled = mean_ids(dataset)
    assert sampled[1] == pytest.approx(3, rel=0.02)
    assert sampled[25] == pytest.approx(20, rel=0.02)
    assert sampled[:1] + sampled[2:25] == [1.0] * 24
    columns = tuple(
        replace(column, statistics={"pooling": 2.75}) if column.name == "C2" else column
        for column in dataset.manifest.columns
    )
    told = mean_ids(Dataset(dataset.path, replace(dataset.manifest, columns=columns)))
    assert (told[1], told[25]) == (2.75, sampled[25])


def test_a_dataset_without_rows_has_no_ids(tmp_path: Path) -> None:
    assert mean_ids(make_dataset(tmp_path, [0], multi_hot={"C2": 6}))[:2] == [1.0, 0.0]
