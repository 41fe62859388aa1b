"""The cost model of a step: the problem that a solver gets, and the exact rating of a whole plan.

    step_ms = sum over phases of (max over ranks of the rank's time in that phase)

    input      ids to the ranks of their rows; hidden under the step before where the pipeline overlaps it
    lookup     pooled lookups of the rank's shards
    output     pooled vectors to the ranks of their samples
    dense      the dense part, forward and backward, alike on all ranks
    gradient   gradients of pooled vectors, back
    update     the fused update
    replicas   dense gradients, all-reduce and optimizer of data-parallel tables
    overhead   what each sharding type in use costs by being in use

Ranks wait for one another in every exchange, so that the slowest rank of each phase counts (as in TorchRec's planner,
which adds up one sum a rank instead, and counts neither latencies nor distinct rows).

`predict` is exact: collectives by their curves. `make_problem` needs times that add up over tables, so it lays a line
below the curve of each collective of each sharding type, the highest at what the type carries if every table uses it
evenly over the ranks. What the line has at 0 bytes is charged once a type. Lines are nowhere above their curves. Where
the shards of a table differ (hot rows in one row-wise shard, a short last one) an option's costs are those of the
largest, which is what a search should fear, and `Option.parts` has what a bound may count: so a lower bound of the
problem bounds the exact step too. The problem carries the exact rating, by which the solver chooses among its plans.
"""

from collections.abc import Collection, Mapping, Sequence
from typing import Literal

from dlrm_scale.errors import PlanError
from dlrm_scale.planning.cluster.cluster import Cluster
from dlrm_scale.planning.costs.dense_work import DenseWork
from dlrm_scale.planning.costs.linear_costs import Offer, charge_of, lines_of, option_of
from dlrm_scale.planning.costs.plan_rating import LOAD_PHASES, Prediction, rate_plan
from dlrm_scale.planning.costs.shard_loads import TableLoads
from dlrm_scale.planning.costs.space import candidates
from dlrm_scale.planning.costs.step_rater import StepRater
from dlrm_scale.planning.costs.step_setting import PipelineChoice, StepSetting, dense_ms, step_setting
from dlrm_scale.planning.costs.type_costs import type_curves
from dlrm_scale.planning.solver.problem import Problem
from dlrm_scale.planning.tables.table_set import TableSet, TableStats
from dlrm_scale.sharding.rules import objection
from dlrm_scale.sharding.shard_shapes import TableShape

__all__ = ["make_problem", "predict", "usable_memory_bytes"]


def predict(
    tables: TableSet,
    cluster: Cluster,
    plan: Sequence[TableShape],
    *,
    ranks: int,
    ranks_per_host: int,
    batch_size_per_rank: int,
    pipeline: PipelineChoice = "auto",
    exchange: Literal["fp32", "fp16", "bf16"] = "fp32",
    dense: DenseWork | None = None,
    touched_maps: int = 2,
) -> Prediction:
    """Rate a whole plan exactly, by rank and phase.

    Args:
        tables: with their lookups.
        cluster: with the costs.
        plan: how each table is cut and where its shards are, in the order of the tables.
        ranks: all of them.
        ranks_per_host: divides `ranks`.
        batch_size_per_rank: rows.
        pipeline: see `step_setting`, as the next three.
        exchange: precision in which pooled vectors travel.
        dense: the dense part.
        touched_maps: of changed rows.

    Raises:
        ConfigError: the cluster has no costs for so many ranks, or numbers that don't go together.
    """
    setting = step_setting(
        tables,
        cluster,
        ranks=ranks,
        ranks_per_host=ranks_per_host,
        batch_size_per_rank=batch_size_per_rank,
        pipeline=pipeline,
        exchange=exchange,
        dense=dense,
        touched_maps=touched_maps,
    )
    return rate_plan(tables, cluster, plan, setting)


def make_problem(
    tables: TableSet,
    cluster: Cluster,
    *,
    ranks: int,
    ranks_per_host: int,
    batch_size_per_rank: int,
    wide: bool = False,
    types: Mapping[str, Collection[str]] | None = None,
    widths: Mapping[str, Collection[int]] | None = None,
    memory_bytes: int | None = None,
    pipeline: PipelineChoice = "auto",
    exchange: Literal["fp32", "fp16", "bf16"] = "fp32",
    dense: DenseWork | None = None,
    touched_maps: int = 2,
) -> Problem:
    """Make the problem of placing tables, in numbers that add up.

    Args:
        tables: with their lookups.
        cluster: with the costs.
        ranks: all of them.
        ranks_per_host: divides `ranks`.
        batch_size_per_rank: rows.
        wide: offer types that cut columns too.
        types: only these sharding types, by table; all for tables that aren't named.
        widths: only these widths of column shards, by table.
        memory_bytes: of a rank's device; the cluster's by default.
        pipeline: see `step_setting`, as the next three.
        exchange: precision in which pooled vectors travel.
        dense: the dense part.
        touched_maps: of changed rows.

    Raises:
        ConfigError: the cluster has no costs for so many ranks, or numbers that don't go together.
        PlanError: a table has no legal option.
    """
    setting = step_setting(
        tables,
        cluster,
        ranks=ranks,
        ranks_per_host=ranks_per_host,
        batch_size_per_rank=batch_size_per_rank,
        pipeline=pipeline,
        exchange=exchange,
        dense=dense,
        touched_maps=touched_maps,
    )
    offers = [
        _offers(t, cluster, setting, wide, (types or {}).get(t.name), (widths or {}).get(t.name)) for t in tables.tables
    ]
    kinds = sorted({offer.candidate.sharding_type for of_table in offers for offer in of_table})
    known = {
        (table, offer.candidate.sharding_type, offer.candidate.columns): offer.loads
        for table, of_table in enumerate(offers)
        for offer in of_table
    }
    lines = {
        kind: lines_of(
            type_curves(cluster, kind, setting),
            [[offer for offer in of_table if offer.candidate.sharding_type == kind] for of_table in offers],
            ranks,
        )
        for kind in kinds
    }
    return Problem(
        ranks=ranks,
        ranks_per_host=ranks_per_host,
        memory_bytes=usable_memory_bytes(tables, cluster, setting, memory_bytes),
        phases=LOAD_PHASES,
        tables=tuple(t.name for t in tables.tables),
        options=tuple(
            tuple(
                option_of(offer, lines[offer.candidate.sharding_type], hides_input=setting.hides_input)
                for offer in of_table
            )
            for of_table in offers
        ),
        charges=tuple(charge_of(cluster, kind, lines[kind], setting) for kind in kinds),
        base_ms=dense_ms(tables, cluster, setting),
        exact=StepRater(tables, cluster, setting, known),
    )


def usable_memory_bytes(
    tables: TableSet, cluster: Cluster, setting: StepSetting, memory_bytes: int | None = None
) -> int:
    """What the tables of a rank may take: its device's memory less the reserve, the dense part and its own ids.

    Args:
        tables: their lookups give the ids of a rank's own batch.
        cluster: its memory and reserve.
        setting: batch and dense part.
        memory_bytes: of the device, in place of the cluster's.
    """
    all_bytes = cluster.memory_bytes if memory_bytes is None else memory_bytes
    return max(0, int(all_bytes * (1 - cluster.reserve)) - setting.fixed_memory_bytes(tables))


def _offers(
    table: TableStats,
    cluster: Cluster,
    setting: StepSetting,
    wide: bool,
    types: Collection[str] | None,
    widths: Collection[int] | None,
) -> list[Offer]:
    found = candidates(
        table.spec,
        optimizer=setting.optimizer,
        ranks=setting.ranks,
        ranks_per_host=setting.ranks_per_host,
        wide=wide,
        types=types,
        widths=widths,
    )
    if not found:
        reasons = [
            f"; {kind} {why[0]}"
            for kind in types or ()
            if (why := objection(kind, table.spec, optimizer=setting.optimizer, allow_split_row_state=wide)) is not None
        ]
        raise PlanError(
            f"table {table.name}: no legal way to shard it is left{''.join(reasons)}",
            remedy="allow more sharding types or widths for it",
        )
    loads = TableLoads(table, cluster, setting)
    return [Offer(candidate=c, loads=loads.of(c.sharding_type, c.columns)) for c in found]
