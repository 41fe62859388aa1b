"""When a run saves, and with how much memory, changes nothing that it learns; what it cost is told."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from dlrm_scale.checkpoint import find_chain
from dlrm_scale.checkpoint.saving.staging import HostStaging
from dlrm_scale.errors import ConfigError
from dlrm_scale.train.memory import staging_memory
from dlrm_scale.train.report import RunReport
from dlrm_scale.train.run_folder import resolve_run
from dlrm_scale.train.run_result import RunResult
from dlrm_scale.train.run_saver import INTERVAL_KEY
from dlrm_scale.train.stop import StopRequest
from dlrm_scale.train.summary import summary_table
from dlrm_scale.train.trainer import _cadence, train_rank
from tests.support.datasets import make_dataset
from tests.support.rank_runner import run_ranks
from tests.support.training import SMALL_MODEL, log_records, losses, read_tables, same_tables

_SHARDING = {"row_wise": ["sharding.kind=row_wise"], "data_parallel": ["sharding.kind=data_parallel"]}


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("data") / "dataset"
    make_dataset(path, 577, table_rows=[300, 4, *[40] * 24], split={"train": [(0, 577)], "validation": []})
    return path


@pytest.fixture(scope="module")
def straight(dataset: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Losses and tables of a run that saves at its end alone, by sharding type."""
    found = {}
    for kind, sharding in _SHARDING.items():
        run = tmp_path_factory.mktemp("straight") / kind
        _train(run, dataset, [*sharding, "checkpoint.every_steps=0"])
        found[kind] = (losses(run), read_tables(run))
    return found


def _train(
    run: Path, dataset: Path, settings: list[str], resume: bool = False, ranks: int = 2
) -> tuple[RunResult, str]:
    """Train, and return rank 0's result and what it said."""
    results: list[tuple[RunResult, str]] = run_ranks(2, _rank, str(run), str(dataset), settings, resume)
    return results[0]


def _rank(run: str, dataset: str, settings: list[str], resume: bool) -> tuple[RunResult, str]:
    said: list[str] = []
    say = RunReport.say
    RunReport.say = lambda self, text: said.append(text)  # type: ignore[method-assign]
    base = [f"run.path={run}"] if resume else [f"run.path={run}", f"data.path={dataset}", *SMALL_MODEL]
    try:
        request = resolve_run(None if resume else "sample", [*base, *settings], resume=resume)
        return train_rank(request, StopRequest()), "\n".join(said)
    finally:
        RunReport.say = say  # type: ignore[method-assign]


def _without_room(run: str, dataset: str, settings: list[str], resume: bool) -> tuple[RunResult, str]:
    """As `_rank`; rank 1 gets no memory to copy rows to."""
    real = HostStaging

    def allocate(size_bytes: int, *, pinned: bool = False) -> HostStaging:
        import torch.distributed as dist

        if size_bytes and dist.get_rank() == 1:
            raise RuntimeError("can't allocate memory\nwith a trace")
        return real(size_bytes, pinned=pinned)

    staging_memory.HostStaging = allocate  # type: ignore[misc, assignment]
    try:
        return _rank(run, dataset, settings, resume)
    finally:
        staging_memory.HostStaging = real  # type: ignore[misc]


@pytest.mark.parametrize(
    ("kind", "settings"),
    [
        ("row_wise", ["interval=seconds", "every_seconds=1e-6"]),
        ("data_parallel", ["interval=auto", "every_steps=2", "overhead_budget=1.0"]),
        ("row_wise", ["interval=auto", "recovery_point_seconds=1e-6", "policy=one_shot"]),
        ("row_wise", ["every_steps=2", "staging_memory=0"]),
        ("data_parallel", ["every_steps=2", "policy=intermittent", "staging_memory=4KiB"]),
    ],
    ids=lambda value: value if isinstance(value, str) else " ".join(value),
)
def test_a_run_learns_the_same_however_it_saves_and_goes_on_from_it_bit_for_bit(
    kind: str, settings: list[str], dataset: Path, straight: dict[str, Any], tmp_path: Path
) -> None:
    checkpoint = [f"checkpoint.{setting}" for setting in settings]
    run = tmp_path / "run"
    first, _ = _train(run, dataset, [*_SHARDING[kind], *checkpoint, "train.max_steps=11"])
    second, _ = _train(run, dataset, ["train.max_steps=0"], resume=True)
    assert (first.step, second.start_step, second.step) == (11, 11, 19)
    assert first.checkpoints_committed >= 2
    expected_losses, expected_tables = straight[kind]
    assert losses(run) == expected_losses
    assert same_tables(read_tables(run), expected_tables)


def test_what_saving_holds_and_costs_is_in_the_log_the_result_and_the_table(dataset: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    settings = ["sharding.kind=row_wise", "checkpoint.policy=one_shot", "checkpoint.every_steps=4"]
    result, said = _train(run, dataset, settings)
    assert "checkpoints are copied to at most " in said
    lines = log_records(run, "checkpoint")
    assert [(line["step"], line["kind"], line["policy"]) for line in lines] == [
        (4, "baseline", "one_shot"),
        *((step, "delta", "one_shot") for step in (8, 12, 16, 19)),
    ]
    assert all(line["interval_steps"] == 4 and line["unstaged_bytes"] == 0 for line in lines)
    assert lines[0]["rows"] == 300 + 4 + 24 * 40
    assert lines[2]["interference_seconds"] is None  # of so few steps
    assert float(str(lines[2]["predicted_overhead"])) > 0
    told = json.loads((run / "result.json").read_text())["checkpoints"]
    assert told == result.checkpoints
    assert (told["policy"], told["interval"], told["baselines"], told["deltas"]) == ("one_shot", "steps", 1, 4)
    assert told["bytes"] == sum(int(str(line["bytes"])) for line in lines)
    assert told["rows"] == sum(int(str(line["rows"])) for line in lines)
    assert told["measured_overhead"] > 0
    assert told["predicted_overhead"] > 0
    assert (told["fewest_steps_between"], told["most_steps_between"]) == (3, 4)
    table = summary_table(result, str(run))
    rows = dict(re.split(r" {2,}", line, maxsplit=1) for line in table.splitlines() if "  " in line)
    assert rows["written to checkpoints"].startswith("1 baselines and 4 deltas (one_shot), ")
    assert rows["checkpoint interval"] == "3 to 4 steps"
    assert rows["cost of checkpoints"].startswith(
        f"{told['measured_overhead']:.2%} of the training time on rank {told['slowest_rank']}, which lost most: "
        f"stalls {told['stall_share']:.2%} ("
    )
    # a stall is told once; the table of times has all that saving took, the last wait too
    assert table.count("stall") == 1
    assert "saving, last wait included" in table
    assert rows["cost of checkpoints"].endswith(f"; predicted {told['predicted_overhead']:.2%}")


def test_an_interval_that_was_found_is_where_a_resumed_run_goes_on(dataset: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    settings = ["checkpoint.interval=auto", "checkpoint.every_steps=4", "checkpoint.overhead_budget=1.0"]
    result, _ = _train(run, dataset, ["sharding.kind=row_wise", *settings, "train.max_steps=15"])
    assert result.checkpoints["most_steps_between"] <= 8  # type: ignore[operator]
    chain = find_chain(run / "checkpoints")
    assert chain is not None
    reached = chain.tip.extra[INTERVAL_KEY]
    earlier = result.checkpoints["chosen_intervals"]
    assert isinstance(earlier, list)
    assert reached in [4, *(steps for _, steps in earlier)]
    config = resolve_run(None, [f"run.path={run}"], resume=True).config
    assert _cadence(config, chain).interval_steps == reached
    assert _cadence(config, None).interval_steps == 4


def test_a_run_with_too_little_memory_for_copies_says_so_before_and_at_the_first_save(
    dataset: Path, tmp_path: Path
) -> None:
    settings = ["sharding.kind=row_wise", "checkpoint.every_steps=4", "checkpoint.staging_memory=20KiB"]
    result, said = _train(tmp_path / "run", dataset, settings)
    assert re.search(r"rank 0 holds 4\S+ KiB of rows, more than fit into checkpoint.staging_memory = 20KiB:", said)
    assert "so it is on 2 of 2 ranks" in said
    assert said.count("don't fit into the memory set aside for copies") == 1
    assert re.search(r"while the checkpoint of step 4 \(baseline\) was written: 4\S+ KiB of rows on rank 0", said)
    lines = log_records(tmp_path / "run", "checkpoint")
    assert int(str(lines[0]["unstaged_bytes"])) > 2 * 40 * 1024
    assert result.checkpoints_failed == 0


def test_a_rank_that_can_not_allocate_its_memory_for_copies_goes_without(
    dataset: Path, straight: dict[str, Any], tmp_path: Path
) -> None:
    run = tmp_path / "run"
    settings = ["sharding.kind=row_wise", "checkpoint.every_steps=5"]
    results: list[tuple[RunResult, str]] = run_ranks(2, _without_room, str(run), str(dataset), settings, False)
    assert "warning: rank 1 can't allocate 4" in results[0][1]
    assert "until they are written: can't allocate memory\n" in results[0][1]
    assert re.search(r"checkpoint of step 5 \(baseline\) was written: \S+ KiB of rows on rank 1", results[0][1])
    assert results[0][0].checkpoints_failed == 0
    assert losses(run) == straight["row_wise"][0]
    assert same_tables(read_tables(run), straight["row_wise"][1])


def test_a_size_that_is_none_is_refused_before_the_run(dataset: Path, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"checkpoint\.staging_memory = 'lots' is not a size"):
        resolve_run("sample", [f"run.path={tmp_path}/run", f"data.path={dataset}", "checkpoint.staging_memory=lots"])
