"""TorchRec's planner, asked what we are asked."""

from typing import TYPE_CHECKING

from dlrm_scale.planning.costs.space import DEFAULT_TYPES, WIDE_TYPES
from dlrm_scale.planning.plan.request import PlanRequest
from dlrm_scale.sharding.rules import objection
from dlrm_scale.sharding.shard_shapes import TableShape

if TYPE_CHECKING:
    from dlrm_scale.sharding.torchrec_costs import TorchRecSetup
    from dlrm_scale.sharding.torchrec_planner import TorchRecPlan

__all__ = ["plan_with_torchrec", "torchrec_plan", "torchrec_setup"]


def plan_with_torchrec(request: PlanRequest) -> tuple[TableShape, ...]:
    """Let TorchRec's planner plan within the types that the trainer may run, for as long as it takes.

    Raises:
        PlanError: it finds nothing that fits.
    """
    return torchrec_plan(request).shapes


def torchrec_plan(request: PlanRequest, *, limit_seconds: int | None = None) -> "TorchRecPlan":
    """Let TorchRec's planner plan within the types that the trainer may run.

    In the wide space that is what TorchRec offers by itself: grids only where a constraint names them, and column
    shards of its own widths.

    Args:
        request: what is planned.
        limit_seconds: see `torchrec_planner.plan_with_torchrec`.

    Raises:
        PlanError: it finds nothing that fits, or not in time.
    """
    from dlrm_scale.sharding.torchrec_planner import plan_with_torchrec as plan

    return plan(
        [table.spec for table in request.tables.tables],
        [table.lookups_per_sample for table in request.tables.tables],
        torchrec_setup(request),
        types=_types(request),
        limit_seconds=limit_seconds,
    )


def torchrec_setup(request: PlanRequest) -> "TorchRecSetup":
    """What TorchRec is told of the cluster: its memory and reserve, and TorchRec's own bandwidths."""
    from dlrm_scale.sharding.torchrec_costs import TorchRecSetup

    return TorchRecSetup(
        ranks=request.ranks,
        ranks_per_host=request.ranks_per_host,
        batch_size_per_rank=request.batch_size_per_rank,
        memory_bytes=request.cluster.memory_bytes,
        device=request.cluster.device,
        reserve=request.cluster.reserve,
    )


def _types(request: PlanRequest) -> dict[str, tuple[str, ...]]:
    offered = tuple(kind for kind in WIDE_TYPES if kind != "grid_shard") if request.wide else DEFAULT_TYPES
    if request.ranks == 1:
        offered = ("table_wise",)
    return {
        table.name: tuple(
            kind
            for kind in request.types.get(table.name, offered)
            if objection(kind, table.spec, optimizer=request.tables.optimizer, allow_split_row_state=request.wide)
            is None
        )
        for table in request.tables.tables
    }
