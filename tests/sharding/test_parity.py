"""Every sharding type on every number of ranks trains like the plain-torch model with whole tables."""

from functools import cache

import pytest
import torch

from dlrm_scale.schema import TableSpec
from dlrm_scale.sharding.sharder import ALL_SHARDING_TYPES
from tests.sharding.sharded_runs import Left, Run, make_config, tables_for, train_runs, whole_state, whole_tables
from tests.support.random_batches import GlobalBatch, random_batches
from tests.support.rank_runner import run_ranks
from tests.support.reference import Trained, train_reference

TOLERANCE = 1e-5
# No size divides by 3; with 5 rows rank 3 of 4 has only padding; with 1 row all but rank 0 have.
ROWS_PER_STEP = (32, 31, 5, 32, 1, 29)
BOTH = ("plain", "sparse_dist")

ColumnSplits = tuple[tuple[str, tuple[tuple[int, int], ...]], ...]


@cache
def _batches(tables: tuple[TableSpec, ...]) -> list[GlobalBatch]:
    return random_batches(tables, ROWS_PER_STEP, most_ids_per_bag=3)


@cache
def _reference(kind: str, optimizer: str, splits: ColumnSplits) -> Trained:
    tables = tables_for(kind)
    return train_reference(make_config(kind, optimizer), tables, _batches(tables), column_splits=dict(splits))


def _check(kind: str, optimizer: str, left: list[Left]) -> None:
    tables = tables_for(kind)
    splits = left[0].column_splits if optimizer == "rowwise_adagrad" else {}
    expected = _reference("grid_shard" if kind == "grid_shard" else "table_wise", optimizer, tuple(splits.items()))
    what = f"{kind}, {optimizer}, {len(left)} ranks"
    assert left[0].losses == pytest.approx(expected.losses, abs=TOLERANCE), what
    for name, weight in whole_tables(left, tables).items():
        torch.testing.assert_close(weight, expected.tables[name], atol=TOLERANCE, rtol=0, msg=f"{what}: {name}")
    if optimizer == "rowwise_adagrad":
        state = whole_state(left, tables)
        for name, by_columns in expected.row_states.items():
            assert state[name].keys() == by_columns.keys(), what
            for columns, total in by_columns.items():
                torch.testing.assert_close(state[name][columns], total, atol=TOLERANCE, rtol=TOLERANCE, msg=what)
    for rank in left:
        for name, parameter in rank.dense.items():
            torch.testing.assert_close(parameter, expected.dense[name], atol=TOLERANCE, rtol=0, msg=f"{what}: {name}")


def _sweep(ranks: int, kinds: tuple[str, ...], optimizers: tuple[str, ...], *, ranks_per_host: int = 0) -> None:
    """Compare with the reference under both pipelines, and the pipelines with one another bit for bit."""
    for tables in {tables_for(kind) for kind in kinds}:
        cases = [(k, o) for k in kinds for o in optimizers if tables_for(k) == tables]
        runs = [
            Run(config=make_config(k, o, sharding={"ranks_per_host": ranks_per_host}), pipeline=p, tables=tables)
            for k, o in cases
            for p in BOTH
        ]
        by_rank = run_ranks(ranks, train_runs, runs, _batches(tables))
        by_run = list(zip(*by_rank, strict=True))
        for index, (kind, optimizer) in enumerate(cases):
            plain, overlapped = (list(left) for left in by_run[2 * index : 2 * index + 2])
            _check(kind, optimizer, plain)
            assert overlapped[0].losses == plain[0].losses, f"{kind}, {optimizer}: pipelines differ"
            ours, theirs = whole_tables(plain, tables), whole_tables(overlapped, tables)
            assert all(torch.equal(ours[name], theirs[name]) for name in ours), f"{kind}, {optimizer}: pipelines differ"


@pytest.mark.parametrize("ranks", [1, 2, 3, 4])
def test_every_sharding_type_equals_the_unsharded_reference(ranks: int) -> None:
    _sweep(ranks, ALL_SHARDING_TYPES, ("sgd", "rowwise_adagrad"))


def test_host_wise_types_on_two_hosts_equal_the_unsharded_reference() -> None:
    kinds = ("table_row_wise", "table_column_wise", "grid_shard")
    _sweep(4, kinds, ("sgd", "rowwise_adagrad"), ranks_per_host=2)
