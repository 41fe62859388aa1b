"""What a step is besides its tables and their plan: ranks, batch, how vectors travel, the dense part."""

from dataclasses import dataclass
from typing import Literal

from dlrm_scale.errors import ConfigError
from dlrm_scale.planning.cluster.cluster import Cluster
from dlrm_scale.planning.costs.collective_costs import Group, collective_curve
from dlrm_scale.planning.costs.dense_work import DenseWork
from dlrm_scale.planning.tables.table_set import TableSet
from dlrm_scale.sharding.shard_memory import ID_COPIES

__all__ = ["PipelineChoice", "StepSetting", "dense_ms", "step_setting"]

OWN_VECTOR_COPIES = 4
"""Of the pooled vectors of a rank's own samples: as they come, in the model's order, and gradients of both (measured:
peaks of 42 plans of three models on two ranks)."""

PipelineChoice = Literal["auto", "plain", "sparse_dist"]


@dataclass(frozen=True, kw_only=True)
class StepSetting:
    """One step's surroundings, checked.

    Attributes:
        ranks: all of them.
        ranks_per_host: divides `ranks`.
        batch_size_per_rank: rows.
        optimizer: of the tables.
        value_bytes: of a pooled value on its way between ranks: 4, or 2 in fp16 and bf16.
        hides_input: the pipeline exchanges the next batch's ids while it computes.
        dense: the dense part; None for one without layers.
        touched_maps: of changed rows, that the checkpoint policy keeps.
    """

    ranks: int
    ranks_per_host: int
    batch_size_per_rank: int
    optimizer: str
    value_bytes: int
    hides_input: bool
    dense: DenseWork | None
    touched_maps: int

    @property
    def hosts(self) -> int:
        """Of all ranks."""
        return self.ranks // self.ranks_per_host

    @property
    def world(self) -> Group:
        """All ranks."""
        return Group(ranks=self.ranks, hosts=self.hosts)

    @property
    def host(self) -> Group:
        """The ranks of one host."""
        return Group(ranks=self.ranks_per_host, hosts=1)

    @property
    def across(self) -> Group:
        """One rank of every host."""
        return Group(ranks=self.hosts, hosts=self.hosts)

    def own_ids_bytes(self, tables: TableSet) -> int:
        """What the ids of a rank's own samples take, whatever the plan."""
        return int(8 * self.batch_size_per_rank * sum(t.lookups_per_sample for t in tables.tables) * ID_COPIES / 2)

    def fixed_memory_bytes(self, tables: TableSet) -> int:
        """What a rank needs beside its shards, whatever the plan."""
        return self.own_ids_bytes(tables) + self.dense_memory_bytes(tables)

    def dense_memory_bytes(self, tables: TableSet) -> int:
        """What the dense part needs, with the pooled vectors of a rank's own samples as it takes them."""
        if self.dense is None:
            return 0
        values = self.batch_size_per_rank * sum(t.dim for t in tables.tables)
        return self.dense.memory_bytes + 4 * OWN_VECTOR_COPIES * values


def step_setting(
    tables: TableSet,
    cluster: Cluster,
    *,
    ranks: int,
    ranks_per_host: int,
    batch_size_per_rank: int,
    pipeline: PipelineChoice = "auto",
    exchange: Literal["fp32", "fp16", "bf16"] = "fp32",
    dense: DenseWork | None = None,
    touched_maps: int = 2,
) -> StepSetting:
    """Check and complete what describes a step.

    Args:
        tables: their optimizer is read.
        cluster: its device settles `auto`.
        ranks: all of them.
        ranks_per_host: divides `ranks`.
        batch_size_per_rank: rows.
        pipeline: `auto` is sparse_dist on CUDA and plain on CPU, as in the trainer. sparse_dist hides the exchange of
            ids on CUDA; on CPU it hides nothing.
        exchange: precision in which pooled vectors travel.
        dense: the dense part.
        touched_maps: of changed rows; 2 with consecutive checkpoints, 3 with others.

    Raises:
        ConfigError: numbers that don't go together.
    """
    if ranks < 1 or ranks_per_host < 1 or ranks % ranks_per_host:
        raise ConfigError(
            f"{ranks} ranks don't divide into hosts of {ranks_per_host}",
            remedy=f"use a multiple of {ranks_per_host} ranks, or another number a host",
        )
    if batch_size_per_rank < 1:
        raise ConfigError(f"a batch of {batch_size_per_rank} rows a rank", remedy="use at least 1")
    return StepSetting(
        ranks=ranks,
        ranks_per_host=ranks_per_host,
        batch_size_per_rank=batch_size_per_rank,
        optimizer=tables.optimizer,
        value_bytes=4 if exchange == "fp32" else 2,
        hides_input=pipeline != "plain" and cluster.device == "cuda",
        dense=dense,
        touched_maps=touched_maps,
    )


def dense_ms(tables: TableSet, cluster: Cluster, setting: StepSetting) -> float:
    """Forward and backward pass of the dense part, its all-reduce and its optimizer."""
    costs, dense, batch = cluster.dense, setting.dense, setting.batch_size_per_rank
    found = costs.call_ms.value + costs.vector_ms.value * batch * sum(t.dim for t in tables.tables) / 1e6
    if dense is None:
        return found
    gflop = 6e-9 * batch * dense.multiply_adds_per_row
    rate = costs.gflop_ms if dense.precision == "fp32" else costs.bf16_gflop_ms
    reduce = collective_curve(cluster, "all_reduce", setting.world) if dense.parameters else None
    found += rate.value * gflop + costs.parameter_ms.value * dense.parameters / 1e6
    return found + (float(reduce.milliseconds(4.0 * dense.parameters)) if reduce is not None else 0.0)
