import os
import signal
import threading

import pytest
import torch
import torch.distributed as dist

from dlrm_scale.errors import ConfigError
from tests.support.rank_runner import RankDied, RankTimeout, run_ranks


def _sum_of_ranks(offset: int) -> tuple[int, int, float]:
    dist.init_process_group("gloo")
    total = torch.tensor([float(dist.get_rank() + offset)])
    dist.all_reduce(total)
    return dist.get_rank(), dist.get_world_size(), total.item()


def _environment() -> tuple[str, ...]:
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "EXTRA")
    return tuple(os.environ.get(name, "") for name in names)


def _change_environment() -> None:
    os.environ["EXTRA"] = "left over"
    signal.signal(signal.SIGTERM, signal.SIG_IGN)


def _sigterm_handler() -> bool:
    return signal.getsignal(signal.SIGTERM) is signal.SIG_DFL


def _one_rank_raises_before_a_collective(failing: int) -> None:
    dist.init_process_group("gloo")
    dist.barrier()
    if dist.get_rank() == failing:
        raise ConfigError("model.dim = 10", remedy="use 8")
    dist.barrier()


def _one_rank_is_killed() -> None:
    dist.init_process_group("gloo")
    dist.barrier()
    if dist.get_rank() == 1:
        os.kill(os.getpid(), signal.SIGKILL)
    dist.barrier()


def _one_rank_waits_for_ever() -> None:
    if os.environ["RANK"] == "1":
        threading.Event().wait()


def _all_ranks_raise() -> None:
    raise ConfigError(f"rank {os.environ['RANK']}")


def _pid() -> int:
    return os.getpid()


def _threads_and_first_draw() -> tuple[int, float]:
    return torch.get_num_threads(), torch.rand(()).item()


def _unpicklable() -> object:
    return threading.Lock()


@pytest.mark.parametrize("ranks", [3, 1, 2])
def test_results_come_in_rank_order_from_a_group_of_exactly_n(ranks: int) -> None:
    expected = float(sum(range(ranks)) + 5 * ranks)
    assert run_ranks(ranks, _sum_of_ranks, 5) == [(rank, ranks, expected) for rank in range(ranks)]


def test_processes_are_kept_between_cases() -> None:
    assert run_ranks(2, _pid) == run_ranks(2, _pid)
    assert os.getpid() not in run_ranks(2, _pid)


def test_ranks_can_pretend_to_be_on_several_hosts() -> None:
    got = run_ranks(4, _environment, ranks_per_host=2, environment={"EXTRA": "x"})
    assert got == [("0", "4", "0", "2", "x"), ("1", "4", "1", "2", "x"), ("2", "4", "0", "2", "x"),
                   ("3", "4", "1", "2", "x")]  # fmt: skip


def test_a_case_leaves_no_environment_and_no_signal_handler_behind() -> None:
    pids = run_ranks(1, _pid)
    run_ranks(1, _change_environment)
    assert run_ranks(1, _environment)[0][-1] == ""
    assert run_ranks(1, _sigterm_handler) == [True]
    assert run_ranks(1, _pid) == pids


def test_every_case_starts_with_one_thread_and_the_same_random_state() -> None:
    assert run_ranks(1, _threads_and_first_draw) == run_ranks(1, _threads_and_first_draw)
    assert run_ranks(1, _threads_and_first_draw)[0][0] == 1


@pytest.mark.parametrize("failing", [0, 1])
def test_the_first_cause_is_raised_and_not_a_neighbours_closed_connection(failing: int) -> None:
    with pytest.raises(ConfigError, match=r"model\.dim = 10") as caught:
        run_ranks(2, _one_rank_raises_before_a_collective, failing)
    assert caught.value.remedy == "use 8"
    notes = "\n".join(caught.value.__notes__)
    assert f"raised by rank {failing} of 2" in notes
    assert "_one_rank_raises_before_a_collective" in notes
    assert run_ranks(2, _sum_of_ranks, 0) == [(0, 2, 1.0), (1, 2, 1.0)]


def test_an_error_on_all_ranks_keeps_the_processes() -> None:
    pids = run_ranks(2, _pid)
    with pytest.raises(ConfigError, match=r"rank [01]"):
        run_ranks(2, _all_ranks_raise)
    assert run_ranks(2, _pid) == pids


def test_a_killed_worker_is_noticed_and_replaced() -> None:
    pids = run_ranks(2, _pid)
    with pytest.raises(RankDied, match="rank 1 was killed by SIGKILL"):
        run_ranks(2, _one_rank_is_killed)
    assert run_ranks(2, _sum_of_ranks, 0) == [(0, 2, 1.0), (1, 2, 1.0)]
    assert run_ranks(2, _pid)[1] != pids[1]


def test_a_rank_that_hangs_is_named_with_its_stack() -> None:
    with pytest.raises(RankTimeout, match=r"no answer from rank 1 in 0\.5 s[\s\S]*_one_rank_waits_for_ever"):
        run_ranks(2, _one_rank_waits_for_ever, timeout_seconds=0.5)
    assert run_ranks(2, _sum_of_ranks, 0) == [(0, 2, 1.0), (1, 2, 1.0)]


def test_a_result_that_cannot_be_pickled_is_an_error() -> None:
    with pytest.raises(TypeError, match="can't be pickled"):
        run_ranks(1, _unpicklable)
