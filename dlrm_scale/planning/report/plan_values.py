"""An answer of the planner as JSON-ready values. Equal requests give equal values, but for the fields of `TIMING`."""

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict

from dlrm_scale.planning.costs.step_setting import COUNTED_MEMORY
from dlrm_scale.planning.plan.analysis import Analysis
from dlrm_scale.planning.plan.memory_caps import MemoryCaps
from dlrm_scale.planning.plan.proposal import Proposal, Rating
from dlrm_scale.planning.plan.request import PlanRequest
from dlrm_scale.planning.plan.simulate import KNEE_RULE, WIDE_GAP, Simulation
from dlrm_scale.planning.report.cluster_source import cluster_source, describe_source
from dlrm_scale.sharding.shard_shapes import HOST_TYPES, TableShape

__all__ = ["TIMING", "analysis_values", "request_values", "shape_values", "simulation_values"]

TIMING = ("plans[].solve_seconds",)
"""Fields that differ from one call to the next."""


def request_values(request: PlanRequest) -> dict[str, object]:
    """What was asked."""
    tables, cluster = request.tables, request.cluster
    return {
        "tables": {
            "name": tables.name,
            "count": len(tables.tables),
            "rows": sum(t.rows for t in tables.tables),
            "weight_bytes": sum(t.spec.weight_bytes for t in tables.tables),
            "optimizer": tables.optimizer,
            "fingerprint": tables.fingerprint(),
        },
        "cluster": {
            "name": cluster.name,
            "device": cluster.device,
            "memory_bytes": cluster.memory_bytes,
            "reserve": cluster.reserve,
            "fingerprint": request.cluster_fingerprint(),
            "source": describe_source(cluster),
            "constants": asdict(cluster_source(cluster)),
        },
        "ranks": request.ranks,
        "ranks_per_host": request.ranks_per_host,
        "batch_size_per_rank": request.batch_size_per_rank,
        "space": request.space,
        "counted_memory": COUNTED_MEMORY,
        "constraints": {name: list(kinds) for name, kinds in request.types.items()},
    }


def analysis_values(analysis: Analysis) -> dict[str, object]:
    """All plans with their ratings, what decides their steps, and what memory and space force."""
    comparison = analysis.comparison
    request = comparison.request
    wide = analysis.wide
    return {
        **request_values(request),
        "plans": [
            {
                **_proposal_values(proposal, request),
                "bottleneck": asdict(analysis.bottlenecks[proposal.planner])
                if proposal.planner in analysis.bottlenecks
                else None,
            }
            for proposal in comparison.proposals
        ],
        "failures": dict(comparison.failures),
        "memory_caps": None if analysis.memory_caps is None else _caps_values(analysis.memory_caps),
        "wide_space": None if wide is None else asdict(wide),
        "timing_fields": list(TIMING),
    }


def simulation_values(simulation: Simulation) -> dict[str, object]:
    """Each number of devices, and the knee."""
    values = request_values(simulation.request)
    values.pop("ranks")
    scales = [
        asdict(scale)
        | {"types": dict(scale.types), "gap_above_5_percent": scale.gap is not None and scale.gap > WIDE_GAP}
        for scale in simulation.scales
    ]
    wide = simulation.wide_at_knee
    return {
        **values,
        "scales": scales,
        "knee": simulation.knee,
        "knee_rule": KNEE_RULE,
        "wide_space_at_knee": None if wide is None else asdict(wide) | {"types": dict(wide.types)},
        "space_is_the_limit": simulation.space_limits,
    }


def shape_values(shape: TableShape) -> dict[str, object]:
    """How a table is cut: `ranks` or `hosts` by column shard; neither where every rank has a part."""
    values: dict[str, object] = {"type": shape.sharding_type, "columns": shape.columns}
    if shape.places:
        values["hosts" if shape.sharding_type in HOST_TYPES else "ranks"] = list(shape.places)
    return values


def _proposal_values(proposal: Proposal, request: PlanRequest) -> dict[str, object]:
    return {
        "planner": proposal.planner,
        "solve_seconds": proposal.solve_seconds,
        "work_units": proposal.work_units,
        "optimal": proposal.optimal,
        "types": dict(sorted(Counter(shape.sharding_type for shape in proposal.shapes).items())),
        "tables": [
            {"table": table.name, "rows": table.rows, "dim": table.dim, **shape_values(shape)}
            for table, shape in zip(request.tables.tables, proposal.shapes, strict=True)
        ],
        "costs": {name: _rating_values(rating) for name, rating in proposal.ratings.items()},
    }


def _rating_values(rating: Rating) -> dict[str, object]:
    load = rating.load
    return {
        "bottleneck_ms": rating.bottleneck_ms,
        "bound_ms": rating.bound_ms or None,
        "gap": rating.gap if rating.bound_ms else None,
        "fits": load.fits,
        "slowest_ms": dict(load.slowest_ms),
        "phases_ms_by_rank": {name: list(times) for name, times in load.phases_ms.items()},
        "memory_bytes_by_rank": {name: list(sizes) for name, sizes in load.memory_bytes.items()},
        "memory_limit_bytes": load.memory_limit_bytes,
    }


def _caps_values(caps: MemoryCaps) -> dict[str, object]:
    larger: Sequence[dict[str, object]] = [
        {
            "memory_bytes": found.memory_bytes,
            "factor": None if found.factor == float("inf") else found.factor,
            "step_ms": found.step_ms,
            "bound_ms": found.bound_ms,
            "changed": [{"table": t, "before": a, "after": b} for t, a, b in found.changed],
        }
        for found in caps.larger
    ]
    return {"memory_bytes": caps.memory_bytes, "step_ms": caps.step_ms, "larger": larger}
