"""The peer: a DLRM as a careful user writes it in plain torch, one process, `EmbeddingBag(sparse=True)` and SGD."""

from collections.abc import Mapping, Sequence

import torch
from torch import nn

__all__ = ["PlainDlrm", "mlp"]


class PlainDlrm(nn.Module):
    """DLRM with dot interaction (Naumov et al., arXiv 1906.00091).

    Args:
        table_rows: rows of each table.
        dim: columns of every table.
        num_dense: dense features.
        dense_layers: sizes of the bottom MLP; the last is `dim`.
        over_layers: sizes of the top MLP; the last is 1.
    """

    def __init__(
        self,
        table_rows: Mapping[str, int],
        dim: int,
        num_dense: int,
        dense_layers: Sequence[int],
        over_layers: Sequence[int],
    ) -> None:
        """Allocate everything; see the class."""
        super().__init__()
        self.tables = nn.ModuleList(
            nn.EmbeddingBag(rows, dim, mode="sum", sparse=True, include_last_offset=True)
            for rows in table_rows.values()
        )
        vectors = len(table_rows) + 1
        self.bottom = mlp(num_dense, dense_layers, relu_on_last=True)
        self.top = mlp(dim + vectors * (vectors - 1) // 2, over_layers, relu_on_last=False)
        self.register_buffer("pairs", torch.triu_indices(vectors, vectors, offset=1))

    def forward(self, dense: torch.Tensor, ids: Sequence[torch.Tensor], offsets: torch.Tensor) -> torch.Tensor:
        """Score a batch.

        Args:
            dense: `[B, num_dense]`.
            ids: one 1-D tensor a table.
            offsets: `[B + 1]`, the bags of every table.

        Returns:
            `[B]` logits.
        """
        bottom = self.bottom(dense)
        pooled = [table(i, offsets) for table, i in zip(self.tables, ids, strict=True)]
        vectors = torch.stack([bottom, *pooled], dim=1)
        products = torch.bmm(vectors, vectors.transpose(1, 2))
        crossed = torch.cat([bottom, products[:, self.pairs[0], self.pairs[1]]], dim=1)
        return self.top(crossed).squeeze(1)


def mlp(inputs: int, sizes: Sequence[int], *, relu_on_last: bool) -> nn.Sequential:
    """Stack linear layers with ReLU between them."""
    layers: list[nn.Module] = []
    for size in sizes:
        layers += [nn.Linear(inputs, size), nn.ReLU()]
        inputs = size
    return nn.Sequential(*(layers if relu_on_last else layers[:-1]))
