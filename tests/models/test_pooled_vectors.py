"""Pooled vectors come in the order of the model's features, whatever order the plan gives them."""

import torch
from torchrec.sparse.jagged_tensor import KeyedTensor

from dlrm_scale.models.pooled_vectors import vectors_in_order


def _pooled(values: torch.Tensor, keys: list[str]) -> KeyedTensor:
    return KeyedTensor(keys=keys, length_per_key=[2] * len(keys), values=values)


def test_vectors_and_their_gradients_are_those_of_split_and_concatenated_ones() -> None:
    came, names = ["C3", "C1", "C4", "C2"], ["C1", "C2", "C3", "C4"]
    values = torch.arange(24.0).view(3, 8).requires_grad_()
    vectors = vectors_in_order(_pooled(values, came), names, 2)
    assert vectors[0].tolist() == [[2, 3], [6, 7], [0, 1], [4, 5]]
    by_name = _pooled(values, came).to_dict()
    expected = torch.stack([by_name[name] for name in names], dim=1)
    assert torch.equal(vectors, expected)
    weights = torch.rand(vectors.shape, generator=torch.Generator().manual_seed(0))
    ours, theirs = (torch.autograd.grad((v * weights).sum(), values)[0] for v in (vectors, expected))
    assert torch.equal(ours, theirs)


def test_vectors_that_come_in_order_are_not_copied() -> None:
    values = torch.rand(3, 4)
    assert vectors_in_order(_pooled(values, ["C1", "C2"]), ["C1", "C2"], 2).data_ptr() == values.data_ptr()
