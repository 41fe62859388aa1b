import pickle

import pytest

from dlrm_scale.planning.solver.infeasible import NoFeasiblePlan
from dlrm_scale.planning.solver.problem import Option, Problem
from dlrm_scale.planning.solver.solve import solve


def _whole(size: int, kind: str = "table_wise") -> Option:
    return Option(
        sharding_type=kind, kernel="fused", placement="ranks", shards=1, columns=8, costs_ms=(1.0,), memory_bytes=size
    )


def _problem(*sizes: int, memory_bytes: int, ranks: int = 2) -> Problem:
    return Problem(
        ranks=ranks,
        ranks_per_host=ranks,
        memory_bytes=memory_bytes,
        phases=("step",),
        tables=tuple(f"t{i}" for i in range(len(sizes))),
        options=tuple((_whole(size),) for size in sizes),
    )


@pytest.mark.parametrize(
    ("sizes", "cause", "word"),
    [
        ((60, 60, 60), "fragmentation", "could not be shared out"),
        ((90, 90, 90), "total", "all tables together"),
        ((5, 120), "single_shard", "the smallest shard of table t1"),
    ],
)
def test_what_binds_is_told_apart(sizes, cause, word):
    with pytest.raises(NoFeasiblePlan) as error:
        solve(_problem(*sizes, memory_bytes=100))
    short = error.value.shortfall
    assert short.cause == cause
    assert short.proven
    assert short.needed_bytes == sum(sizes)
    assert short.available_bytes == 200
    assert short.needed_per_rank_bytes == -(-sum(sizes) // 2)
    assert short.available_per_rank_bytes == 100
    assert short.largest[0].shard_bytes == max(sizes)
    assert word.replace("could not", "cannot") in error.value.message
    assert error.value.exit_code == 3


def test_the_numbers_cross_a_process():
    with pytest.raises(NoFeasiblePlan) as error:
        solve(_problem(90, 90, 90, memory_bytes=100))
    again = pickle.loads(pickle.dumps(error.value))
    assert again.shortfall == error.value.shortfall
    assert str(again) == str(error.value)


def test_a_plan_that_only_one_arrangement_fits_is_found():
    problem = _problem(50, 50, 40, 30, 30, memory_bytes=100)
    assert solve(problem).optimal
