"""What a memory cap forces, on a problem small enough to see the answer."""

from dlrm_scale.planning.plan.memory_caps import describe_memory_caps, what_memory_forces
from dlrm_scale.planning.plan.shapes import shapes_of
from dlrm_scale.planning.solver.problem import Option, Problem
from dlrm_scale.planning.solver.solve import solve


def _option(kind: str, milliseconds: float, memory_bytes: int) -> Option:
    return Option(
        sharding_type=kind,
        kernel="fused",
        placement="ranks" if kind == "table_wise" else "all_ranks",
        shards=1 if kind == "table_wise" else 2,
        columns=16,
        costs_ms=(milliseconds,),
        memory_bytes=memory_bytes,
    )


def _problem(memory_bytes: int) -> Problem:
    """Two tables that are quick whole (120 bytes) and slow in rows (50 a rank)."""
    options = (_option("table_wise", 1.0, 120), _option("row_wise", 2.0, 50))
    return Problem(
        ranks=2,
        ranks_per_host=2,
        memory_bytes=memory_bytes,
        phases=("step",),
        tables=("a", "b"),
        options=(options, options),
    )


def test_a_cap_that_costs_time_is_told_with_the_tables_that_would_change() -> None:
    # 110: no table fits whole, so that both lie by rows and take 2 + 2.
    problem = _problem(110)
    solution = solve(problem)
    assert solution.step_ms == 4.0
    caps = what_memory_forces(problem, shapes_of(problem, solution.assignment), solution.step_ms, solve)
    assert [(found.factor, found.step_ms, found.memory_bytes) for found in caps.larger] == [(1.25, 1.0, 137)]
    assert caps.larger[0].changed == (("a", "row_wise", "table_wise"), ("b", "row_wise", "table_wise"))
    told = describe_memory_caps(caps)
    assert "tables may take 110 B on a rank, and that costs time" in told
    assert "with 1.25 times as much 1.000 ms (75.0% less): a row_wise -> table_wise, b row_wise -> table_wise" in told


def test_a_cap_that_costs_nothing_says_so() -> None:
    problem = _problem(120)
    solution = solve(problem)
    caps = what_memory_forces(problem, shapes_of(problem, solution.assignment), solution.step_ms, solve)
    assert caps.larger == ()
    assert describe_memory_caps(caps) == ("tables may take 120 B on a rank; more memory wouldn't make the step shorter")
