"""A run with a plan from a file: trained, resumed, evaluated and predicted with it (B25)."""

import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest

from dlrm_scale.data.dataset.dataset import Dataset
from dlrm_scale.errors import PlanError
from dlrm_scale.models.tables import table_specs
from dlrm_scale.recipes import load_config
from dlrm_scale.schema import TableSpec
from dlrm_scale.scoring.evaluate_run import EvaluationRequest, EvaluationResult, evaluate_rank
from dlrm_scale.sharding.plan_file import PlanFile, load_plan, planned_table, save_plan
from dlrm_scale.sharding.shard_shapes import TableShape
from dlrm_scale.train.run_folder import resolve_run
from dlrm_scale.train.stop import StopRequest
from tests.support.datasets import make_dataset
from tests.support.rank_runner import run_ranks
from tests.support.training import SMALL_MODEL, log_records, losses, read_tables, run_training, same_tables

_RANKS = 2


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("data") / "dataset"
    split = {"train": [(0, 227)], "validation": [(227, 277)]}
    make_dataset(path, (150, 77, 50), table_rows=[3, 4, 10, 2, *[40] * 22], split=split)
    return path


def _tables(dataset: Path) -> tuple[TableSpec, ...]:
    return table_specs(load_config("sample", ["model.dim=16"]).model, Dataset.open(dataset).table_rows)


def _mixed(tables: Sequence[TableSpec], ranks: int = _RANKS) -> PlanFile:
    """Every other table by rows, the rest on the last rank but one copy."""
    kinds = ["row_wise", "table_wise"] * 12 + ["data_parallel", "table_row_wise"]
    places = {"table_wise": (ranks - 1,), "table_row_wise": (0,)}
    return PlanFile(
        planner="forced",
        ranks=ranks,
        ranks_per_host=ranks,
        optimizer="rowwise_adagrad",
        batch_size_per_rank=16,
        tables=tuple(
            planned_table(table, TableShape(sharding_type=kind, columns=16, places=places.get(kind, ())))
            for table, kind in zip(tables, kinds, strict=True)
        ),
    )


@pytest.fixture(scope="module")
def straight(dataset: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """An uninterrupted run with a plan file."""
    root = tmp_path_factory.mktemp("straight")
    save_plan(root / "plan.json", _mixed(_tables(dataset)))
    run_training(_RANKS, root / "run", dataset, [f"sharding.plan={root / 'plan.json'}"])
    return root


def test_the_runs_folder_keeps_the_plan_byte_for_byte(straight: Path) -> None:
    assert (straight / "run" / "plan.json").read_bytes() == (straight / "plan.json").read_bytes()


def test_a_run_resumes_with_its_own_plan_after_the_file_is_gone_and_the_folder_moved(
    straight: Path, dataset: Path, tmp_path: Path
) -> None:
    plan = tmp_path / "plan.json"
    save_plan(plan, _mixed(_tables(dataset)))
    run_training(_RANKS, tmp_path / "first", dataset, [f"sharding.plan={plan}", "train.max_steps=4"])
    plan.unlink()
    run = tmp_path / "moved"
    shutil.move(tmp_path / "first", run)
    assert resolve_run(None, [f"run.path={run}"], resume=True).config.sharding.plan == str(run / "plan.json")
    run_training(_RANKS, run, dataset, ["train.max_steps=0"], resume=True)
    assert losses(run) == losses(straight / "run")
    assert same_tables(read_tables(run), read_tables(straight / "run"))
    assert load_plan(run / "plan.json").layout() == _mixed(_tables(dataset)).layout()


def test_other_ranks_need_another_plan_named_by_set(straight: Path, dataset: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    plan = straight / "plan.json"
    run_training(_RANKS, run, dataset, [f"sharding.plan={plan}", "train.max_steps=4"])
    with pytest.raises(PlanError, match="ranks: the plan's 2, here 3"):
        run_training(3, run, dataset, ["train.max_steps=0"], resume=True)
    save_plan(tmp_path / "three.json", _mixed(_tables(dataset), 3))
    other = [f"sharding.plan={tmp_path / 'three.json'}", "train.max_steps=6"]
    run_training(3, run, dataset, other, resume=True)
    assert load_plan(run / "plan.json").ranks == 3
    run_training(1, run, dataset, ["sharding.plan=torchrec", "train.max_steps=0"], resume=True)
    assert load_plan(run / "plan.json").planner == "torchrec"
    ours, theirs = (dict(zip(range(99), losses(path), strict=False)) for path in (run, straight / "run"))
    assert len(ours) == len(theirs)
    assert list(ours.values()) == pytest.approx(list(theirs.values()), abs=1e-6)


def _evaluate(run: str, dataset: str) -> EvaluationResult:
    request = EvaluationRequest(
        config=load_config(Path(run) / "config.toml"), run=run, data=dataset, split="validation", step=None
    )
    return evaluate_rank(request, StopRequest())


def test_a_run_is_evaluated_on_its_plan_and_on_other_ranks_with_a_note(straight: Path, dataset: Path) -> None:
    on_plan = run_ranks(_RANKS, _evaluate, str(straight / "run"), str(dataset))[0]
    assert on_plan.notes == []
    logged = log_records(straight / "run", "validation")[-1]
    assert on_plan.metrics.logloss == logged["logloss"]
    (alone,) = run_ranks(1, _evaluate, str(straight / "run"), str(dataset))
    assert alone.notes == [
        "scoring with a plan of TorchRec's in place of the run's: ranks: the plan's 2, here 1; "
        "ranks a host: the plan's 2, here 1"
    ]
    assert alone.metrics.logloss == pytest.approx(on_plan.metrics.logloss, abs=1e-6)


def test_a_new_run_is_refused_a_plan_for_another_dataset_and_leaves_no_folder(dataset: Path, tmp_path: Path) -> None:
    tables = [TableSpec(name="C1", rows=99, dim=16), *_tables(dataset)[1:]]
    save_plan(tmp_path / "plan.json", _mixed(tables))
    with pytest.raises(PlanError, match="table C1: rows in the plan 99, here 3"):
        run_training(_RANKS, tmp_path / "run", dataset, [f"sharding.plan={tmp_path / 'plan.json'}"])
    assert not (tmp_path / "run").exists()


@pytest.mark.parametrize(("dry", "rows"), [(False, 9), (True, 9), (True, 16)])
def test_a_plan_for_another_batch_size_is_taken_with_a_note(
    dry: bool, rows: int, dataset: Path, tmp_path: Path
) -> None:
    whole = [
        planned_table(t, TableShape(sharding_type="table_wise", columns=16, places=(0,))) for t in _tables(dataset)
    ]
    plan = _mixed(_tables(dataset)).model_copy(update={"ranks": 1, "ranks_per_host": 1, "tables": tuple(whole)})
    save_plan(tmp_path / "plan.json", plan)
    settings = [f"run.path={tmp_path / 'run'}", f"data.path={dataset}", *SMALL_MODEL, f"data.batch_size={rows}"]
    settings += [f"sharding.plan={tmp_path / 'plan.json'}", "train.max_steps=1"]
    words = ["train", "sample", "--nproc", "1", *(word for value in settings for word in ("--set", value))]
    command = [sys.executable, "-m", "dlrm_scale", *words, *(["--dry-run"] if dry else [])]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    told = done.stdout + done.stderr
    assert done.returncode == 0, told
    assert f"sharding plan from {tmp_path / 'plan.json'}, made by forced" in told
    note = "the plan was made for 16 rows of a batch a rank, and here a rank has 9"
    assert (note in told) is (rows != 16)
