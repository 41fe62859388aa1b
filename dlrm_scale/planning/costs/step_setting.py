"""What a step is besides its tables and their plan: ranks, batch, how vectors travel, the dense part."""

from dataclasses import dataclass
from typing import Literal

from dlrm_scale.errors import ConfigError
from dlrm_scale.planning.cluster.cluster import Cluster
from dlrm_scale.planning.costs.collective_costs import Group, collective_curve
from dlrm_scale.planning.costs.dense_work import DenseWork
from dlrm_scale.planning.findings import shortened
from dlrm_scale.planning.tables.table_set import TableSet
from dlrm_scale.sharding.shard_memory import ID_COPIES
from dlrm_scale.units import format_bytes, format_count

__all__ = ["COUNTED_MEMORY", "PipelineChoice", "StepSetting", "check_rank_count", "dense_ms", "step_setting"]

COUNTED_MEMORY = (
    "tables, exchange and dense part; a process adds its libraries, the input pipeline and checkpoint buffers, which "
    "`dlrm-scale train --dry-run` counts"
)
"""What our predicted memory of a rank is of, for whoever shows it."""

OWN_VECTOR_COPIES = 4
"""Of the pooled vectors of a rank's own samples: as they come, in the model's order, and gradients of both (measured:
peaks of 42 plans of three models on two ranks)."""

PipelineChoice = Literal["auto", "plain", "sparse_dist"]

_MOST_RANKS, _MOST_ROWS = 2**20, 2**31 - 1
"""Of a plan, and of a rank's batch, whose rows torch and fbgemm count in 32 bits."""
_MOST_BYTES = 2**50
"""Of all tables' weights, of a global batch's ids, of its pooled vectors: a pebibyte each. More is a slip of the pen,
and sums over ranks and copies must stay within 64 bits."""


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
    check_rank_count(ranks)
    if not 1 <= batch_size_per_rank <= _MOST_ROWS:
        raise ConfigError(
            f"a batch of {shortened(batch_size_per_rank)} rows a rank: allowed are 1 to {format_count(_MOST_ROWS)}",
            remedy="use another batch size",
        )
    _check_sizes(tables, ranks * batch_size_per_rank)
    if dense is not None and dense.precision == "tf32" and cluster.device == "cpu":
        raise ConfigError(
            f"train.tf32 = true: TF32 is a format of CUDA devices, and cluster {cluster.name} is of CPUs",
            remedy="leave it out, or plan for a cluster of GPUs",
        )
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


def check_rank_count(ranks: int) -> None:
    """Refuse more ranks than plans are made for, before anything is listed or made by rank.

    Raises:
        ConfigError: there are more.
    """
    if ranks > _MOST_RANKS:
        raise ConfigError(
            f"a plan for {shortened(ranks)} ranks: at most {format_count(_MOST_RANKS)} are allowed",
            remedy="use fewer ranks",
        )


def dense_ms(tables: TableSet, cluster: Cluster, setting: StepSetting) -> float:
    """Forward and backward pass of the dense part, its all-reduce and its optimizer."""
    costs, dense, batch = cluster.dense, setting.dense, setting.batch_size_per_rank
    found = costs.call_ms.value + costs.vector_ms.value * batch * sum(t.dim for t in tables.tables) / 1e6
    if dense is None:
        return found
    gflop = 6e-9 * batch * dense.multiply_adds_per_row
    reduce = collective_curve(cluster, "all_reduce", setting.world) if dense.parameters else None
    found += costs.flop_rate_ms(dense.precision) * gflop + costs.parameter_ms.value * dense.parameters / 1e6
    return found + (float(reduce.milliseconds(4.0 * dense.parameters)) if reduce is not None else 0.0)


def _check_sizes(tables: TableSet, rows: int) -> None:
    batch = f"of a global batch of {format_count(rows)} rows"
    for what, size_bytes in (
        ("the weights of all tables", 4 * sum(table.rows * table.dim for table in tables.tables)),
        (f"the ids {batch}", 8 * rows * sum(table.lookups_per_sample for table in tables.tables)),
        (f"the pooled vectors {batch}", 4 * rows * sum(table.dim for table in tables.tables)),
    ):
        if size_bytes > _MOST_BYTES:
            raise ConfigError(
                f"{tables.name}: {what} take {format_bytes(size_bytes)}; plans are made for up to "
                f"{format_bytes(_MOST_BYTES)}",
                remedy="check rows, columns and lookups_per_sample of its tables, ranks and batch size",
            )
