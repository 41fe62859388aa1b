"""Ranks that share an object store instead of a folder train, resume and evaluate as with one."""

from pathlib import Path
from unittest.mock import patch

from dlrm_scale.checkpoint import list_checkpoints, verify
from dlrm_scale.recipes import find_checkpoints, load_config
from dlrm_scale.scoring.evaluate_run import EvaluationRequest, evaluate_rank
from dlrm_scale.train.report import RunReport
from dlrm_scale.train.run_folder import resolve_run
from dlrm_scale.train.stop import StopRequest
from dlrm_scale.train.trainer import train_rank
from tests.checkpoint.faulty_bucket import FolderBucket
from tests.support.datasets import make_dataset
from tests.support.rank_runner import run_ranks
from tests.support.training import SMALL_MODEL, read_tables, run_training, same_tables


def _train(run: str, overrides: list[str], resume: bool) -> tuple[int, list[str]]:
    """Train on this rank; the step it began with, and what it said."""
    FolderBucket.register()
    source = None if resume else "sample"
    request = resolve_run(source, [f"run.path={run}", *overrides], resume=resume)
    said: list[str] = []
    with patch.object(RunReport, "say", lambda _, text: said.append(text)):
        result = train_rank(request, StopRequest())
    return result.start_step, said


def _evaluate(run: str, dataset: str) -> tuple[int, float]:
    FolderBucket.register()
    config = load_config(Path(run) / "config.toml")
    request = EvaluationRequest(config=config, run=run, data=dataset, split="validation", step=None)
    result = evaluate_rank(request, StopRequest())
    return result.step, result.metrics.logloss


def test_two_ranks_on_a_store_without_links_and_renames_equal_those_on_a_folder(tmp_path: Path) -> None:
    dataset, run, bucket = tmp_path / "dataset", tmp_path / "run", tmp_path / "bucket"
    make_dataset(
        dataset,
        (150, 77, 50),
        table_rows=[3, 4, 10, 2, *[40] * 22],
        split={"train": [(0, 227)], "validation": [(227, 277)]},
    )
    settings = ["sharding.kind=row_wise"]
    run_training(2, tmp_path / "straight", dataset, settings)
    url = f"checkpoint.path=folder-bucket://{bucket}/run"
    first = [f"data.path={dataset}", *SMALL_MODEL, *settings, url, "train.max_steps=4"]
    (start, said), (other_start, other_said) = run_ranks(2, _train, str(run), first, False)
    assert (start, other_start, other_said) == (0, 0, [])
    assert any("two trainers that start on this URL at the same moment" in text for text in said)
    assert [start for start, _ in run_ranks(2, _train, str(run), ["train.max_steps=0"], True)] == [4, 4]
    FolderBucket.register()
    location = find_checkpoints(str(run))
    assert location == f"folder-bucket://{bucket}/run"
    assert not (run / "checkpoints").exists()
    assert verify(location, "full") == []
    assert [row.kind for row in list_checkpoints(location)][:2] == ["baseline", "delta"]
    assert {"FORMAT", "data", "manifests", "starts"} <= {path.name for path in (bucket / "run").iterdir()}
    assert same_tables(read_tables(run), read_tables(tmp_path / "straight"))
    # another number of ranks and plan reads it too
    assert [start for start, _ in run_ranks(1, _train, str(run), ["sharding.kind=table_wise"], True)] == [8]
    assert run_ranks(2, _evaluate, str(run), str(dataset))[0][0] == 8
