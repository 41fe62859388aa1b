"""TorchRec's own performance and storage model, for one shard at a time.

Its enumerator makes an object for every shard, which at 4,096 ranks is minutes; but the shards of an option are equal,
or smaller at the end, so that the first one tells all. These are TorchRec's functions, not their formulas written anew.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.planner import Topology
from torchrec.distributed.planner.constants import DEFAULT_PERF_ESTIMATOR
from torchrec.distributed.planner.enumerators import get_partition_by_type
from torchrec.distributed.planner.estimator import EmbeddingPerfEstimatorFactory
from torchrec.distributed.planner.shard_estimators import EmbeddingStorageEstimator
from torchrec.distributed.planner.types import (
    HardwareConfig,
    KernelConfig,
    Shard,
    ShardingOption,
    TopologyFactory,
    TrainerConfig,
)
from torchrec.distributed.planner.utils import build_sharder_data_map, sharder_name
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection

from dlrm_scale.schema import TableSpec

__all__ = ["ShardCost", "TorchRecCosts", "TorchRecSetup", "make_topology", "table_memory_bytes"]

_GIB = 1024**3


@dataclass(frozen=True, kw_only=True, slots=True)
class TorchRecSetup:
    """What TorchRec's planner is told of a cluster.

    Attributes:
        ranks: all of them.
        ranks_per_host: divides `ranks`.
        batch_size_per_rank: samples.
        memory_bytes: of a device; of a rank's share of the host on CPU.
        device: what computes.
        reserve: share of the memory that is kept, beside the input batches that TorchRec counts 20 times.
        host_memory_bytes: of a rank, beside a device's; TorchRec's 128 GiB.
        intra_host_gib_per_second: between ranks of a host; None for TorchRec's.
        inter_host_gib_per_second: between hosts; None for TorchRec's.
        memory_gib_per_second: of the device's memory; None for TorchRec's.
    """

    ranks: int
    ranks_per_host: int
    batch_size_per_rank: int
    memory_bytes: int
    device: Literal["cpu", "cuda"] = "cuda"
    reserve: float = 0.15
    host_memory_bytes: int = 128 * _GIB
    intra_host_gib_per_second: float | None = None
    inter_host_gib_per_second: float | None = None
    memory_gib_per_second: float | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardCost:
    """Of one shard on its rank.

    Attributes:
        milliseconds: TorchRec's sum of forward and backward lookup and communication.
        memory_bytes: of the device's memory: rows and buffers.
    """

    milliseconds: float
    memory_bytes: int


def make_topology(setup: TorchRecSetup) -> Topology:
    """Describe a cluster in TorchRec's terms."""
    on_gpu = setup.device == "cuda"
    memory_bandwidth = _bytes_per_ms(setup.memory_gib_per_second)
    return TopologyFactory.create_topology(
        TrainerConfig(world_size=setup.ranks, local_world_size=setup.ranks_per_host),
        HardwareConfig(
            hbm_cap_bytes=setup.memory_bytes if on_gpu else None,
            ddr_cap_bytes=setup.host_memory_bytes if on_gpu else setup.memory_bytes,
            hbm_mem_bw=memory_bandwidth if on_gpu else None,
            ddr_mem_bw=None if on_gpu else memory_bandwidth,
            intra_host_bw=_bytes_per_ms(setup.intra_host_gib_per_second),
            inter_host_bw=_bytes_per_ms(setup.inter_host_gib_per_second),
        ),
        KernelConfig(compute_device=setup.device),
    )


def table_memory_bytes(setup: TorchRecSetup, lookups_per_sample: Sequence[float]) -> int:
    """Memory that TorchRec leaves for tables on each rank, without a dense part (`HeuristicalStorageReservation`).

    On CPU it keeps no share, only the batches.

    Args:
        setup: of the cluster.
        lookups_per_sample: mean ids in a bag, by table.
    """
    # Two batches in the pipeline, with 10 copies inside each, of 8-byte ids.
    batches = math.ceil(sum(x * setup.batch_size_per_rank for x in lookups_per_sample) * 8.0) * 20
    kept = int((1 - setup.reserve) * setup.memory_bytes) if setup.device == "cuda" else setup.memory_bytes
    return kept - batches


class TorchRecCosts:
    """Asks TorchRec's estimators for one shard after the other.

    Args:
        setup: of the cluster.
    """

    def __init__(self, setup: TorchRecSetup) -> None:
        """Make the estimators; see the class."""
        self._setup = setup
        topology = make_topology(setup)
        self._performance = EmbeddingPerfEstimatorFactory.create(DEFAULT_PERF_ESTIMATOR, topology=topology)
        self._storage = EmbeddingStorageEstimator(topology=topology)
        sharder = EmbeddingBagCollectionSharder()
        self._sharders = build_sharder_data_map({sharder_name(sharder.module_type): sharder})
        # Estimators look at the module's type alone.
        table = EmbeddingBagConfig(name="t", embedding_dim=4, num_embeddings=1, feature_names=["f"])
        self._module = ("", EmbeddingBagCollection(tables=[table], device=torch.device("meta")))

    def shard(
        self, table: TableSpec, lookups_per_sample: float, sharding_type: str, kernel: str, rows: int, columns: int
    ) -> ShardCost:
        """Cost of a shard; every shard of an option costs the same time, and none takes more memory than the first.

        Args:
            table: whole.
            lookups_per_sample: mean ids in a bag.
            sharding_type: TorchRec's name.
            kernel: `fused` or `dense`.
            rows: of the shard.
            columns: of the shard.
        """
        option = ShardingOption(
            name=table.name,
            tensor=torch.empty(table.rows, table.dim, device="meta"),
            module=self._module,
            input_lengths=[lookups_per_sample],
            batch_size=self._setup.batch_size_per_rank,
            sharding_type=sharding_type,
            partition_by=get_partition_by_type(sharding_type),
            compute_kernel=kernel,
            shards=[Shard(size=[rows, columns], offset=[0, 0])],
            is_pooled=True,
        )
        self._performance.estimate([option], self._sharders)
        self._storage.estimate([option], self._sharders)
        shard = option.shards[0]
        assert shard.perf is not None
        assert shard.storage is not None
        memory = shard.storage.hbm if self._setup.device == "cuda" else shard.storage.ddr
        return ShardCost(milliseconds=float(shard.perf.total), memory_bytes=int(memory))


def _bytes_per_ms(gib_per_second: float | None) -> float | None:
    return None if gib_per_second is None else gib_per_second * _GIB / 1000
