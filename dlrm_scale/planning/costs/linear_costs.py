"""Costs that add up over tables: a line below each curve of a type's collectives, and options with their share."""

from collections.abc import Sequence
from dataclasses import dataclass

from dlrm_scale.planning.cluster.cluster import Cluster
from dlrm_scale.planning.costs.collective_costs import CostCurve, LineBelow
from dlrm_scale.planning.costs.shard_loads import ShardLoads
from dlrm_scale.planning.costs.space import Candidate
from dlrm_scale.planning.costs.step_setting import StepSetting
from dlrm_scale.planning.costs.type_costs import TypeCurves, type_constant_ms
from dlrm_scale.planning.solver.problem import Charge, Option

__all__ = ["Offer", "TypeLines", "charge_of", "lines_of", "option_of"]


@dataclass(frozen=True, kw_only=True)
class Offer:
    """A way to shard a table with what its shards ask of their ranks."""

    candidate: Candidate
    loads: ShardLoads


@dataclass(frozen=True, kw_only=True)
class TypeLines:
    """Lines below a type's curves, by their names in `TypeCurves`."""

    input: LineBelow
    output: LineBelow
    gradient: LineBelow
    cross: LineBelow
    cross_gradient: LineBelow
    replicas: LineBelow


def lines_of(curves: TypeCurves, offers: Sequence[Sequence[Offer]], ranks: int) -> TypeLines:
    """Lay a line below each curve, the highest at what the type usually carries.

    Usual is every table of the type spread evenly over all ranks; at most, all its shards are on one rank.

    Args:
        curves: of the type.
        offers: of the type, by table.
        ranks: all of them.
    """

    def line(curve: CostCurve | None, name: str) -> LineBelow:
        if curve is None:
            return LineBelow(start_ms=0.0, ms_per_byte=0.0)
        usual = sum(max((_usual(offer, name, ranks) for offer in of_table), default=0.0) for of_table in offers)
        most = sum(max((_most(offer, name) for offer in of_table), default=0.0) for of_table in offers)
        return curve.line_below(usual, most)

    return TypeLines(
        input=line(curves.input, "input_bytes"),
        output=line(curves.output, "output_bytes"),
        gradient=line(curves.gradient, "output_bytes"),
        cross=line(curves.cross, "cross_bytes"),
        cross_gradient=line(curves.cross_gradient, "cross_bytes"),
        replicas=line(curves.replicas, "replica_bytes"),
    )


def option_of(offer: Offer, lines: TypeLines, *, hides_input: bool) -> Option:
    """Give a way to shard a table its costs; of shards that differ, the largest of each phase.

    Args:
        offer: the way.
        lines: of its type.
        hides_input: the exchange of ids costs nothing.
    """
    candidate, loads = offer.candidate, offer.loads
    input_ms = float((loads.input_ms + lines.input.ms_per_byte * loads.input_bytes).max())
    costs = {
        "input": 0.0 if hides_input else input_ms,
        "lookup": float(loads.lookup_ms.max()),
        "output": lines.output.ms_per_byte * loads.output_bytes + lines.cross.ms_per_byte * loads.cross_bytes,
        "gradient": (
            lines.gradient.ms_per_byte * loads.output_bytes + lines.cross_gradient.ms_per_byte * loads.cross_bytes
        ),
        "update": float(loads.update_ms.max()),
        "replicas": float(loads.replica_ms.max()) + lines.replicas.ms_per_byte * loads.replica_bytes,
    }
    return Option(
        sharding_type=candidate.sharding_type,
        kernel=candidate.kernel,
        placement=candidate.placement,
        shards=candidate.shards,
        columns=candidate.columns,
        costs_ms=tuple(costs.values()),
        memory_bytes=int(loads.memory_bytes.sum(axis=0).max()),
    )


def charge_of(cluster: Cluster, kind: str, lines: TypeLines, setting: StepSetting) -> Charge:
    """Add up what a step pays as soon as a table uses a type: its constants, and its lines at 0 bytes."""
    constants = type_constant_ms(cluster, kind)
    starts = {
        "input": lines.input.start_ms,
        "output": lines.output.start_ms + lines.cross.start_ms,
        "gradient": lines.gradient.start_ms + lines.cross_gradient.start_ms,
        "replicas": lines.replicas.start_ms,
    }
    if setting.hides_input:
        starts["input"] = constants["input"] = 0.0
    return Charge(sharding_types=frozenset({kind}), milliseconds=sum(constants.values()) + sum(starts.values()))


def _usual(offer: Offer, name: str, ranks: int) -> float:
    of_parts = getattr(offer.loads, name)
    mean = float(of_parts) if isinstance(of_parts, float) else float(of_parts.mean())
    return mean * offer.candidate.shards / ranks


def _most(offer: Offer, name: str) -> float:
    of_parts = getattr(offer.loads, name)
    largest = float(of_parts) if isinstance(of_parts, float) else float(of_parts.max())
    copies = 1 if offer.candidate.placement == "all_ranks" else offer.candidate.shards // offer.candidate.row_parts
    return largest * copies
