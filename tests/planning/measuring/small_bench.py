"""A benchmark of a few small tables on a cluster with round numbers."""

from typing import Any

from dlrm_scale.planning.measuring.bench_setup import prepare_bench
from dlrm_scale.planning.measuring.plan_bench import BenchRequest
from dlrm_scale.planning.tables.table_set import TableSet, TableStats
from tests.planning.costs.small_cluster import small_cluster

__all__ = ["SMALL_SET", "small_bench"]

SMALL_SET = TableSet(
    name="small set",
    tables=(
        TableStats(name="long", rows=20_000, dim=16, lookups_per_sample=4.0),
        TableStats(name="middle", rows=3_000, dim=16, lookups_per_sample=2.0),
        TableStats(name="short", rows=30, dim=16, lookups_per_sample=1.0),
        TableStats(name="tiny", rows=3, dim=16),
    ),
)


def small_bench(
    *, ranks: int = 2, tables: TableSet = SMALL_SET, cluster_memory_bytes: int = 1 << 30, **settings: Any
) -> BenchRequest:
    """Prepare it; `reserve` is half of the memory."""
    cluster = small_cluster(memory_bytes=cluster_memory_bytes)
    settings = {"batch_size_per_rank": 16, "rounds": 4} | settings
    return prepare_bench(tables, cluster, ranks=ranks, device="cpu", **settings)
