"""Small models run under their plans, and take the memory that is predicted."""

import pytest

from dlrm_scale.planning.costs.step_model import predict
from dlrm_scale.planning.measuring.probe_models import probe_models
from dlrm_scale.planning.measuring.probe_steps import ModelSteps
from dlrm_scale.sharding.ranks import init_ranks
from tests.planning.costs.small_cluster import small_cluster
from tests.support.rank_runner import run_ranks


def _memory(first: int, last: int) -> list[tuple[int, int, int, int]]:
    """Predicted and actual bytes of weights, and of optimizer state, of this rank, by model."""
    ranks = init_ranks("cpu", 60)
    found = []
    for probe in probe_models(last, ranks=ranks.ranks, ranks_per_host=ranks.local_ranks)[first:]:
        steps = ModelSteps(probe, ranks)
        for _ in range(2):
            steps.run()
        predicted = predict(
            probe.tables,
            small_cluster(),
            probe.plan,
            ranks=ranks.ranks,
            ranks_per_host=ranks.local_ranks,
            batch_size_per_rank=probe.batch_size_per_rank,
        )
        parts = dict(zip(predicted.memory_parts, predicted.memory_bytes[:, ranks.rank].tolist(), strict=True))
        shards = steps.sharded.local_shards
        found.append(
            (
                parts["weights"] + parts["replicas"],
                sum(shard.weight.nbytes for shard in shards),
                parts["optimizer_state"],
                sum(state.nbytes for shard in shards for state in shard.state.values()),
            )
        )
    return found


def test_models_of_every_kind_of_plan_take_the_static_memory_that_is_predicted() -> None:
    by_rank = run_ranks(2, _memory, 0, 8)
    assert [len(found) for found in by_rank] == [8, 8]
    for found in by_rank:
        for weights, actual_weights, state, actual_state in found:
            assert weights == actual_weights
            assert state == actual_state
    assert by_rank[0] != by_rank[1], "some plans use one rank alone"


@pytest.mark.slow
def test_plans_over_two_hosts_of_two_ranks_run_too() -> None:
    by_rank = run_ranks(4, _memory, 8, 16, ranks_per_host=2)
    for found in by_rank:
        assert all(weights == actual and state == held for weights, actual, state, held in found)
