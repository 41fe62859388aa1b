"""One rank's share of one global batch.

Shapes: B rows on this rank (padding included, the same B on every rank in a step), 13 integers, 26 categories.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor
from torchrec.streamable import Pipelineable

__all__ = ["Batch", "one_hot_features"]


@dataclass(kw_only=True)
class Batch(Pipelineable):
    """What the model gets.

    Attributes:
        dense_features: `[B, 13]` float32.
        sparse_features: `B` bags for each category column; padding rows have empty bags.
        labels: `[B]` float32, 0 or 1.
        weights: `[B]` float32: 1 for a true row, 0 for padding.
        loss_scale: `[]` float32, ranks / true rows of the global batch: the loss on a rank is
            `loss_scale * sum(weights * row_loss)`, so that the average over ranks is the mean over true rows.
        rows_global: true rows of the global batch.
        rows_local: true rows on this rank; they come first, padding last.
        cursor: position after this batch, JSON-ready; None in evaluation.
    """

    dense_features: torch.Tensor
    sparse_features: KeyedJaggedTensor
    labels: torch.Tensor
    weights: torch.Tensor
    loss_scale: torch.Tensor
    rows_global: int
    rows_local: int
    cursor: Mapping[str, object] | None = None

    def to(self, device: torch.device, non_blocking: bool = False) -> "Batch":
        """Copy to a device."""
        return self._map(lambda t: t.to(device=device, non_blocking=non_blocking))

    def pin_memory(self) -> "Batch":
        """Copy to page-locked host memory."""
        return self._map(lambda t: t.pin_memory())

    def record_stream(self, stream: torch.Stream) -> None:
        """Tell the allocator that `stream` uses the tensors."""
        for t in (self.dense_features, self.labels, self.weights, self.loss_scale):
            t.record_stream(stream)  # type: ignore[arg-type]
        self.sparse_features.record_stream(stream)  # type: ignore[arg-type]

    def _map(self, f) -> "Batch":  # type: ignore[no-untyped-def]
        return Batch(
            dense_features=f(self.dense_features),
            sparse_features=f(self.sparse_features),
            labels=f(self.labels),
            weights=f(self.weights),
            loss_scale=f(self.loss_scale),
            rows_global=self.rows_global,
            rows_local=self.rows_local,
            cursor=self.cursor,
        )


def one_hot_features(keys: Sequence[str], ids: torch.Tensor, true_rows: int) -> KeyedJaggedTensor:
    """Make a KeyedJaggedTensor in which every true row has one id per key and padding rows have none.

    Args:
        keys: the category columns.
        ids: `[len(keys), true_rows]`, contiguous; int32 or int64.
        true_rows: number of rows with an id.
    """
    raise NotImplementedError
