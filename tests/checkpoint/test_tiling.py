"""Rectangles partition a table or the first fault is named; checked against counting every cell."""

from hypothesis import given
from hypothesis import strategies as st

from dlrm_scale.checkpoint.files.tiling import tiling_fault


def test_stripes_columns_and_grids_partition_a_table() -> None:
    assert tiling_fault([(0, 3, 0, 4)], 3, 4) is None
    assert tiling_fault([(0, 1, 0, 4), (1, 3, 0, 4), (3, 3, 0, 4)], 3, 4) is None
    assert tiling_fault([(0, 3, 0, 2), (0, 2, 2, 4), (2, 3, 2, 4)], 3, 4) is None


def test_gaps_overlaps_and_overhangs_are_named() -> None:
    assert tiling_fault([], 3, 4) == "rows 0 to 3 of columns 0 to 4 are missing"
    assert tiling_fault([(0, 3, 0, 2)], 3, 4) == "rows 0 to 3 of columns 2 to 4 are missing"
    assert tiling_fault([(0, 2, 0, 4), (1, 3, 0, 4)], 3, 4) == "rows 1 to 2 of columns 0 to 4 are there twice"
    assert "lie outside" in str(tiling_fault([(0, 4, 0, 4)], 3, 4))


_bounds = st.tuples(st.integers(0, 5), st.integers(0, 5)).map(sorted)


@given(st.lists(st.tuples(_bounds, _bounds).map(lambda b: (*b[0], *b[1])), max_size=5))
def test_a_fault_is_found_exactly_when_some_cell_is_not_covered_once(rectangles: list[tuple[int, ...]]) -> None:
    count = {(r, c): 0 for r in range(5) for c in range(5)}
    for row_start, row_end, column_start, column_end in rectangles:
        for cell in count:
            count[cell] += row_start <= cell[0] < row_end and column_start <= cell[1] < column_end
    sound = all(n == 1 for n in count.values())
    assert (tiling_fault(rectangles, 5, 5) is None) == sound
