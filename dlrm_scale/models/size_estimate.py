"""How large the dense part of a model is, from its sizes alone, before anything is built."""

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import pairwise

from dlrm_scale.config import ModelConfig
from dlrm_scale.schema import INTEGER_COLUMNS

__all__ = ["ACTIVATION_COPIES", "DENSE_STATES", "DenseSizes", "dense_sizes"]

DENSE_STATES = {"sgd": 0, "adagrad": 1, "adam": 2}
"""Values of optimizer state a parameter."""
ACTIVATION_COPIES = 1.25
"""Activations, and those gradients that are alive at one time (measured on an MLP and a DCNv2)."""


@dataclass(frozen=True, kw_only=True)
class DenseSizes:
    """Numbers of values.

    Attributes:
        parameters: dense parameters.
        activations_per_row: values that a forward pass leaves for a row of the batch, pooled vectors not counted.
        vectors_per_row: values of a row's pooled vectors and of the bottom MLP's.
        multiply_adds_per_row: of a forward pass; biases and activation functions count as nothing.
    """

    parameters: int
    activations_per_row: int
    vectors_per_row: int
    multiply_adds_per_row: int


def dense_sizes(config: ModelConfig, tables: int) -> DenseSizes:
    """Count what `build_model` would build.

    Args:
        config: the model section.
        tables: number of tables, F.
    """
    dim, vectors = config.dim, tables + 1
    bottom = (len(INTEGER_COLUMNS), *config.dense_layers)
    match config.kind:
        case "dlrm":
            crossed = dim + vectors * (vectors - 1) // 2
            parameters, activations = 0, vectors * vectors + crossed
            products = vectors * vectors * dim
        case "projection":
            left, right = config.interaction_branch1_layers, config.interaction_branch2_layers
            pairs = (left[-1] // dim) * (right[-1] // dim)
            crossed, products = dim + pairs, pairs * dim
            parameters = _mlp(vectors * dim, left) + _mlp(vectors * dim, right)
            activations = 2 * (sum(left) + sum(right)) + pairs + crossed
        case "dcnv2":
            crossed, products = vectors * dim, 0
            rank, layers = config.dcn_low_rank_dim, config.dcn_num_layers
            parameters = layers * (2 * rank * crossed + crossed)
            activations = layers * (rank + 3 * crossed)
    parameters += _mlp(bottom[0], bottom[1:]) + _mlp(crossed, config.over_layers)
    # a linear layer's output and what its activation function makes of it
    activations += 2 * (sum(config.dense_layers) + sum(config.over_layers))
    return DenseSizes(
        parameters=parameters,
        activations_per_row=activations,
        vectors_per_row=vectors * dim,
        # a weight is used once a row
        multiply_adds_per_row=parameters + products,
    )


def _mlp(inputs: int, layers: Iterable[int]) -> int:
    return sum(before * after + after for before, after in pairwise((inputs, *layers)))
