"""A whole plan's time and memory, rank by rank."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dlrm_scale.errors import PlanError
from dlrm_scale.planning.cluster.cluster import Cluster
from dlrm_scale.planning.costs.shard_loads import MEMORY_PARTS
from dlrm_scale.planning.costs.step_rater import STEP_PHASES, StepRater
from dlrm_scale.planning.costs.step_setting import StepSetting
from dlrm_scale.planning.tables.table_set import TableSet
from dlrm_scale.sharding.shard_shapes import HOST_TYPES, TableShape

__all__ = ["LOAD_PHASES", "STEP_PHASES", "Prediction", "rate_plan"]

Numbers = NDArray[np.float64]

LOAD_PHASES = ("input", "lookup", "output", "gradient", "update", "replicas")
"""Phases whose time depends on the plan; those of a problem."""


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
    rater = StepRater(tables, cluster, setting)
    phase_ms = np.tile(rater.base_ms[:, None], (1, setting.ranks))
    memory_bytes = np.zeros((len(MEMORY_PARTS), setting.ranks), dtype=np.int64)
    sizes: dict[str, Numbers] = {}
    for table, shape in enumerate(plan):
        part = rater.part_of(table, shape.sharding_type, shape.columns, _ranks_of(shape, setting))
        phase_ms += part.added_ms
        memory_bytes += part.memory_bytes
        sizes[shape.sharding_type] = sizes.get(shape.sharding_type, 0.0) + part.sizes
    for kind, carried in sizes.items():
        phase_ms += rater.type_ms(kind, carried)
    own_ids, dense = setting.own_ids_bytes(tables), setting.dense_memory_bytes(tables)
    alike = np.tile(np.array([[own_ids], [dense]], dtype=np.int64), (1, setting.ranks))
    return Prediction(
        phases=STEP_PHASES,
        phase_ms=phase_ms,
        exposed_input_ms=rater.exposed_input_ms(phase_ms),
        step_ms=rater.step_ms(phase_ms, tuple(sizes)),
        memory_parts=(*MEMORY_PARTS, "own_ids", "dense"),
        memory_bytes=np.concatenate([memory_bytes, alike]),
        capacity_bytes=int(cluster.memory_bytes * (1 - cluster.reserve)),
    )


def _ranks_of(shape: TableShape, setting: StepSetting) -> tuple[int, ...]:
    if shape.sharding_type not in HOST_TYPES:
        return shape.places
    local = setting.ranks_per_host
    return tuple(host * local + rank for host in shape.places for rank in range(local))
