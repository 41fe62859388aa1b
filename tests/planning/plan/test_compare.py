"""What moves from one plan to another, byte by byte."""

from dlrm_scale.planning.plan.compare import compare_plans
from dlrm_scale.planning.report.plan_text import describe_difference
from dlrm_scale.schema import TableSpec
from dlrm_scale.sharding.plan_file import PlanFile, Prediction, planned_table, runs_of
from dlrm_scale.sharding.shard_shapes import TableShape

_A = TableSpec(name="a", rows=10, dim=8)
_B = TableSpec(name="b", rows=7, dim=8)


def _plan(shapes: dict[TableSpec, TableShape], step_ms: float = 2.0, **values: object) -> PlanFile:
    fields = {
        "planner": "dlrm_scale",
        "ranks": 2,
        "ranks_per_host": 2,
        "optimizer": "rowwise_adagrad",
        "batch_size_per_rank": 4,
        "tables": tuple(planned_table(table, shape) for table, shape in shapes.items()),
        "prediction": Prediction(
            costs="x",
            step_ms=step_ms,
            phases_ms={"lookup": runs_of([step_ms / 2, 0.5])},
            memory_bytes={"weights": runs_of([100, 50]), "optimizer_state": runs_of([10, 5])},
        ),
    }
    return PlanFile.model_validate({**fields, **values})


def _whole(rank: int) -> TableShape:
    return TableShape(sharding_type="table_wise", columns=8, places=(rank,))


_ROWS = TableShape(sharding_type="row_wise", columns=8)
_COPIES = TableShape(sharding_type="data_parallel", columns=8)


def test_a_plan_differs_in_nothing_from_itself() -> None:
    plan = _plan({_A: _whole(0), _B: _ROWS})
    found = compare_plans(plan, plan)
    assert found.equal
    assert (found.moves, found.moved_bytes, found.fields) == ((), 0, ())
    assert "every shard stays where it is" in describe_difference(found)


def test_bytes_that_move_are_those_that_a_rank_did_not_hold() -> None:
    # a by rows: rank 1 gets rows 5-9, 5 x (8 x 4 + 4); b copied: rank 0 gets all of its 7 rows.
    before = _plan({_A: _whole(0), _B: _whole(1)})
    after = _plan({_A: _ROWS, _B: _COPIES}, step_ms=1.5)
    found = compare_plans(before, after)
    assert {(m.table, m.before, m.after, m.moved_bytes) for m in found.moves} == {
        ("a", "table_wise", "row_wise of 2", 5 * 36),
        ("b", "table_wise", "data_parallel", 7 * 36),
    }
    assert found.moved_bytes == 12 * 36
    assert found.step_ms == (2.0, 1.5)
    assert found.phases_ms == {"lookup": (1.0, 0.75)}
    assert found.memory_bytes == (110.0, 110.0)
    told = describe_difference(found)
    assert "2 tables lie elsewhere, 432 B move; 0 stay" in told
    assert "predicted step: 2.000 ms -> 1.500 ms (-25.0%)" in told


def test_a_whole_table_that_changes_ranks_moves_whole() -> None:
    found = compare_plans(_plan({_A: _whole(0)}), _plan({_A: _whole(1)}))
    assert [(m.table, m.moved_bytes) for m in found.moves] == [("a", 10 * 36)]


def test_tables_of_another_size_and_other_fields_are_named() -> None:
    larger = TableSpec(name="b", rows=8, dim=8)
    found = compare_plans(
        _plan({_A: _whole(0), _B: _ROWS}), _plan({_A: _whole(0), larger: _ROWS}, batch_size_per_rank=8)
    )
    assert (found.only_before, found.only_after) == (("b",), ("b",))
    assert found.fields == (("batch_size_per_rank", 4, 8),)
    assert not found.equal
