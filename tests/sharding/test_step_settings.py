"""Micro-batches, gradient clipping and quantized exchanges on ranks."""

import logging
from functools import cache

import pytest
import torch

from dlrm_scale.config import Config
from dlrm_scale.errors import ConfigError
from dlrm_scale.sharding.exchange_precision import exchange_codecs
from dlrm_scale.sharding.pipeline import make_train_pipeline
from dlrm_scale.sharding.ranks import init_ranks
from dlrm_scale.sharding.rules import allowed_types, check_sharding
from tests.sharding.sharded_runs import (
    TABLES,
    Left,
    Run,
    build,
    make_config,
    rank_batches,
    train_runs,
    whole_state,
    whole_tables,
)
from tests.support.random_batches import GlobalBatch, random_batches
from tests.support.rank_runner import run_ranks

BOTH = ("plain", "sparse_dist")


@cache
def _batches() -> list[GlobalBatch]:
    # the fourth has padding on one rank, the fifth on both but one row
    return random_batches(TABLES, (32, 31, 32, 5, 1, 32, 29, 32), most_ids_per_bag=3)


def _train(configs: list[Config], pipelines: tuple[str, ...] = ("plain",), ranks: int = 2) -> list[list[Left]]:
    """Train each config under each pipeline; the result holds the ranks of each run."""
    runs = [Run(config=config, pipeline=pipeline) for config in configs for pipeline in pipelines]
    return [list(left) for left in zip(*run_ranks(ranks, train_runs, runs, _batches()), strict=True)]


def _assert_close(ours: list[Left], theirs: list[Left], tolerance: float) -> None:
    assert ours[0].losses == pytest.approx(theirs[0].losses, abs=tolerance)
    one, other = whole_tables(ours, TABLES), whole_tables(theirs, TABLES)
    for name in one:
        torch.testing.assert_close(one[name], other[name], atol=tolerance, rtol=0, msg=name)
    one_state, other_state = whole_state(ours, TABLES), whole_state(theirs, TABLES)
    for name, by_columns in one_state.items():
        for columns, state in by_columns.items():
            torch.testing.assert_close(state, other_state[name][columns], atol=tolerance, rtol=1e-5, msg=name)
    for name, parameter in ours[0].dense.items():
        torch.testing.assert_close(parameter, theirs[0].dense[name], atol=tolerance, rtol=0, msg=name)


@pytest.mark.parametrize("kind", ["table_wise", "row_wise", "data_parallel"])
@pytest.mark.parametrize("optimizer", ["sgd", "rowwise_adagrad"])
def test_micro_batches_train_like_the_large_batch(kind: str, optimizer: str) -> None:
    whole, parts = (make_config(kind, optimizer, train={"micro_batches": n}) for n in (1, 3))
    runs = _train([whole, parts], BOTH)
    _assert_close(runs[2], runs[0], 1e-6)
    for plain, overlapped in ((runs[0], runs[1]), (runs[2], runs[3])):
        assert overlapped[0].losses == plain[0].losses
        assert all(torch.equal(v, overlapped[0].dense[name]) for name, v in plain[0].dense.items())
    for left in runs:  # replicas stay equal
        assert all(torch.equal(v, left[1].dense[name]) for name, v in left[0].dense.items())


def test_bf16_trains_alike_under_both_pipelines_and_near_fp32() -> None:
    exact, rounded, overlapped = (
        _train([make_config(train={"precision": precision})], (pipeline,))[0]
        for precision, pipeline in (("fp32", "plain"), ("bf16", "plain"), ("bf16", "sparse_dist"))
    )
    assert overlapped[0].losses == rounded[0].losses
    assert rounded[0].losses != exact[0].losses
    assert rounded[0].losses == pytest.approx(exact[0].losses, abs=0.02)
    for left in (rounded, overlapped):
        assert all(p.dtype == torch.float32 for p in left[0].dense.values())
        assert all(weight.dtype == torch.float32 for _, weight, _ in left[0].shards)


def _clipped_step(norm: float) -> tuple[float, dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """One step: the norm that was found, and how far dense parameters and tables moved."""
    ranks = init_ranks("cpu", 60)
    sharded = build(make_config(optimizer="sgd", train={"gradient_clip_norm": norm}), TABLES, ranks)
    before = {name: p.detach().clone() for name, p in sharded.dense_parameters.items()}
    rows = {s.region.table: s.weight.clone() for s in sharded.local_shards}
    make_train_pipeline(sharded, "plain").progress(rank_batches(_batches()[:1], TABLES, ranks))
    found = sharded.gradient_norm
    return (
        found.item() if found is not None else -1.0,
        {name: before[name] - p.detach() for name, p in sharded.dense_parameters.items()},
        {s.region.table: rows[s.region.table] - s.weight for s in sharded.local_shards},
    )


def test_clipping_scales_the_averaged_dense_gradients_to_the_norm_on_all_ranks_and_no_table() -> None:
    free = run_ranks(2, _clipped_step, 0.0)
    norm = torch.cat([moved.flatten() for moved in free[0][1].values()]).norm().item() / 0.1  # the learning rate
    limit = norm / 3
    loose, tight = run_ranks(2, _clipped_step, 2 * norm), run_ranks(2, _clipped_step, limit)
    assert free[0][0] == -1.0
    for rank in range(2):
        assert loose[rank][0] == pytest.approx(norm, rel=1e-4)
        assert tight[rank][0] == loose[0][0]
        for name, moved in free[rank][1].items():
            assert torch.equal(loose[rank][1][name], moved)
            torch.testing.assert_close(tight[rank][1][name], moved / 3, rtol=1e-3, atol=1e-6)
            assert torch.equal(tight[rank][1][name], tight[0][1][name])
        for name, moved in free[rank][2].items():
            assert torch.equal(tight[rank][2][name], moved)


# Adagrad's first steps have full size, whatever the gradient; among 4 columns rounding can turn one.
@pytest.mark.parametrize(
    ("optimizer", "kinds", "tolerance"),
    [("sgd", ("table_wise", "row_wise", "column_wise"), 5e-4), ("rowwise_adagrad", ("table_wise", "row_wise"), 2e-3)],
)
def test_exchanges_in_fp16_train_near_those_in_fp32(optimizer: str, kinds: tuple[str, ...], tolerance: float) -> None:
    configs = [
        make_config(kind, optimizer, sharding={"all_to_all_precision": precision})
        for kind in kinds
        for precision in ("fp32", "fp16")
    ]
    runs = _train(configs)
    for index, kind in enumerate(kinds):
        exact, halved = runs[2 * index : 2 * index + 2]
        assert halved[0].losses != exact[0].losses, f"{kind}: nothing was rounded"
        _assert_close(halved, exact, tolerance)


def test_small_gradients_keep_their_digits_in_fp16() -> None:
    gradients = torch.logspace(-10, -3, 50)  # those of a mean over 16,384 rows
    codecs = exchange_codecs("fp16", 16384, torch.device("cpu"))
    assert codecs is not None
    for codec in codecs.values():
        sent = codec.backward.encode(gradients)
        assert sent.dtype == torch.float16
        torch.testing.assert_close(codec.backward.decode(sent)[15:], gradients[15:], rtol=1e-3, atol=0)
        lost = codec.forward.decode(codec.forward.encode(gradients))
        assert not lost[:15].any()  # unscaled, they would vanish


def _refused_without_a_log() -> str:
    ranks = init_ranks("cpu", 60)
    logged: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: logged.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger().addHandler(handler)
    try:
        with pytest.raises(ConfigError) as error:
            build(make_config("row_wise", sharding={"all_to_all_precision": "bf16"}), TABLES, ranks)
    finally:
        logging.getLogger().removeHandler(handler)
    assert logged == []
    return error.value.message


def test_bf16_exchanges_on_cpu_are_refused_before_torchrec_logs_that_it_falls_back() -> None:
    assert all("not on CPU" in message for message in run_ranks(2, _refused_without_a_log))


def test_an_exchange_precision_that_would_become_another_or_do_nothing_is_refused() -> None:
    bf16 = make_config("row_wise", sharding={"all_to_all_precision": "bf16"})
    with pytest.raises(ConfigError, match=r"sharding\.all_to_all_precision = \"bf16\": not on CPU.*fp16 instead"):
        allowed_types(TABLES, bf16, "cpu", ranks=2)
    with pytest.raises(ConfigError, match="not on CPU"):
        check_sharding(bf16.model_copy(update={"train": bf16.train.model_copy(update={"device": "cpu"})}))
    assert allowed_types(TABLES, bf16, "cuda", ranks=2)["C1"] == ("row_wise",)
    replicated = make_config("data_parallel", sharding={"all_to_all_precision": "fp16"})
    with pytest.raises(ConfigError, match="would do nothing: with data_parallel alone"):
        allowed_types(TABLES, replicated, "cpu", ranks=2)
    mixed = make_config("data_parallel", sharding={"all_to_all_precision": "fp16", "tables": {"C1": "row_wise"}})
    assert allowed_types(TABLES, mixed, "cpu", ranks=2)["C1"] == ("row_wise",)
