"""Exact times and memory of whole plans, table by table, so that a solver can rate a change without the whole plan."""

from collections.abc import Collection, Mapping

import numpy as np
from numpy.typing import NDArray

from dlrm_scale.planning.cluster.cluster import Cluster
from dlrm_scale.planning.costs.collective_costs import CostCurve
from dlrm_scale.planning.costs.shard_loads import ShardLoads, TableLoads
from dlrm_scale.planning.costs.step_setting import StepSetting, dense_ms
from dlrm_scale.planning.costs.type_costs import TypeCurves, type_constant_ms, type_curves
from dlrm_scale.planning.solver.problem import Option, Part
from dlrm_scale.planning.tables.table_set import TableSet
from dlrm_scale.sharding.shard_shapes import HOST_TYPES

__all__ = ["STEP_PHASES", "StepRater"]

Numbers = NDArray[np.float64]

STEP_PHASES = ("input", "lookup", "output", "dense", "gradient", "update", "replicas", "overhead")
"""All phases of a step, in the order in which they begin."""
_AT = {phase: i for i, phase in enumerate(STEP_PHASES)}
_INPUT, _OUTPUT, _CROSS, _REPLICAS = range(4)
"""Rows of `Part.sizes`."""


class StepRater:
    """A `PlanRater` by the phases of a step. Loads and curves are worked out once.

    Args:
        tables: with their lookups.
        cluster: with the costs.
        setting: of the step.
        known: loads by position of the table, sharding type and columns.
    """

    def __init__(
        self,
        tables: TableSet,
        cluster: Cluster,
        setting: StepSetting,
        known: Mapping[tuple[int, str, int], ShardLoads] | None = None,
    ) -> None:
        self._tables, self._cluster, self._setting = tables, cluster, setting
        self._known = dict(known or {})
        self._loads: dict[int, TableLoads] = {}
        self._types: dict[str, tuple[TypeCurves, Numbers]] = {}
        self._base_ms = np.zeros(len(STEP_PHASES))
        self._base_ms[_AT["dense"]] = dense_ms(tables, cluster, setting)

    @property
    def phases(self) -> tuple[str, ...]:
        """`STEP_PHASES`."""
        return STEP_PHASES

    @property
    def base_ms(self) -> Numbers:
        """See `PlanRater`: the dense part."""
        return self._base_ms

    def part(self, table: int, option: Option, ranks: tuple[int, ...]) -> Part:
        """See `PlanRater`."""
        return self.part_of(table, option.sharding_type, option.columns, ranks)

    def part_of(self, table: int, sharding_type: str, columns: int, ranks: tuple[int, ...]) -> Part:
        """What a table adds.

        Args:
            table: its position.
            sharding_type: TorchRec's name.
            columns: of a shard.
            ranks: of its shards, host by host for types by hosts; () where every rank has one.

        Returns:
            With rows of memory by `MEMORY_PARTS`, without a rank's own ids and the dense part.
        """
        setting, loads = self._setting, self._loads_of(table, sharding_type, columns)
        everywhere = np.arange(setting.ranks)
        shards = np.ones(setting.ranks, dtype=np.int64)
        if ranks:
            shards = np.bincount(np.array(ranks, dtype=np.int64), minlength=setting.ranks)
        # Which part of the rows a rank has, where it has one.
        parts = len(loads.lookup_ms)
        of_rank = everywhere % parts
        added_ms = np.zeros((len(STEP_PHASES), setting.ranks))
        input_ms = loads.input_ms
        if sharding_type in HOST_TYPES:
            # Whichever ranks have the shards, every rank cuts its own ids, once for each column shard.
            bucketize_ms = self._table_loads(table).bucketize_ms
            input_ms = input_ms - bucketize_ms
            added_ms[_AT["input"]] = bucketize_ms * (len(ranks) // parts)
        added_ms[_AT["input"]] += input_ms[of_rank] * shards
        added_ms[_AT["lookup"]] = loads.lookup_ms[of_rank] * shards
        added_ms[_AT["update"]] = loads.update_ms[of_rank] * shards
        added_ms[_AT["replicas"]] = loads.replica_ms[of_rank] * shards
        sizes = np.empty((4, setting.ranks))
        sizes[_INPUT] = loads.input_bytes[of_rank] * shards
        sizes[_OUTPUT] = loads.output_bytes * shards
        sizes[_CROSS] = loads.cross_bytes * shards
        sizes[_REPLICAS] = loads.replica_bytes * shards
        return Part(
            sharding_type=sharding_type,
            added_ms=added_ms,
            sizes=sizes,
            memory_bytes=loads.memory_bytes[:, of_rank] * shards,
        )

    def type_ms(self, sharding_type: str, sizes: Numbers) -> Numbers:
        """See `PlanRater`: its exchanges by their curves, and what it costs by being in use."""
        if sharding_type not in self._types:
            constant = np.zeros(len(STEP_PHASES))
            for phase, milliseconds in type_constant_ms(self._cluster, sharding_type).items():
                constant[_AT[phase]] = milliseconds
            self._types[sharding_type] = type_curves(self._cluster, sharding_type, self._setting), constant
        curves, constant = self._types[sharding_type]
        found: Numbers = np.tile(constant[:, None], (1, self._setting.ranks))
        for phase, curve, row in (
            ("input", curves.input, _INPUT),
            ("output", curves.output, _OUTPUT),
            ("output", curves.cross, _CROSS),
            ("gradient", curves.gradient, _OUTPUT),
            ("gradient", curves.cross_gradient, _CROSS),
            ("replicas", curves.replicas, _REPLICAS),
        ):
            if curve is not None:
                found[_AT[phase]] += _milliseconds(curve, sizes[row])
        return found

    def step_ms(self, phase_ms: Numbers, types: Collection[str]) -> float:
        """See `PlanRater`: the slowest rank of each phase, of the input what nothing hides."""
        slowest = phase_ms.max(axis=1)
        return float(slowest.sum() - slowest[_AT["input"]]) + self._exposed(slowest)

    def exposed_input_ms(self, phase_ms: Numbers) -> float:
        """What of the slowest rank's input phase nothing hides.

        Args:
            phase_ms: `[STEP_PHASES, ranks]`.
        """
        return self._exposed(phase_ms.max(axis=1))

    def _exposed(self, slowest: Numbers) -> float:
        input_ms = float(slowest[_AT["input"]])
        if self._setting.hides_input:
            input_ms -= float(sum(slowest[_AT[phase]] for phase in ("lookup", "dense", "update")))
        return max(0.0, input_ms)

    def _loads_of(self, table: int, sharding_type: str, columns: int) -> ShardLoads:
        key = table, sharding_type, columns
        if key not in self._known:
            self._known[key] = self._table_loads(table).of(sharding_type, columns)
        return self._known[key]

    def _table_loads(self, table: int) -> TableLoads:
        if table not in self._loads:
            self._loads[table] = TableLoads(self._tables.tables[table], self._cluster, self._setting)
        return self._loads[table]


def _milliseconds(curve: CostCurve, sizes: Numbers) -> Numbers:
    # Most exchanges carry as much on every rank.
    if (sizes == sizes[0]).all():
        return np.full(len(sizes), float(curve.milliseconds(float(sizes[0]))))
    return curve.milliseconds(sizes)
