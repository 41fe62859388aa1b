"""What a sharded model offers: live shards, dense state, one optimizer a parameter, bounded memory."""

import resource
import warnings

import pytest
import torch

from dlrm_scale.errors import CheckpointError
from dlrm_scale.models.build import build_model
from dlrm_scale.schema import TableSpec
from dlrm_scale.sharding.pipeline import make_eval_pipeline, make_train_pipeline
from dlrm_scale.sharding.ranks import Ranks, close_ranks, init_ranks
from dlrm_scale.sharding.shard import ShardedModel, shard_model
from dlrm_scale.sharding.sharder import ALL_SHARDING_TYPES
from tests.sharding.sharded_runs import TABLES, build, make_config, rank_batches, tables_for
from tests.support.random_batches import random_batches
from tests.support.rank_runner import run_ranks

BATCHES = random_batches(TABLES, [16, 16, 9, 16, 16, 16, 2, 16])
MIXED = {"C1": "row_wise", "C3": "data_parallel", "C4": "column_wise"}


def _steps(sharded: ShardedModel, first: int, last: int) -> list[float]:
    pipeline = make_train_pipeline(sharded, "plain")
    source = rank_batches(BATCHES[first:last], [t.spec for t in sharded.layout.tables], sharded.ranks)
    return [pipeline.progress(source)[1].item() for _ in range(first, last)]


# -- resuming --------------------------------------------------------------------------------------------------------


def _resumes(dense: str, ranks: Ranks) -> None:
    """Half of the steps, everything copied into a fresh model, the other half: equal to all steps at once."""
    config = make_config(dense_optimizer={"kind": dense}, sharding={"tables": MIXED})
    straight = build(config, TABLES, ranks)
    losses = _steps(straight, 0, 8)
    first = build(config, TABLES, ranks)
    before = _steps(first, 0, 4)
    second = shard_model(build_model(config.model, TABLES), TABLES, config, ranks)  # rows not filled
    for source, target in zip(first.local_shards, second.local_shards, strict=True):
        target.weight.copy_(source.weight)
        assert source.state.keys() == target.state.keys()
        for name, value in source.state.items():
            target.state[name].copy_(value)
    second.load_dense_state({name: value.clone() for name, value in first.dense_state().items()})
    second.set_table_iterations(first.table_iterations())
    assert before + _steps(second, 4, 8) == losses, dense
    assert second.table_iterations() == 8
    for one, other in zip(straight.local_shards, second.local_shards, strict=True):
        assert torch.equal(one.weight, other.weight)
        assert all(torch.equal(one.state[k], other.state[k]) for k in one.state)
    ours, theirs = straight.dense_state(), second.dense_state()
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)


def _resumes_with_every_dense_optimizer() -> None:
    ranks = init_ranks("cpu", 60)
    for dense in ("sgd", "adagrad", "adam"):
        _resumes(dense, ranks)


def test_a_run_continued_in_a_fresh_model_before_its_first_step_is_bit_equal() -> None:
    run_ranks(2, _resumes_with_every_dense_optimizer)


# -- dense state -----------------------------------------------------------------------------------------------------


def _dense_states() -> dict[str, dict[str, torch.Tensor]]:
    ranks = init_ranks("cpu", 60)
    return {
        kind: dict(build(make_config(dense_optimizer={"kind": kind}), TABLES, ranks).dense_state())
        for kind in ("sgd", "adagrad", "adam")
    }


def test_dense_state_holds_parameters_and_optimizer_state_before_the_first_step() -> None:
    (states,) = run_ranks(1, _dense_states)
    parameters = {n for n in states["sgd"] if n.startswith("parameter/")}
    assert set(states["sgd"]) == parameters
    assert "parameter/dlrm.over_arch.model.1.bias" in parameters
    assert not any("embedding" in n for n in parameters)
    names = {n.removeprefix("parameter/") for n in parameters}
    for kind, keys in (("adagrad", {"step", "sum"}), ("adam", {"step", "exp_avg", "exp_avg_sq"})):
        assert set(states[kind]) == parameters | {f"optimizer/{n}/{k}" for n in names for k in keys}


def _load_wrong_dense_state() -> str:
    sharded = build(make_config(dense_optimizer={"kind": "adam"}), TABLES, init_ranks("cpu", 60))
    good = {name: value.clone() for name, value in sharded.dense_state().items()}
    bad = {name: value + 1 for name, value in good.items()}
    bad["parameter/extra"] = torch.zeros(1)
    del bad["parameter/dlrm.over_arch.model.1.weight"]
    bad["optimizer/dlrm.over_arch.model.1.bias/exp_avg"] = torch.zeros(2)
    with pytest.raises(CheckpointError) as caught:
        sharded.load_dense_state(bad)
    assert all(torch.equal(value, good[name]) for name, value in sharded.dense_state().items()), "half loaded"
    return caught.value.message


def test_dense_state_that_does_not_fit_is_refused_with_every_name_and_nothing_is_loaded() -> None:
    (message,) = run_ranks(1, _load_wrong_dense_state)
    assert "missing: parameter/dlrm.over_arch.model.1.weight" in message
    assert "unexpected: parameter/extra" in message
    assert (
        "optimizer/dlrm.over_arch.model.1.bias/exp_avg: the checkpoint has float32 [2], the model float32 [1]"
        in message
    )


# -- shards ----------------------------------------------------------------------------------------------------------


def _writing_rows_changes_scores(kind: str, ranks: Ranks) -> None:
    tables = tables_for(kind)
    sharded = build(make_config(kind), tables, ranks)
    batches = random_batches(tables, [8])
    pipeline = make_eval_pipeline(sharded, "plain")

    def scores() -> torch.Tensor:
        return next(pipeline.run(rank_batches(batches, tables, ranks)))[2]

    filled = scores()
    saved = [s.weight.clone() for s in sharded.local_shards]
    for shard in sharded.local_shards:
        shard.weight.zero_()
    assert not torch.equal(scores(), filled), kind
    for shard, weight in zip(sharded.local_shards, saved, strict=True):
        shard.weight.copy_(weight)
    assert torch.equal(scores(), filled), kind


def _shards_of_every_type() -> None:
    ranks = init_ranks("cpu", 60)
    for kind in ALL_SHARDING_TYPES:
        _writing_rows_changes_scores(kind, ranks)
        tables = tables_for(kind)
        config = make_config(kind)
        sharded = shard_model(build_model(config.model, tables), tables, config, ranks)
        assert [s.region for s in sharded.local_shards] == sharded.layout.regions_of_rank(ranks.rank)
        for shard in sharded.local_shards:
            assert shard.weight.shape == (shard.region.rows, shard.region.columns)
            assert not shard.weight.any(), "rows are zero until they are filled"
            assert {k: tuple(v.shape) for k, v in shard.state.items()} == {"momentum1": (shard.region.rows,)}
            assert shard.replicated == (kind == "data_parallel")
        sgd = make_config(kind, "sgd")
        sharded = shard_model(build_model(sgd.model, tables), tables, sgd, ranks)
        assert all(s.state == {} for s in sharded.local_shards)


def test_local_shards_are_live_views_with_their_optimizer_state() -> None:
    run_ranks(2, _shards_of_every_type)


def _random_state_moves() -> bool:
    ranks = init_ranks("cpu", 60)
    before = torch.random.get_rng_state()
    build(make_config(sharding={"tables": MIXED}), TABLES, ranks)
    return not torch.equal(before, torch.random.get_rng_state())


def test_sharding_draws_nothing_from_the_global_generator() -> None:
    assert run_ranks(2, _random_state_moves) == [False, False]


# -- optimizers ------------------------------------------------------------------------------------------------------


def _owners() -> dict[str, str]:
    config = make_config(dense_optimizer={"kind": "adam"}, sharding={"tables": MIXED})
    return build(config, TABLES, init_ranks("cpu", 60)).optimizer_owners()


def test_every_parameter_has_exactly_one_optimizer_in_a_mixed_plan() -> None:
    owners, other = run_ranks(2, _owners)
    assert owners == other
    tables = {n.split(".")[-2]: owner for n, owner in owners.items() if "embedding_bags" in n}
    fused = "fused rowwise_adagrad"
    assert tables == {"C1": fused, "C2": fused, "C3": "data-parallel rowwise_adagrad", "C4": fused, "C5": fused}
    assert {owner for n, owner in owners.items() if "embedding_bags" not in n} == {"dense Adam"}


def _ownerless() -> str:
    sharded = build(make_config(), TABLES, init_ranks("cpu", 60))
    sharded.dense_optimizer.param_groups[0]["params"].pop()
    with pytest.raises(RuntimeError, match="parameters without exactly one optimizer") as caught:
        sharded.optimizer_owners()
    return str(caught.value)


def test_a_parameter_without_an_optimizer_is_found() -> None:
    assert "dlrm.over_arch.model.1.bias" in run_ranks(1, _ownerless)[0]


# -- steps -----------------------------------------------------------------------------------------------------------


def _counted_steps(kind: str, pipeline: str) -> tuple[int, list[int], list[set[int]]]:
    """Counts and the kernels' own counters: after 3 steps, after setting them to 40, and after 2 steps more."""
    ranks = init_ranks("cpu", 60)
    tables = TABLES[:2]
    sharded = build(make_config(kind), tables, ranks)
    steps = make_train_pipeline(sharded, pipeline)
    source = rank_batches(random_batches(tables, [9] * 5), tables, ranks)
    counts, kernels = [], []

    def note() -> None:
        counts.append(sharded.table_iterations())
        counters = [k.module.emb_module for k in sharded.kernels if k.fused]
        kernels.append({int(c.iter.item()) for c in counters} | {int(c.iter_cpu.item()) for c in counters})

    for _ in range(3):
        steps.progress(source)
    note()
    sharded.set_table_iterations(40)
    note()
    for _ in range(2):
        steps.progress(source)
    note()
    return sum(k.fused for k in sharded.kernels), counts, kernels


@pytest.mark.parametrize("pipeline", ["plain", "sparse_dist"])
def test_all_ranks_count_the_same_steps_with_tables_or_without(pipeline: str) -> None:
    with_tables = run_ranks(3, _counted_steps, "table_wise", pipeline)
    assert sorted(fused for fused, _, _ in with_tables) == [0, 1, 1]  # two tables on three ranks
    replicated = run_ranks(3, _counted_steps, "data_parallel", pipeline)
    assert [fused for fused, _, _ in replicated] == [0, 0, 0]
    for fused, counts, kernels in with_tables + replicated:
        assert counts == [3, 40, 42]
        assert kernels == ([{3}, {40}, {42}] if fused else [set(), set(), set()])


# -- limits ----------------------------------------------------------------------------------------------------------

BIG = tuple(TableSpec(name=f"C{i}", rows=262_144, dim=64) for i in range(1, 5))  # 4 x 64 MiB


def _peak_bytes_of_sharding() -> int:
    config = make_config("row_wise", model={"dim": 64, "dense_layers": (64,)})
    ranks = init_ranks("cpu", 60)
    with open("/proc/self/clear_refs", "w") as clear:
        clear.write("5")  # the peak starts from what is resident now
    before = _peak_resident_bytes()
    shard_model(build_model(config.model, BIG), BIG, config, ranks)
    return _peak_resident_bytes() - before


def _peak_resident_bytes() -> int:
    with open("/proc/self/status") as status:
        (line,) = [line for line in status if line.startswith("VmHWM")]
    return 1024 * int(line.split()[1])


def test_only_this_ranks_shards_are_allocated() -> None:
    whole = sum(t.weight_bytes for t in BIG)
    # in fresh processes: what a test before has freed may be kept, and taken again without new pages
    for peak in run_ranks(4, _peak_bytes_of_sharding, fresh=True):
        # the lower bound shows that the measurement works
        assert 0.9 * whole / 4 < peak < whole // 2


def _bad_id() -> str:
    tables = (TableSpec(name="C1", rows=10, dim=16),)
    sharded = build(make_config(), tables, init_ranks("cpu", 60))
    batch = next(rank_batches(random_batches(tables, [4]), tables, sharded.ranks))
    batch.sparse_features.values()[2] = 10
    with pytest.raises(RuntimeError) as caught:
        make_train_pipeline(sharded, "plain").progress(iter([batch]))
    return str(caught.value)


def test_an_id_beyond_its_table_stops_the_step() -> None:
    assert "idx < num_rows" in run_ranks(1, _bad_id)[0]


# -- ranks -----------------------------------------------------------------------------------------------------------


def _ranks() -> tuple[int, int, int, list[object], object, bytes]:
    ranks = init_ranks("cpu", 60)
    if ranks.rank == 0:
        ranks.store.set("vote", "yes")
    vote = ranks.store.get("vote")
    found = (
        ranks.rank,
        ranks.ranks,
        ranks.local_ranks,
        ranks.gather_objects(ranks.rank * 10),
        ranks.broadcast_object(f"from {ranks.rank}", source=1),
        vote,
    )
    close_ranks()
    close_ranks()
    assert not torch.distributed.is_initialized()
    return found


def test_ranks_know_their_place_and_share_a_store() -> None:
    expected = [(r, 4, 2, [0, 10, 20, 30], "from 1", b"yes") for r in range(4)]
    assert run_ranks(4, _ranks, ranks_per_host=2) == expected


def test_a_process_without_a_launcher_is_the_only_rank(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.delenv(name, raising=False)
    ranks = init_ranks("cpu", 5)
    try:
        assert (ranks.rank, ranks.ranks, ranks.local_ranks) == (0, 1, 1)
        assert ranks.gather_objects("x") == ["x"]
    finally:
        close_ranks()


def test_known_warnings_are_silent_before_any_thread_starts() -> None:
    """A thread that compiles with numba puts back the filters that it found: those of `shard_model` would be lost."""
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        ranks = init_ranks("cpu", 5)
        try:
            with warnings.catch_warnings():
                build(make_config(), TABLES, ranks)
            warnings.warn("`broadcast_buffers` is deprecated. Use another.", FutureWarning, stacklevel=1)
        finally:
            close_ranks()


def test_peak_memory_is_read_from_this_system() -> None:
    assert _peak_resident_bytes() == pytest.approx(1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, rel=0.5)
