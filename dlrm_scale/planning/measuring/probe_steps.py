"""Whole steps of small models, measured in turn, and what they say beyond micro-benchmarks."""

import gc
import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from dlrm_scale.layout import ShardLayout
from dlrm_scale.models.build import build_model
from dlrm_scale.planning.cluster.cluster import Cluster, Constant
from dlrm_scale.planning.costs.plan_rating import Prediction
from dlrm_scale.planning.costs.step_model import predict
from dlrm_scale.planning.measuring.calibration_fit import fit_intervals, fit_multipliers
from dlrm_scale.planning.measuring.micro_timing import RankTimer, Timing
from dlrm_scale.planning.measuring.probe_models import ProbeModel, probe_batches
from dlrm_scale.planning.tables.table_set import TableSet
from dlrm_scale.sharding.pipeline import make_train_pipeline
from dlrm_scale.sharding.plan_file import plan_of_layout
from dlrm_scale.sharding.ranks import Ranks
from dlrm_scale.sharding.shard import shard_model
from dlrm_scale.sharding.shard_shapes import table_layout

__all__ = [
    "PARTS",
    "ModelSteps",
    "ProbedStep",
    "TypeEvidence",
    "apply_probes",
    "measure_probes",
    "rated_step",
    "type_evidence",
]

Numbers = NDArray[np.float64]

PARTS: dict[str, tuple[str, ...]] = {
    "lookup": ("lookup",),
    "update": ("update",),
    "input": ("input",),
    "exchange": ("output", "gradient"),
    "sums": (),
    "replicas": ("replicas",),
    "dense": ("dense",),
}
"""Parts of a step that get a multiplier each, and their phases. `sums` are the exchanges of types that cut rows, in the
same phases as those of vectors: one multiplier for both left row_wise 16 % too fast beside table_wise on each of three
models (two ranks, elapsed time)."""

_SUMS = ("reduce_scatter", "all_gather")
_COLLECTIVE_PARTS = {"all_to_all": "input", "all_reduce": "replicas", **dict.fromkeys(_SUMS, "sums")}
"""Parts of the collectives whose part isn't `exchange`."""

_TOGETHER = 8
"""Models that are measured in turn: as many as have every kind of plan."""
_UNPROBED = {"grid_shard": "table_row_wise"}
"""A grid needs several hosts; it does what table_row_wise does."""


@dataclass(frozen=True, kw_only=True)
class ProbedStep:
    """One model's step.

    Attributes:
        timing: of the whole step.
        predicted: by the micro-benchmarks alone.
        sums_ms: of the predicted exchanges, those of partial sums.
        types: in use.
    """

    timing: Timing
    predicted: Prediction
    sums_ms: float
    types: frozenset[str]

    @property
    def parts_ms(self) -> tuple[float, ...]:
        """Predicted, in the order of `PARTS`."""
        slowest = self.predicted.slowest_ms
        parts = {part: sum(slowest[phase] for phase in phases) for part, phases in PARTS.items()}
        return tuple((parts | {"exchange": parts["exchange"] - self.sums_ms, "sums": self.sums_ms}).values())


@dataclass(frozen=True, kw_only=True, slots=True)
class TypeEvidence:
    """A sharding type's constant, and what the steps say of it.

    Attributes:
        kind: the type.
        value_ms: fitted.
        low_ms: 5th percentile of fits to models drawn again.
        high_ms: 95th.
        typical_step_ms: median over the models that use the type.
    """

    kind: str
    value_ms: float
    low_ms: float
    high_ms: float
    typical_step_ms: float


def measure_probes(
    probes: Sequence[ProbeModel],
    cluster: Cluster,
    ranks: Ranks,
    timer: RankTimer,
    *,
    rounds: int,
    progress: Callable[[str], None],
) -> list[ProbedStep]:
    """Measure the step of every model, eight in turn in each round. A collective.

    Args:
        probes: models with plans.
        cluster: from micro-benchmarks, without constants of types.
        ranks: the process group.
        timer: of all ranks.
        rounds: in each of which a model does a step that counts and one before it that doesn't.
        progress: told after every eight.
    """
    found: list[ProbedStep] = []
    for first in range(0, len(probes), _TOGETHER):
        together = probes[first : first + _TOGETHER]
        steps = [ModelSteps(probe, ranks) for probe in together]
        seconds = np.zeros((len(steps), 3, rounds))
        for turn in range(-1, rounds):
            order = np.random.default_rng(first + turn + 1).permutation(len(steps))
            for index in order:
                steps[index].run()
                measured = timer.once(steps[index].run)
                if turn >= 0:
                    seconds[index, :, turn] = measured
        for step, taken in zip(steps, seconds, strict=True):
            timing = timer.summary(taken)
            timer.timings.append(timing)
            found.append(step.rated(cluster, timing))
        del steps
        gc.collect()
        progress(f"whole steps: {len(found)} of {len(probes)} models")
    return found


def apply_probes(cluster: Cluster, steps: Sequence[ProbedStep]) -> tuple[Cluster, float]:
    """Bring a cluster's costs to what whole steps took.

    Args:
        cluster: from micro-benchmarks, without constants of types.
        steps: measured.

    Returns:
        The cluster, and the mean relative error over the steps.
    """
    types = _types(steps)
    fit = fit_multipliers(*_features(steps))
    factors = dict(zip(PARTS, fit.values, strict=False))
    always, *type_values = fit.values[len(PARTS) :]
    source = f"calibrate: steps of {len(steps)} models"
    type_ms = {kind: Constant(value=value, source=source) for kind, value in zip(types, type_values, strict=True)}
    for kind, like in _UNPROBED.items():
        if kind not in type_ms and like in type_ms:
            type_ms[kind] = Constant(value=type_ms[like].value, source=f"assumed: as {like}'s")
    scaled = _scaled(cluster, factors)
    call = scaled.dense.call_ms
    dense = scaled.dense.model_copy(
        update={"call_ms": Constant(value=call.value + always, source=f"{call.source}; {always:.3g} ms of whole steps")}
    )
    return scaled.model_copy(update={"type_ms": type_ms, "dense": dense}), fit.error


def type_evidence(steps: Sequence[ProbedStep]) -> tuple[TypeEvidence, ...]:
    """Say how well the steps tell each sharding type's constant.

    Args:
        steps: measured, as for `apply_probes`.
    """
    parts, constants, measured = _features(steps)
    values = fit_multipliers(parts, constants, measured).values[len(PARTS) + 1 :]
    low, high = fit_intervals(parts, constants, measured)[:, len(PARTS) + 1 :]
    return tuple(
        TypeEvidence(
            kind=kind,
            value_ms=value,
            low_ms=float(low[number]),
            high_ms=float(high[number]),
            typical_step_ms=float(np.median([step.timing.milliseconds for step in steps if kind in step.types])),
        )
        for number, (kind, value) in enumerate(zip(_types(steps), values, strict=True))
    )


def _types(steps: Sequence[ProbedStep]) -> list[str]:
    return sorted({kind for step in steps for kind in step.types})


def _features(steps: Sequence[ProbedStep]) -> tuple[Numbers, Numbers, Numbers]:
    """Milliseconds by part, constants that are paid (of every step, then of each type), and what was measured."""
    parts = [step.parts_ms for step in steps]
    constants = [[1.0, *(float(kind in step.types) for kind in _types(steps))] for step in steps]
    return np.array(parts), np.array(constants), np.array([step.timing.milliseconds for step in steps])


def _scaled(cluster: Cluster, factors: dict[str, float]) -> Cluster:
    def constants(section: object, factor: float) -> object:
        values = {
            name: Constant(
                value=constant.value * factor, source=f"{constant.source}; times {factor:.3f} in whole steps"
            )
            for name, constant in vars(section).items()
            if constant is not None
        }
        return type(section)(**values)

    collectives = []
    for costs in cluster.collectives:
        factor = factors[_COLLECTIVE_PARTS.get(costs.collective, "exchange")]
        points = tuple((size, ms * factor) for size, ms in costs.curve.points)
        curve = costs.curve.model_copy(
            update={"points": points, "source": f"{costs.curve.source}; times {factor:.3f} in whole steps"}
        )
        collectives.append(costs.model_copy(update={"curve": curve}))
    return cluster.model_copy(
        update={
            "forward": constants(cluster.forward, factors["lookup"]),
            "backward": constants(cluster.backward, factors["update"]),
            "input": constants(cluster.input, factors["input"]),
            "replicas": constants(cluster.replicas, factors["replicas"]),
            "dense": constants(cluster.dense, factors["dense"]),
            "collectives": tuple(collectives),
        }
    )


class ModelSteps:
    """A sharded model with batches in turn. Making one is a collective.

    Args:
        probe: the model and its plan.
        ranks: the process group.

    Attributes:
        sharded: the model.
        tables: with what the batches look up.
    """

    def __init__(self, probe: ProbeModel, ranks: Ranks) -> None:
        """Shard the model, fill its tables and draw batches."""
        self._probe, self._ranks = probe, ranks
        tables = [table.spec for table in probe.tables.tables]
        config = probe.config(ranks.ranks, ranks.local_ranks)
        shards = tuple(
            table_layout(table, shape, ranks=ranks.ranks, ranks_per_host=ranks.local_ranks)
            for table, shape in zip(tables, probe.plan, strict=True)
        )
        plan = plan_of_layout(
            ShardLayout(ranks=ranks.ranks, tables=shards),
            planner="calibrate",
            ranks_per_host=ranks.local_ranks,
            optimizer="rowwise_adagrad",
            batch_size_per_rank=probe.batch_size_per_rank,
        )
        self.sharded = shard_model(build_model(config.model, tables), tables, config, ranks, given=plan)
        for shard in self.sharded.local_shards:
            shard.weight.fill_(0.01)
        batches, self.tables = probe_batches(probe, ranks.rank, ranks.ranks)
        self._batches = itertools.cycle([batch.to(ranks.device) for batch in batches])
        self._pipeline = make_train_pipeline(self.sharded, "plain")

    def run(self) -> None:
        """Do a step. A collective."""
        self._pipeline.progress(self._batches)

    def rated(self, cluster: Cluster, timing: Timing) -> ProbedStep:
        """Put what a cluster predicts beside what was measured."""
        return rated_step(
            self._probe,
            self.tables,
            cluster,
            timing,
            ranks=self._ranks.ranks,
            ranks_per_host=self._ranks.local_ranks,
        )


def rated_step(
    probe: ProbeModel, tables: TableSet, cluster: Cluster, timing: Timing, *, ranks: int, ranks_per_host: int
) -> ProbedStep:
    """Put what a cluster predicts of a model's step beside what was measured.

    Args:
        probe: the model and its plan.
        tables: with what its batches look up.
        cluster: from micro-benchmarks.
        timing: of the step.
        ranks: all of them.
        ranks_per_host: of them.
    """

    def rated(by: Cluster) -> Prediction:
        return predict(
            tables,
            by,
            probe.plan,
            ranks=ranks,
            ranks_per_host=ranks_per_host,
            batch_size_per_rank=probe.batch_size_per_rank,
            pipeline="plain",
            dense=probe.dense(),
        )

    predicted, others = rated(cluster), rated(_with_free_sums(cluster))
    exchanges = PARTS["exchange"]
    sums_ms = sum(predicted.slowest_ms[phase] - others.slowest_ms[phase] for phase in exchanges)
    types = frozenset(shape.sharding_type for shape in probe.plan)
    return ProbedStep(timing=timing, predicted=predicted, sums_ms=sums_ms, types=types)


def _with_free_sums(cluster: Cluster) -> Cluster:
    free = tuple(
        costs.model_copy(
            update={"curve": costs.curve.model_copy(update={"points": tuple((n, 0.0) for n, _ in costs.curve.points)})}
        )
        if costs.collective in _SUMS
        else costs
        for costs in cluster.collectives
    )
    return cluster.model_copy(update={"collectives": free})
