"""Evaluating a run's checkpoint on a dataset, on any number of ranks."""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from dlrm_scale.checkpoint import Chain
from dlrm_scale.config import Config
from dlrm_scale.data.dataset.dataset import Dataset
from dlrm_scale.data.loading.loader import EvalLoader
from dlrm_scale.errors import CheckpointError, DatasetError, MissingCheckpointError, TrainingError
from dlrm_scale.install import check_install
from dlrm_scale.models.tables import table_specs
from dlrm_scale.scoring.scoring_plan import scoring_plan
from dlrm_scale.sharding.eval_pipeline import EvalPipeline
from dlrm_scale.sharding.pipeline import make_eval_pipeline
from dlrm_scale.sharding.ranks import Ranks, close_ranks, init_ranks
from dlrm_scale.train.chain_choice import agree_on_chain
from dlrm_scale.train.evaluate import evaluate_slices
from dlrm_scale.train.memory.memory_check import ScoringMemory
from dlrm_scale.train.memory.memory_use import memory_use
from dlrm_scale.train.metrics.metrics import ClickMetrics
from dlrm_scale.train.metrics.row_slices import make_slices
from dlrm_scale.train.metrics.score_ranking import auc_kind
from dlrm_scale.train.resume import RestoredRun, restore_run
from dlrm_scale.train.run_folder import RunFolder
from dlrm_scale.train.setup import build_on_ranks, device_kind, pipeline_kind, set_threads
from dlrm_scale.train.stop import StopRequest
from dlrm_scale.train.told_checkpoints import with_lost_steps
from dlrm_scale.train.told_on_ranks import told_on_all_ranks

__all__ = ["EvaluationRequest", "EvaluationResult", "evaluate_rank", "interrupted", "restored_pipeline"]


@dataclass(frozen=True, kw_only=True)
class EvaluationRequest:
    """What to evaluate.

    Attributes:
        config: the run's saved config.
        run: its folder.
        data: the dataset's folder.
        split: `validation`, `test` or `train`.
        step: checkpoint of this step; None for the newest.
        manifest: name of the checkpoint's manifest, which goes before `step`; or "".
        by: what the rows are sliced by, `day` or a column; or "".
        top: values of a column that have slices of their own.
    """

    config: Config
    run: str
    data: str
    split: str
    step: int | None
    manifest: str = ""
    by: str = ""
    top: int = 10


@dataclass(frozen=True, kw_only=True)
class EvaluationResult:
    """Metrics and what they were measured on.

    Attributes:
        step: of the checkpoint.
        metrics: over all rows of the split.
        notes: damaged checkpoints that were skipped, memory that is short.
        slices: over the rows of each slice that has any, by its name.
        memory: predicted and used, see `memory_use`.
    """

    step: int
    metrics: ClickMetrics
    notes: list[str]
    slices: Mapping[str, ClickMetrics]
    memory: Mapping[str, object]


def evaluate_rank(request: EvaluationRequest, stop: StopRequest) -> EvaluationResult:
    """Restore and score on this rank; called on every rank with the same request.

    Raises:
        CheckpointError: no checkpoint, or one that doesn't fit; DatasetError: a dataset that doesn't fit.
        ConfigError: slices that can't be made; PlanError: not enough memory.
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
                remedy="evaluate on labeled rows, or score these with `dlrm-scale predict`",
            )
        if not dataset.split_rows(request.split):
            filled = [split for split in ("train", "validation", "test") if dataset.split_rows(split)]
            raise DatasetError(
                f"{dataset.path} has no rows in its {request.split} split",
                remedy=f"evaluate --split {' or '.join(filled)}",
            )
        slices = make_slices(request.by, dataset, request.split, request.top) if request.by else None
        memory = ScoringMemory(
            config, dataset, dataset.split_rows(request.split), ranks, slices=len(slices.names) if slices else 0
        )
        restored, pipeline = restored_pipeline(
            config, dataset, ranks, request.run, request.step, request.manifest, memory
        )
        batches = EvalLoader(
            dataset,
            split=request.split,
            batch_size=config.train.validation_batch_size or config.data.batch_size,
            rank=ranks.rank,
            ranks=ranks.ranks,
            pin_memory=ranks.device.type == "cuda",
            readers=config.data.readers,
        )
        auc = auc_kind(config.train.auc, batches.rows)
        evaluation = evaluate_slices(pipeline.run, batches, ranks, stop, auc=auc, slices=slices)
        if evaluation is None:
            raise interrupted(stop)
        return EvaluationResult(
            step=restored.step,
            metrics=evaluation.metrics,
            notes=[*memory.warnings, *restored.notes],
            # of the powers of two most have no rows
            slices={name: metrics for name, metrics in evaluation.slices.items() if metrics.rows},
            memory=memory_use(memory.estimate, ranks),
        )
    finally:
        close_ranks()


def restored_pipeline(
    config: Config,
    dataset: Dataset,
    ranks: Ranks,
    run: str,
    step: int | None,
    manifest: str,
    memory: ScoringMemory,
) -> tuple[RestoredRun, EvalPipeline]:
    """Build the model, fill it from a checkpoint and make a pipeline that scores with it; a collective.

    Args:
        config: of the run.
        dataset: what is scored.
        ranks: the process group.
        run: folder of the run.
        step: checkpoint of this step; None for the newest.
        manifest: name of the checkpoint's manifest, which goes before `step`; or "".
        memory: checked before the model is built, and before its tables are allocated.

    Raises:
        CheckpointError: no checkpoint, or one that doesn't fit; DatasetError: a dataset that doesn't fit.
        PlanError: no plan, or not enough memory.
    """
    memory.check_dense()
    config, plan, notes = scoring_plan(config, run, table_specs(config.model, dataset.table_rows), ranks)
    model = build_on_ranks(config, dataset, ranks, memory.check, plan)
    folder = RunFolder(path=Path(run))
    told = told_on_all_ranks(folder, ranks) if step is None and not manifest else None
    location = folder.checkpoints
    chain = agree_on_chain(location, ranks, step, manifest=manifest)
    if chain is None and told is not None:
        raise CheckpointError(
            f"{folder.path / told.source} tells of committed checkpoints, and {location} has none",
            remedy="put the files back from a copy, or train again",
        )
    if chain is None:
        raise MissingCheckpointError(f"run {run} has no checkpoint", remedy="train it first")

    def next_best(damaged: Mapping[str, str]) -> Chain | None:
        found = agree_on_chain(location, ranks, step, manifest=manifest, damaged=damaged)
        return None if found is None else with_lost_steps(found, told)

    restored = restore_run(
        with_lost_steps(chain, told),
        config,
        model.sharded,
        dataset,
        ranks,
        position=False,
        next_best=next_best,
    )
    restored.notes.extend(notes)
    return restored, make_eval_pipeline(model.sharded, pipeline_kind(config, ranks.device))


def interrupted(stop: StopRequest) -> TrainingError:
    """What to raise when a signal ended the work."""
    error = TrainingError(f"stopped by {stop.signal_name or 'a signal to another rank'}")
    error.exit_code = 130
    return error
