"""TorchRec's own planner on a cluster that is only described: no ranks are needed."""

import time
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.planner import EmbeddingShardingPlanner, ParameterConstraints
from torchrec.distributed.planner.stats import NoopEmbeddingStats
from torchrec.distributed.planner.storage_reservations import HeuristicalStorageReservation
from torchrec.distributed.planner.types import PlannerError
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection

from dlrm_scale.errors import PlanError
from dlrm_scale.schema import TableSpec
from dlrm_scale.sharding.ordered_enumerator import OrderedEnumerator
from dlrm_scale.sharding.shard_shapes import TableShape, shape_of
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
    """

    shapes: tuple[TableShape, ...]
    seconds: float


def plan_with_torchrec(
    tables: Sequence[TableSpec],
    lookups_per_sample: Sequence[float],
    setup: TorchRecSetup,
    *,
    types: Mapping[str, Sequence[str]] | None = None,
) -> TorchRecPlan:
    """Let `EmbeddingShardingPlanner` plan as it does by default, with its estimates of memory.

    Its kernels are those that the trainer has: fused, or dense for data-parallel tables. It takes minutes for hundreds
    of tables or ranks.

    Args:
        tables: to be placed.
        lookups_per_sample: mean ids in a bag, by table.
        setup: what it is told of the cluster.
        types: allowed sharding types by table; None for what it takes by itself: all but grids.

    Raises:
        PlanError: it finds nothing that fits.
    """
    model = EmbeddingBagCollection(
        device=torch.device("meta"),
        tables=[
            EmbeddingBagConfig(name=t.name, embedding_dim=t.dim, num_embeddings=t.rows, feature_names=[t.name])
            for t in tables
        ],
    )
    constraints = {
        t.name: ParameterConstraints(
            pooling_factors=[lookups],
            compute_kernels=["fused", "dense"],
            sharding_types=None if types is None else list(types[t.name]),
        )
        for t, lookups in zip(tables, lookups_per_sample, strict=True)
    }
    topology = make_topology(setup)
    with warnings.catch_warnings():
        # TorchRec recommends another reservation for models with a dense part; this one has none.
        warnings.simplefilter("ignore", FutureWarning)
        reservation = HeuristicalStorageReservation(percentage=setup.reserve)
    planner = EmbeddingShardingPlanner(
        topology=topology,
        batch_size=setup.batch_size_per_rank,
        enumerator=OrderedEnumerator(topology=topology, batch_size=setup.batch_size_per_rank, constraints=constraints),
        constraints=constraints,
        storage_reservation=reservation,
        stats=NoopEmbeddingStats(),
        debug=False,
    )
    started = time.perf_counter()
    try:
        with quiet_start_up():
            made = planner.plan(model, [EmbeddingBagCollectionSharder()])
    except PlannerError as error:
        total = sum(t.weight_bytes for t in tables)
        raise PlanError(
            f"TorchRec's planner finds no plan for {len(tables)} tables of {format_bytes(total)} on {setup.ranks} "
            f"ranks of {format_bytes(setup.memory_bytes)}"
        ) from error
    seconds = time.perf_counter() - started
    layout = layout_of(made, tables, setup.ranks)
    shapes = [shape_of(t, ranks=setup.ranks, ranks_per_host=setup.ranks_per_host) for t in layout.tables]
    return TorchRecPlan(shapes=tuple(_normal(s) for s in shapes), seconds=seconds)


def _normal(shape: TableShape) -> TableShape:
    whole = shape.sharding_type in ("column_wise", "table_column_wise") and len(shape.places) == 1
    return replace(shape, sharding_type="table_wise") if whole else shape
