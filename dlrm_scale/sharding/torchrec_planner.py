"""TorchRec's own planner on a cluster that is only described: no ranks are needed."""

import math
import time
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import nn
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.planner import EmbeddingShardingPlanner, ParameterConstraints
from torchrec.distributed.planner.stats import NoopEmbeddingStats
from torchrec.distributed.planner.storage_reservations import HeuristicalStorageReservation
from torchrec.distributed.planner.types import PlannerError, ShardingOption
from torchrec.distributed.types import ModuleSharder
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection

from dlrm_scale.errors import PlanError
from dlrm_scale.schema import TableSpec
from dlrm_scale.sharding.ordered_enumerator import OrderedEnumerator
from dlrm_scale.sharding.shard_shapes import TableShape, shape_of
from dlrm_scale.sharding.sharder import ALL_SHARDING_TYPES
from dlrm_scale.sharding.third_party_logs import quiet_start_up
from dlrm_scale.sharding.torchrec_costs import TorchRecSetup, make_topology
from dlrm_scale.sharding.torchrec_plan import layout_of
from dlrm_scale.units import format_bytes

__all__ = ["TorchRecPlan", "plan_with_torchrec"]


@dataclass(frozen=True, kw_only=True)
class TorchRecPlan:
    """What it made.

    Attributes:
        shapes: by table; a table that is cut into one column shard counts as table_wise.
        seconds: that it planned for, without making the model.
        cut_off: it had more proposals when its time was up.
    """

    shapes: tuple[TableShape, ...]
    seconds: float
    cut_off: bool = False


def plan_with_torchrec(
    tables: Sequence[TableSpec],
    lookups_per_sample: Sequence[float],
    setup: TorchRecSetup,
    *,
    types: Mapping[str, Sequence[str]] | None = None,
    limit_seconds: int | None = None,
) -> TorchRecPlan:
    """Let `EmbeddingShardingPlanner` plan as it does by default, with its estimates of memory.

    Its kernels are those that the trainer has: fused, or dense for data-parallel tables. It takes minutes for hundreds
    of tables or ranks.

    Args:
        tables: to be placed.
        lookups_per_sample: mean ids in a bag, by table.
        setup: what it is told of the cluster.
        types: allowed sharding types by table; None for what it takes by itself: all but grids. On CPU it doesn't
            offer types that cut rows, which makes its plans better there; tables that may have no other get them.
        limit_seconds: of trying proposals, once all options are listed; then it gives the best plan that it has.

    Raises:
        PlanError: it finds nothing that fits, or not in time.
    """
    model = EmbeddingBagCollection(
        device=torch.device("meta"),
        tables=[
            EmbeddingBagConfig(name=t.name, embedding_dim=t.dim, num_embeddings=t.rows, feature_names=[t.name])
            for t in tables
        ],
    )
    own = EmbeddingBagCollectionSharder().sharding_types(setup.device)
    constraints = {
        t.name: ParameterConstraints(
            pooling_factors=[lookups],
            compute_kernels=["fused", "dense"],
            sharding_types=None if types is None else [k for k in types[t.name] if k in own] or list(types[t.name]),
        )
        for t, lookups in zip(tables, lookups_per_sample, strict=True)
    }
    topology = make_topology(setup)
    with warnings.catch_warnings():
        # TorchRec recommends another reservation for models with a dense part; this one has none.
        warnings.simplefilter("ignore", FutureWarning)
        reservation = HeuristicalStorageReservation(percentage=setup.reserve)
    enumerator = _TimedEnumerator(topology=topology, batch_size=setup.batch_size_per_rank, constraints=constraints)
    planner = EmbeddingShardingPlanner(
        topology=topology,
        batch_size=setup.batch_size_per_rank,
        enumerator=enumerator,
        constraints=constraints,
        storage_reservation=reservation,
        stats=NoopEmbeddingStats(),
        debug=False,
        timeout_seconds=limit_seconds,
    )
    started = time.perf_counter()
    try:
        with quiet_start_up():
            made = planner.plan(model, [EmbeddingBagCollectionSharder() if types is None else _EveryType()])
    except PlannerError as error:
        total = sum(t.weight_bytes for t in tables)
        raise PlanError(
            f"TorchRec's planner finds no plan for {len(tables)} tables of {format_bytes(total)} on {setup.ranks} "
            f"ranks of {format_bytes(setup.memory_bytes)}"
            + (f" in {limit_seconds} s" if enumerator.ran_out(limit_seconds) else "")
        ) from error
    seconds, cut_off = time.perf_counter() - started, enumerator.ran_out(limit_seconds)
    layout = layout_of(made, tables, setup.ranks)
    shapes = [shape_of(t, ranks=setup.ranks, ranks_per_host=setup.ranks_per_host) for t in layout.tables]
    return TorchRecPlan(
        shapes=tuple(_normal(s) for s in shapes),
        seconds=seconds,
        cut_off=cut_off,
    )


class _EveryType(EmbeddingBagCollectionSharder):
    """Offers every type on every device; constraints choose from them."""

    def sharding_types(self, compute_device_type: str) -> list[str]:
        return list(ALL_SHARDING_TYPES)


class _TimedEnumerator(OrderedEnumerator):
    """Tells when all options were listed: from then on the planner looks at its time limit."""

    listed_at = math.inf

    def enumerate(self, module: nn.Module, sharders: list[ModuleSharder[nn.Module]]) -> list[ShardingOption]:
        options: list[ShardingOption] = super().enumerate(module, sharders)
        self.listed_at = time.perf_counter()
        return options

    def ran_out(self, limit_seconds: int | None) -> bool:
        return limit_seconds is not None and time.perf_counter() - self.listed_at > limit_seconds


def _normal(shape: TableShape) -> TableShape:
    whole = shape.sharding_type in ("column_wise", "table_column_wise") and len(shape.places) == 1
    return replace(shape, sharding_type="table_wise") if whole else shape
