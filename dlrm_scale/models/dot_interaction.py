"""The dot interaction of a DLRM with a backward pass of its own."""

from typing import Any

import torch
from torch import fx
from torchrec.models.dlrm import InteractionArch

__all__ = ["DotInteraction"]


class DotInteraction(InteractionArch):
    """Pairwise dot products of the vectors of a row (Naumov et al., arXiv 1906.00091): TorchRec's, differentiated once.

    Each unordered pair of the `V = F + 1` vectors gives one product, so its gradient belongs at two places of the
    symmetric `[V, V]` matrix. Autograd sees a matrix whose halves are unrelated: it writes the gradients into the upper
    half by an indexed accumulation, and multiplies that half and its transpose with the vectors one after the other.
    Here they are gathered into both halves at once and multiplied once. Values of the forward pass are equal to the
    bit; gradients differ in the order of a sum.
    """

    def __init__(self, num_sparse_features: int) -> None:
        """Prepare the places of the pairs.

        Args:
            num_sparse_features: F, at least 1.
        """
        super().__init__(num_sparse_features)
        vectors = num_sparse_features + 1
        upper = torch.triu_indices(vectors, vectors, offset=1)
        count = upper.shape[1]
        # which pair stands at each place of the matrix; the diagonal gets the one after the last, whose gradient is 0
        pair_at = torch.full((vectors, vectors), count, dtype=torch.int64)
        pair_at[upper[0], upper[1]] = torch.arange(count)
        pair_at[upper[1], upper[0]] = torch.arange(count)
        self.register_buffer("_place_of", upper[0] * vectors + upper[1], persistent=False)
        self.register_buffer("_pair_at", pair_at.view(-1), persistent=False)

    def forward(self, dense_features: torch.Tensor, sparse_features: torch.Tensor) -> torch.Tensor:
        """Combine `[B, D]` and `[B, F, D]` into `[B, D + V (V - 1) / 2]`, the dense vector first."""
        combined: torch.Tensor = _interact(dense_features, sparse_features, self._place_of, self._pair_at)
        return combined


@fx.wrap
def _interact(dense: torch.Tensor, sparse: torch.Tensor, place_of: torch.Tensor, pair_at: torch.Tensor) -> torch.Tensor:
    combined: torch.Tensor = _Interaction.apply(dense, sparse, place_of, pair_at)  # type: ignore[no-untyped-call]
    return combined


class _Interaction(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, dense: torch.Tensor, sparse: torch.Tensor, place_of: torch.Tensor, pair_at: torch.Tensor
    ) -> torch.Tensor:
        vectors = torch.cat((dense.unsqueeze(1), sparse), dim=1)
        products = torch.bmm(vectors, vectors.transpose(1, 2))
        ctx.save_for_backward(vectors, pair_at)
        return torch.cat((dense, products.flatten(1).index_select(1, place_of)), dim=1)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, None, None]:
        vectors, pair_at = ctx.saved_tensors
        count, dim = vectors.shape[1:]
        padded = torch.nn.functional.pad(gradient[:, dim:], (0, 1))
        symmetric = padded.index_select(1, pair_at).view(-1, count, count)
        # two products instead of one that would have to be cut: the lookup's backward pass wants whole memory
        of_sparse = torch.bmm(symmetric[:, 1:], vectors)
        of_dense = gradient[:, :dim] + torch.bmm(symmetric[:, :1], vectors).squeeze(1)
        return of_dense, of_sparse, None, None
