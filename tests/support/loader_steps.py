"""What tests of loaders look at: the batches of all ranks in one step."""

from collections.abc import Collection

import numpy as np
import numpy.typing as npt
import torch

from dlrm_scale.batch import Batch
from dlrm_scale.data.dataset.dataset import Dataset
from dlrm_scale.data.loading.loader import EvalLoader
from dlrm_scale.schema import CATEGORY_COLUMNS
from tests.support.datasets import row_numbers

__all__ = ["Step", "check_step", "evaluate", "rows_global", "rows_of"]

Step = list[Batch]
"""The batches of all ranks in one step."""


def evaluate(dataset: Dataset, ranks: int, **arguments: object) -> list[Step]:
    """Run evaluation loaders of all ranks side by side; all must end together."""
    loaders = [EvalLoader(dataset, rank=rank, ranks=ranks, **arguments) for rank in range(ranks)]
    return [list(step) for step in zip(*loaders, strict=True)]


def rows_of(batch: Batch) -> npt.NDArray[np.int64]:
    """Return the numbers in the dataset of a batch's true rows, from their features."""
    return row_numbers(batch.dense_features[: batch.rows_local])


def rows_global(step: Step) -> npt.NDArray[np.int64]:
    """Return the rows of all ranks, those of rank 0 first."""
    return np.concatenate([rows_of(batch) for batch in step])


def check_step(step: Step, multi_hot: Collection[str] = ()) -> None:
    """Every rank has as many rows, padding is last and empty, and the numbers of rows agree."""
    one_hot = [k for k, name in enumerate(CATEGORY_COLUMNS) if name not in multi_hot]
    rows = len(step[0].labels)
    assert rows == max(batch.rows_local for batch in step)
    for batch in step:
        n = batch.rows_local
        assert batch.dense_features.shape == (rows, 13)
        assert batch.labels.shape == batch.weights.shape == (rows,)
        assert batch.rows_global == sum(b.rows_local for b in step)
        assert batch.loss_scale == torch.tensor(len(step) / batch.rows_global)
        assert batch.weights.tolist() == [1.0] * n + [0.0] * (rows - n)
        lengths = batch.sparse_features.lengths().view(26, rows)
        assert lengths[one_hot, :n].eq(1).all()
        assert not lengths[:, n:].any()
        assert batch.sparse_features.values().dtype == torch.int64
        assert not batch.dense_features[n:].any()
        assert not batch.labels[n:].any()
