"""A whole plan's time and memory, rank by rank."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dlrm_scale.errors import PlanError
from dlrm_scale.planning.cluster.cluster import Cluster
from dlrm_scale.planning.costs.collective_costs import CostCurve
from dlrm_scale.planning.costs.shard_loads import MEMORY_PARTS, ShardLoads, TableLoads
from dlrm_scale.planning.costs.step_setting import StepSetting, dense_ms
from dlrm_scale.planning.costs.type_costs import type_constant_ms, type_curves
from dlrm_scale.planning.tables.table_set import TableSet
from dlrm_scale.sharding.shard_shapes import HOST_TYPES, TableShape

__all__ = ["LOAD_PHASES", "STEP_PHASES", "Prediction", "rate_plan"]

Numbers = NDArray[np.float64]

LOAD_PHASES = ("input", "lookup", "output", "gradient", "update", "replicas")
"""Phases whose time depends on the plan; those of a problem."""
STEP_PHASES = ("input", "lookup", "output", "dense", "gradient", "update", "replicas", "overhead")
"""All phases of a step, in the order in which they begin."""

_TRANSIENT = ("vectors", "ids", "own_ids")


@dataclass(frozen=True, kw_only=True)
class Prediction:
    """What a plan asks of every rank.

    Attributes:
        phases: `STEP_PHASES`.
        phase_ms: `[phases, ranks]`; of the input phase all of it, hidden or not.
        exposed_input_ms: what of the slowest rank's input phase nothing hides.
        step_ms: sum over phases of the slowest rank, of the input phase what is exposed.
        memory_parts: names; `own_ids` are those of the rank's samples, `dense` the dense part with its vectors.
        memory_bytes: `[memory_parts, ranks]`.
        capacity_bytes: of a rank, less the reserve.
    """

    phases: tuple[str, ...]
    phase_ms: Numbers
    exposed_input_ms: float
    step_ms: float
    memory_parts: tuple[str, ...]
    memory_bytes: NDArray[np.int64]
    capacity_bytes: int

    @property
    def slowest_ms(self) -> dict[str, float]:
        """Of each phase, the slowest rank; they add up to the step."""
        slowest = dict(zip(self.phases, self.phase_ms.max(axis=1).tolist(), strict=True))
        return slowest | {"input": self.exposed_input_ms}

    @property
    def bytes_per_rank(self) -> NDArray[np.int64]:
        """`[ranks]`, all parts together."""
        total: NDArray[np.int64] = self.memory_bytes.sum(axis=0)
        return total

    @property
    def static_bytes_per_rank(self) -> NDArray[np.int64]:
        """`[ranks]`: weights, state, replicas with their gradients, and maps of touched rows."""
        kept = [i for i, part in enumerate(self.memory_parts) if part not in (*_TRANSIENT, "dense")]
        static: NDArray[np.int64] = self.memory_bytes[kept].sum(axis=0)
        return static

    @property
    def fits(self) -> bool:
        """Whether every rank's memory holds its part."""
        return bool((self.bytes_per_rank <= self.capacity_bytes).all())


def rate_plan(tables: TableSet, cluster: Cluster, plan: Sequence[TableShape], setting: StepSetting) -> Prediction:
    """Rate a plan exactly; memory may be exceeded.

    Args:
        tables: with their lookups.
        cluster: with the costs.
        plan: a shape for each table, in their order.
        setting: of the step.

    Raises:
        ConfigError: the cluster has no costs for so many ranks.
        PlanError: the plan has another number of tables.
    """
    if len(plan) != len(tables.tables):
        raise PlanError(f"a plan of {len(plan)} tables for a set of {len(tables.tables)}")
    sums = _Sums(setting)
    for table, shape in zip(tables.tables, plan, strict=True):
        loads = TableLoads(table, cluster, setting)
        sums.add(shape, loads.of(shape.sharding_type, shape.columns), loads.bucketize_ms)
    phase_ms = _phases(sums, cluster, setting, dense_ms(tables, cluster, setting))
    slowest = dict(zip(STEP_PHASES, phase_ms.max(axis=1).tolist(), strict=True))
    exposed = slowest["input"]
    if setting.hides_input:
        exposed = max(0.0, exposed - slowest["lookup"] - slowest["dense"] - slowest["update"])
    own_ids, dense = setting.own_ids_bytes(tables), setting.dense_memory_bytes(tables)
    alike = np.tile(np.array([[own_ids], [dense]], dtype=np.int64), (1, setting.ranks))
    return Prediction(
        phases=STEP_PHASES,
        phase_ms=phase_ms,
        exposed_input_ms=exposed,
        step_ms=sum(slowest.values()) - slowest["input"] + exposed,
        memory_parts=(*MEMORY_PARTS, "own_ids", "dense"),
        memory_bytes=np.concatenate([sums.memory_bytes, alike]),
        capacity_bytes=int(cluster.memory_bytes * (1 - cluster.reserve)),
    )


class _Sums:
    """Loads of all tables by rank; bytes by type as well."""

    def __init__(self, setting: StepSetting) -> None:
        self._setting = setting
        self.ms = {phase: np.zeros(setting.ranks) for phase in LOAD_PHASES}
        self.memory_bytes = np.zeros((len(MEMORY_PARTS), setting.ranks), dtype=np.int64)
        self.bytes: dict[str, dict[str, Numbers]] = {}

    def add(self, shape: TableShape, loads: ShardLoads, bucketize_ms: float) -> None:
        """Add one table."""
        kind, setting = shape.sharding_type, self._setting
        of_type = self.bytes.setdefault(
            kind, {name: np.zeros(setting.ranks) for name in ("input", "output", "cross", "replicas")}
        )
        input_ms = loads.input_ms
        if kind in HOST_TYPES:
            # Whichever ranks have the shards, every rank cuts its own ids, once for each column shard.
            input_ms = input_ms - bucketize_ms
            self.ms["input"] += bucketize_ms * len(shape.places)
        for ranks, shards in self._places(shape):
            times = {"input": input_ms, "lookup": loads.lookup_ms, "update": loads.update_ms}
            for phase, milliseconds in (times | {"replicas": loads.replica_ms}).items():
                self.ms[phase][ranks] += milliseconds * shards
            of_type["input"][ranks] += loads.input_bytes * shards
            of_type["output"][ranks] += loads.output_bytes * shards
            of_type["cross"][ranks] += loads.cross_bytes * shards
            of_type["replicas"][ranks] += loads.replica_bytes * shards
            self.memory_bytes[:, ranks] += loads.memory_bytes * np.asarray(shards, dtype=np.int64)

    def _places(self, shape: TableShape) -> list[tuple[slice, int]] | list[tuple[NDArray[np.int64], NDArray[np.int64]]]:
        """Where shards are: ranks that take one shard of each part of the rows, and how many times."""
        if not shape.places:
            return [(slice(None), 1)]
        places, counts = np.unique(np.array(shape.places, dtype=np.int64), return_counts=True)
        if shape.sharding_type in HOST_TYPES:
            local = self._setting.ranks_per_host
            return [
                (slice(int(host) * local, (int(host) + 1) * local), int(count))
                for host, count in zip(places, counts, strict=True)
            ]
        return [(places, counts)]


def _phases(sums: _Sums, cluster: Cluster, setting: StepSetting, dense: float) -> Numbers:
    found = {phase: np.zeros(setting.ranks) for phase in STEP_PHASES} | sums.ms
    found["dense"] = np.full(setting.ranks, dense)
    for kind, carried in sums.bytes.items():
        curves = type_curves(cluster, kind, setting)
        for phase, curve, size in (
            ("input", curves.input, carried["input"]),
            ("output", curves.output, carried["output"]),
            ("output", curves.cross, carried["cross"]),
            ("gradient", curves.gradient, carried["output"]),
            ("gradient", curves.cross_gradient, carried["cross"]),
            ("replicas", curves.replicas, carried["replicas"]),
        ):
            found[phase] = found[phase] + _time(curve, size)
        for phase, constant in type_constant_ms(cluster, kind).items():
            found[phase] = found[phase] + constant
    return np.stack([found[phase] for phase in STEP_PHASES])


def _time(curve: CostCurve | None, sizes: Numbers) -> Numbers | float:
    return 0.0 if curve is None else curve.milliseconds(sizes)
