"""Assignments of a solver and shapes of a plan say the same."""

import pytest

from dlrm_scale.planning.plan.shapes import assignment_of, places_of, shapes_of
from dlrm_scale.planning.solver.problem import Assignment, Option, Problem
from dlrm_scale.sharding.shard_shapes import TableShape


def _option(kind: str, placement: str, shards: int, columns: int) -> Option:
    return Option(
        sharding_type=kind,
        kernel="dense" if kind == "data_parallel" else "fused",
        placement=placement,  # type: ignore[arg-type]
        shards=shards,
        columns=columns,
        costs_ms=(1.0,),
        memory_bytes=1,
    )


_OPTIONS = (
    _option("table_wise", "ranks", 1, 16),
    _option("row_wise", "all_ranks", 6, 16),
    _option("table_row_wise", "hosts", 2, 16),
    _option("column_wise", "ranks", 4, 4),
    _option("column_wise", "ranks", 2, 8),
    _option("table_column_wise", "one_host", 2, 8),
    _option("grid_shard", "hosts", 4, 8),
    _option("data_parallel", "all_ranks", 6, 16),
)
_RANKS = ((5,), (), (2, 3), (5, 0, 0, 1), (3, 3), (4, 5), (4, 5, 0, 1), ())
_PROBLEM = Problem(
    ranks=6,
    ranks_per_host=2,
    memory_bytes=10,
    phases=("step",),
    tables=tuple("abcdefgh"),
    options=(_OPTIONS,) * 8,
)


def test_an_assignment_of_every_type_is_found_again_in_its_shapes() -> None:
    assignment = Assignment(chosen=tuple(range(8)), ranks=_RANKS)
    shapes = shapes_of(_PROBLEM, assignment)
    assert shapes == (
        TableShape(sharding_type="table_wise", columns=16, places=(5,)),
        TableShape(sharding_type="row_wise", columns=16),
        TableShape(sharding_type="table_row_wise", columns=16, places=(1,)),
        TableShape(sharding_type="column_wise", columns=4, places=(5, 0, 0, 1)),
        TableShape(sharding_type="column_wise", columns=8, places=(3, 3)),
        TableShape(sharding_type="table_column_wise", columns=8, places=(4, 5)),
        TableShape(sharding_type="grid_shard", columns=8, places=(2, 0)),
        TableShape(sharding_type="data_parallel", columns=16),
    )
    assert assignment_of(_PROBLEM, shapes) == assignment
    assert [places_of(shape, 2) for shape in shapes] == list(_RANKS)


def test_a_cut_that_a_problem_does_not_offer_is_named() -> None:
    narrow = TableShape(sharding_type="column_wise", columns=12, places=(0,))
    whole = TableShape(sharding_type="row_wise", columns=16)
    with pytest.raises(ValueError, match="table b: column_wise of 12 columns isn't offered"):
        assignment_of(_PROBLEM, [whole, narrow, *[whole] * 6])
