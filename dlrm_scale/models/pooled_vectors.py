"""The lookup of a DLRM, without a copy where TorchRec makes one."""

from collections.abc import Sequence

import torch
from torch import fx
from torchrec.models.dlrm import SparseArch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor, KeyedTensor

__all__ = ["OrderedSparseArch"]


@fx.wrap
def _in_order(pooled: KeyedTensor, names: Sequence[str], dim: int) -> torch.Tensor:
    """Arrange pooled vectors as `[B, F, D]` in the order of `names`.

    A function of its own, wrapped for torch.fx, because its branch depends on what the lookup returns.
    """
    values: torch.Tensor
    if pooled.keys() == names:
        values = pooled.values()
    else:
        by_name = pooled.to_dict()
        values = torch.cat([by_name[name] for name in names], dim=1)
    return values.reshape(-1, len(names), dim)


class OrderedSparseArch(SparseArch):
    """TorchRec's `SparseArch` that takes the pooled vectors as they are when they come in the order of the tables.

    They do with one rank and whenever the plan keeps the order. TorchRec splits and concatenates them, and its
    backward pass does so again: two copies of `B * F * D` floats a step. The values are the same to the bit.
    """

    def forward(self, features: KeyedJaggedTensor) -> torch.Tensor:
        """Look up a batch: `[B, F, D]`."""
        vectors: torch.Tensor = _in_order(self.embedding_bag_collection(features), self.sparse_feature_names, self.D)
        return vectors
