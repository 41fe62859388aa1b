"""The bottleneck of a plan, on a problem small enough to see the answer."""

from collections.abc import Sequence

from dlrm_scale.planning.plan.cost_models import PlanLoad
from dlrm_scale.planning.plan.explain import describe_bottleneck, explain
from dlrm_scale.planning.plan.proposal import Proposal, Rating
from dlrm_scale.planning.plan.shapes import assignment_of
from dlrm_scale.planning.solver.problem import Assignment, Option, Problem
from dlrm_scale.planning.solver.rate import rate
from dlrm_scale.sharding.shard_shapes import TableShape


def _option(kind: str, lookup_ms: float, output_ms: float, memory_bytes: int) -> Option:
    return Option(
        sharding_type=kind,
        kernel="fused",
        placement="ranks" if kind == "table_wise" else "all_ranks",
        shards=1 if kind == "table_wise" else 2,
        columns=16,
        costs_ms=(lookup_ms, output_ms),
        memory_bytes=memory_bytes,
    )


class _Model:
    """A given problem as a model of costs."""

    name = "dlrm_scale"

    def __init__(self, problem: Problem) -> None:
        self.problem = self.everything = problem

    def place(self, shapes: Sequence[TableShape]) -> tuple[Problem, Assignment]:
        return self.problem, assignment_of(self.problem, shapes)

    def load(self, shapes: Sequence[TableShape]) -> PlanLoad:
        rating = rate(*self.place(shapes))
        rows = dict(zip(self.problem.phases, rating.load_ms.tolist(), strict=True))
        return PlanLoad(
            step_ms=rating.step_ms,
            phases_ms={name: tuple(row) for name, row in rows.items()},
            slowest_ms={name: max(row) for name, row in rows.items()},
            memory_bytes={"shards": tuple(rating.memory_bytes.tolist())},
            memory_limit_bytes=self.problem.memory_bytes,
        )


def _explained(memory_bytes: int, places: Sequence[int], by_rows_bytes: int = 40, base_ms: float = 0.0) -> str:
    whole = (_option("table_wise", 6.0, 0.5, 60), _option("row_wise", 3.5, 0.6, by_rows_bytes))
    problem = Problem(
        ranks=2,
        ranks_per_host=2,
        memory_bytes=memory_bytes,
        phases=("lookup", "output"),
        tables=("big", "second", "third"),
        base_ms=base_ms,
        options=(whole, (_option("table_wise", 2.0, 0.1, 20),), (_option("table_wise", 1.0, 0.1, 20),)),
    )
    model = _Model(problem)
    shapes = tuple(TableShape(sharding_type="table_wise", columns=16, places=(rank,)) for rank in places)
    rating = Rating(load=model.load(shapes), bound_ms=1.0)
    proposal = Proposal(planner="x", shapes=shapes, ratings={"dlrm_scale": rating})
    return describe_bottleneck(explain(proposal, model), 2, optimal=None)


def test_the_slowest_rank_its_phase_and_its_tables_are_named() -> None:
    lines = _explained(200, (1, 1, 0)).splitlines()
    assert lines[0] == ("lookup takes longest: 8.000 ms on rank 1, 93% of the step; the mean of all ranks is 4.500 ms")
    assert lines[1] == "there: big (table_wise) 6.000 ms, second (table_wise) 2.000 ms"


def test_the_best_change_of_one_table_is_the_relief() -> None:
    # big by rows: 3.5 ms on both ranks, and the longest of 3.5 + 2 and 3.5 + 1; outputs 0.7. Moving second: 6.0 + 0.6.
    assert "it would help to make big row_wise (16 columns a shard): 6.200 ms a step" in _explained(200, (1, 1, 0))


def test_a_relief_that_lacks_memory_says_how_much() -> None:
    # By rows big takes 70 on every rank, beside the other two: 90 of 80. Moving second to rank 0 fits, and helps less.
    lines = _explained(80, (1, 1, 0), by_rows_bytes=70).splitlines()
    assert lines[3:] == [
        "it would help to make second table_wise (16 columns a shard): 6.500 ms a step",
        "with 10 B more on a rank it would help to make big row_wise (16 columns a shard): 6.200 ms a step",
    ]


def test_a_plan_that_no_single_change_helps_says_so() -> None:
    lines = _explained(80, (1, 0, 0)).splitlines()
    assert lines[2] == "the step: lookup 6.000 + output 0.500 ms"
    assert lines[3:] == ["no other way to shard one of these tables alone helps and fits"]


def test_a_dense_part_that_takes_longest_is_told_apart_from_what_a_plan_changes() -> None:
    assert _explained(200, (1, 1, 0), base_ms=91.4).splitlines()[0] == (
        "lookup takes longest, after the dense part's 91.400 ms, which no plan changes: 8.000 ms on rank 1, 8% of the "
        "step; the mean of all ranks is 4.500 ms"
    )
