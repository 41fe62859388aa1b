"""The pooled vectors of a lookup, without a copy where TorchRec makes one."""

from collections.abc import Sequence

import torch
from torch import fx
from torchrec.sparse.jagged_tensor import KeyedTensor

__all__ = ["vectors_in_order"]


@fx.wrap
def vectors_in_order(pooled: KeyedTensor, names: Sequence[str], dim: int) -> torch.Tensor:
    """Arrange pooled vectors as `[B, F, D]` in the order of `names`, waiting for them if they are still on their way.

    They are taken as they are when they come in that order: with one rank and whenever the plan keeps the order.
    TorchRec's `SparseArch` always splits and concatenates them, and its backward pass does so again: two copies of
    `B * F * D` floats a step. The values are the same to the bit. Wrapped for torch.fx, because the branch depends on
    what the lookup returns.

    Args:
        pooled: what an `EmbeddingBagCollection` returns.
        names: the F features.
        dim: D.
    """
    values: torch.Tensor
    if pooled.keys() == names:
        values = pooled.values()
    else:
        by_name = pooled.to_dict()
        values = torch.cat([by_name[name] for name in names], dim=1)
    return values.reshape(-1, len(names), dim)
