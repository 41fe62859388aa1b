"""Ids and distinct rows of ranges of rows."""

import numpy as np
import pytest

from dlrm_scale.planning.costs.lookup_work import row_hits
from dlrm_scale.planning.tables.table_set import TableStats


def _halves(table: TableStats, samples: int) -> tuple[np.ndarray, np.ndarray]:
    middle = table.rows // 2
    return row_hits(table, samples).between(np.array([0, middle]), np.array([middle, table.rows]))


def test_evenly_drawn_rows_split_evenly() -> None:
    table = TableStats(name="C1", rows=1000, dim=8, lookups_per_sample=3)
    lookups, unique = _halves(table, 100)
    assert lookups.tolist() == pytest.approx([150, 150])
    assert unique.tolist() == pytest.approx([table.unique_rows_of(100) / 2] * 2, rel=1e-3)


def test_a_hot_row_loads_its_shard_with_ids_and_hardly_with_rows() -> None:
    # row 0 alone gets half of the lookups
    table = TableStats(name="C1", rows=10_000, dim=8, lookups_before_row=((1, 0.5),))
    lookups, unique = _halves(table, 1000)
    assert lookups.tolist() == pytest.approx([500 + 250, 250], rel=1e-3)
    # the hot row, and 500 ids over the others
    assert unique.sum() == pytest.approx(1 + 10_000 * (1 - np.exp(-0.05)), rel=1e-3)
    assert unique[0] == pytest.approx(unique[1] + 1, rel=0.01)


def test_the_tables_own_curve_says_how_many_distinct_rows_there_are() -> None:
    table = TableStats(name="C1", rows=10_000, dim=8, unique_rows=((1000, 100.0), (2000, 150.0)))
    lookups, unique = _halves(table, 2000)
    assert lookups.tolist() == pytest.approx([1000, 1000])
    assert unique.tolist() == pytest.approx([75, 75])


def test_distinct_rows_match_a_draw() -> None:
    random = np.random.default_rng(0)
    table = TableStats(name="C1", rows=4000, dim=8, lookups_per_sample=4, lookups_before_row=((1000, 0.75),))
    hot, cold = random.integers(0, 1000, 6000), random.integers(1000, 4000, 2000)
    _, unique = row_hits(table, 2000).between(np.array([0, 1000]), np.array([1000, 4000]))
    drawn = [len(np.unique(hot)), len(np.unique(cold))]
    assert unique.tolist() == pytest.approx(drawn, rel=0.02)


def test_a_range_has_no_more_distinct_rows_than_ids_or_rows() -> None:
    table = TableStats(
        name="C1", rows=100, dim=8, lookups_before_row=((50, 0.9),), unique_rows=((10, 10.0), (100, 100.0))
    )
    lookups, unique = _halves(table, 100)
    assert (unique <= np.minimum(lookups, 50) + 1e-9).all()
    empty = row_hits(table, 100).between(np.array([100]), np.array([100]))
    assert [float(values[0]) for values in empty] == [0.0, 0.0]
