"""Drawn ids have a table set's distinct rows, hot rows, places and bag sizes."""

import numpy as np
import pytest

from dlrm_scale.planning.tables.draw import BatchDrawer
from dlrm_scale.planning.tables.generate import generate_tables
from dlrm_scale.planning.tables.table_set import TableSet, TableStats
from tests.planning.tables.uses_of_rows import share_of_rows


def _drawer(*tables: TableStats, seed: int = 0) -> BatchDrawer:
    return BatchDrawer(TableSet(name="a", tables=tables), seed=seed)


@pytest.mark.parametrize("kind", ["production", "synthetic"])
@pytest.mark.parametrize("samples", [1024, 6000])
def test_distinct_rows_of_generated_sets_are_those_of_their_curves(kind: str, samples: int) -> None:
    made = generate_tables(kind, tables=60, seed=2)
    drawn = BatchDrawer(made).draw(samples)
    found = {t.name: len(np.unique(drawn[t.name].ids)) for t in made.tables}
    expected = {t.name: t.unique_rows_of(samples) for t in made.tables}
    assert sum(found.values()) == pytest.approx(sum(expected.values()), rel=0.01)
    for name, rows in expected.items():
        # 3 %, or what chance makes of few rows
        assert found[name] == pytest.approx(rows, rel=0.03, abs=4 * rows**0.5)


def test_ids_lie_where_the_set_says_and_are_as_hot() -> None:
    popularity = 1 / np.arange(1, 100_001) ** 1.1
    popularity /= popularity.sum()
    hottest = np.cumsum(popularity)
    # Rows 0, 1 and 40,000 are the three hottest ones, the others lie evenly.
    one, two, three = popularity[:3].tolist()
    even = (1 - hottest[2]) / 99_997
    table = TableStats(
        name="C1",
        rows=100_000,
        dim=4,
        unique_rows=tuple((4**k, float(np.sum(-np.expm1(-(4**k) * popularity)))) for k in range(4, 9)),
        hot_rows=tuple((k, float(hottest[k - 1])) for k in (1, 2, 3, 10, 100, 1000, 10_000)),
        lookups_before_row=(
            (1, two),
            (2, two + three),
            (40_000, two + three + 39_998 * even),
            (40_001, one + two + three + 39_998 * even),
        ),
    )
    ids = _drawer(table).draw(65536)["C1"].ids
    assert len(np.unique(ids)) == pytest.approx(table.unique_rows_of(65536), rel=0.02)
    for start, end in ((0, 1), (1, 2), (2, 40_000), (40_000, 40_001), (40_001, 100_000)):
        assert np.mean((ids >= start) & (ids < end)) == pytest.approx(share_of_rows(table, start, end), abs=0.006)
    found = np.sort(np.bincount(ids))[::-1] / len(ids)
    for rows in (1, 3, 10, 100):
        assert found[:rows].sum() == pytest.approx(hottest[rows - 1], abs=0.01)


def test_hot_ids_are_scattered_over_row_wise_shards() -> None:
    made = generate_tables("production", tables=20, seed=5)
    drawn = BatchDrawer(made).draw(4096)
    for table in made.tables:
        ids = drawn[table.name].ids
        hottest = max(table.share_of_hottest(1), 4 / table.rows)
        shard = np.bincount(ids * 4 // table.rows, minlength=4) / len(ids)
        assert shard.max() < 0.25 + 4 * hottest + 4 * (0.25 / len(ids)) ** 0.5


@pytest.mark.parametrize(
    ("mean", "p99", "least", "most"),
    [
        (1.0, None, 1, 1),
        (100.0, 100.0, 100, 100),
        (2.25, None, 2, 3),
        (2.5, 7.0, 6, 7),
        (5.0, 40.0, 35, 44),
        (0.3, 6.0, 4, 7),
        (0.3, 1.0, 1, 1),
    ],
)
def test_bags_have_the_mean_and_the_percentile(mean: float, p99: float | None, least: float, most: float) -> None:
    table = TableStats(name="a", rows=1000, dim=4, lookups_per_sample=mean, lookups_per_sample_p99=p99)
    drawn = _drawer(table).draw(40_000)["a"]
    assert drawn.lengths.mean() == pytest.approx(mean, rel=0.06)
    assert least <= np.percentile(drawn.lengths, 99) <= most
    assert len(drawn.ids) == drawn.lengths.sum()
    assert (drawn.ids.dtype, drawn.lengths.dtype) == (np.int64, np.int32)


def test_a_tables_ids_depend_on_seed_and_batch_and_not_on_which_tables_are_drawn() -> None:
    tables = [TableStats(name=f"t{i}", rows=2**31, dim=4, lookups_per_sample=3.0) for i in range(3)]
    all_of_them = _drawer(*tables).draw(100, batch=5)
    alone = _drawer(*tables).draw(100, batch=5, tables=["t2"])
    assert list(alone) == ["t2"]
    np.testing.assert_array_equal(alone["t2"].ids, all_of_them["t2"].ids)
    assert all_of_them["t0"].ids.max() < 2**31
    assert all_of_them["t0"].ids.min() >= 0
    others = (_drawer(*tables).draw(100, batch=6), _drawer(*tables, seed=1).draw(100, batch=5))
    assert not any(np.array_equal(other["t2"].ids, alone["t2"].ids) for other in others)
    assert not np.array_equal(all_of_them["t0"].ids, all_of_them["t1"].ids)


def test_tiny_tables_are_drawn_too() -> None:
    drawn = _drawer(
        TableStats(name="one", rows=1, dim=4),
        TableStats(name="three", rows=3, dim=4, hot_rows=((1, 0.9),), lookups_before_row=((1, 0.9), (2, 0.95))),
        TableStats(name="none", rows=9, dim=4, lookups_per_sample=0.0),
    ).draw(5000)
    assert set(drawn["one"].ids.tolist()) == {0}
    np.testing.assert_allclose(np.bincount(drawn["three"].ids) / 5000, [0.9, 0.05, 0.05], atol=0.015)
    assert len(drawn["none"].ids) == 0
