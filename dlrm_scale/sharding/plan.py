"""Making or reading a sharding plan on one rank, for all of them."""

import hashlib
from collections.abc import Mapping, Sequence

import torch
from torch import nn
from torchrec.distributed.planner import EmbeddingShardingPlanner, ParameterConstraints
from torchrec.distributed.planner.stats import NoopEmbeddingStats
from torchrec.distributed.planner.storage_reservations import FixedPercentageStorageReservation
from torchrec.distributed.planner.types import (
    HardwareConfig,
    KernelConfig,
    PlannerError,
    TopologyFactory,
    TrainerConfig,
)

from dlrm_scale.config import Config
from dlrm_scale.errors import ConfigError, DlrmScaleError, PlanError
from dlrm_scale.host_memory import host_memory
from dlrm_scale.schema import TableSpec
from dlrm_scale.sharding.given_plan import check_given_plan, plan_path
from dlrm_scale.sharding.ordered_enumerator import OrderedEnumerator
from dlrm_scale.sharding.plan_file import PlanFile, load_plan, plan_of_layout
from dlrm_scale.sharding.plan_rows import state_bytes
from dlrm_scale.sharding.ranks import Ranks
from dlrm_scale.sharding.rules import allowed_types, device_memory_bytes
from dlrm_scale.sharding.sharder import TableSharder
from dlrm_scale.sharding.torchrec_plan import layout_of
from dlrm_scale.units import format_bytes, format_count

__all__ = ["check_agreement", "check_equal_requests", "make_plan"]

_RESERVED_SHARE = 0.15
"""Of a device's memory, kept for the dense part, batches and buffers."""


def make_plan(
    model: nn.Module,
    tables: Sequence[TableSpec],
    config: Config,
    sharder: TableSharder,
    ranks: Ranks,
    *,
    host_ranks: int,
    given: PlanFile | None = None,
) -> PlanFile:
    """Let rank 0 plan, or read a plan, and give it to every rank. A collective: all ranks call it.

    Args:
        model: with its `EmbeddingBagCollection` on the meta device.
        tables: the model's tables.
        config: `sharding`, `sparse_optimizer` and `data.batch_size` are read.
        sharder: what shards the tables.
        ranks: this process among the others.
        host_ranks: ranks that count as one host.
        given: on rank 0, a plan that goes before `sharding.plan`.

    Raises:
        ConfigError: see `rules.allowed_types`, and `given_plan.check_given_plan` for a plan from a file.
        PlanError: a type isn't allowed, nothing fits, or the file's plan is for something else. Raised on every rank.
    """
    types = allowed_types(tables, config, ranks.device.type, ranks.ranks)
    answer: object = None
    if ranks.rank == 0:
        try:
            answer = _read(given, tables, config, ranks, host_ranks)
            if answer is None:
                answer = _plan(model, tables, types, config, sharder, ranks, host_ranks)
        except DlrmScaleError as error:
            answer = error
        except Exception as error:
            ranks.broadcast_object(PlanError(f"rank 0 failed to plan: {error!r}"))
            raise
    answer = ranks.broadcast_object(answer)
    if isinstance(answer, DlrmScaleError):
        raise answer
    assert isinstance(answer, PlanFile)
    return answer


def check_equal_requests(tables: Sequence[TableSpec], config: Config, ranks: Ranks) -> None:
    """Make sure that all ranks are about to shard the same tables in the same way. A collective.

    Comes before every check that could stop one rank alone and leave the others waiting for it.

    Raises:
        PlanError: on every rank, naming the ranks that differ.
    """
    # Only rank 0 reads a plan's file: other hosts may have it elsewhere, or not at all.
    path = plan_path(config.sharding)
    sharding = config.sharding if path is None else config.sharding.model_copy(update={"plan": "a file"})
    asked = repr((tuple(tables), sharding, config.sparse_optimizer, ranks.device.type, ranks.local_ranks))
    fingerprint = hashlib.sha256(asked.encode()).hexdigest()
    check_agreement(fingerprint, "tables, sharding config, device or ranks a host", ranks)


def check_agreement(fingerprint: str, what: str, ranks: Ranks) -> None:
    """Compare a fingerprint over all ranks. A collective.

    Raises:
        PlanError: on every rank, naming the ranks that differ from rank 0.
    """
    fingerprints = ranks.gather_objects(fingerprint)
    different = [str(r) for r, f in enumerate(fingerprints) if f != fingerprints[0]]
    if different:
        raise PlanError(
            f"{what}: rank {', '.join(different)} of {ranks.ranks} differs from rank 0",
            remedy="start every rank with the same config, dataset and package versions",
        )


def _read(
    given: PlanFile | None, tables: Sequence[TableSpec], config: Config, ranks: Ranks, host_ranks: int
) -> PlanFile | None:
    """Take a plan that is there already; None if TorchRec is to make one."""
    path = plan_path(config.sharding)
    if given is None:
        if config.sharding.plan == "auto":
            raise ConfigError(
                'sharding.plan = "auto" needs a planner, and none was asked here',
                remedy='make a plan with `dlrm-scale plan -o FILE` and set sharding.plan = "FILE"',
            )
        if path is None:
            return None
        given = load_plan(path)
    check_given_plan(given, tables, config, ranks=ranks.ranks, ranks_per_host=host_ranks)
    return given


def _plan(
    model: nn.Module,
    tables: Sequence[TableSpec],
    types: Mapping[str, tuple[str, ...]],
    config: Config,
    sharder: TableSharder,
    ranks: Ranks,
    host_ranks: int,
) -> PlanFile:
    memory_bytes = _device_memory_bytes(config, ranks)
    on_gpu = ranks.device.type == "cuda"
    topology = TopologyFactory.create_topology(
        TrainerConfig(world_size=ranks.ranks, local_world_size=host_ranks),
        HardwareConfig(hbm_cap_bytes=memory_bytes if on_gpu else None, ddr_cap_bytes=None if on_gpu else memory_bytes),
        KernelConfig(compute_device=ranks.device.type),
    )
    constraints = {
        name: ParameterConstraints(sharding_types=list(t), min_partition=config.sharding.min_columns_per_shard)
        for name, t in types.items()
    }
    batch_size = max(1, config.data.batch_size // ranks.ranks)
    planner = EmbeddingShardingPlanner(
        topology=topology,
        batch_size=batch_size,
        enumerator=OrderedEnumerator(topology=topology, batch_size=batch_size, constraints=constraints),
        constraints=constraints,
        storage_reservation=FixedPercentageStorageReservation(percentage=_RESERVED_SHARE),
        stats=NoopEmbeddingStats(),
        debug=False,
    )
    try:
        made = planner.plan(model, [sharder])
    except PlannerError as error:
        raise _does_not_fit(tables, types, config, ranks.ranks, memory_bytes) from error
    return plan_of_layout(
        layout_of(made, tables, ranks.ranks),
        planner="torchrec",
        ranks_per_host=host_ranks,
        optimizer=config.sparse_optimizer.kind,
        batch_size_per_rank=batch_size,
        packages=("torchrec",),
    )


def _does_not_fit(
    tables: Sequence[TableSpec],
    types: Mapping[str, tuple[str, ...]],
    config: Config,
    ranks: int,
    memory_bytes: int,
) -> PlanError:
    """Say what is needed and what there is. TorchRec's own message rounds both to GB and lists its internals."""
    optimizer = config.sparse_optimizer.kind
    needs = {t.name: t.weight_bytes + state_bytes(t.rows, t.dim, optimizer) for t in tables}
    largest = max(needs, key=lambda name: needs[name])
    budget = int(memory_bytes * (1 - _RESERVED_SHARE))
    if 2 * sum(needs.values()) <= budget:
        rows = max(1, config.data.batch_size // ranks)
        return PlanError(
            f"no sharding plan fits: {len(tables)} tables need {format_bytes(sum(needs.values()))} with optimizer "
            f"state, but TorchRec's planner counts buffers for batches of {format_count(rows)} rows a rank on top, "
            f"and {format_bytes(budget)} a rank are there ({format_bytes(memory_bytes)}, less "
            f"{_RESERVED_SHARE:.0%} for the dense part and batches)",
            remedy="use a smaller data.batch_size, more ranks, or more sharding.device_memory",
        )
    return PlanError(
        f"no sharding plan fits: {len(tables)} tables need {format_bytes(sum(needs.values()))} with optimizer state "
        f"and buffers on top; {ranks} x {format_bytes(budget)} are there ({format_bytes(memory_bytes)} a rank, less "
        f"{_RESERVED_SHARE:.0%} for the dense part and batches). The largest is {largest}: "
        f"{format_bytes(needs[largest])}, allowed as {', '.join(types[largest])}",
        remedy=f"use more ranks, a smaller model.dim, more sharding.device_memory, or "
        f'sharding.tables.{largest} = "row_wise", which divides it over all ranks',
    )


def _device_memory_bytes(config: Config, ranks: Ranks) -> int:
    stated = device_memory_bytes(config.sharding)
    if stated is not None:
        return stated
    if ranks.device.type == "cuda":
        return int(torch.cuda.get_device_properties(ranks.device).total_memory)
    return host_memory().total_bytes // ranks.local_ranks
