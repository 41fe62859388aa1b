"""The peer: MLPerf's DLRM-DCNv2 in plain torch, one process, sparse gradients, row-wise Adagrad by hand."""

from collections.abc import Mapping, Sequence

import torch
from plain_dlrm import mlp
from torch import nn

__all__ = ["PlainDcnV2", "PlainRowwiseAdagrad"]


class PlainDcnV2(nn.Module):
    """DLRM with a low-rank cross network (Wang et al., arXiv 2008.13535).

    Args:
        table_rows: rows of each table.
        dim: columns of every table.
        num_dense: dense features.
        dense_layers: sizes of the bottom MLP; the last is `dim`.
        over_layers: sizes of the top MLP; the last is 1.
        cross_layers: how many.
        rank: of the cross layers.
    """

    def __init__(
        self,
        table_rows: Mapping[str, int],
        dim: int,
        num_dense: int,
        dense_layers: Sequence[int],
        over_layers: Sequence[int],
        cross_layers: int,
        rank: int,
    ) -> None:
        """Allocate everything; see the class."""
        super().__init__()
        self.tables = nn.ModuleDict(
            {
                name: nn.EmbeddingBag(rows, dim, mode="sum", sparse=True, include_last_offset=True)
                for name, rows in table_rows.items()
            }
        )
        columns = dim * (len(table_rows) + 1)
        self.bottom = mlp(num_dense, dense_layers, relu_on_last=True)
        self.down = nn.ModuleList(nn.Linear(columns, rank, bias=False) for _ in range(cross_layers))
        self.up = nn.ModuleList(nn.Linear(rank, columns) for _ in range(cross_layers))
        self.top = mlp(columns, over_layers, relu_on_last=False)

    def forward(
        self, dense: torch.Tensor, ids: Sequence[torch.Tensor], offsets: Sequence[torch.Tensor]
    ) -> torch.Tensor:
        """Score a batch.

        Args:
            dense: `[B, num_dense]`.
            ids: one 1-D tensor a table.
            offsets: one `[B + 1]` tensor a table.

        Returns:
            `[B]` logits.
        """
        pooled = [table(i, o) for table, i, o in zip(self.tables.values(), ids, offsets, strict=True)]
        first = crossed = torch.cat([self.bottom(dense), *pooled], dim=1)
        for down, up in zip(self.down, self.up, strict=True):
            crossed = first * up(down(crossed)) + crossed
        logits: torch.Tensor = self.top(crossed).squeeze(1)
        return logits


class PlainRowwiseAdagrad:
    """Row-wise Adagrad for sparse gradients: one number a row, the mean of the squared gradients so far.

    Args:
        weights: with sparse gradients.
        rate: learning rate.
        eps: added to the denominator.
    """

    def __init__(self, weights: Sequence[nn.Parameter], rate: float, eps: float) -> None:
        self.weights, self.rate, self.eps = list(weights), rate, eps
        self.sums = [torch.zeros(len(weight)) for weight in self.weights]

    @torch.no_grad()
    def step(self) -> None:
        """Update the rows that have a gradient, and drop it."""
        for weight, sums in zip(self.weights, self.sums, strict=True):
            assert weight.grad is not None
            gradient = weight.grad.coalesce()
            rows, values = gradient.indices()[0], gradient.values()
            sums.index_add_(0, rows, values.square().mean(dim=1))
            scale = -self.rate / (sums[rows].sqrt() + self.eps)
            weight.index_add_(0, rows, values * scale.unsqueeze(1))
            weight.grad = None
