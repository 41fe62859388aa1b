"""Rows of a popularity are dealt out so that each part of the table has its rows and its lookups."""

from itertools import pairwise

import numpy as np
import pytest

from dlrm_scale.planning.tables.placement import place_rows
from dlrm_scale.planning.tables.popularity import Popularity
from dlrm_scale.planning.tables.table_set import TableStats
from tests.planning.tables.uses_of_rows import share_of_rows

_ZIPF = 1 / np.arange(1, 30_001)
_LAW = Popularity(rows=np.ones(30_000), share=_ZIPF / _ZIPF.sum())
_TOP = _LAW.share[0]


@pytest.mark.parametrize(
    "places",
    [
        (),
        ((15_000, 0.5),),
        ((300, 0.55), (3000, 0.77)),
        ((29_000, 0.35),),
        ((7, 0.001), (8, 0.001 + _TOP), (20_000, 0.6)),
    ],
    ids=["whole", "even", "hot rows first", "hot rows last", "one hot row"],
)
def test_every_row_has_a_place_and_every_part_its_lookups(places: tuple[tuple[int, float], ...]) -> None:
    table = TableStats(name="a", rows=30_000, dim=4, lookups_before_row=places)
    placed = place_rows(table, _LAW)
    shares = np.diff(placed.share_ends, prepend=0)
    bounds = [0, *(row for row, _ in places), 30_000]
    assert placed.segment_starts.tolist() == bounds[:-1]
    for number, (start, end) in enumerate(pairwise(bounds)):
        mine = placed.segment == number
        assert placed.rows[mine].sum() == end - start
        # one block after the other, without gaps
        np.testing.assert_array_equal(placed.first_rank[mine], np.cumsum(placed.rows[mine]) - placed.rows[mine])
        assert shares[mine].sum() == pytest.approx(share_of_rows(table, start, end), abs=0.01)
    a_row = np.sort(np.repeat(shares / placed.rows, placed.rows))[::-1]
    np.testing.assert_allclose(np.cumsum(a_row)[[0, 9, 99, 9999]], np.cumsum(_LAW.share)[[0, 9, 99, 9999]], rtol=0.01)
