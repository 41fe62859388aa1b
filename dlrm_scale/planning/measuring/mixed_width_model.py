"""A small model for tables of different widths, which no DLRM takes: pooled vectors side by side, then an MLP."""

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits
from torchrec.modules.embedding_configs import EmbeddingBagConfig, PoolingType
from torchrec.modules.embedding_modules import EmbeddingBagCollection

from dlrm_scale.batch import Batch
from dlrm_scale.models.initial_dense import fill_initial_dense
from dlrm_scale.schema import INTEGER_COLUMNS, TableSpec

__all__ = ["MixedWidthModel"]


class MixedWidthModel(nn.Module):
    """Called as `TrainingModel`, with the same loss.

    Args:
        tables: of any widths; without memory yet.
        layers: hidden sizes of both MLPs.
        seed: of the dense weights.
    """

    def __init__(self, tables: Sequence[TableSpec], layers: Sequence[int], *, seed: int) -> None:
        """Build it; see the class."""
        super().__init__()
        self._names = [table.name for table in tables]
        self.tables = EmbeddingBagCollection(
            tables=[
                EmbeddingBagConfig(
                    name=table.name,
                    embedding_dim=table.dim,
                    num_embeddings=table.rows,
                    feature_names=[table.name],
                    pooling=PoolingType.SUM if table.pooling == "sum" else PoolingType.MEAN,
                )
                for table in tables
            ],
            device=torch.device("meta"),
        )
        with torch.random.fork_rng(devices=[]):
            self.bottom = _mlp((len(INTEGER_COLUMNS), *layers))
            self.top = _mlp((sum(table.dim for table in tables) + layers[-1], *layers, 1))
        fill_initial_dense(self, seed, skip=self.tables)

    @staticmethod
    def count_parameters(width: int, layers: Sequence[int]) -> int:
        """Dense parameters of a model whose tables have `width` columns together."""
        sizes = [(len(INTEGER_COLUMNS), *layers), (width + layers[-1], *layers, 1)]
        return sum(a * b + b for of_mlp in sizes for a, b in pairwise(of_mlp))

    def forward(self, batch: Batch) -> tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor]]:
        """Score a batch; as `TrainingModel.forward`."""
        pooled = self.tables(batch.sparse_features)
        bottom = self.bottom(batch.dense_features)
        vectors = pooled.to_dict()
        logits = self.top(torch.cat([bottom, *(vectors[name] for name in self._names)], dim=1)).squeeze(1)
        row_loss = binary_cross_entropy_with_logits(logits, batch.labels, reduction="none")
        row_loss_sum = torch.sum(row_loss * batch.weights)
        return batch.loss_scale * row_loss_sum, (row_loss_sum.detach(), logits.detach())


def _mlp(sizes: Sequence[int]) -> nn.Sequential:
    layers: list[nn.Module] = []
    for index, (before, after) in enumerate(pairwise(sizes)):
        layers.append(nn.Linear(before, after))
        if after != 1 and index < len(sizes) - 1:
            layers.append(nn.ReLU())
    return nn.Sequential(*layers)
