"""Marked rows are exactly those looked up, under every sharding type (B15)."""

from collections.abc import Sequence

import pytest
import torch

from dlrm_scale.schema import TableSpec
from dlrm_scale.sharding.pipeline import make_eval_pipeline, make_train_pipeline
from dlrm_scale.sharding.ranks import Ranks, init_ranks
from dlrm_scale.sharding.shard import ShardedModel
from dlrm_scale.sharding.sharder import ALL_SHARDING_TYPES
from dlrm_scale.touched_rows import TouchedRows
from tests.sharding.sharded_runs import build, make_config, rank_batches, tables_for
from tests.support.random_batches import GlobalBatch, random_batches
from tests.support.rank_runner import run_ranks


def _looked_up(batches: Sequence[GlobalBatch], tables: Sequence[TableSpec]) -> dict[str, set[int]]:
    return {table.name: {int(i) for batch in batches for i in batch.ids[k]} for k, table in enumerate(tables)}


def _marked(sharded: ShardedModel, touched: TouchedRows) -> list[set[int]]:
    return [set(touched.current(i).nonzero().squeeze(1).tolist()) for i in range(len(sharded.local_shards))]


def _check_marks(sharded: ShardedModel, touched: TouchedRows, expected: dict[str, set[int]], what: str) -> None:
    """Compare each shard's map with the global ids that fall into it."""
    for shard, marked in zip(sharded.local_shards, _marked(sharded, touched), strict=True):
        region = shard.region
        ids = {i - region.row_start for i in expected[region.table] if region.row_start <= i < region.row_end}
        assert marked == ids, f"{what}: {region}"


def _follow(kind: str, pipeline_kind: str, ranks: Ranks) -> None:
    what = f"{kind}, {pipeline_kind}"
    tables = tables_for(kind)
    batches = random_batches(tables, [12, 11, 4, 1, 12, 12], most_ids_per_bag=2)
    sharded = build(make_config(kind), tables, ranks)
    touched = TouchedRows([s.region.rows for s in sharded.local_shards])
    sharded.track(touched)
    source = rank_batches(batches, tables, ranks)
    pipeline = make_train_pipeline(sharded, pipeline_kind)

    pipeline.progress(source)
    assert not any(_marked(sharded, touched)), f"{what}: marked while disabled"

    touched.enabled = True
    before = [(s.weight.clone(), {k: v.clone() for k, v in s.state.items()}) for s in sharded.local_shards]
    for _ in range(3):
        pipeline.progress(source)
    for index, shard in enumerate(sharded.local_shards):
        changed = (shard.weight != before[index][0]).any(dim=1)
        for name, value in shard.state.items():
            changed |= value != before[index][1][name]
        if not shard.replicated:  # a replica also changes where only other ranks looked
            assert not (changed & (touched.current(index) == 0)).any(), f"{what}: a changed row isn't marked"
    sharded.union_replicated(touched)
    for index, shard in enumerate(sharded.local_shards):
        changed = (shard.weight != before[index][0]).any(dim=1)
        assert not (changed & (touched.current(index) == 0)).any(), f"{what}: a changed row isn't marked"
    _check_marks(sharded, touched, _looked_up(batches[1:4], tables), what)

    touched.freeze()  # the next interval starts empty; it must not hold the batches that are in flight
    assert not any(_marked(sharded, touched)), what
    for _ in make_eval_pipeline(sharded, pipeline_kind).run(rank_batches(batches, tables, ranks)):
        pass
    assert not any(_marked(sharded, touched)), f"{what}: evaluation marked rows"
    for _ in range(2):
        pipeline.progress(source)
    sharded.union_replicated(touched)
    _check_marks(sharded, touched, _looked_up(batches[4:6], tables), what)
    touched.release()


def _follow_all(kinds: tuple[str, ...]) -> None:
    ranks = init_ranks("cpu", 60)
    for kind in kinds:
        for pipeline_kind in ("plain", "sparse_dist"):
            _follow(kind, pipeline_kind, ranks)


@pytest.mark.parametrize("ranks", [1, 3])
def test_marked_rows_are_exactly_the_looked_up_ones_for_every_sharding_type(ranks: int) -> None:
    run_ranks(ranks, _follow_all, ALL_SHARDING_TYPES)


def test_host_wise_types_on_two_hosts_mark_exactly_the_looked_up_rows() -> None:
    kinds = ("table_row_wise", "table_column_wise", "grid_shard")
    run_ranks(4, _follow_all, kinds, ranks_per_host=2)


def _replicas_differ_until_merged() -> tuple[list[int], list[int]]:
    ranks = init_ranks("cpu", 60)
    tables = (TableSpec(name="C1", rows=50, dim=16),)
    sharded = build(make_config("data_parallel"), tables, ranks)
    touched = TouchedRows([50])
    sharded.track(touched)
    touched.enabled = True
    make_train_pipeline(sharded, "plain").progress(rank_batches(random_batches(tables, [8]), tables, ranks))
    own = touched.current(0).nonzero().squeeze(1).tolist()
    sharded.union_replicated(touched)
    return own, touched.current(0).nonzero().squeeze(1).tolist()


def test_a_data_parallel_table_gets_the_union_of_all_ranks_rows() -> None:
    (own0, union0), (own1, union1) = run_ranks(2, _replicas_differ_until_merged)
    assert own0 != own1
    assert union0 == union1 == sorted({*own0, *own1})


def _empty_bags_only() -> bool:
    ranks = init_ranks("cpu", 60)
    tables = tables_for("table_wise")
    sharded = build(make_config("row_wise"), tables, ranks)
    touched = TouchedRows([s.region.rows for s in sharded.local_shards])
    sharded.track(touched)
    touched.enabled = True
    batch = random_batches(tables, [4], most_ids_per_bag=2)[0]
    empty = GlobalBatch(
        dense_features=batch.dense_features,
        lengths=batch.lengths * 0,
        ids=tuple(ids[:0] for ids in batch.ids),
        labels=batch.labels,
    )
    before = [s.weight.clone() for s in sharded.local_shards]
    make_train_pipeline(sharded, "plain").progress(rank_batches([empty], tables, ranks))
    unchanged = all(torch.equal(s.weight, w) for s, w in zip(sharded.local_shards, before, strict=True))
    return unchanged and not any(_marked(sharded, touched))


def test_a_step_of_empty_bags_changes_and_marks_no_row() -> None:
    assert run_ranks(2, _empty_bags_only) == [True, True]
