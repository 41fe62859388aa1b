"""Both training pipelines, and evaluation in the middle of them (B07, B35)."""

from collections.abc import Iterator
from itertools import islice

import pytest
import torch
import torch.distributed as dist

from dlrm_scale.batch import Batch
from dlrm_scale.sharding.pipeline import make_eval_pipeline, make_train_pipeline
from dlrm_scale.sharding.ranks import init_ranks
from dlrm_scale.sharding.sharder import ALL_SHARDING_TYPES
from dlrm_scale.touched_rows import TouchedRows
from tests.sharding.sharded_runs import TABLES, Run, build, make_config, rank_batches, tables_for, train_runs
from tests.support.random_batches import GlobalBatch, random_batches
from tests.support.rank_runner import run_ranks
from tests.support.reference import reference_logits, train_reference

KINDS = ("plain", "sparse_dist")
TRAIN = random_batches(TABLES, [16, 15, 16, 7, 16, 16, 3, 16], most_ids_per_bag=2)
HELD_OUT = random_batches(TABLES, [12, 12, 5, 12], seed=1, most_ids_per_bag=2)


def _row_marks(batch: Batch) -> list[float]:
    """The first dense feature of each true row tells rows apart."""
    return batch.dense_features[: batch.rows_local, 0].tolist()


def _train_and_evaluate(
    kind: str, training: str, evaluation: str | None, every: int, limit: int | None
) -> dict[str, object]:
    """Two epochs from one iterator; after each `every` steps score up to `limit` held-out batches, then stop."""
    ranks = init_ranks("cpu", 60)
    tables = tables_for(kind)
    sharded = build(make_config(kind), tables, ranks)
    touched = TouchedRows([s.region.rows for s in sharded.local_shards])
    sharded.track(touched)
    touched.enabled = True
    pipeline = make_train_pipeline(sharded, training)
    scorer = make_eval_pipeline(sharded, evaluation) if evaluation else None
    source = rank_batches([*TRAIN, *TRAIN], tables, ranks)
    losses, rows, scores = [], [], []
    step = 0
    while True:
        try:
            batch, row_loss_sum, _ = pipeline.progress(source)
        except StopIteration:
            break
        step += 1
        losses.append(row_loss_sum.item())
        rows.append(_row_marks(batch))
        if scorer is not None and step % every == 0:
            run = scorer.run(rank_batches(HELD_OUT, tables, ranks))
            scores.append([logits[: b.rows_local].tolist() for b, _, logits in islice(run, limit)])
            assert torch.is_grad_enabled()
            assert sharded.module.training
            assert touched.enabled
    return {
        "losses": losses,
        "rows": rows,
        "scores": scores,
        "steps": sharded.table_iterations(),
        "kernel_steps": {int(k.module.emb_module.iter.item()) for k in sharded.kernels if k.fused},
        "weights": [s.weight.clone() for s in sharded.local_shards],
        "dense": {name: value.clone() for name, value in sharded.dense_state().items()},
        "touched": [touched.current(i).clone() for i in range(len(sharded.local_shards))],
    }


def _sweep_evaluations(kind: str) -> list[dict[str, object]]:
    results = []
    for training in KINDS:
        results.append(_train_and_evaluate(kind, training, None, 1, None))
        for evaluation in KINDS:
            results.append(_train_and_evaluate(kind, training, evaluation, 3, None))
            results.append(_train_and_evaluate(kind, training, evaluation, 2, 2))  # abandoned after two of four
    return results


def _equal(one: object, other: object) -> bool:
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(_equal(one[k], other[k]) for k in one)
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(_equal(a, b) for a, b in zip(one, other, strict=True))
    return one == other


@pytest.mark.parametrize("kind", ["table_wise", "row_wise", "column_wise", "data_parallel"])
def test_evaluation_in_the_middle_changes_nothing_of_training(kind: str) -> None:
    for rank in run_ranks(2, _sweep_evaluations, kind):
        straight = rank[0]
        assert len(straight["losses"]) == 2 * len(TRAIN)
        assert straight["steps"] == 2 * len(TRAIN)
        assert straight["kernel_steps"] <= {2 * len(TRAIN)}
        for other in rank[1:]:
            for key in straight.keys() - {"scores"}:
                assert _equal(straight[key], other[key]), f"{kind}: evaluation or pipeline changed {key}"
        whole, part = rank[1], rank[2]
        assert [len(s) for s in whole["scores"]] == [len(HELD_OUT)] * 5
        assert [len(s) for s in part["scores"]] == [2] * 8
        evaluated = [r for r in rank if r["scores"]]
        for other in evaluated[2:]:  # the other pipelines score alike, bit for bit
            assert other["scores"] in (whole["scores"], part["scores"])


def _scores_after_training(evaluation: str, steps: int) -> list[torch.Tensor]:
    ranks = init_ranks("cpu", 60)
    sharded = build(make_config("row_wise"), TABLES, ranks)
    source = rank_batches(TRAIN, TABLES, ranks)
    pipeline = make_train_pipeline(sharded, "sparse_dist")
    for _ in range(steps):
        pipeline.progress(source)
    run = make_eval_pipeline(sharded, evaluation).run(rank_batches(HELD_OUT, TABLES, ranks))
    return [logits[: batch.rows_local] for batch, _, logits in run]


def _scores_of_both(steps: int) -> list[list[torch.Tensor]]:
    return [_scores_after_training(evaluation, steps) for evaluation in KINDS]


def test_evaluation_scores_its_own_batches_and_not_those_in_flight() -> None:
    by_rank = run_ranks(2, _scores_of_both, 3)
    config = make_config("row_wise")
    trained = train_reference(config, TABLES, TRAIN[:3])
    for kind in range(len(KINDS)):
        for index, batch in enumerate(HELD_OUT):
            expected = reference_logits(config.model, TABLES, trained.tables, trained.dense, batch)
            got = torch.cat([rank[kind][index] for rank in by_rank])
            torch.testing.assert_close(got, expected.detach(), atol=1e-5, rtol=0)


def _count_steps(numbers: list[int]) -> list[tuple[int, list[list[float]], int]]:
    """For each number of batches: steps until StopIteration, rows of each step, and of a second epoch."""
    ranks = init_ranks("cpu", 60)
    results = []
    for training in KINDS:
        sharded = build(make_config(), TABLES, ranks)
        pipeline = make_train_pipeline(sharded, training)
        for number in numbers:
            rows = list(_until_exhausted(pipeline, rank_batches(TRAIN[:number], TABLES, ranks)))
            again = list(_until_exhausted(pipeline, rank_batches(TRAIN[:number], TABLES, ranks)))
            results.append((number, rows, len(again)))
    return results


def _until_exhausted(pipeline, batches: Iterator[Batch]) -> Iterator[list[float]]:
    while True:
        try:
            yield _row_marks(pipeline.progress(batches)[0])
        except StopIteration:
            return


def test_every_batch_is_applied_in_order_before_the_pipeline_stops_and_a_new_iterator_goes_on() -> None:
    (results,) = run_ranks(1, _count_steps, [0, 1, 2, 3, len(TRAIN)])
    assert len(results) == 2 * 5
    for number, rows, again in results:
        assert rows == [batch.dense_features[:, 0].tolist() for batch in TRAIN[:number]]
        assert again == number


class _ReaderError(RuntimeError):
    pass


def _failing(batches: Iterator[Batch], good: int) -> Iterator[Batch]:
    yield from islice(batches, good)
    raise _ReaderError(f"bad record after {good} batches")


def _steps_before_error(good: int) -> list[str]:
    ranks = init_ranks("cpu", 60)
    messages = []
    for training in KINDS:
        pipeline = make_train_pipeline(build(make_config(), TABLES, ranks), training)
        source = _failing(rank_batches(TRAIN, TABLES, ranks), good)
        try:
            for _ in range(good + 1):
                pipeline.progress(source)
        except _ReaderError as error:
            messages.append(str(error))
    return messages


def test_an_error_of_the_iterator_reaches_the_caller() -> None:
    for good in (0, 1, 4):
        assert run_ranks(2, _steps_before_error, good) == [[f"bad record after {good} batches"] * 2] * 2


def test_learning_rates_take_effect_on_the_next_step_in_every_optimizer() -> None:
    multipliers = (1.0, 0.5, 0.0, 2.0, 0.25, 0.0, 1.0, 1.5)
    runs = [
        Run(config=make_config(kind, optimizer), pipeline=pipeline, multipliers=multipliers)
        for kind in ("table_wise", "data_parallel")
        for optimizer in ("sgd", "rowwise_adagrad")
        for pipeline in KINDS
    ]
    by_rank = run_ranks(2, train_runs, runs, TRAIN)
    for index, run in enumerate(runs):
        expected = train_reference(run.config, TABLES, TRAIN, multipliers=multipliers)
        assert by_rank[0][index].losses == pytest.approx(expected.losses, abs=1e-5)
    constant = train_reference(runs[0].config, TABLES, TRAIN)
    assert by_rank[0][0].losses[3:] != pytest.approx(constant.losses[3:], abs=1e-3)  # the test can fail


def _pipelined_collections() -> tuple[bool, bool]:
    ranks = init_ranks("cpu", 60)
    sharded = build(make_config("auto"), TABLES, ranks)
    pipeline = make_train_pipeline(sharded, "sparse_dist")
    source = rank_batches(TRAIN, TABLES, ranks)
    pipeline.progress(source)
    before = _overridden(sharded.module)
    next(make_eval_pipeline(sharded, "plain").run(rank_batches(HELD_OUT, TABLES, ranks)))
    dist.barrier(group=ranks.control_group)
    return before, _overridden(sharded.module)


def _overridden(module: torch.nn.Module) -> bool:
    return any("forward" in m.__dict__ for m in module.modules())


def test_the_tables_are_really_pipelined_and_stay_so_after_an_evaluation() -> None:
    assert run_ranks(1, _pipelined_collections) == [(True, True)]


def _all_types_evaluate() -> None:
    ranks = init_ranks("cpu", 60)
    for kind in ALL_SHARDING_TYPES:
        tables = tables_for(kind)
        sharded = build(make_config(kind), tables, ranks)
        scores = []
        for evaluation in KINDS:
            run = make_eval_pipeline(sharded, evaluation).run(rank_batches(HELD_OUT, tables, ranks))
            scores.append([logits for _, _, logits in run])
        assert _equal(scores[0], scores[1]), kind


def test_evaluation_before_the_first_step_works_for_every_sharding_type() -> None:
    run_ranks(2, _all_types_evaluate)


def test_batches_have_rows_of_their_own() -> None:
    # `_row_marks` tells rows apart only if no two are equal.
    marks = [m for batch in (*TRAIN, *HELD_OUT) for m in _marks(batch)]
    assert len(set(marks)) == len(marks)


def _marks(batch: GlobalBatch) -> list[float]:
    return batch.dense_features[:, 0].tolist()
