"""One rank plans, all receive it; plans are described (B25)."""

import os

import pytest
from torchrec.distributed.planner import ParameterConstraints
from torchrec.distributed.planner.types import Topology

from dlrm_scale.errors import ConfigError, PlanError
from dlrm_scale.layout import ShardLayout
from dlrm_scale.sharding.ordered_enumerator import OrderedEnumerator
from dlrm_scale.sharding.plan_rows import plan_rows
from dlrm_scale.sharding.ranks import init_ranks
from dlrm_scale.sharding.sharder import ALL_SHARDING_TYPES
from tests.sharding.sharded_runs import TABLES, build, make_config, tables_for
from tests.support.rank_runner import run_ranks


def _layouts(kind: str, overrides: dict[str, object]) -> tuple[ShardLayout, list[dict[str, object]]]:
    config = make_config(kind, sharding=overrides)
    sharded = build(config, tables_for(kind), init_ranks("cpu", 60))
    return sharded.layout, sharded.plan_rows()


def _covers(layout: ShardLayout) -> bool:
    """Every cell of every table lies in exactly one region."""
    for table in layout.tables:
        cells = [
            (r, c)
            for region in table.regions
            for r in range(region.row_start, region.row_end)
            for c in range(region.column_start, region.column_end)
        ]
        if len(cells) != len(set(cells)) or len(cells) != table.spec.rows * table.spec.dim:
            return False
    return True


@pytest.mark.parametrize("kind", ALL_SHARDING_TYPES)
def test_the_layout_is_equal_on_all_ranks_and_covers_each_table_once(kind: str) -> None:
    layouts = [layout for layout, _ in run_ranks(3, _layouts, kind, {})]
    assert len({layout.fingerprint() for layout in layouts}) == 1
    assert layouts[0] == layouts[1] == layouts[2]
    assert _covers(layouts[0])
    assert {t.sharding_type for t in layouts[0].tables} == {kind}
    assert [t.spec for t in layouts[0].tables] == list(tables_for(kind))


def test_single_tables_get_their_own_type() -> None:
    tables = {"C1": "row_wise", "C3": "data_parallel", "C4": "column_wise"}
    (layout, rows), _ = run_ranks(2, _layouts, "table_wise", {"tables": tables})
    assert {t.spec.name: t.sharding_type for t in layout.tables} == {"C2": "table_wise", "C5": "table_wise", **tables}
    by_table = {row["table"]: row for row in rows}
    assert by_table["C1"] | {"ranks": [0, 1], "shards": 2, "bytes_per_rank": 4 * 52 * 16 + 4 * 52} == by_table["C1"]
    assert by_table["C3"] | {"ranks": [0, 1], "shards": 1, "bytes_per_rank": 4 * 3 * 16 + 4 * 3} == by_table["C3"]
    assert by_table["C4"]["shards"] == 4
    assert len(by_table["C2"]["ranks"]) == 1


def test_auto_leaves_out_column_splits_for_rowwise_adagrad() -> None:
    (layout, _), _ = run_ranks(2, _layouts, "auto", {"allow_split_row_state": False})
    assert all(len(t.column_splits) == 1 for t in layout.tables)


def _differing_configs() -> str:
    ranks = init_ranks("cpu", 60)
    kind = "grid_shard" if ranks.rank == 1 else "table_wise"  # which rank 1 alone would refuse
    with pytest.raises(PlanError) as caught:
        build(make_config(kind), TABLES, ranks)
    return caught.value.message


def test_ranks_with_different_configs_all_stop_and_name_the_odd_one() -> None:
    expected = "tables, sharding config, device or ranks a host: rank 1 of 3 differs from rank 0"
    assert run_ranks(3, _differing_configs) == [expected] * 3


def _refused_everywhere() -> str:
    with pytest.raises(PlanError) as caught:
        build(make_config(sharding={"device_memory": "1K"}), TABLES, init_ranks("cpu", 60))
    return caught.value.message


def test_a_plan_that_does_not_fit_is_refused_on_every_rank() -> None:
    messages = run_ranks(2, _refused_everywhere)
    assert messages[0] == messages[1]
    assert "5 tables need 23.8 KiB with optimizer state" in messages[0]
    assert "2 x 870 B are there (1.0 KiB a rank, less 15%" in messages[0]
    assert "The largest is C4: 14.0 KiB, allowed as table_wise" in messages[0]


def _too_large_a_batch() -> str:
    config = make_config(data={"batch_size": 1 << 20}, sharding={"device_memory": "1M"})
    with pytest.raises(PlanError) as caught:
        build(config, TABLES, init_ranks("cpu", 60))
    return str(caught.value)


def test_a_plan_that_fits_but_for_its_batches_names_the_batch_size() -> None:
    (message,) = run_ranks(1, _too_large_a_batch)
    assert "buffers for batches of 1,048,576 rows a rank" in message
    assert "remedy: use a smaller data.batch_size" in message


def _hosts_of_three() -> str:
    environment = dict(os.environ)
    with pytest.raises(ConfigError) as caught:
        build(make_config(sharding={"ranks_per_host": 3}), TABLES, init_ranks("cpu", 60))
    build(make_config("table_row_wise", sharding={"ranks_per_host": 1}), TABLES, init_ranks("cpu", 60))
    assert dict(os.environ) == environment
    return caught.value.message


def test_hosts_that_do_not_divide_the_ranks_are_refused() -> None:
    expected = "sharding.ranks_per_host: 3 doesn't divide 4 ranks into equal hosts"
    assert run_ranks(4, _hosts_of_three) == [expected] * 4


def _hosts_of_two_after_four() -> list[set[int]]:
    ranks = init_ranks("cpu", 60)
    found = []
    for size in (4, 2, 4):
        layout = build(make_config("table_row_wise", sharding={"ranks_per_host": size}), TABLES, ranks).layout
        found.append({len(t.regions) for t in layout.tables})
    return found


def test_the_host_size_may_change_in_one_process() -> None:
    assert run_ranks(4, _hosts_of_two_after_four) == [[{4}, {2}, {4}]] * 4


def test_options_come_in_a_fixed_order_whatever_the_hash_seed() -> None:
    constraints = {"C1": ParameterConstraints(sharding_types=["row_wise", "table_wise", "data_parallel"])}
    topology = Topology(world_size=2, compute_device="cpu", local_world_size=2)
    enumerator = OrderedEnumerator(topology=topology, batch_size=8, constraints=constraints)
    order = enumerator._filter_sharding_types("C1", list(ALL_SHARDING_TYPES))
    assert order == ["table_wise", "row_wise", "data_parallel"]


def test_rows_of_a_plan_count_optimizer_state() -> None:
    (layout, _), _ = run_ranks(2, _layouts, "table_wise", {})
    sizes = {
        o: {r["table"]: r["bytes_per_rank"] for r in plan_rows(layout, o)} for o in ("sgd", "rowwise_adagrad", "adam")
    }
    assert sizes["sgd"]["C1"] == 4 * 103 * 16
    assert sizes["rowwise_adagrad"]["C1"] == 4 * 103 * 16 + 4 * 103
    assert sizes["adam"]["C1"] == 3 * 4 * 103 * 16
