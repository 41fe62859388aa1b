"""A benchmark of plans on the ranks at hand: what is predicted of each, and what measuring finds."""

import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal, Protocol

import torch

from dlrm_scale.errors import ConfigError, DlrmScaleError, PlanError
from dlrm_scale.host_cores import usable_cores
from dlrm_scale.host_memory import host_memory
from dlrm_scale.planning.measuring.micro_timing import Clock
from dlrm_scale.planning.measuring.plan_groups import group_plans
from dlrm_scale.planning.measuring.plan_matrix import MadePlan
from dlrm_scale.planning.measuring.plan_rounds import RoundsResult, measure_plans
from dlrm_scale.planning.measuring.plan_workload import PlanWorkload, drawn_batches, real_batches
from dlrm_scale.planning.plan.cost_models import OurCosts, PlanLoad, TorchRecModel
from dlrm_scale.planning.plan.request import PlanRequest
from dlrm_scale.sharding.hosts import ranks_per_host as settle_ranks_per_host
from dlrm_scale.sharding.memory_pages import keep_freed_memory
from dlrm_scale.sharding.ranks import Ranks, close_ranks, init_ranks
from dlrm_scale.sharding.shard_shapes import table_layout
from dlrm_scale.units import format_bytes

__all__ = ["BenchRequest", "PlanPrediction", "bench_rank", "choose_anchor", "predict_plans"]

_TIMEOUT_SECONDS = 300.0
_MEMORY_SHARE = 0.7
"""Of a host's free memory that plans may take together, by what is predicted of them."""
_OWN_ID_BYTES = 8


@dataclass(frozen=True, kw_only=True)
class PlanPrediction:
    """What is predicted of one plan.

    Attributes:
        ours: by our costs.
        torchrec_ms: by TorchRec's; None where it doesn't know the plan.
        measurable_bytes: `[ranks]`, what a measurement of its peak should find: no maps of changed rows, which only a
            run keeps, and not the batch that is there before.
        reason: why it can't be used on this cluster; "" if it can.
    """

    ours: PlanLoad
    torchrec_ms: float | None
    measurable_bytes: tuple[int, ...]
    reason: str = ""


@dataclass(frozen=True, kw_only=True)
class BenchRequest:
    """What is measured; the same on every rank.

    Attributes:
        workload: model and batches.
        planned: tables, cluster, ranks and batch.
        plans: with those that have no shapes.
        predictions: of plans with shapes.
        device: of the ranks.
        rounds: of each group of plans.
        seed: of the order.
        clock: by which plans are compared.
        memory_bytes: of a host, that plans may take together; None for a share of what is free.
        anchor: plan that is in every group; see `choose_anchor`.
    """

    workload: PlanWorkload
    planned: PlanRequest
    plans: tuple[MadePlan, ...]
    predictions: Mapping[str, PlanPrediction]
    device: Literal["cpu", "cuda"]
    rounds: int
    seed: int = 0
    clock: Clock = "elapsed"
    memory_bytes: int | None = None
    anchor: str = ""

    @property
    def feasible(self) -> list[str]:
        """Names of plans that are measured, each different from the others."""
        return [
            plan.name
            for plan in self.plans
            if plan.shapes is not None and not plan.same_as and not self.predictions[plan.name].reason
        ]


class _Stop(Protocol):
    @property
    def requested(self) -> bool: ...


def predict_plans(request: PlanRequest, plans: Sequence[MadePlan]) -> dict[str, PlanPrediction]:
    """Predict every plan that there is, by our costs and by TorchRec's.

    Raises:
        ConfigError: the cluster has no costs for so many ranks.
    """
    ours, theirs = OurCosts(request), TorchRecModel(request)
    without_maps = OurCosts(replace(request, touched_maps=0))
    found: dict[str, PlanPrediction] = {}
    for plan in plans:
        if plan.shapes is None:
            continue
        load = ours.load(plan.shapes)
        torchrec_ms: float | None
        try:
            torchrec_ms = theirs.load(plan.shapes).step_ms
        except (ValueError, DlrmScaleError):
            torchrec_ms = None
        found[plan.name] = PlanPrediction(
            ours=load,
            torchrec_ms=torchrec_ms,
            measurable_bytes=_measurable(request, without_maps.load(plan.shapes)),
            reason="" if load.fits else _why_not(request, plan, load),
        )
    return found


def choose_anchor(feasible: Sequence[str]) -> str:
    """Choose the plan by which others are scaled: longest-first if it is there, which is never extreme."""
    return "longest_first" if "longest_first" in feasible else feasible[0]


def bench_rank(request: BenchRequest, stop: _Stop) -> RoundsResult:
    """Measure on this rank; called on every rank with the same request.

    Raises:
        ConfigError: other ranks than were planned for.
        PlanError: no plan could be measured (exit code 3).
    """
    ranks = init_ranks(request.device, _TIMEOUT_SECONDS)
    try:
        return _bench(request, ranks, stop)
    finally:
        close_ranks()


def _bench(request: BenchRequest, ranks: Ranks, stop: _Stop) -> RoundsResult:
    started = time.perf_counter()
    planned = request.planned
    if ranks.ranks != planned.ranks:
        raise ConfigError(
            f"the plans are for {planned.ranks} ranks, and {ranks.ranks} were started",
            remedy=f"start as many, or use --ranks {ranks.ranks}",
        )
    views = ranks.gather_objects((planned.tables.fingerprint(), repr(request.plans), request.rounds, request.seed))
    if any(view != views[0] for view in views):
        raise ConfigError(
            "ranks were started with different tables, plans or rounds", remedy="give every host the same command"
        )
    settle_ranks_per_host(planned.ranks_per_host, ranks)
    torch.set_num_threads(max(1, usable_cores() // ranks.local_ranks))
    if ranks.device.type == "cpu":
        keep_freed_memory()

    def progress(text: str) -> None:
        if ranks.rank == 0:
            sys.stderr.write(f"{time.perf_counter() - started:6.1f} s  {text}\n")
            sys.stderr.flush()

    workload = request.workload
    batches = real_batches(workload, ranks) if workload.dataset else drawn_batches(workload, ranks)
    batches = [batch.to(ranks.device) for batch in batches]
    progress(f"{len(batches)} batches of {planned.batch_size_per_rank} rows a rank are in memory")
    free = request.memory_bytes
    if free is None:
        free = min(int(str(view)) for view in ranks.gather_objects(_free_bytes(ranks)))
    sizes = {name: request.predictions[name].ours.memory_by_rank for name in request.feasible}
    groups, refused = group_plans(sizes, ranks.local_ranks, free, request.anchor)
    if len(groups) > 1:
        progress(f"{format_bytes(free)} a host hold the plans in {len(groups)} groups that share {request.anchor}")
    by_name = {plan.name: plan.shapes for plan in request.plans if plan.shapes is not None}
    result = measure_plans(
        workload,
        by_name,
        groups,
        batches,
        ranks,
        ranks_per_host=planned.ranks_per_host,
        rounds=request.rounds,
        seed=request.seed,
        asked_to_stop=lambda: stop.requested,
        progress=progress,
    )
    result.refused = refused | result.refused
    if not any(result.losses.keys() - result.refused.keys()):
        lines = [f"{name}: {why}" for name, why in result.refused.items()]
        raise PlanError("no plan can be measured on these ranks:\n  " + "\n  ".join(lines))
    return result


def _free_bytes(ranks: Ranks) -> int:
    """Memory of a host's ranks together that plans may take."""
    if ranks.device.type == "cuda":
        return int(_MEMORY_SHARE * torch.cuda.mem_get_info(ranks.device)[0] * ranks.local_ranks)
    return int(_MEMORY_SHARE * host_memory().free_bytes)


def _measurable(request: PlanRequest, load: PlanLoad) -> tuple[int, ...]:
    lookups = sum(table.lookups_per_sample for table in request.tables.tables)
    batch = round(_OWN_ID_BYTES * lookups * request.batch_size_per_rank)
    return tuple(size - batch for size in load.memory_by_rank)


def _why_not(request: PlanRequest, plan: MadePlan, load: PlanLoad) -> str:
    """Need, budget, reserve, and the largest shard of the fullest rank."""
    assert plan.shapes is not None
    by_rank = load.memory_by_rank
    rank = by_rank.index(max(by_rank))
    largest, largest_bytes, kind = "", 0, ""
    for table, shape in zip(request.tables.tables, plan.shapes, strict=True):
        layout = table_layout(table.spec, shape, ranks=request.ranks, ranks_per_host=request.ranks_per_host)
        size = sum(4 * r.rows * r.columns for r in layout.regions if r.rank == rank or layout.replicated)
        if size > largest_bytes:
            largest, largest_bytes, kind = table.name, size, shape.sharding_type
    cluster = request.cluster
    return (
        f"rank {rank} would need {format_bytes(by_rank[rank])}, and {format_bytes(load.memory_limit_bytes)} are there "
        f"({format_bytes(cluster.memory_bytes)} less {cluster.reserve:.0%} reserve); its largest shard is table "
        f"{largest}, {format_bytes(largest_bytes)} as {kind}: a type that divides it would need less"
    )
