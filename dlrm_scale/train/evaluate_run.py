"""Evaluating a run's checkpoint on a dataset, on any number of ranks."""

from dataclasses import dataclass
from pathlib import Path

from dlrm_scale.config import Config
from dlrm_scale.data.dataset import Dataset
from dlrm_scale.data.loader import EvalLoader
from dlrm_scale.errors import CheckpointError, DatasetError, TrainingError
from dlrm_scale.install import check_install
from dlrm_scale.sharding.pipeline import make_eval_pipeline
from dlrm_scale.sharding.ranks import close_ranks, init_ranks
from dlrm_scale.train.evaluate import evaluate_batches
from dlrm_scale.train.metrics import ClickMetrics
from dlrm_scale.train.resume import agree_on_chain, restore_run
from dlrm_scale.train.run_folder import RunFolder
from dlrm_scale.train.setup import build_on_ranks, device_kind, pipeline_kind, set_threads
from dlrm_scale.train.stop import StopRequest

__all__ = ["EvaluationRequest", "EvaluationResult", "evaluate_rank"]


@dataclass(frozen=True, kw_only=True)
class EvaluationRequest:
    """What to evaluate.

    Attributes:
        config: the run's saved config.
        run: its folder.
        data: the dataset's folder.
        split: `validation`, `test` or `train`.
        step: checkpoint of this step; None for the newest.
    """

    config: Config
    run: str
    data: str
    split: str
    step: int | None


@dataclass(frozen=True, kw_only=True)
class EvaluationResult:
    """Metrics and what they were measured on.

    Attributes:
        step: of the checkpoint.
        metrics: over all rows of the split.
        notes: damaged checkpoints that were skipped.
    """

    step: int
    metrics: ClickMetrics
    notes: list[str]


def evaluate_rank(request: EvaluationRequest, stop: StopRequest) -> EvaluationResult:
    """Restore and score on this rank; called on every rank with the same request.

    Raises:
        CheckpointError: no checkpoint, or one that doesn't fit; DatasetError: a dataset that doesn't fit.
        TrainingError: a signal ended it.
    """
    config = request.config
    kind = device_kind(config)
    check_install(device=kind)
    ranks = init_ranks(kind, config.train.collective_timeout_seconds)
    try:
        set_threads(config, ranks.local_ranks)
        dataset = Dataset.open(Path(request.data))
        if dataset.manifest.statistics.get("labeled") is False:
            raise DatasetError(
                f"{dataset.path}: its rows have no labels (--unlabeled), so there is nothing to compare scores with",
                remedy="evaluate on labeled rows",
            )
        model = build_on_ranks(config, dataset, ranks)
        chain = agree_on_chain(RunFolder(path=Path(request.run)).checkpoints, ranks, request.step)
        if chain is None:
            raise CheckpointError(f"run {request.run} has no checkpoint", remedy="train it first")
        restored = restore_run(chain, config, model.sharded, dataset, ranks, position=False)
        pipeline = make_eval_pipeline(model.sharded, pipeline_kind(config, ranks.device))
        batches = EvalLoader(
            dataset,
            split=request.split,
            batch_size=config.train.validation_batch_size or config.data.batch_size,
            rank=ranks.rank,
            ranks=ranks.ranks,
            pin_memory=ranks.device.type == "cuda",
        )
        metrics = evaluate_batches(pipeline.run, batches, ranks, stop)
        if metrics is None:
            interrupted = TrainingError(f"stopped by {stop.signal_name or 'a signal to another rank'}")
            interrupted.exit_code = 130
            raise interrupted
        return EvaluationResult(step=restored.step, metrics=metrics, notes=restored.notes)
    finally:
        close_ranks()
