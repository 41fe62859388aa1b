"""Shards by type: every cell once, on 1 to 4,096 ranks, as TorchRec cuts them (B21, B22)."""

from collections.abc import Sequence
from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torchrec.distributed.sharding_plan import calculate_shard_sizes_and_offsets

from dlrm_scale.errors import PlanError
from dlrm_scale.layout import ShardRegion, TableLayout
from dlrm_scale.schema import TableSpec
from dlrm_scale.sharding.shard_shapes import TableShape, shape_of, table_layout
from dlrm_scale.sharding.sharder import ALL_SHARDING_TYPES


@st.composite
def _cuts(draw: st.DrawFn) -> tuple[TableSpec, TableShape, int, int]:
    """Draw a table, a shape for it, ranks and ranks a host."""
    per_host, hosts = draw(st.integers(1, 6)), draw(st.integers(1, 6))
    width, parts = 4 * draw(st.integers(1, 4)), draw(st.integers(1, 6))
    kind = draw(st.sampled_from(ALL_SHARDING_TYPES))
    table = TableSpec(name="t", rows=draw(st.integers(1, 40)), dim=width * parts)
    columns, places = table.dim, ()
    if kind == "table_wise":
        places = (draw(st.integers(0, per_host * hosts - 1)),)
    elif kind == "table_row_wise":
        places = (draw(st.integers(0, hosts - 1)),)
    elif kind == "column_wise":
        columns = width
        places = tuple(draw(st.lists(st.integers(0, per_host * hosts - 1), min_size=parts, max_size=parts)))
    elif kind == "table_column_wise":
        columns, host = width, draw(st.integers(0, hosts - 1))
        ranks = st.integers(host * per_host, (host + 1) * per_host - 1)
        places = tuple(draw(st.lists(ranks, min_size=parts, max_size=parts)))
    elif kind == "grid_shard":
        columns, places = width, tuple(draw(st.lists(st.integers(0, hosts - 1), min_size=parts, max_size=parts)))
    return table, TableShape(sharding_type=kind, columns=columns, places=places), per_host * hosts, per_host


@given(_cuts())
def test_every_cell_of_a_table_lies_in_exactly_one_shard(cut: tuple[TableSpec, TableShape, int, int]) -> None:
    table, shape, ranks, per_host = cut
    layout = table_layout(table, shape, ranks=ranks, ranks_per_host=per_host)
    held = torch.zeros(table.rows, table.dim, dtype=torch.int64)
    for region in layout.regions:
        assert 0 <= region.rank < ranks
        held[region.row_start : region.row_end, region.column_start : region.column_end] += 1
    assert (held == 1).all()
    assert layout.replicated == (shape.sharding_type == "data_parallel")


@given(_cuts())
def test_a_shape_is_found_again_in_its_shards(cut: tuple[TableSpec, TableShape, int, int]) -> None:
    table, shape, ranks, per_host = cut
    layout = table_layout(table, shape, ranks=ranks, ranks_per_host=per_host)
    assert shape_of(layout, ranks=ranks, ranks_per_host=per_host) == shape


@given(_cuts())
def test_shards_are_those_that_torchrec_cuts(cut: tuple[TableSpec, TableShape, int, int]) -> None:
    table, shape, ranks, per_host = cut
    if shape.sharding_type == "data_parallel":
        return
    sizes, offsets = calculate_shard_sizes_and_offsets(
        torch.empty(table.rows, table.dim, device="meta"), ranks, per_host, shape.sharding_type, shape.columns
    )
    layout = table_layout(table, shape, ranks=ranks, ranks_per_host=per_host)
    ours = sorted((_size(r), _offset(r)) for r in layout.regions)
    theirs = sorted(zip(map(tuple, sizes), map(tuple, offsets), strict=True))
    if shape.sharding_type == "grid_shard":
        assert ours == theirs
    else:  # TorchRec puts the offset of an empty shard where the last full one ends, and so do we
        assert [o for o in ours if o[0][0]] == [t for t in theirs if t[0][0]]
        assert len(ours) == len(theirs)


def _size(region: ShardRegion) -> tuple[int, ...]:
    return (region.rows, region.columns)


def _offset(region: ShardRegion) -> tuple[int, ...]:
    return (region.row_start, region.column_start)


def test_three_rows_on_four_ranks_leave_the_last_one_an_empty_shard() -> None:
    table = TableSpec(name="t", rows=3, dim=4)
    layout = table_layout(table, TableShape(sharding_type="row_wise", columns=4), ranks=4, ranks_per_host=4)
    assert [(r.rank, r.row_start, r.row_end) for r in layout.regions] == [(0, 0, 1), (1, 1, 2), (2, 2, 3), (3, 3, 3)]


@pytest.mark.parametrize(
    ("kind", "columns", "places", "words"),
    [
        ("table_wise", 16, (4,), "names rank 4 of 4"),
        ("table_wise", 16, (0, 1), "keeps its 16 columns in one place"),
        ("table_row_wise", 16, (2,), "names host 2 of 2"),
        ("row_wise", 16, (1,), "has no choice of places"),
        ("column_wise", 6, (0, 1), "equal shards of a multiple of 4"),
        ("column_wise", 8, (0, 1, 2), "3 shards of 8 columns are given"),
        ("table_column_wise", 8, (1, 2), "stays on one host, and ranks 1, 2 are on several"),
        ("grid_shard", 8, (1, 2), "names host 2 of 2"),
        ("diagonal", 16, (0,), "is no sharding type"),
    ],
)
def test_shards_that_torchrec_cannot_make_are_refused(
    kind: str, columns: int, places: Sequence[int], words: str
) -> None:
    table = TableSpec(name="C7", rows=10, dim=16)
    with pytest.raises(PlanError, match=f"table C7: {kind} .*{words}"):
        table_layout(
            table,
            TableShape(sharding_type=kind, columns=columns, places=tuple(places)),
            ranks=4,
            ranks_per_host=2,
        )


def test_shards_of_another_cut_are_no_shape() -> None:
    table = TableSpec(name="C7", rows=10, dim=16)
    even = table_layout(table, TableShape(sharding_type="row_wise", columns=16), ranks=2, ranks_per_host=2)
    first, second = even.regions
    uneven = TableLayout(
        spec=table, sharding_type="row_wise", regions=(replace(first, row_end=3), replace(second, row_start=3))
    )
    with pytest.raises(PlanError, match="table C7: its 2 shards aren't those of row_wise on 2 ranks"):
        shape_of(uneven, ranks=2, ranks_per_host=2)
