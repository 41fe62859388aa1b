"""Hooks that split a step leave nothing behind."""

import gc
import weakref

import pytest

from dlrm_scale.sharding.pipeline import make_train_pipeline
from dlrm_scale.sharding.ranks import init_ranks
from dlrm_scale.sharding.step_phases import mark_phases
from dlrm_scale.sharding.table_kernels import sharded_collections
from dlrm_scale.telemetry import StepClock
from tests.sharding.sharded_runs import TABLES, build, make_config, rank_batches
from tests.support.random_batches import random_batches
from tests.support.rank_runner import run_ranks

STEPS = 5


def _outputs_left(kind: str) -> tuple[int, int]:
    """How many lookups there were after the first, and how many of their outputs are still there."""
    ranks = init_ranks("cpu", 60)
    sharded = build(make_config("row_wise"), TABLES, ranks)
    clock = StepClock()
    mark_phases(sharded, clock)
    outputs: list[weakref.ref[object]] = []
    for collection in sharded_collections(sharded.module.module).values():
        collection.register_forward_hook(lambda _, __, output: outputs.append(weakref.ref(output)))
    pipeline = make_train_pipeline(sharded, kind, clock)
    source = rank_batches(random_batches(TABLES, [16] * (STEPS + 1)), TABLES, ranks)
    pipeline.progress(source)
    outputs.clear()
    gc.collect()
    gc.disable()
    try:
        for _ in range(STEPS):
            pipeline.progress(source)
        assert clock.seconds["output_all_to_all"] > 0
        return len(outputs), sum(output() is not None for output in outputs)
    finally:
        gc.enable()


@pytest.mark.parametrize("kind", ["plain", "sparse_dist"])
def test_pooled_vectors_are_freed_with_their_step_and_not_by_the_collector(kind: str) -> None:
    assert run_ranks(2, _outputs_left, kind) == [(STEPS, 0)] * 2
