"""How a host's memory for snapshots is shared among its ranks."""

from dataclasses import replace

import pytest

from dlrm_scale.checkpoint.saving.snapshot import choose_rows, staging_bytes
from dlrm_scale.config import CheckpointConfig, Config, DataConfig, SparseOptimizerConfig
from dlrm_scale.errors import ConfigError
from dlrm_scale.train.memory.staging_plan import (
    StagingNeed,
    StagingPlan,
    describe_staging,
    plan_staging,
    staging_memory_bytes,
)
from dlrm_scale.units import GIB, MIB
from tests.checkpoint.simulated_run import SHARDING_TYPES, TABLES, make_layout, make_truth, shards_of

NEED = StagingNeed(whole_bytes=4 * GIB, delta_bytes=GIB, ids_bytes=MIB, free_bytes=100 * GIB, other_bytes=GIB)


def _sizes(needs: list[StagingNeed], local_ranks: int, setting_bytes: int | None = None) -> list[int]:
    return [plan.size_bytes for plan in plan_staging(needs, local_ranks, setting_bytes)]


def test_where_there_is_room_every_rank_gets_what_all_its_rows_take() -> None:
    needs = [NEED, replace(NEED, whole_bytes=6 * GIB), replace(NEED, whole_bytes=0, delta_bytes=0)]
    assert _sizes(needs, 3) == [4 * GIB, 6 * GIB, 0]
    assert not any(plan.is_short for plan in plan_staging(needs, 3, None))


def test_half_of_what_is_left_is_shared_in_proportion_by_the_ranks_of_a_host() -> None:
    # 11 GiB free, 2 * (1 GiB + 1 MiB) for the rest, half of 9 GiB: 4.5 of the 8 GiB wanted, each rank 2.25 of 4
    needs = [replace(NEED, free_bytes=11 * GIB + 2 * MIB, delta_bytes=3 * GIB)] * 2
    assert _sizes(needs * 2, 2) == [int(2.25 * GIB)] * 4
    other_host = [NEED] * 2
    assert _sizes(needs + other_host, 2) == [int(2.25 * GIB)] * 2 + [4 * GIB] * 2


def test_without_room_for_a_baseline_no_more_is_taken_than_a_delta_needs() -> None:
    needs = [replace(NEED, free_bytes=11 * GIB)] * 2
    assert _sizes(needs, 2) == [GIB] * 2
    assert all(plan.is_short for plan in plan_staging(needs, 2, None))


def test_a_host_that_is_full_leaves_nothing() -> None:
    assert _sizes([replace(NEED, free_bytes=MIB)], 1) == [0]


def test_a_size_that_was_set_holds_for_each_rank() -> None:
    assert _sizes([NEED, replace(NEED, whole_bytes=2 * GIB)], 2, 3 * GIB) == [GIB, 2 * GIB]
    assert _sizes([NEED], 1, 0) == [0]


@pytest.mark.parametrize("kind", SHARDING_TYPES)
@pytest.mark.parametrize(
    ("optimizer", "states"), [("sgd", []), ("rowwise_adagrad", ["row"]), ("adam", ["element", "element"])]
)
def test_a_planned_rank_has_room_for_all_its_rows(kind: str, optimizer: str, states: list[str]) -> None:
    layout, truth = make_layout(kind, 3), make_truth(TABLES, states)
    if optimizer == "adam":
        for state in truth.state.values():
            state["moment1"] = state["moment2"].clone()
    config = Config(sparse_optimizer=SparseOptimizerConfig(kind=optimizer))  # type: ignore[arg-type]
    for rank in range(3):
        need = StagingNeed.of_rank(config, layout, rank, [1.0] * 4, free_bytes=GIB, other_bytes=0)
        actual = staging_bytes(choose_rows(layout, shards_of(layout, truth, rank), None, rank))
        assert actual <= need.whole_bytes <= actual + 4 * 3 * 2 * 64


def test_a_delta_is_bounded_by_the_rows_that_its_steps_can_touch_where_these_are_known() -> None:
    layout = make_layout("table_wise", 1)

    def delta_rows(pooling: float = 1.0, **checkpoint: object) -> int:
        config = Config(data=DataConfig(batch_size=2), checkpoint=CheckpointConfig(**checkpoint))  # type: ignore[arg-type]
        need = StagingNeed.of_rank(config, layout, 0, [pooling] * 4, free_bytes=GIB, other_bytes=0)
        return need.ids_bytes // 4

    everything = 97 + 3 + 40 + 1
    assert delta_rows(every_steps=10) == 20 + 3 + 20 + 1
    assert delta_rows(2.0, every_steps=10) == 40 + 3 + 40 + 1
    for unbounded in ({"policy": "one_shot"}, {"interval": "auto"}, {"interval": "seconds"}):
        assert delta_rows(every_steps=10, **unbounded) == everything


def test_a_shortage_is_described_by_the_rank_that_lacks_most() -> None:
    plans = [
        StagingPlan(size_bytes=GIB, whole_bytes=2 * GIB, ids_bytes=0),
        StagingPlan(size_bytes=GIB, whole_bytes=4 * GIB, ids_bytes=0),
    ]
    text = describe_staging(plans, "auto")
    assert "rank 1 holds 4.0 GiB of rows, more than fit into 1.0 GiB, its share of half" in text
    assert "so it is on 2 of 2 ranks" in text
    assert "rank 1 holds 4.0 GiB of rows, more than fit into checkpoint.staging_memory = 1GiB:" in describe_staging(
        plans, "1GiB"
    )
    enough = [replace(plan, size_bytes=4 * GIB) for plan in plans]
    assert describe_staging(enough, "auto") == "checkpoints are copied to at most 4.0 GiB of host memory a rank"


def test_the_setting_is_auto_or_a_size() -> None:
    assert staging_memory_bytes(CheckpointConfig()) is None
    assert staging_memory_bytes(CheckpointConfig(staging_memory="3GiB")) == 3 * GIB
    with pytest.raises(ConfigError, match="auto takes what the host has left"):
        staging_memory_bytes(CheckpointConfig(staging_memory="some"))
