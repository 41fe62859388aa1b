"""Gradient accumulation that equals the large batch: one lookup, one table update, the dense part in slices.

The optimizers of the tables run inside the backward pass, so two backward passes would update a row twice. Here the
whole batch is looked up at once. The dense part then takes slices of it: forward and backward of one slice before the
next, so that only one slice's activations are held. What is left of the backward pass is the finished gradient of all
pooled vectors, and the summed gradients of the parameters, which autograd hands on as if they came from one pass:
data-parallel averaging, exchange and table update happen once a step. The loss is a sum over rows, so the result
differs from the large batch in the order of that sum alone.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.functional import binary_cross_entropy_with_logits

__all__ = ["loss_in_micro_batches"]

Score = Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def loss_in_micro_batches(
    score: Score,
    parameters: Sequence[nn.Parameter],
    count: int,
    dense_features: torch.Tensor,
    vectors: torch.Tensor,
    labels: torch.Tensor,
    weights: torch.Tensor,
    loss_scale: torch.Tensor,
) -> tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor]]:
    """Compute the loss of a batch and its gradients in one go; `backward` of the result only hands them on.

    Args:
        score: from `[b, 13]` dense features and `[b, F, D]` vectors to `[b]` logits, for any slice.
        parameters: all that `score` uses.
        count: slices of equal size but for the last; fewer where the batch has fewer rows.
        dense_features: `[B, 13]`.
        vectors: `[B, F, D]`, which require gradients.
        labels: `[B]`.
        weights: `[B]`.
        loss_scale: `[]`.

    Returns:
        The loss `[]`, then, detached, `sum(weights * row_loss)` and the logits `[B]`.
    """
    loss, row_loss_sum, logits = _Accumulated.apply(  # type: ignore[no-untyped-call]
        score, count, dense_features, vectors, labels, weights, loss_scale, *parameters
    )
    return loss, (row_loss_sum, logits)


class _Accumulated(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        score: Score,
        count: int,
        dense_features: torch.Tensor,
        vectors: torch.Tensor,
        labels: torch.Tensor,
        weights: torch.Tensor,
        loss_scale: torch.Tensor,
        *parameters: nn.Parameter,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        rows = max(1, -(-len(labels) // count))
        of_vectors = torch.empty_like(vectors)
        of_parameters: list[torch.Tensor] = []
        logits = []
        for start in range(0, len(labels), rows):
            part = slice(start, start + rows)
            with torch.enable_grad():
                piece = vectors[part].detach().requires_grad_()
                scored = score(dense_features[part], piece)
                row_loss = binary_cross_entropy_with_logits(scored, labels[part], reduction="none")
                loss = loss_scale * torch.sum(row_loss * weights[part])
            of_vectors[part], *found = torch.autograd.grad(loss, [piece, *parameters])
            if of_parameters:
                torch._foreach_add_(of_parameters, found)
            else:
                of_parameters = list(found)
            logits.append(scored.detach())
        ctx.gradients = (of_vectors, *of_parameters)
        every_logit = torch.cat(logits)
        row_loss = binary_cross_entropy_with_logits(every_logit, labels, reduction="none")
        row_loss_sum = torch.sum(row_loss * weights)
        ctx.mark_non_differentiable(row_loss_sum, every_logit)
        return loss_scale * row_loss_sum, row_loss_sum, every_logit

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor, *_: object) -> tuple[torch.Tensor | None, ...]:
        of_vectors, *of_parameters = ctx.gradients
        ctx.gradients = None  # they are scaled in place
        of_vectors.mul_(gradient)
        torch._foreach_mul_(of_parameters, gradient)
        return None, None, None, of_vectors, None, None, None, *of_parameters
