"""Where the time of a run went: whole runs in which one thing is slow, and the arithmetic of ranks."""

import json
import os
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from dlrm_scale.checkpoint import CheckpointEngine
from dlrm_scale.data.loading import loader as loader_module
from dlrm_scale.sharding import table_kernels as kernels_module
from dlrm_scale.telemetry import INTERVALS, OTHER, StepClock
from dlrm_scale.train import trainer as trainer_module
from dlrm_scale.train.attribution.attribution import Attribution, IntervalWindow, RankTime
from dlrm_scale.train.attribution.attribution_table import attribution_lines
from dlrm_scale.train.loop import TrainingLoop
from dlrm_scale.train.run_folder import resolve_run
from dlrm_scale.train.run_result import RunResult
from dlrm_scale.train.stop import StopRequest
from dlrm_scale.train.summary import summary_table
from dlrm_scale.train.trainer import train_rank
from tests.support.datasets import make_dataset
from tests.support.rank_runner import run_ranks
from tests.support.training import SMALL_MODEL, log_records, losses, run_training

SPLIT = {"train": [(0, 900)], "validation": [(900, 1000)]}
QUIET = ("train.log_every_steps=10", "checkpoint.every_steps=0")


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("attribution") / "data"
    make_dataset(path, 1000, split=SPLIT)
    return path


def _rank_time(**seconds: float) -> RankTime:
    busy = seconds.pop("busy_backward", 0.0)
    return RankTime(seconds=seconds, busy_backward_seconds=busy)


def test_the_rank_that_computes_longest_is_the_slowest_and_not_the_one_that_waits() -> None:
    times = (
        _rank_time(lookup=6.0, dense_forward=1.0, backward=4.0, busy_backward=3.0, output_all_to_all=0.5, other=0.5),
        _rank_time(lookup=1.0, dense_forward=1.0, backward=4.0, busy_backward=1.0, output_all_to_all=5.5, other=0.5),
    )
    got = Attribution(times=times).as_dict()
    assert got["compute_seconds_per_rank"] == [10.0, 3.0]
    assert got["exchange_seconds_per_rank"] == [1.5, 8.5]
    assert (got["slowest_rank"], got["compute_imbalance"]) == (0, 10.0 / 6.5)
    assert got["intervals"]["lookup"] == {
        "seconds": 3.5,
        "share": 3.5 / 12,
        "slowest_rank": 0,
        "slowest_rank_seconds": 6.0,
        "imbalance": 6.0 / 3.5,
    }
    assert list(got["intervals"]) == ["lookup", "output_all_to_all", "dense_forward", "backward", "other"]
    assert sum(entry["share"] for entry in got["intervals"].values()) == pytest.approx(1, abs=1e-12)
    last = attribution_lines(got)[-1]
    assert "rank 0 is the slowest" in last
    assert "imbalance 1.54" in last
    assert "rank 1 spends 71% of the time in exchanges" in last


def test_even_ranks_are_called_even_and_one_rank_has_no_balance() -> None:
    even = (_rank_time(lookup=6.0, output_all_to_all=1.0), _rank_time(lookup=6.1, output_all_to_all=0.9))
    assert attribution_lines(Attribution(times=even).as_dict())[-1].startswith("ranks compute evenly (imbalance 1.01)")
    alone = attribution_lines(Attribution(times=even[:1]).as_dict())
    assert [line.split() for line in alone] == [
        ["main", "thread", "seconds", "share"],
        ["lookup", "6.00", "85.7%"],
        ["output", "all-to-all", "1.00", "14.3%"],
    ]


def test_a_gpus_own_timeline_decides_where_there_is_one() -> None:
    queueing = {"lookup": 0.1, "backward": 9.0}
    times = tuple(
        RankTime(seconds=queueing, gpu_seconds={"lookup": seconds, "output_all_to_all": 5 - seconds})
        for seconds in (1.0, 3.0)
    )
    got = Attribution(times=times).as_dict()
    assert (got["slowest_rank"], got["compute_seconds_per_rank"]) == (1, [1.0, 3.0])
    assert got["exchange_seconds_per_rank"] == [4.0, 2.0]
    assert got["gpu_seconds"] == {"lookup": 2.0, "output_all_to_all": 3.0}


def test_windows_hold_what_came_since_the_last_one() -> None:
    now = [0.0]
    clock = StepClock(lambda: now[0], lambda: now[0])
    window = IntervalWindow(clock)

    def spend(name: str, seconds: float) -> None:
        with clock.busy(name):
            now[0] += seconds

    spend("lookup", 1)
    spend("backward", 2)
    first = IntervalWindow.rank_time(window.take())
    assert first.seconds == {"lookup": 1.0, "backward": 2.0}
    assert first.busy_backward_seconds == 2.0
    spend("lookup", 4)
    now[0] += 8
    assert IntervalWindow.rank_time(window.take()).seconds == {"lookup": 4.0, OTHER: 8.0}


def test_on_a_gpu_a_log_lines_slowest_rank_is_told_by_its_timeline() -> None:
    """The main thread of the other rank spends more, but it only queues work."""
    by_rank = []
    for queueing, computing in ((1.0, 5.0), (2.0, 4.0)):
        now = [0.0]
        clock = StepClock(lambda now=now: now[0], lambda now=now: now[0])
        gpu: Any = SimpleNamespace(seconds={"lookup": 100.0})
        window = IntervalWindow(clock, gpu)
        with clock.interval("lookup"):
            now[0] += queueing
        gpu.seconds = {"lookup": 100.0 + computing, "output_all_to_all": 1.0}
        by_rank.append(IntervalWindow.rank_time(window.take()))
    got = Attribution(times=tuple(by_rank)).as_dict()
    assert got["compute_seconds_per_rank"] == [5.0, 4.0]
    assert got["slowest_rank"] == 0
    assert got["intervals"]["lookup"]["seconds"] == 1.5
    assert "on the GPU's own timeline: lookup 4.50 s, output all-to-all 1.00 s" in attribution_lines(got)


def _slow(function: Callable[..., Any], seconds: float) -> Callable[..., Any]:
    def slowed(*args: Any, **kwargs: Any) -> Any:
        time.sleep(seconds)
        return function(*args, **kwargs)

    return slowed


_PLACES: dict[str, tuple[object, str]] = {
    "lookup": (kernels_module.BatchedFusedEmbeddingBag, "forward"),
    "loader": (loader_module, "make_batch"),
    "reading": (loader_module.RecordBatchCache, "read"),
    "checkpoint": (CheckpointEngine, "save"),
    "evaluation": (trainer_module, "evaluate_batches"),
}


def _train(run: str, dataset: str, overrides: list[str], slow: str, slow_rank: int, seconds: float) -> RunResult:
    """Train with one function of one rank made slow."""
    request = resolve_run("sample", [f"run.path={run}", f"data.path={dataset}", *SMALL_MODEL, *QUIET, *overrides])
    with pytest.MonkeyPatch.context() as patch:
        if slow and int(os.environ["RANK"]) == slow_rank:
            owner, name = _PLACES[slow]
            patch.setattr(owner, name, _slow(getattr(owner, name), seconds))
        return train_rank(request, StopRequest())


def _run(
    ranks: int, run: Path, dataset: Path, *overrides: str, slow: str = "", slow_rank: int = 0, seconds: float = 0.02
) -> RunResult:
    return run_ranks(ranks, _train, str(run), str(dataset), list(overrides), slow, slow_rank, seconds)[0]


def _intervals(result: RunResult) -> dict[str, dict[str, float]]:
    intervals = result.attribution["intervals"]
    assert isinstance(intervals, dict)
    return intervals


def _measured(run: str, dataset: str, overrides: list[str]) -> tuple[RunResult, RankTime, float]:
    """Train and measure this rank's time from the loop's begin to the sum of the run, without the clock."""
    begun, ended, times = [], [], []
    begin, make_result = TrainingLoop._begin, trainer_module.make_result

    def watched_begin(self: TrainingLoop) -> None:
        begun.append(time.perf_counter())
        begin(self)

    def watched_result(*args: Any) -> RunResult:
        ended.append(time.perf_counter())
        times.extend(value for value in args if isinstance(value, RankTime))
        return make_result(*args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(TrainingLoop, "_begin", watched_begin)
        patch.setattr(trainer_module, "make_result", watched_result)
        result = _train(run, dataset, overrides, "", 0, 0.0)
    return result, times[0], ended[0] - begun[0]


@pytest.mark.parametrize("pipeline", ["plain", "sparse_dist"])
def test_the_intervals_of_a_run_add_up_to_its_time_and_leave_little_over(
    tmp_path: Path, dataset: Path, pipeline: str
) -> None:
    settings = ["sharding.kind=row_wise", "train.validate_every_steps=10", "data.batch_size=256", "train.epochs=10"]
    by_rank = run_ranks(2, _measured, str(tmp_path / "run"), str(dataset), [*settings, f"train.pipeline={pipeline}"])
    for _, rank_time, measured_seconds in by_rank:
        assert 0.98 * measured_seconds <= sum(rank_time.seconds.values()) <= measured_seconds
        assert rank_time.seconds[OTHER] <= 0.02 * measured_seconds
    result = by_rank[0][0]
    assert by_rank[1][0].attribution == result.attribution
    intervals, wall = _intervals(result), float(str(result.attribution["wall_seconds"]))
    assert sum(entry["seconds"] for entry in intervals.values()) == pytest.approx(wall, rel=1e-9)
    assert set(intervals) == {*INTERVALS, OTHER} - {"profile"} - ({"pipeline"} if pipeline == "plain" else set())
    # result.json and the printed table say the same
    assert json.loads((tmp_path / "run" / "result.json").read_text())["attribution"] == result.attribution
    table = summary_table(result, "runs/a")
    assert f"{intervals['backward']['share']:.1%}" in table
    assert "hidden in other threads: fetch" in table
    assert "samples/s" in table
    nothing_left = summary_table(replace(result, rows=0), "runs/a")
    assert "samples/s" not in nothing_left
    assert "of the time\n" not in nothing_left.split("cost of checkpoints")[0]


def test_each_log_line_has_the_seconds_since_the_last_one(tmp_path: Path, dataset: Path) -> None:
    result = _run(2, tmp_path / "run", dataset, "train.epochs=2")
    records = log_records(tmp_path / "run", "train")
    assert len(records) > 3
    totals: dict[str, float] = {}
    for record in records:
        seconds = record["interval_seconds"]
        assert isinstance(seconds, dict)
        assert seconds["lookup"] > 0
        assert record["slowest_rank"] in (0, 1)
        assert float(str(record["compute_imbalance"])) >= 1
        for name, value in seconds.items():
            totals[name] = totals.get(name, 0.0) + value
    whole = sum(totals.values())
    assert 0.5 * result.seconds < whole <= result.seconds  # the last save comes after the last line
    board = EventAccumulator(str(tmp_path / "run" / "tensorboard")).Reload()
    points = board.Scalars("train/interval_seconds/lookup")
    assert [p.step for p in points] == [r["step"] for r in records]
    assert sum(p.value for p in points) == pytest.approx(totals["lookup"], rel=1e-5)


@pytest.mark.parametrize("slow_rank", [0, 1])
def test_a_rank_with_slow_lookups_is_named_and_the_other_one_waits(
    tmp_path: Path, dataset: Path, slow_rank: int
) -> None:
    result = _run(2, tmp_path / "run", dataset, "sharding.kind=row_wise", slow="lookup", slow_rank=slow_rank)
    attribution = result.attribution
    assert attribution["slowest_rank"] == slow_rank
    assert float(str(attribution["compute_imbalance"])) > 1.3
    assert _intervals(result)["lookup"]["slowest_rank"] == slow_rank
    assert _intervals(result)["output_all_to_all"]["slowest_rank"] == 1 - slow_rank
    steps = result.step - result.start_step
    assert _intervals(result)["output_all_to_all"]["slowest_rank_seconds"] > 0.5 * 0.02 * steps
    last = summary_table(result, "runs/a").splitlines()[-1]
    assert f"rank {slow_rank} is the slowest" in last
    assert f"rank {1 - slow_rank} spends" in last
    records = log_records(tmp_path / "run", "train")
    assert {record["slowest_rank"] for record in records} == {slow_rank}


@pytest.mark.parametrize(
    ("slow", "interval", "calls"),
    [("loader", "data_wait", 10), ("checkpoint", "checkpoint", 5), ("evaluation", "evaluation", 5)],
)
def test_slow_data_checkpoints_and_evaluations_show_under_their_names(
    tmp_path: Path, dataset: Path, slow: str, interval: str, calls: int
) -> None:
    """Everything else of these ten steps takes a fraction of the 100 ms that each call is slowed by."""
    often = ("checkpoint.every_steps=2", "train.validate_every_steps=2") if slow != "loader" else ()
    settings = ("train.max_steps=10", "train.validation_batch_size=100", *often)
    result = _run(1, tmp_path / "run", dataset, *settings, slow=slow, seconds=0.1)
    seconds = {name: entry["seconds"] for name, entry in _intervals(result).items()}
    assert max(seconds, key=seconds.__getitem__) == interval
    assert seconds[interval] >= 0.1 * calls / 2  # the loader is ahead by some batches when the first step begins
    hidden = result.attribution["hidden_seconds"]
    assert isinstance(hidden, dict)
    if slow == "loader":
        assert hidden["prep"] >= 0.1 * calls
        assert result.data_wait_share == pytest.approx(seconds["data_wait"] / result.seconds, abs=0.02)
    if slow == "checkpoint":
        assert hidden["persist"] > 0
        assert float(str(result.checkpoints["stall_share"])) > 0.5


def test_slow_storage_shows_as_fetching_in_the_loaders_thread(tmp_path: Path, dataset: Path) -> None:
    result = _run(1, tmp_path / "run", dataset, slow="reading")
    hidden = result.attribution["hidden_seconds"]
    assert isinstance(hidden, dict)
    assert set(hidden) == {"fetch", "prep", "persist"}
    assert all(value > 0 for value in hidden.values())


def test_attribution_changes_no_number_of_a_run(tmp_path: Path, dataset: Path) -> None:
    """Profiled or not, split or not: the same losses to the bit."""
    settings = ("sharding.kind=table_wise", "train.max_steps=8")
    for pipeline in ("plain", "sparse_dist"):
        run_training(2, tmp_path / pipeline, dataset, [*settings, f"train.pipeline={pipeline}"])
    run_training(2, tmp_path / "traced", dataset, [*settings, "train.profile_steps=[3, 4, 7]"])
    assert losses(tmp_path / "plain") == losses(tmp_path / "sparse_dist") == losses(tmp_path / "traced")
