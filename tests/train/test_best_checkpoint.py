"""The best checkpoint is kept and named, whatever retention, crashes and resumes do."""

import json
from pathlib import Path

import numpy as np
import pytest
from typer.testing import CliRunner

from dlrm_scale.checkpoint import list_checkpoints, open_chain, verify
from dlrm_scale.checkpoint.saving.engine import SaveOutcome
from dlrm_scale.cli.checkpoint import app as checkpoint_commands
from dlrm_scale.errors import CheckpointError
from dlrm_scale.recipes import load_config
from dlrm_scale.scoring.evaluate_run import EvaluationRequest, evaluate_rank
from dlrm_scale.train.best_checkpoint import BestKeeper, best_manifest, read_best, undefined_warning
from dlrm_scale.train.metrics.metrics import ClickMetrics, click_metrics
from dlrm_scale.train.run_folder import RunFolder
from dlrm_scale.train.stop import StopRequest
from tests.support.datasets import make_dataset
from tests.support.rank_runner import run_ranks
from tests.support.training import log_records, run_training

# a baseline at every save, and only the newest chain is kept; the rate is so large that the model gets worse later
SETTINGS = (
    "sharding.kind=row_wise",
    "checkpoint.keep_baselines=1",
    "checkpoint.baseline_ratio=0.000001",
    "train.validate_every_steps=2",
    "dense_optimizer.learning_rate=0.05",
    "train.epochs=3",
)


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("data") / "dataset"
    make_dataset(path, (227, 60), table_rows=[40] * 26, split={"train": [(0, 227)], "validation": [(227, 287)]})
    return path


def _best_of_log(run: Path) -> tuple[float, int]:
    return min((float(str(r["logloss"])), int(str(r["step"]))) for r in log_records(run, "validation"))


def _evaluate(run: str, dataset: str) -> tuple[int, ClickMetrics]:
    folder = RunFolder(path=Path(run))
    request = EvaluationRequest(
        config=load_config(folder.config),
        run=run,
        data=dataset,
        split="validation",
        step=None,
        manifest=best_manifest(folder.best),
    )
    result = evaluate_rank(request, StopRequest())
    return result.step, result.metrics


def test_the_best_checkpoint_survives_retention_and_a_resume(dataset: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    run_training(2, run, dataset, [*SETTINGS, "train.max_steps=14"])
    first = read_best(run / "best.json")
    assert first is not None
    assert (first.value, first.step) == _best_of_log(run)
    second = run_training(2, run, dataset, ["train.max_steps=0"], resume=True)[0].result
    best = read_best(run / "best.json")
    assert best is not None
    assert (best.value, best.step) == _best_of_log(run)
    assert best.step < second.step == 24
    assert second.best == best.as_dict()
    assert verify(run / "checkpoints") == []
    kept = list_checkpoints(run / "checkpoints")
    assert best.manifest in {row.name for row in kept}
    assert sum(row.kind == "baseline" for row in kept) == 2
    listed = json.loads(CliRunner().invoke(checkpoint_commands, ["ls", str(run), "--json"]).output)
    assert [row["step"] for row in listed if row["best"]] == [best.step]
    # it is worth what was measured when it was saved
    step, metrics = run_ranks(2, _evaluate, str(run), str(dataset))[0]
    assert (step, metrics.logloss) == (best.step, best.value)


def test_a_crash_between_commit_and_best_json_loses_nothing(dataset: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    run_training(1, run, dataset, [*SETTINGS, "train.max_steps=2", "checkpoint.every_steps=0"])
    best = read_best(run / "best.json")
    assert best is not None
    (run / "best.json").unlink()
    run_training(1, run, dataset, ["train.max_steps=3", "train.best_metric=none"], resume=True)
    assert read_best(run / "best.json") == best


def test_none_keeps_no_best_and_saves_nothing_more(dataset: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    settings = [*SETTINGS, "train.max_steps=8", "train.best_metric=none", "checkpoint.every_steps=0"]
    result = run_training(1, run, dataset, settings)[0].result
    assert result.best is None
    assert not (run / "best.json").exists()
    assert [row.step for row in list_checkpoints(run / "checkpoints")] == [8]
    with pytest.raises(CheckpointError, match="no validation has told the best checkpoint"):
        best_manifest(run / "best.json")


def test_validations_on_fewer_rows_are_compared_with_their_like(dataset: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    run_training(1, run, dataset, [*SETTINGS, "train.max_steps=5", "train.validation_rows=40"])
    best = read_best(run / "best.json")
    assert best is not None
    assert best.rows == 40
    last = log_records(run, "validation")[-1]
    assert (last["step"], last["rows"]) == (5, 60)


def _outcome(manifest: str, *, committed: bool = True) -> SaveOutcome:
    return SaveOutcome(
        step=1,
        seq=1,
        manifest=manifest,
        kind="delta",
        committed=committed,
        bytes=1,
        rows=1,
        stall_seconds=0.0,
        persist_seconds=0.0,
    )


def _metrics(logloss: float | None, auc: float | None, rows: int = 100) -> ClickMetrics:
    made = click_metrics(np.zeros(rows, np.float32), np.array([0, 1] * (rows // 2), np.uint8))
    return ClickMetrics(**{**made.as_dict(), "logloss": logloss, "auc": auc})


def test_only_committed_improvements_count_and_undefined_values_never_do(tmp_path: Path) -> None:
    path = tmp_path / "best.json"
    keeper = BestKeeper("auc", path)
    assert not keeper.improved_by(_metrics(0.1, None), 1)
    assert keeper.improved_by(_metrics(0.5, 0.6), 2)
    assert keeper.record == {"metric": "auc", "value": 0.6, "rows": 100, "step": 2, "manifest": ""}
    assert not keeper.named("manifests/a")
    assert not path.exists()
    # an older save ends first, then the one in question fails
    assert not keeper.note(_outcome("manifests/older"))
    assert not keeper.note(_outcome("manifests/a", committed=False))
    assert keeper.pinned == set()
    assert keeper.improved_by(_metrics(0.5, 0.55), 3)
    assert not keeper.named("manifests/b")
    assert keeper.note(_outcome("manifests/b"))
    assert json.loads(path.read_text())["manifest"] == "manifests/b"
    assert not keeper.improved_by(_metrics(0.1, 0.55), 4)
    assert not keeper.improved_by(_metrics(0.1, 0.5), 4)
    # while the next one is on its way both stay
    assert keeper.improved_by(_metrics(0.9, 0.7), 5)
    assert not keeper.named("manifests/c")
    assert keeper.pinned == {"manifests/b", "manifests/c"}
    assert keeper.note(_outcome("manifests/c"))
    assert keeper.pinned == {"manifests/c"}
    # two on their way: the better one stays pending although the first is committed, and a worse one doesn't count
    assert keeper.improved_by(_metrics(0.9, 0.8), 6)
    keeper.named("manifests/d")
    assert not keeper.improved_by(_metrics(0.9, 0.75), 7)
    assert keeper.improved_by(_metrics(0.9, 0.85), 8)
    keeper.named("manifests/e")
    assert keeper.pinned == {"manifests/c", "manifests/d", "manifests/e"}
    assert keeper.note(_outcome("manifests/d"))
    assert keeper.pinned == {"manifests/d", "manifests/e"}
    assert not keeper.note(_outcome("manifests/e", committed=False))
    assert (keeper.pinned, keeper.best.value) == ({"manifests/d"}, 0.8)
    # another number of rows begins a new comparison
    assert keeper.improved_by(_metrics(0.9, 0.1, rows=50), 9)


def test_a_metric_that_can_tell_no_best_is_warned_of() -> None:
    one_class = click_metrics(np.zeros(100, np.float32), np.zeros(100, np.uint8))
    assert undefined_warning("auc", one_class) == (
        'train.best_metric = "auc" can\'t tell the best checkpoint: only label 0 occurs: AUC and normalized entropy '
        "are undefined"
    )
    assert undefined_warning("logloss", one_class) is None
    assert undefined_warning("none", one_class) is None
    assert undefined_warning("auc", _metrics(0.5, 0.6)) is None


def test_a_damaged_best_json_is_named_and_does_not_hold_up_a_resume(dataset: Path, tmp_path: Path) -> None:
    run = tmp_path / "run"
    run_training(1, run, dataset, [*SETTINGS, "train.max_steps=2"])
    chain = open_chain(run / "checkpoints", best_manifest(run / "best.json"))
    (run / "best.json").write_text("{")
    with pytest.raises(CheckpointError, match=r"best\.json can't be read"):
        best_manifest(run / "best.json")
    keeper = BestKeeper("logloss", run / "best.json")
    notes = keeper.resume(chain)
    assert "best.json can't be read" in notes[0]
    assert keeper.best is not None
    assert keeper.best.manifest == chain.tip.name
