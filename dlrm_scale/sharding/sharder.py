"""TorchRec's sharder, told which sharding types are allowed and which optimizer is fused into the backward pass."""

from typing import get_args

from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torchrec.distributed.embedding_types import EmbeddingComputeKernel
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.types import BoundsCheckMode, QuantizedCommCodecs, ShardingType

from dlrm_scale.config import ShardingType as ShardingKind
from dlrm_scale.config import SparseOptimizerConfig

__all__ = ["ALL_SHARDING_TYPES", "TableSharder"]

ALL_SHARDING_TYPES: tuple[str, ...] = get_args(ShardingKind)

_FUSED_OPTIMIZERS = {
    "sgd": EmbOptimType.EXACT_SGD,
    "rowwise_adagrad": EmbOptimType.EXACT_ROWWISE_ADAGRAD,
    "adam": EmbOptimType.ADAM,
}


class TableSharder(EmbeddingBagCollectionSharder):
    """Shards every embedding table, on any device, by any of the seven types.

    TorchRec's own sharder hides row_wise, table_row_wise and grid_shard on CPU; with gloo of torch 2.13 they work
    there (tests/sharding compares each with an unsharded reference).

    Args:
        optimizer: the optimizer that is fused into the backward pass of the sharded tables.
        codecs: from `exchange_codecs`: how pooled vectors and their gradients travel; None for fp32.
    """

    def __init__(self, optimizer: SparseOptimizerConfig, codecs: dict[str, QuantizedCommCodecs] | None = None) -> None:
        """Translate the config into fbgemm arguments; see the class."""
        fused: dict[str, object] = {
            "optimizer": _FUSED_OPTIMIZERS[optimizer.kind],
            "learning_rate": optimizer.learning_rate,
            # fbgemm's default, WARNING, does the same pass over the ids and then repairs a bad one to row 0 with
            # a line on stderr. FATAL stops. The dataset's ids fit by construction; this guards against our bugs.
            "bounds_check_mode": BoundsCheckMode.FATAL,
        }
        if optimizer.kind != "sgd":
            fused["eps"] = optimizer.eps
        super().__init__(fused, codecs)

    def sharding_types(self, compute_device_type: str) -> list[str]:
        """List the types that the planner may choose from, in a fixed order."""
        return list(ALL_SHARDING_TYPES)

    def compute_kernels(self, sharding_type: str, compute_device_type: str) -> list[str]:
        """Name the one kernel of a type: fused, or dense for data-parallel tables.

        Tables in host memory behind a GPU cache (UVM) are left out: nothing here measures them yet.
        """
        dense = sharding_type == ShardingType.DATA_PARALLEL.value
        return [(EmbeddingComputeKernel.DENSE if dense else EmbeddingComputeKernel.FUSED).value]
