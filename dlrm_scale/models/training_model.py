"""A DLRM with its loss: what the training pipelines call with a batch."""

from typing import Literal

import torch
from torch import nn
from torchrec.models.dlrm import DLRM

from dlrm_scale.batch import Batch
from dlrm_scale.models.dense_part import DensePart

__all__ = ["TrainingModel"]


class TrainingModel(nn.Module):
    """Binary cross-entropy of a DLRM over the true rows of a batch.

    `TrainPipelineSparseDist` can trace it with torch.fx: the lookup, then the dense part as one leaf.

    Args:
        dlrm: its lookup takes a `KeyedJaggedTensor`; its other layers give `[B, 1]` logits.
        precision: of the dense part.
        micro_batches: of the dense part.
    """

    def __init__(self, dlrm: DLRM, *, precision: Literal["fp32", "bf16"] = "fp32", micro_batches: int = 1) -> None:
        """Wrap a model; see the class."""
        super().__init__()
        self.dlrm = dlrm
        self.dense_part = DensePart(dlrm, precision=precision, micro_batches=micro_batches)

    def forward(self, batch: Batch) -> tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor]]:
        """Score a batch.

        Returns:
            The loss `[]` to differentiate, `loss_scale * sum(weights * row_loss)`: averaged over ranks it is the
            mean over the global batch's true rows. Then, detached: `sum(weights * row_loss)`, a `[]` tensor in
            nats, and the logits `[B]` (those of padding rows mean nothing).
        """
        pooled = self.dlrm.sparse_arch.embedding_bag_collection(batch.sparse_features)
        losses: tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor]] = self.dense_part(
            batch.dense_features, pooled, batch.labels, batch.weights, batch.loss_scale
        )
        return losses
