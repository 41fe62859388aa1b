import pytest

from dlrm_scale.planning.costs.space import DEFAULT_TYPES, WIDE_TYPES, candidates, column_widths
from dlrm_scale.schema import TableSpec
from dlrm_scale.sharding.shard_shapes import HOST_TYPES, TableShape, table_layout


def _types(**changes):
    given = {"optimizer": "rowwise_adagrad", "ranks": 16, "ranks_per_host": 8, "wide": False, **changes}
    table = given.pop("table", TableSpec(name="t", rows=1000, dim=128))
    return candidates(table, **given)


def _names(found):
    return list(dict.fromkeys(c.sharding_type for c in found))


def test_row_wise_adagrad_keeps_rows_whole_unless_the_space_is_wide():
    assert _names(_types()) == list(DEFAULT_TYPES)
    assert _names(_types(wide=True)) == list(WIDE_TYPES)
    assert _types(types=("column_wise",)) == ()


def test_other_optimizers_cut_columns_on_request():
    assert _names(_types(optimizer="sgd", types=("column_wise",))) == ["column_wise"]
    assert "data_parallel" not in _names(_types(optimizer="adam", wide=True))


def test_every_width_that_divides_the_columns_by_a_multiple_of_four_is_there():
    assert column_widths(128) == (64, 32, 16, 8, 4)
    assert column_widths(96) == (48, 32, 24, 16, 12, 8, 4)
    assert column_widths(4) == column_widths(10) == ()
    assert [c.columns for c in _types(wide=True) if c.sharding_type == "column_wise"] == [64, 32, 16, 8, 4]
    assert [c.columns for c in _types(wide=True, widths=(32, 8)) if c.sharding_type == "column_wise"] == [32, 8]


def test_a_grid_has_a_host_for_every_column_shard():
    assert [c.columns for c in _types(wide=True) if c.sharding_type == "grid_shard"] == [64]
    assert [c.columns for c in _types(wide=True, ranks=64) if c.sharding_type == "grid_shard"] == [64, 32, 16]
    assert "grid_shard" not in _names(_types(wide=True, ranks=8))
    mean = TableSpec(name="t", rows=1000, dim=128, pooling="mean")
    assert "grid_shard" not in _names(_types(wide=True, table=mean))


def test_one_rank_keeps_tables_whole():
    assert _names(_types(ranks=1, ranks_per_host=1, wide=True)) == ["table_wise"]


@pytest.mark.parametrize("dim", [4, 10, 64, 96, 128])
def test_every_candidate_is_a_shape_that_the_trainer_cuts(dim):
    table = TableSpec(name="t", rows=1000, dim=dim)
    for c in _types(table=table, wide=True):
        places: tuple[int, ...] = ()
        if c.placement != "all_ranks":
            unit = 8 if c.sharding_type in HOST_TYPES else 1
            places = tuple(range(c.shards // unit)) if c.placement != "one_host" else (3,) * c.shards
        if c.placement == "ranks":
            places = tuple(p % 16 for p in places)
        shape = TableShape(sharding_type=c.sharding_type, columns=c.columns, places=places)
        layout = table_layout(table, shape, ranks=16, ranks_per_host=8)
        assert len(layout.regions) == (1 if c.sharding_type == "data_parallel" else c.shards)
        assert max(r.rows for r in layout.regions) == -(-table.rows // c.row_parts)
