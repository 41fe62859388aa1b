"""Everything of a model after the lookup: MLPs, interaction and loss, where precision and micro-batches are settled."""

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Literal

import torch
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits
from torchrec.models.dlrm import DLRM
from torchrec.sparse.jagged_tensor import KeyedTensor

from dlrm_scale.models.micro_batches import loss_in_micro_batches
from dlrm_scale.models.pooled_vectors import vectors_in_order

__all__ = ["DensePart", "Losses"]

Losses = tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor]]


class DensePart(nn.Module):
    """From dense features and pooled vectors to logits and the loss.

    It has no parameters of its own: it runs the layers of a DLRM, whose names stay what TorchRec calls them. TorchRec's
    pipeline takes it for a leaf and doesn't trace it, so that it may have branches.

    Args:
        dlrm: any of `torchrec.models.dlrm`.
        precision: `bf16` runs the layers under `torch.autocast`; weights, logits and loss stay float32.
        micro_batches: parts that a batch is trained in, one after the other.
    """

    def __init__(self, dlrm: DLRM, *, precision: Literal["fp32", "bf16"] = "fp32", micro_batches: int = 1) -> None:
        """Take the layers of a model; see the class."""
        super().__init__()
        self._dlrm = (dlrm,)  # in a tuple: a child would give each parameter a second name
        self.precision = precision
        self.micro_batches = micro_batches
        self.bottom_function: Callable[..., torch.Tensor] = self._bottom
        self.top_function: Callable[..., torch.Tensor] = self._top

    def forward(
        self,
        dense_features: torch.Tensor,
        pooled: KeyedTensor,
        labels: torch.Tensor,
        weights: torch.Tensor,
        loss_scale: torch.Tensor,
    ) -> Losses:
        """Score a batch.

        Args:
            dense_features: `[B, 13]`.
            pooled: what the lookup returned, perhaps still on its way; the bottom MLP runs before it is waited for.
            labels: `[B]`.
            weights: `[B]`.
            loss_scale: `[]`.

        Returns:
            As `TrainingModel.forward`.
        """
        arch = self._dlrm[0].sparse_arch
        if self.micro_batches > 1 and torch.is_grad_enabled():
            vectors = vectors_in_order(pooled, arch.sparse_feature_names, arch.D)
            return loss_in_micro_batches(
                self.score, self._parameters_used(), self.micro_batches, dense_features, vectors, labels, weights,
                loss_scale,
            )  # fmt: skip
        bottom = self.bottom_function(dense_features)
        vectors = vectors_in_order(pooled, arch.sparse_feature_names, arch.D)
        logits = self.top_function(bottom, vectors)
        row_loss = binary_cross_entropy_with_logits(logits, labels, reduction="none")
        row_loss_sum = torch.sum(row_loss * weights)
        return loss_scale * row_loss_sum, (row_loss_sum.detach(), logits.detach())

    def score(self, dense_features: torch.Tensor, vectors: torch.Tensor) -> torch.Tensor:
        """Compute `[B]` float32 logits of `[B, 13]` dense features and `[B, F, D]` pooled vectors."""
        return self.top_function(self.bottom_function(dense_features), vectors)

    def try_layers(self, rows: int) -> None:
        """Run all layers forward and backward on `rows` rows of zeros; nothing keeps a gradient."""
        arch, parameters = self._dlrm[0].sparse_arch, self._parameters_used()
        first = next(self._dlrm[0].dense_arch.parameters())
        dense_features = first.new_zeros(rows, first.shape[1])
        vectors = first.new_zeros(rows, arch.F, arch.D, requires_grad=True)
        torch.autograd.grad(self.score(dense_features, vectors).sum(), [vectors, *parameters])

    def _bottom(self, dense_features: torch.Tensor) -> torch.Tensor:
        with self._precision(dense_features.device):
            bottom: torch.Tensor = self._dlrm[0].dense_arch(dense_features)
        return bottom

    def _top(self, bottom: torch.Tensor, vectors: torch.Tensor) -> torch.Tensor:
        dlrm = self._dlrm[0]
        with self._precision(bottom.device):
            logits: torch.Tensor = dlrm.over_arch(dlrm.inter_arch(bottom, vectors.to(bottom.dtype)))
        return logits.squeeze(1).float()

    def _precision(self, device: torch.device) -> AbstractContextManager[object]:
        return torch.autocast(device.type, dtype=torch.bfloat16) if self.precision == "bf16" else nullcontext()

    def _parameters_used(self) -> list[nn.Parameter]:
        dlrm = self._dlrm[0]
        return [p for part in (dlrm.dense_arch, dlrm.inter_arch, dlrm.over_arch) for p in part.parameters()]
