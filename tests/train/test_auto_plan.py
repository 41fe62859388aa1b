"""`sharding.plan = "auto"`: chosen by measuring, told, kept by the run, and without a trace in its values."""

from collections.abc import Sequence
from pathlib import Path

import pytest

from dlrm_scale.errors import ConfigError, PlanError
from dlrm_scale.planning.cluster.cluster_file import save_cluster
from dlrm_scale.planning.measuring import auto_choice, best_predicted
from dlrm_scale.sharding.plan_file import load_plan
from dlrm_scale.train.dry_run import dry_run_rank
from dlrm_scale.train.run_folder import resolve_run
from dlrm_scale.train.stop import StopRequest
from dlrm_scale.train.trainer import train_rank
from tests.planning.costs.small_cluster import small_cluster
from tests.support.datasets import make_dataset
from tests.support.rank_runner import run_ranks
from tests.support.training import SMALL_MODEL, losses, read_tables, run_training, same_tables

_RANKS = 2


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("data") / "dataset"
    split = {"train": [(0, 227)], "validation": [(227, 277)]}
    make_dataset(path, (150, 77, 50), table_rows=[3, 4, 10, 2, *[40] * 22], split=split)
    return path


@pytest.fixture(scope="module")
def cluster(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("cluster") / "cluster.toml"
    save_cluster(small_cluster(), path)
    return path


@pytest.fixture(scope="module")
def straight(dataset: Path, cluster: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An uninterrupted run that chose its plan."""
    run = tmp_path_factory.mktemp("straight") / "run"
    run_ranks(_RANKS, _train_quickly, _request(run, dataset, [f"sharding.cluster={cluster}"]))
    return run


def test_the_log_says_what_was_tried_and_the_run_keeps_the_fastest(
    dataset: Path, cluster: Path, tmp_path: Path
) -> None:
    request = _request(tmp_path / "run", dataset, [f"sharding.cluster={cluster}"])
    plan, kept, times, notes = run_ranks(_RANKS, _choose, request)[0]
    assert len(times) >= 2
    assert times[kept] == min(times.values())
    text = "\n".join(notes)
    assert "noisy" not in text
    assert "costs of cluster small" in text
    assert "side by side" in text
    assert f"kept: {kept}, " in text
    assert "less a step than" in text
    for name in times:
        assert f"{name}: " in text
    assert plan.ranks == _RANKS
    assert plan.prediction is not None
    assert plan.prediction.costs == "small"


def test_measuring_leaves_no_trace_in_the_runs_values(straight: Path, dataset: Path, tmp_path: Path) -> None:
    plan = load_plan(straight / "plan.json")
    assert plan.planner == "dlrm_scale"
    run_training(_RANKS, tmp_path / "given", dataset, [f"sharding.plan={straight / 'plan.json'}"])
    assert losses(straight) == losses(tmp_path / "given")
    assert same_tables(read_tables(straight), read_tables(tmp_path / "given"))


def test_a_resumed_run_goes_on_with_the_plan_that_it_kept_bit_for_bit(
    dataset: Path, cluster: Path, tmp_path: Path
) -> None:
    run, whole = tmp_path / "run", tmp_path / "whole"
    settings = [f"sharding.cluster={cluster}", "train.max_steps=5"]
    run_ranks(_RANKS, _train_quickly, _request(run, dataset, settings))
    kept = load_plan(run / "plan.json")
    run_ranks(_RANKS, _train_quickly, [f"run.path={run}", "train.max_steps=0"], resume=True)
    assert load_plan(run / "plan.json").tables == kept.tables
    run_training(_RANKS, whole, dataset, [f"sharding.plan={run / 'plan.json'}"])
    assert losses(run) == losses(whole)
    assert same_tables(read_tables(run), read_tables(whole))


def test_a_run_that_kept_a_plan_measures_nothing_when_it_is_resumed(straight: Path, dataset: Path) -> None:
    plan, notes = run_ranks(_RANKS, _choose_resumed, str(straight))[0]
    assert plan == load_plan(straight / "plan.json")
    assert notes == ("sharding.plan = auto: the plan that the run kept",)


@pytest.mark.slow
def test_a_run_that_is_resumed_on_other_ranks_chooses_anew(straight: Path, dataset: Path) -> None:
    plan, notes = run_ranks(3, _choose_resumed, str(straight))[0]
    assert plan.ranks == 3
    assert "ranks: the plan's 2, here 3" in notes[0]
    assert "choosing anew" in notes[0]


def test_plans_are_measured_one_at_a_time_where_they_do_not_fit_together(
    dataset: Path, cluster: Path, tmp_path: Path
) -> None:
    request = _request(tmp_path / "run", dataset, [f"sharding.cluster={cluster}"])
    _, kept, times, notes = run_ranks(_RANKS, _choose, request, one_at_a_time=True)[0]
    assert len(times) >= 2
    assert times[kept] == min(times.values())
    assert any("one at a time, for memory" in note for note in notes)


def test_types_that_a_run_asks_for_are_kept(dataset: Path, cluster: Path, tmp_path: Path) -> None:
    settings = [f"sharding.cluster={cluster}", "sharding.tables.C5=row_wise"]
    request = _request(tmp_path / "run", dataset, settings)
    plan, kept, times, _ = run_ranks(_RANKS, _choose, request)[0]
    assert {table.name: table.type for table in plan.tables}["C5"] == "row_wise"
    assert auto_choice.BASELINE not in times, "table-wise isn't allowed for C5"
    assert auto_choice.TORCHREC in times, times
    assert kept


def test_nothing_that_fits_ends_the_run_with_3(dataset: Path, cluster: Path, tmp_path: Path) -> None:
    settings = [f"sharding.cluster={cluster}", "sharding.device_memory=1K"]
    with pytest.raises(PlanError) as error:
        run_ranks(_RANKS, _choose, _request(tmp_path / "run", dataset, settings))
    assert error.value.exit_code == 3


def test_a_cluster_of_another_device_is_a_wrong_setting(dataset: Path, tmp_path: Path) -> None:
    request = _request(tmp_path / "run", dataset, ["sharding.cluster=h100x8"])
    with pytest.raises(ConfigError, match="h100x8 describes cuda ranks, and these are on cpu") as error:
        run_ranks(_RANKS, _choose, request)
    assert error.value.exit_code == 2


def test_a_dry_run_takes_the_best_predicted_plan_and_measures_nothing(dataset: Path, tmp_path: Path) -> None:
    noise = "other programs took 24 % of the time"
    save_cluster(small_cluster().model_copy(update={"noise": noise}), tmp_path / "noisy.toml")
    request = _request(tmp_path / "run", dataset, [f"sharding.cluster={tmp_path / 'noisy.toml'}"])
    found = run_ranks(_RANKS, _dry_run, request)[0]
    assert len(found.plan) == 26
    assert any("nothing was measured" in note for note in found.notes)
    assert any("kept: predicted best" in note for note in found.notes)
    told = f"sharding.plan = auto: these costs come from a busy or noisy machine: {noise}"
    assert found.notes.count(told) == 1


def test_one_rank_holds_every_table(dataset: Path, tmp_path: Path) -> None:
    run_training(1, tmp_path / "run", dataset, ["sharding.plan=auto", "train.max_steps=2"])
    plan = load_plan(tmp_path / "run/plan.json")
    assert {table.type for table in plan.tables} == {"table_wise"}


@pytest.mark.slow
def test_without_a_cluster_the_ranks_are_measured(dataset: Path, tmp_path: Path) -> None:
    _, kept, times, notes = run_ranks(_RANKS, _choose, _request(tmp_path / "run", dataset, []), timeout_seconds=600.0)[
        0
    ]
    assert times[kept] == min(times.values())
    assert any("costs of these ranks, measured in" in note for note in notes)


def _request(run: Path, dataset: Path, settings: list[str]) -> list[str]:
    return [f"run.path={run}", f"data.path={dataset}", *SMALL_MODEL, "sharding.plan=auto", *settings]


def _choose(settings: list[str], one_at_a_time: bool = False) -> tuple[object, str, dict[str, float], list[str]]:
    from dlrm_scale.data.dataset.dataset import Dataset
    from dlrm_scale.sharding.ranks import init_ranks
    from dlrm_scale.train import auto_plan

    _hurry()
    request = resolve_run("sample", settings)
    seen: list[auto_choice.AutoChoice] = []
    choose = auto_plan.choose_by_measuring

    def watched(*arguments: object, **named: object) -> auto_choice.AutoChoice:
        if one_at_a_time:
            candidates: Sequence[auto_choice.AutoCandidate] = arguments[2]  # type: ignore[assignment]
            named["free_bytes"] = max(sum(candidate.load.memory_by_rank) for candidate in candidates)
        seen.append(choose(*arguments, **named))  # type: ignore[arg-type]
        return seen[-1]

    auto_plan.choose_by_measuring = watched
    try:
        found = auto_plan.choose_auto_plan(
            request, Dataset.open(Path(request.config.data.path)), None, init_ranks("cpu", 60), StopRequest()
        )
    finally:
        auto_plan.choose_by_measuring = choose
    times = {name: time.median_ms for name, time in seen[0].times.items()}
    return found.plan, seen[0].kept, times, list(found.notes)


def _choose_resumed(run: str) -> tuple[object, tuple[str, ...]]:
    from dlrm_scale.data.dataset.dataset import Dataset
    from dlrm_scale.sharding.ranks import init_ranks
    from dlrm_scale.train.auto_plan import choose_auto_plan

    _hurry()
    request = resolve_run(None, [f"run.path={run}"], resume=True)
    dataset = Dataset.open(Path(request.config.data.path))
    found = choose_auto_plan(request, dataset, None, init_ranks("cpu", 60), StopRequest())
    return found.plan, found.notes


def _train_quickly(settings: list[str], resume: bool = False) -> None:
    _hurry()
    train_rank(resolve_run(None if resume else "sample", settings, resume=resume), StopRequest())


def _hurry() -> None:
    """Little work for the solver and few rounds: what is chosen matters less here than how."""
    auto_choice._SECONDS = 0.3
    best_predicted._WHOLE_EFFORT = best_predicted._EFFORT = 0.0


def _dry_run(settings: list[str]) -> object:
    _hurry()
    return dry_run_rank(resolve_run("sample", settings), StopRequest())
