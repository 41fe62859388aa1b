import itertools

from hypothesis import given, settings

from dlrm_scale.planning.solver.rate import rate
from tests.support.placement_problems import every_plan, naive_loads, placement_problems


@settings(max_examples=60, deadline=None)
@given(problem=placement_problems())
def test_a_rating_is_what_loops_over_shards_give(problem):
    for plan in itertools.islice(every_plan(problem), 0, 400, 40):
        step, memory = naive_loads(problem, plan)
        rating = rate(problem, plan)
        assert abs(rating.step_ms - step) < 1e-9
        assert rating.memory_bytes.tolist() == memory
        assert rating.load_ms.shape == (len(problem.phases), problem.ranks)
