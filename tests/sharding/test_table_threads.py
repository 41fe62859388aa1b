"""Tables shared out over threads train as fbgemm does on one, to the bit."""

import threading

import pytest
import torch

from dlrm_scale.sharding.pipeline import make_train_pipeline
from dlrm_scale.sharding.ranks import init_ranks
from dlrm_scale.sharding.table_threads import TableThreads, look_up_in_threads
from tests.sharding.sharded_runs import TABLES, build, make_config, rank_batches, tables_for
from tests.support.random_batches import random_batches
from tests.support.rank_runner import run_ranks

KINDS = ("table_wise", "row_wise", "column_wise", "table_column_wise", "grid_shard")
Trained = tuple[list[float], list[torch.Tensor]]


def _train_with_and_without_threads(kind: str, optimizer: str) -> list[tuple[Trained, int]]:
    """Losses, tables and state, and into how many parts the kernels were cut: without threads, then with three."""
    ranks, found = init_ranks("cpu", 60), []
    tables = tables_for(kind)
    for threads in (1, 3):
        sharded = build(make_config(kind, optimizer), tables, ranks)
        look_up_in_threads(sharded.kernels, threads)
        lookups = [k.module.emb_module.__dict__.get("forward") for k in sharded.kernels if k.fused]
        parts = sum(len(lookup.cuts) - 1 for lookup in lookups if lookup is not None)
        steps = make_train_pipeline(sharded, "plain")
        batches = random_batches(tables, [32, 31, 5, 1, 29], most_ids_per_bag=3)
        source = rank_batches(batches, tables, ranks)
        losses = [steps.progress(source)[1].item() for _ in batches]
        values = [t.clone() for s in sharded.local_shards for t in (s.weight, *s.state.values())]
        found.append(((losses, values), parts))
    return found


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("ranks", [1, 4])
def test_threads_change_no_bit(kind: str, ranks: int) -> None:
    for optimizer in ("sgd", "rowwise_adagrad"):
        parts_of_all = 0
        for (alone, none), (threaded, parts) in run_ranks(ranks, _train_with_and_without_threads, kind, optimizer):
            assert none == 0
            parts_of_all += parts
            assert threaded[0] == alone[0]
            for ours, theirs in zip(threaded[1], alone[1], strict=True):
                assert torch.equal(ours, theirs)
        assert parts_of_all > 1


def _parts_by_torch_threads(threads: int) -> tuple[list[int], int]:
    torch.set_num_threads(threads)
    ranks = init_ranks("cpu", 60)
    sharded = build(make_config(), TABLES, ranks)
    source = rank_batches(random_batches(TABLES, [32]), TABLES, ranks)
    make_train_pipeline(sharded, "plain").progress(source)
    lookups = [k.module.emb_module.__dict__.get("forward") for k in sharded.kernels]
    return [len(lookup.cuts) - 1 for lookup in lookups if lookup is not None], torch.get_num_threads()


def test_a_rank_with_two_torch_threads_uses_them_for_tables_and_keeps_both_for_torch() -> None:
    assert run_ranks(1, _parts_by_torch_threads, 2) == [([4], 2)]  # four sums; the one mean has a kernel of its own
    assert run_ranks(1, _parts_by_torch_threads, 1) == [([], 1)]


def test_every_task_runs_once_and_the_caller_works_too() -> None:
    done: list[tuple[int, str]] = []
    both = threading.Barrier(2, timeout=60)

    def task(number: int) -> None:
        if number >= 8:  # the two largest, which are taken first
            both.wait()
        done.append((number, threading.current_thread().name))

    TableThreads(2).run([(n, lambda n=n: task(n)) for n in range(10)])  # type: ignore[misc]
    assert sorted(n for n, _ in done) == list(range(10))
    assert len({name for n, name in done if n >= 8}) == 2
    assert threading.current_thread().name in {name for _, name in done}


@pytest.mark.parametrize("fails_in", ["caller", "other thread"])
def test_a_failed_task_reaches_the_caller_after_all_others_ended(fails_in: str) -> None:
    both, running = threading.Barrier(2, timeout=60), []

    def task() -> None:
        running.append(None)
        both.wait()
        running.pop()
        here = "caller" if threading.current_thread() is threading.main_thread() else "other thread"
        if here == fails_in:
            raise ValueError(here)

    with pytest.raises(ValueError, match=fails_in):
        TableThreads(2).run([(1, task), (1, task)])
    assert not running
