"""A DLRM with its loss: what the training pipelines call with a batch."""

import torch
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits
from torchrec.models.dlrm import DLRM

from dlrm_scale.batch import Batch

__all__ = ["TrainingModel"]


class TrainingModel(nn.Module):
    """Binary cross-entropy of a DLRM over the true rows of a batch.

    It has no branch on tensor values, so that `TrainPipelineSparseDist` can trace it with torch.fx.

    Args:
        dlrm: takes `[B, 13]` dense features and a `KeyedJaggedTensor`, returns `[B, 1]` logits.
    """

    def __init__(self, dlrm: DLRM) -> None:
        """Wrap a model; see the class."""
        super().__init__()
        self.dlrm = dlrm

    def forward(self, batch: Batch) -> tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor]]:
        """Score a batch.

        Returns:
            The loss `[]` to differentiate, `loss_scale * sum(weights * row_loss)`: averaged over ranks it is the
            mean over the global batch's true rows. Then, detached: `sum(weights * row_loss)`, a `[]` tensor in
            nats, and the logits `[B]` (those of padding rows mean nothing).
        """
        logits = self.dlrm(batch.dense_features, batch.sparse_features).squeeze(1)
        row_loss = binary_cross_entropy_with_logits(logits, batch.labels, reduction="none")
        row_loss_sum = torch.sum(row_loss * batch.weights)
        return batch.loss_scale * row_loss_sum, (row_loss_sum.detach(), logits.detach())
