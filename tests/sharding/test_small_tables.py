"""Tables smaller than the number of ranks, and ranks without tables (B21, B22)."""

import pytest
import torch

from dlrm_scale.schema import TableSpec
from tests.sharding.sharded_runs import Run, make_config, train_runs, whole_state, whole_tables
from tests.support.random_batches import random_batches
from tests.support.rank_runner import run_ranks
from tests.support.reference import train_reference

# Groups of one kernel each: sums and means. On 4 ranks the last one's kernels have no row at all, or end empty.
TINY = (TableSpec(name="C1", rows=3, dim=16), TableSpec(name="C2", rows=2, dim=16, pooling="mean"))
ENDS_EMPTY = (
    TableSpec(name="C1", rows=10, dim=16),
    TableSpec(name="C2", rows=3, dim=16),
    TableSpec(name="C3", rows=1, dim=16),
)
ONE = (TableSpec(name="C1", rows=37, dim=16),)


@pytest.mark.parametrize("tables", [TINY, ENDS_EMPTY], ids=["tiny", "ends_empty"])
def test_row_wise_tables_with_fewer_rows_than_ranks_train_with_empty_shards(tables: tuple[TableSpec, ...]) -> None:
    batches = random_batches(tables, [9, 4, 9, 2, 9], most_ids_per_bag=2)
    runs = [
        Run(config=make_config(kind, optimizer), pipeline=pipeline, tables=tables)
        for kind in ("row_wise", "table_row_wise")
        for optimizer in ("sgd", "rowwise_adagrad")
        for pipeline in ("plain", "sparse_dist")
    ]
    by_rank = run_ranks(4, train_runs, runs, batches)
    for index, run in enumerate(runs):
        left = [runs_of_rank[index] for runs_of_rank in by_rank]
        expected = train_reference(run.config, tables, batches)
        assert left[0].losses == pytest.approx(expected.losses, abs=1e-5)
        for name, weight in whole_tables(left, tables).items():
            torch.testing.assert_close(weight, expected.tables[name], atol=1e-5, rtol=0)
        for table in tables:
            held = [sum(r.rows for r, _, _ in rank.shards if r.table == table.name) for rank in left]
            assert sum(held) == table.rows
            assert 0 in held or table.rows >= 4
        if run.config.sparse_optimizer.kind == "rowwise_adagrad":
            for name, by_columns in whole_state(left, tables).items():
                torch.testing.assert_close(by_columns[0, 16], expected.row_states[name][0, 16], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("kind", ["table_wise", "table_row_wise", "data_parallel"])
def test_ranks_without_any_table_take_part(kind: str) -> None:
    batches = random_batches(ONE, [8, 2, 3, 8])  # 2 and 3 rows on 4 ranks: some have only padding
    runs = [
        Run(config=make_config(kind, sharding={"ranks_per_host": 2}), pipeline=pipeline, tables=ONE)
        for pipeline in ("plain", "sparse_dist")
    ]
    by_rank = run_ranks(4, train_runs, runs, batches)
    expected = train_reference(runs[0].config, ONE, batches)
    for index in range(len(runs)):
        left = [runs_of_rank[index] for runs_of_rank in by_rank]
        holders = sum(bool(rank.shards) for rank in left)
        assert holders == {"table_wise": 1, "table_row_wise": 2, "data_parallel": 4}[kind]
        assert left[0].losses == pytest.approx(expected.losses, abs=1e-5)
        torch.testing.assert_close(whole_tables(left, ONE)["C1"], expected.tables["C1"], atol=1e-5, rtol=0)
