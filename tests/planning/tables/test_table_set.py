"""What a table set refuses, and what it says of lookups."""

from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError

from dlrm_scale.planning.tables.table_set import TableSet, TableStats


def _table(**values: Any) -> TableStats:
    return TableStats(**{"name": "C1", "rows": 1000, "dim": 16, **values})


@pytest.mark.parametrize(
    ("values", "said"),
    [
        ({"dim": 1}, "nearest allowed: 4"),
        ({"dim": 6}, "nearest allowed: 4 or 8"),
        ({"dim": 13}, "nearest allowed: 12 or 16"),
        ({"dim": 0}, "nearest allowed: 4"),
        ({"rows": 0}, "allowed are 1 to 2,147,483,648"),
        ({"rows": 2**31 + 1}, "allowed are 1 to 2,147,483,648"),
        ({"unique_rows": ((10, 11.0),)}, "10 samples have 10 lookups, and 11 rows"),
        ({"rows": 5, "unique_rows": ((10, 6.0),)}, "10 samples look up 6 rows of 5"),
        ({"unique_rows": ((10, 5.0), (10, 6.0))}, "unique_rows must rise"),
        ({"unique_rows": ((10, 5.0), (20, 4.0))}, "unique_rows must rise"),
        ({"hot_rows": ((1, 0.5), (10, 0.4))}, "hot_rows must rise"),
        ({"hot_rows": ((10, 0.1), (20, 0.5))}, "rows after the hottest 10 get more lookups"),
        ({"hot_rows": ((10, 0.001),)}, "rows after the hottest 10 get more lookups"),
        ({"hot_rows": ((1001, 1.0),)}, "in a table of 1000 rows"),
        ({"lookups_before_row": ((1000, 0.9),)}, "in a table of 1000 rows"),
        ({"lookups_before_row": ((5, 0.2), (4, 0.3))}, "lookups_before_row must rise"),
    ],
)
def test_a_table_that_contradicts_itself_is_refused(values: dict[str, Any], said: str) -> None:
    with pytest.raises(ValidationError) as refused:
        _table(**values)
    assert said in str(refused.value)


def test_two_tables_of_one_name_are_refused() -> None:
    with pytest.raises(ValidationError, match="tables 1 and 3 are both named 'C1'"):
        TableSet(name="a", tables=(_table(), _table(name="C2"), _table()))


def test_lookups_without_a_curve_count_as_even() -> None:
    table = _table(lookups_per_sample=3.0)
    rows = np.random.default_rng(0).integers(0, 1000, (200, 1500))
    drawn = np.mean([len(np.unique(batch)) for batch in rows])
    assert table.unique_rows_of(500) == pytest.approx(drawn, rel=0.005)
    assert table.share_of_hottest(10) == pytest.approx(0.01)
    assert _table(rows=1).unique_rows_of(64) == 1


def test_unique_rows_follow_the_points_and_stay_below_lookups_and_rows() -> None:
    table = _table(unique_rows=((100, 80.0), (400, 160.0)))
    assert [table.unique_rows_of(s) for s in (50, 100, 200, 400, 1600)] == pytest.approx([40, 80, 113.137, 160, 320])
    assert table.unique_rows_of(10**9) == 1000
    assert table.unique_rows_of(0.5) == pytest.approx(0.4)


def test_how_hot_rows_are_is_told_by_a_curve_of_its_own() -> None:
    table = _table(hot_rows=((1, 0.4),), lookups_before_row=((500, 0.3), (501, 0.6)))
    assert table.share_of_hottest(1) == pytest.approx(0.4)
