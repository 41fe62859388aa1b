"""Traces of chosen steps."""

import gzip
import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from dlrm_scale.errors import ConfigError
from dlrm_scale.recipes import load_config
from dlrm_scale.sharding.step_phases import BackwardRanges
from dlrm_scale.telemetry import StepClock
from dlrm_scale.train.attribution.profile import StepProfiler
from tests.support.datasets import make_dataset
from tests.support.training import log_records, run_training

PARTS = ("backward: gradient all-to-all", "backward: tables and their update")
INTERVALS = (
    "data_wait",
    "copy",
    "input_all_to_all",
    "lookup",
    "output_all_to_all",
    "dense_forward",
    "backward",
    "dense_optimizer",
)


@pytest.fixture(scope="module", params=["plain", "sparse_dist"])
def run(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("profile")
    make_dataset(folder / "data", 300)
    settings = [f"train.pipeline={request.param}", "sharding.kind=table_wise", "train.profile_steps=[4, 5, 8]"]
    run_training(2, folder / "run", folder / "data", settings)
    return folder / "run"


def _events(path: Path) -> list[dict[str, object]]:
    with gzip.open(path, "rt") as file:
        return [event for event in json.load(file)["traceEvents"] if event.get("ph") == "X"]


def _traces(run: Path) -> Iterator[tuple[str, list[dict[str, object]]]]:
    for path in sorted((run / "profile").iterdir()):
        yield path.name, _events(path)


def test_every_rank_writes_one_trace_for_each_run_of_steps(run: Path) -> None:
    names = [f"steps-{steps}-rank-{rank}.json.gz" for steps in ("4-5", "8-8") for rank in (0, 1)]
    assert sorted(path.name for path in (run / "profile").iterdir()) == names
    assert all(path.stat().st_size < 4 << 20 for path in (run / "profile").iterdir())


def test_a_trace_names_the_intervals_and_the_parts_of_the_backward_pass(run: Path) -> None:
    for name, events in _traces(run):
        steps = 2 if "4-5" in name else 1
        count = {part: sum(event["name"] == part for event in events) for part in (*INTERVALS, *PARTS)}
        assert all(count[interval] >= steps for interval in INTERVALS), name
        assert count["backward"] == steps
        assert count["backward: tables and their update"] == steps
        assert count["backward: gradient all-to-all"] == steps


def test_the_parts_lie_inside_the_backward_pass_and_hold_its_operators(run: Path) -> None:
    for name, events in _traces(run):
        spans = {part: _spans(events, part) for part in (*PARTS, "backward")}
        for part in PARTS:
            for span in spans[part]:
                assert any(_inside(span, outer) for outer in spans["backward"]), (name, part)
        kernels = [e for e in events if "split_embedding_backward" in str(e["name"]) and e.get("cat") == "cpu_op"]
        for event in kernels:
            assert any(_inside(_span(event), outer) for outer in spans[PARTS[1]]), event["name"]


def test_the_log_charges_profiling_apart(run: Path) -> None:
    records = {record["step"]: record["interval_seconds"] for record in log_records(run, "train")}
    assert {step for step, seconds in records.items() if "profile" in seconds} == {4, 5, 8}


def _span(event: dict[str, object]) -> tuple[float, float]:
    start = float(str(event["ts"]))
    return start, start + float(str(event["dur"]))


def _spans(events: list[dict[str, object]], name: str) -> list[tuple[float, float]]:
    return [_span(event) for event in events if event["name"] == name]


def _inside(inner: tuple[float, float], outer: tuple[float, float]) -> bool:
    slack = 1.0  # microseconds: the trace rounds
    return outer[0] - slack <= inner[0] and inner[1] <= outer[1] + slack


def test_a_trace_that_cannot_be_written_is_told_and_ends_nothing(tmp_path: Path) -> None:
    (tmp_path / "profile").touch()
    clock = StepClock()
    profiler = StepProfiler((3,), tmp_path / "profile", 0, clock, BackwardRanges([]))
    profiler.before(3)
    assert profiler.after(3)
    assert profiler.written == []
    (note,) = profiler.take_notes()
    assert "steps-3-3-rank-0" in note
    assert "isn't written" in note
    assert profiler.take_notes() == []
    assert clock.listeners == []


def test_steps_that_a_run_did_not_reach_are_named_at_its_end(tmp_path: Path) -> None:
    profiler = StepProfiler((3, 7, 9), tmp_path / "profile", 0, StepClock(), BackwardRanges([]))
    for step in (1, 2, 3, 4):
        profiler.before(step)
        profiler.after(step)
    profiler.end()
    assert profiler.take_notes() == [
        f"traces of step 3, of every rank: {tmp_path / 'profile'}",
        "warning: train.profile_steps: no trace of 7, 9, which this start did not train",
    ]
    profiler.end()
    assert profiler.take_notes() == []


def test_a_run_that_ends_among_profiled_steps_writes_those_that_it_did(tmp_path: Path) -> None:
    clock = StepClock()
    profiler = StepProfiler((3, 4, 5), tmp_path / "profile", 1, clock, BackwardRanges([]))
    for step in (1, 2, 3, 4):
        profiler.before(step)
        with clock.interval("lookup"):
            pass
        assert not profiler.after(step)
    profiler.close()
    profiler.close()
    (path,) = profiler.written
    assert path.name == "steps-3-4-rank-1.json.gz"
    assert profiler.take_notes() == [f"traces of steps 3 to 4, of every rank: {tmp_path / 'profile'}"]
    assert sum(event["name"] == "lookup" for event in _events(path)) == 2


@pytest.mark.parametrize("steps", ["[0]", "[-1]", str(list(range(1, 30)))])
def test_steps_that_never_come_and_too_many_of_them_are_refused(steps: str) -> None:
    with pytest.raises(ConfigError, match="profile_steps"):
        load_config("sample", [f"train.profile_steps={steps}"])
