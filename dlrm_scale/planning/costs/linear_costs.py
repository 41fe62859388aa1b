"""Costs that add up over tables: a line below each curve of a type's collectives, and options with their share."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dlrm_scale.planning.cluster.cluster import Cluster
from dlrm_scale.planning.costs.collective_costs import CostCurve, LineBelow
from dlrm_scale.planning.costs.shard_loads import ShardLoads
from dlrm_scale.planning.costs.space import Candidate
from dlrm_scale.planning.costs.step_setting import StepSetting
from dlrm_scale.planning.costs.type_costs import TypeCurves, type_constant_ms
from dlrm_scale.planning.solver.problem import Charge, Option, RowParts

__all__ = ["Offer", "TypeLines", "charge_of", "lines_of", "option_of"]

_ROUNDED = 1 - 1e-12


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
    """Give a way to shard a table its costs; of shards that differ, the largest of each phase, with their parts.

    Args:
        offer: the way.
        lines: of its type.
        hides_input: the exchange of ids costs nothing.
    """
    candidate, loads = offer.candidate, offer.loads
    # [phases, shards], in the order of LOAD_PHASES.
    costs = np.zeros((6, len(loads.lookup_ms)))
    if not hides_input:
        costs[0] = loads.input_ms + lines.input.ms_per_byte * loads.input_bytes
    costs[1] = loads.lookup_ms
    costs[2] = lines.output.ms_per_byte * loads.output_bytes + lines.cross.ms_per_byte * loads.cross_bytes
    costs[3] = lines.gradient.ms_per_byte * loads.output_bytes + lines.cross_gradient.ms_per_byte * loads.cross_bytes
    costs[4] = loads.update_ms
    costs[5] = loads.replica_ms + lines.replicas.ms_per_byte * loads.replica_bytes
    memory = loads.memory_bytes.sum(axis=0)
    return Option(
        sharding_type=candidate.sharding_type,
        kernel=candidate.kernel,
        placement=candidate.placement,
        shards=candidate.shards,
        columns=candidate.columns,
        costs_ms=tuple(costs.max(axis=1).tolist()),
        memory_bytes=int(memory.max()),
        parts=_parts(costs, memory),
    )


def _parts(costs: NDArray[np.float64], memory: NDArray[np.int64]) -> RowParts | None:
    """What shards that differ cost; None where they are alike, up to rounding in their ids."""
    most, least = costs.max(axis=1), costs.min(axis=1)
    if (most - least <= 1e-12 * most).all() and int(memory.max()) == int(memory.min()):
        return None
    return RowParts(
        # A mean may be rounded above what its parts sum to.
        mean_ms=tuple((costs.mean(axis=1) * _ROUNDED).tolist()),
        least_ms=tuple(least.tolist()),
        first_ms=tuple(costs[:, 0].tolist()),
        mean_bytes=float(memory.mean()) * _ROUNDED,
        least_bytes=int(memory.min()),
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
