"""A popularity fitted to curves has the rows, lookups, hot rows and distinct rows that they tell of."""

import numpy as np
import pytest

from dlrm_scale.planning.tables.popularity import Popularity, concave, fit_popularity
from dlrm_scale.planning.tables.table_set import TableStats
from tests.planning.tables.uses_of_rows import uses

_ZIPF = 1 / np.arange(1, 20_001) ** 1.1
_ZIPF /= _ZIPF.sum()


def _zipf_table() -> TableStats:
    sums = np.cumsum(_ZIPF)
    return TableStats(
        name="z",
        rows=20_000,
        dim=4,
        lookups_per_sample=2.0,
        unique_rows=tuple((4**k, float(np.sum(-np.expm1(-2 * 4**k * _ZIPF)))) for k in range(3, 9)),
        hot_rows=tuple((4**k, float(sums[4**k - 1])) for k in range(7)),
    )


def test_a_fit_keeps_rows_and_lookups_and_distinct_rows() -> None:
    table = _zipf_table()
    law = fit_popularity(table)
    assert law.rows.sum() == pytest.approx(20_000, rel=1e-4)
    assert law.rows @ law.share == pytest.approx(1, rel=1e-4)
    for rows, share in table.hot_rows:
        assert law.share_of_hottest(rows) == pytest.approx(share, rel=0.01)
    for samples in (64, 100, 1000, 30_000):
        assert law.unique_rows(2 * samples) == pytest.approx(np.sum(-np.expm1(-2 * samples * _ZIPF)), rel=0.01)


def test_uses_are_those_of_a_draw() -> None:
    law = fit_popularity(_zipf_table())
    counts = np.bincount(np.random.default_rng(0).choice(20_000, 200_000, p=_ZIPF))
    counts = counts[counts > 0]
    edges = (0, 1, 2, 4, 16, 256)
    rows, lookups = uses(law, 200_000, edges)
    bins = np.searchsorted(edges, counts, side="left") - 1
    np.testing.assert_allclose(rows, np.bincount(bins, minlength=6), rtol=0.1)
    np.testing.assert_allclose(lookups, np.bincount(bins, weights=counts, minlength=6), rtol=0.1)
    assert rows.sum() == pytest.approx(law.unique_rows(200_000))
    assert lookups.sum() == pytest.approx(200_000, rel=1e-3)


def test_nothing_known_is_one_class_of_all_rows() -> None:
    law = fit_popularity(TableStats(name="a", rows=50, dim=4))
    np.testing.assert_array_equal(law.rows, [50])
    np.testing.assert_array_equal(law.share, [0.02])


def test_rows_that_are_hot_by_their_place_are_hot() -> None:
    law = fit_popularity(TableStats(name="a", rows=10_000, dim=4, lookups_before_row=((7000, 0.42), (7001, 0.82))))
    assert law.share_of_hottest(1) == pytest.approx(0.4)
    assert law.rows.sum() == pytest.approx(10_000)
    skewed = fit_popularity(
        TableStats(name="a", rows=10_000, dim=4, unique_rows=((4096, 600.0),), lookups_before_row=((5000, 0.7),))
    )
    assert skewed.unique_rows(4096) == pytest.approx(600, rel=0.001)
    assert skewed.rows @ skewed.share == pytest.approx(1, rel=1e-4)


def test_points_below_the_others_lines_are_left_out() -> None:
    assert concave(((1, 0.2), (10, 0.25), (20, 0.5), (100, 0.9), (50, 0.95)), 100) == ((1, 0.2), (20, 0.5), (50, 0.95))


def test_distinct_rows_of_classes_are_the_even_draws() -> None:
    law = Popularity(rows=np.array([10.0, 90.0]), share=np.array([0.05, 0.5 / 90]))
    draws = np.random.default_rng(1).choice(100, (4000, 80), p=np.r_[np.full(10, 0.05), np.full(90, 0.5 / 90)])
    assert law.unique_rows(80) == pytest.approx(np.mean([len(set(d)) for d in draws.tolist()]), rel=0.01)
    assert law.share_of_hottest(10) == pytest.approx(0.5)
    assert law.share_of_hottest(55) == pytest.approx(0.75)
