"""What the dense part of a model asks of every rank, whatever the plan."""

from dataclasses import dataclass
from typing import Literal

from dlrm_scale.config import Config
from dlrm_scale.models.size_estimate import ACTIVATION_COPIES, DENSE_STATES, dense_sizes

__all__ = ["DenseWork"]


@dataclass(frozen=True, kw_only=True, slots=True)
class DenseWork:
    """Sizes of the dense part.

    Attributes:
        parameters: number of them; all ranks average their gradients.
        multiply_adds_per_row: of a forward pass of one sample; the backward pass does twice as many.
        precision: of the matrix products; `tf32` with `train.tf32`.
        memory_bytes: parameters, gradients, optimizer state and activations on one rank.
    """

    parameters: int
    multiply_adds_per_row: int
    precision: Literal["fp32", "tf32", "bf16"] = "fp32"
    memory_bytes: int = 0

    @classmethod
    def of_config(cls, config: Config, tables: int, batch_size_per_rank: int) -> "DenseWork":
        """Work it out from a run's settings.

        Args:
            config: sections `model`, `train` and `dense_optimizer` are read.
            tables: number of tables.
            batch_size_per_rank: rows.
        """
        sizes = dense_sizes(config.model, tables)
        rows = -(-batch_size_per_rank // min(config.train.micro_batches, batch_size_per_rank))
        activations = int(4 * sizes.activations_per_row * rows * ACTIVATION_COPIES)
        in_tf32 = config.train.tf32 and config.train.precision == "fp32"
        states = DENSE_STATES[config.dense_optimizer.kind]
        return cls(
            parameters=sizes.parameters,
            multiply_adds_per_row=sizes.multiply_adds_per_row,
            precision="tf32" if in_tf32 else config.train.precision,
            memory_bytes=4 * sizes.parameters * (3 + states) + activations,
        )
