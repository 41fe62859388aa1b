"""The placement problem in TorchRec's own costs: one phase, in which all that a shard costs adds up."""

from dlrm_scale.planning.costs.space import Candidate, candidates
from dlrm_scale.planning.solver.problem import Option, Problem
from dlrm_scale.planning.tables.table_set import TableSet, TableStats
from dlrm_scale.sharding.torchrec_costs import TorchRecCosts, TorchRecSetup, table_memory_bytes

__all__ = ["make_torchrec_problem"]


def make_torchrec_problem(tables: TableSet, setup: TorchRecSetup, *, wide: bool) -> Problem:
    """Cost every candidate with TorchRec's performance and storage model.

    TorchRec's model counts no optimizer state unless the optimizer was applied to the model before planning, and no
    charges of types; so does this.

    Args:
        tables: to be placed.
        setup: what TorchRec is told of the cluster.
        wide: see `space.candidates`.
    """
    costs = TorchRecCosts(setup)
    options = tuple(
        tuple(_option(costs, table, c) for c in _candidates(tables, table, setup, wide)) for table in tables.tables
    )
    return Problem(
        ranks=setup.ranks,
        ranks_per_host=setup.ranks_per_host,
        memory_bytes=table_memory_bytes(setup, [t.lookups_per_sample for t in tables.tables]),
        phases=("step",),
        tables=tuple(t.name for t in tables.tables),
        options=options,
    )


def _candidates(tables: TableSet, table: TableStats, setup: TorchRecSetup, wide: bool) -> tuple[Candidate, ...]:
    return candidates(
        table.spec, optimizer=tables.optimizer, ranks=setup.ranks, ranks_per_host=setup.ranks_per_host, wide=wide
    )


def _option(costs: TorchRecCosts, table: TableStats, candidate: Candidate) -> Option:
    cost = costs.shard(
        table.spec,
        table.lookups_per_sample,
        candidate.sharding_type,
        candidate.kernel,
        -(-table.rows // candidate.row_parts),
        candidate.columns,
    )
    return Option(
        sharding_type=candidate.sharding_type,
        kernel=candidate.kernel,
        placement=candidate.placement,
        shards=candidate.shards,
        columns=candidate.columns,
        costs_ms=(cost.milliseconds,),
        memory_bytes=cost.memory_bytes,
    )
