"""Datasets with bags of ids train like plain torch, from the files to the checkpoints, and resume bit for bit."""

from collections.abc import Sequence
from functools import cache
from pathlib import Path

import numpy as np
import pytest

from dlrm_scale.checkpoint import find_chain
from dlrm_scale.config import Config
from dlrm_scale.data.dataset.dataset import Dataset
from dlrm_scale.models.tables import table_specs
from dlrm_scale.schema import CATEGORY_COLUMNS
from dlrm_scale.train.run_folder import resolve_run
from tests.support.datasets import bags_of, make_dataset
from tests.support.random_batches import GlobalBatch
from tests.support.reference import Trained, train_reference
from tests.support.training import SMALL_MODEL, losses, read_tables, run_training, same_tables

ROWS = (150, 77)  # 227 rows: 8 steps of 32 an epoch, the last with 3 rows
TOLERANCE = 1e-5


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Bags in a table of 3 rows, in one that most bags miss (0 or 1 ids), and in long ones; the rest is one-hot."""
    path = tmp_path_factory.mktemp("data") / "dataset"
    split = {"train": [(0, 227)], "validation": [(227, 277)]}
    multi_hot = {"C1": 4, "C3": 1, "C7": 12, "C26": 5}
    make_dataset(path, (*ROWS, 50), table_rows=[3, 4, 10, 2, *[40] * 22], split=split, multi_hot=multi_hot)
    return path


def _settings(kind: str, optimizer: str, pooling: str) -> list[str]:
    return [
        f"sharding.kind={kind}",
        "train.epochs=2",
        f"model.pooling={pooling}",
        f"sparse_optimizer.kind={optimizer}",
        "sparse_optimizer.learning_rate=0.1",
        # SGD: Adagrad's first steps turn gradients of nearly 0 into steps of full size, and rounding with them.
        "dense_optimizer.kind=sgd",
        "dense_optimizer.learning_rate=0.1",
        "schedule.warmup_steps=0",
        "schedule.decay_to_end=false",
        # Deltas, not baselines: a row that isn't marked as touched is missing from them.
        "checkpoint.baseline_ratio=1000",
    ]


@cache
def _global_batches(path: Path, rows_per_step: tuple[tuple[int, ...], ...]) -> list[GlobalBatch]:
    """The rows of each step as they stand in the files."""
    dataset = Dataset.open(path)
    parts = [dataset.read(part, 0) for part in range(len(dataset.manifest.parts))]
    labels = np.concatenate([part.labels for part in parts])
    dense = np.concatenate([part.dense for part in parts], axis=1)
    bags = []
    for k, name in enumerate(CATEGORY_COLUMNS):
        multi_hot = name in dataset.multi_hot
        bags.append([b for p in parts for b in (bags_of(p.bags[name]) if multi_hot else [[i] for i in p.ids[k]])])
    return [
        GlobalBatch(
            dense_features=np.ascontiguousarray(dense[:, list(rows)].T),
            lengths=np.array([[len(column[row]) for row in rows] for column in bags], np.int32),
            ids=tuple(np.array([i for row in rows for i in column[row]], np.int64) for column in bags),
            labels=labels[list(rows)].astype(np.float32),
        )
        for rows in rows_per_step
    ]


def _reference(config: Config, dataset: Path, rows_per_step: Sequence[Sequence[int]]) -> Trained:
    batches = _global_batches(dataset, tuple(tuple(rows) for rows in rows_per_step))
    return train_reference(config, table_specs(config.model, Dataset.open(dataset).table_rows), batches)


@pytest.mark.parametrize(
    ("kind", "optimizer", "pooling"),
    [
        ("row_wise", "rowwise_adagrad", "sum"),
        ("table_wise", "rowwise_adagrad", "mean"),
        ("data_parallel", "rowwise_adagrad", "sum"),
        ("table_row_wise", "sgd", "mean"),
        ("column_wise", "sgd", "sum"),
        ("grid_shard", "sgd", "sum"),
    ],
)
def test_bags_train_like_plain_torch_and_resume_bit_for_bit(
    kind: str, optimizer: str, pooling: str, dataset: Path, tmp_path: Path
) -> None:
    settings = _settings(kind, optimizer, pooling)
    straight = run_training(2, tmp_path / "straight", dataset, settings)
    run_training(2, tmp_path / "run", dataset, [*settings, "train.max_steps=10", "train.pipeline=sparse_dist"])
    run_training(2, tmp_path / "run", dataset, ["train.max_steps=0"], resume=True)
    tables = read_tables(tmp_path / "straight", optimizer)
    assert losses(tmp_path / "run") == losses(tmp_path / "straight")
    assert same_tables(read_tables(tmp_path / "run", optimizer), tables)
    chain = find_chain(tmp_path / "run" / "checkpoints")
    assert chain is not None
    assert len(chain.manifests) >= 5

    config = resolve_run("sample", [f"run.path={tmp_path}", f"data.path={dataset}", *SMALL_MODEL, *settings]).config
    rows = [[*a, *b] for a, b in zip(straight[0].rows_per_step, straight[1].rows_per_step, strict=True)]
    assert len(rows) == 16
    expected = _reference(config, dataset, rows)
    assert list(losses(tmp_path / "straight").values()) == pytest.approx(expected.losses, abs=TOLERANCE)
    for name, weight in expected.tables.items():
        np.testing.assert_allclose(tables[f"{name}.weight"], weight.numpy(), atol=TOLERANCE, rtol=0, err_msg=name)
