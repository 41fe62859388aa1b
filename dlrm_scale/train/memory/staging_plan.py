"""How much host memory each rank sets aside for snapshots of its rows, known before anything is allocated.

A snapshot of everything, as a baseline is, is what there should be room for. Where `checkpoint.staging_memory` leaves
less, larger saves are written while training waits, and the run says so before its first step.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from dlrm_scale.config import CheckpointConfig, Config
from dlrm_scale.errors import ConfigError
from dlrm_scale.layout import ShardLayout, ShardRegion
from dlrm_scale.sharding.plan_rows import state_bytes
from dlrm_scale.units import format_bytes, parse_bytes

__all__ = ["FREE_SHARE", "StagingNeed", "StagingPlan", "describe_staging", "plan_staging", "staging_memory_bytes"]

FREE_SHARE = 0.5
"""Of what a host has left besides everything else that its ranks are predicted to need: staging may take this much."""

_PADDING_BYTES = 64
"""Each tensor's share begins at a multiple of this."""


@dataclass(frozen=True, kw_only=True)
class StagingNeed:
    """What one rank could use.

    Attributes:
        whole_bytes: a snapshot of all its rows with their state.
        delta_bytes: one of as many rows as the steps between two saves can touch, if that is known and less.
        ids_bytes: ids of the most rows that a delta names one by one; held besides the staging.
        free_bytes: main memory that its host has left now.
        other_bytes: main memory that the rank will take for everything else.
    """

    whole_bytes: int
    delta_bytes: int
    ids_bytes: int
    free_bytes: int
    other_bytes: int

    @classmethod
    def of_rank(
        cls,
        config: Config,
        layout: ShardLayout,
        rank: int,
        pooling: Sequence[float],
        *,
        free_bytes: int,
        other_bytes: int,
    ) -> "StagingNeed":
        """Add up a rank's rows.

        Args:
            config: the whole run's.
            layout: the plan.
            rank: which rank; rank 0 writes the data-parallel tables.
            pooling: mean ids of each table in a row of data, in the layout's order.
            free_bytes: see the class.
            other_bytes: see the class.
        """
        optimizer, steps = config.sparse_optimizer.kind, _steps_between_saves(config)
        held = [
            (region, region.rows if steps is None else min(region.rows, int(config.data.batch_size * steps * ids)))
            for table, ids in zip(layout.tables, pooling, strict=True)
            for region in table.regions
            if region.rank == rank and region.rows and region.columns and (not table.replicated or rank == 0)
        ]
        return cls(
            whole_bytes=sum(_rows_bytes(region, region.rows, optimizer) for region, _ in held),
            delta_bytes=sum(_rows_bytes(region, rows, optimizer) for region, rows in held),
            ids_bytes=4 * sum(rows for _, rows in held),
            free_bytes=free_bytes,
            other_bytes=other_bytes,
        )


@dataclass(frozen=True, kw_only=True)
class StagingPlan:
    """What one rank gets.

    Attributes:
        size_bytes: allocated at the start.
        whole_bytes: a snapshot of all its rows.
        ids_bytes: as in `StagingNeed`.
    """

    size_bytes: int
    whole_bytes: int
    ids_bytes: int

    @property
    def is_short(self) -> bool:
        """A baseline doesn't fit."""
        return self.size_bytes < self.whole_bytes


def staging_memory_bytes(config: CheckpointConfig) -> int | None:
    """Read `checkpoint.staging_memory`; None for auto.

    Raises:
        ConfigError: it is neither auto nor a size.
    """
    if config.staging_memory == "auto":
        return None
    try:
        return parse_bytes(config.staging_memory)
    except ConfigError as error:
        text = f"checkpoint.staging_memory = {error.message}"
        raise ConfigError(text, remedy=f"{error.remedy}; auto takes what the host has left") from None


def plan_staging(needs: Sequence[StagingNeed], local_ranks: int, setting_bytes: int | None) -> list[StagingPlan]:
    """Share the memory of each host among its ranks, in proportion to what they hold.

    Args:
        needs: of all ranks; those of one host follow one another.
        local_ranks: of a host.
        setting_bytes: the limit for each rank that the user set; None for `FREE_SHARE` of what is left.
    """
    plans = []
    for first in range(0, len(needs), local_ranks):
        host = needs[first : first + local_ranks]
        left = min(n.free_bytes for n in host) - sum(n.other_bytes + n.ids_bytes for n in host)
        wanted = sum(n.whole_bytes for n in host)
        share = min(1.0, max(0, left) * FREE_SHARE / wanted) if wanted else 1.0
        for need in host:
            limit = int(share * need.whole_bytes) if setting_bytes is None else setting_bytes
            # without room for a baseline there is no use in more than a delta takes
            size = need.whole_bytes if limit >= need.whole_bytes else min(limit, need.delta_bytes)
            plans.append(StagingPlan(size_bytes=size, whole_bytes=need.whole_bytes, ids_bytes=need.ids_bytes))
    return plans


def describe_staging(plans: Sequence[StagingPlan], setting: str) -> str:
    """One line for the user: the bound, and what happens to saves above it."""
    largest = max(plan.size_bytes for plan in plans)
    text = f"checkpoints are copied to at most {format_bytes(largest)} of host memory a rank"
    short = [(rank, plan) for rank, plan in enumerate(plans) if plan.is_short]
    if not short:
        return text
    rank, plan = max(short, key=lambda item: item[1].whole_bytes - item[1].size_bytes)
    room = f"checkpoint.staging_memory = {setting}"
    if setting == "auto":
        room = f"{format_bytes(plan.size_bytes)}, its share of half the memory that its host has left"
    return (
        f"warning: rank {rank} holds {format_bytes(plan.whole_bytes)} of rows, more than fit into {room}: checkpoints "
        "that don't fit, baselines among them, are written block by block while training waits"
        + (f"; so it is on {len(short)} of {len(plans)} ranks" if len(short) > 1 else "")
    )


def _steps_between_saves(config: Config) -> int | None:
    """The most steps whose rows a delta holds; None where nothing bounds them."""
    checkpoint = config.checkpoint
    if checkpoint.policy != "consecutive" or checkpoint.interval != "steps":
        return None
    return checkpoint.every_steps or config.train.max_steps or None


def _rows_bytes(region: ShardRegion, rows: int, optimizer: str) -> int:
    tensors = {"sgd": 1, "rowwise_adagrad": 2}.get(optimizer, 3)
    return 4 * rows * region.columns + state_bytes(rows, region.columns, optimizer) + tensors * _PADDING_BYTES
