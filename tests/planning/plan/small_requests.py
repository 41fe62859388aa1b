"""A few tables on a described cluster, small enough to plan in a fraction of a second."""

from dlrm_scale.planning.cluster.cluster_file import load_cluster
from dlrm_scale.planning.plan.request import PlanRequest, plan_request
from dlrm_scale.planning.tables.table_set import SparseOptimizer, TableSet, TableStats
from dlrm_scale.units import GIB

__all__ = ["SMALL_TABLES", "small_request", "small_tables"]

SMALL_TABLES = (
    TableStats(name="large", rows=20_000_000, dim=64, lookups_per_sample=20.0),
    TableStats(name="wide", rows=2_000_000, dim=128, lookups_per_sample=4.0),
    TableStats(name="middle", rows=300_000, dim=64, lookups_per_sample=2.0),
    TableStats(name="mean", rows=50_000, dim=64, lookups_per_sample=3.0, pooling="mean"),
    TableStats(name="tiny", rows=3, dim=64),
)


def small_tables(optimizer: SparseOptimizer = "rowwise_adagrad") -> TableSet:
    """Make the set."""
    return TableSet(name="small", optimizer=optimizer, tables=SMALL_TABLES)


def small_request(
    *,
    ranks: int = 8,
    ranks_per_host: int | None = None,
    memory_bytes: int = 80 * GIB,
    batch_size_per_rank: int = 1024,
    optimizer: SparseOptimizer = "rowwise_adagrad",
    wide: bool = False,
    types: dict[str, tuple[str, ...]] | None = None,
) -> PlanRequest:
    """Ask for a plan of the set on A100 hosts."""
    cluster = load_cluster("a100x8").model_copy(update={"memory_bytes": memory_bytes})
    return plan_request(
        small_tables(optimizer),
        cluster,
        ranks=ranks,
        batch_size_per_rank=batch_size_per_rank,
        ranks_per_host=ranks_per_host,
        wide=wide,
        types=types,
    )
