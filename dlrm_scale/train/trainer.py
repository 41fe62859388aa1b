"""One rank's run from start to end: wires dataset, model, checkpoints and loop."""

import json
import os
import time
from dataclasses import asdict
from pathlib import Path

import torch

from dlrm_scale import __version__
from dlrm_scale.checkpoint import Chain, CheckpointEngine
from dlrm_scale.config import Config
from dlrm_scale.data.dataset import Dataset
from dlrm_scale.data.loader import EvalLoader, TrainLoader
from dlrm_scale.errors import CheckpointError, ConfigError
from dlrm_scale.install import check_install
from dlrm_scale.sharding.pipeline import make_eval_pipeline, make_train_pipeline
from dlrm_scale.sharding.plan_file import save_plan
from dlrm_scale.sharding.ranks import Ranks, close_ranks, init_ranks
from dlrm_scale.touched_rows import TouchedRows
from dlrm_scale.train.evaluate import evaluate_batches
from dlrm_scale.train.feature_mapping import feature_mapping
from dlrm_scale.train.loop import TrainingLoop
from dlrm_scale.train.metrics import ClickMetrics
from dlrm_scale.train.plan_table import describe_plan
from dlrm_scale.train.report import RunReport
from dlrm_scale.train.resume import RestoredRun, agree_on_chain, restore_run
from dlrm_scale.train.run_folder import RunFolder, RunRequest
from dlrm_scale.train.run_result import RunResult, make_result
from dlrm_scale.train.schedule import multiplier
from dlrm_scale.train.setup import ModelOnRanks, build_on_ranks, device_kind, pipeline_kind, set_threads
from dlrm_scale.train.stop import StopRequest

__all__ = ["train_rank"]


def train_rank(request: RunRequest, stop: StopRequest) -> RunResult:
    """Train on this rank; called on every rank with the same request.

    Args:
        request: from `resolve_run`.
        stop: set by SIGINT and SIGTERM.

    Raises:
        DlrmScaleError: whatever a user can mend.
    """
    config = request.config
    kind = device_kind(config)
    check_install(device=kind)
    ranks = init_ranks(kind, config.train.collective_timeout_seconds)
    try:
        set_threads(config, ranks.local_ranks)
        return _train(request, stop, ranks)
    finally:
        close_ranks()


def _train(request: RunRequest, stop: StopRequest, ranks: Ranks) -> RunResult:
    config = request.config
    dataset = Dataset.open(Path(config.data.path))
    chain = _find_chain(request, ranks)
    loader = TrainLoader(
        dataset,
        config.data,
        rank=ranks.rank,
        ranks=ranks.ranks,
        epochs=config.train.epochs,
        cursor=chain.tip.cursor or None if chain is not None and request.resume else None,
        pin_memory=ranks.device.type == "cuda",
    )
    try:
        # the first batch is ready by the time that the model is
        loader.read_ahead()
        return _train_on(dataset, loader, chain, request, stop, ranks)
    finally:
        loader.close()


def _train_on(
    dataset: Dataset, loader: TrainLoader, chain: Chain | None, request: RunRequest, stop: StopRequest, ranks: Ranks
) -> RunResult:
    config, folder = request.config, request.folder
    model = build_on_ranks(config, dataset, ranks)
    sharded = model.sharded
    notes = [f"changed by --set: {path} from {before} to {after}" for path, before, after in request.changes]
    resumed = _fill(model, chain, dataset, request, ranks, notes)
    # only now: a mistake found above leaves no folder behind
    _claim_folder(request, ranks)
    touched = TouchedRows([shard.region.rows for shard in sharded.local_shards], ranks.device)
    sharded.track(touched)
    engine = CheckpointEngine(
        folder.checkpoints,
        layout=sharded.layout,
        shards=sharded.local_shards,
        touched=touched,
        rank=ranks.rank,
        ranks=ranks.ranks,
        store=ranks.store if ranks.ranks > 1 else None,
        config=config.checkpoint,
        optimizer=config.sparse_optimizer.kind,
        resumed_from=resumed.chain if resumed else None,
    )
    pipeline = pipeline_kind(config, ranks.device)
    evaluation = make_eval_pipeline(sharded, pipeline)

    def validate(limit_rows: int) -> ClickMetrics:
        batches = EvalLoader(
            dataset,
            split="validation",
            batch_size=config.train.validation_batch_size or config.data.batch_size,
            rank=ranks.rank,
            ranks=ranks.ranks,
            limit_rows=limit_rows,
            pin_memory=ranks.device.type == "cuda",
        )
        return evaluate_batches(evaluation.run, batches, ranks)

    start_step = resumed.step if resumed else 0
    total_steps = min(config.train.max_steps or loader.total_steps, loader.total_steps)
    report = RunReport(folder, total_steps, start_step) if ranks.rank == 0 else None
    loop = TrainingLoop(
        config=config,
        ranks=ranks,
        sharded=sharded,
        touched=touched,
        loader=loader,
        pipeline=make_train_pipeline(sharded, pipeline),
        engine=engine,
        stop=stop,
        validate=validate,
        report=report,
        start_step=start_step,
        cursor=resumed.cursor if resumed else None,
        record={"feature_mapping": feature_mapping(dataset)},
    )
    try:
        if report is None:
            return _finish(loop, dataset, None, folder, ranks)
        save_plan(folder.plan, sharded.layout)
        with report:
            _introduce(report, model, dataset, loader, ranks, start_step, config, notes)
            return _finish(loop, dataset, report, folder, ranks)
    finally:
        engine.close()


def _finish(
    loop: TrainingLoop, dataset: Dataset, report: RunReport | None, folder: RunFolder, ranks: Ranks
) -> RunResult:
    end = loop.run()
    validation = None
    if end.state == "finished" and dataset.split_rows("validation"):
        validation = loop.validate(0)
        if report is not None:
            report.record("validation", end.step, validation.as_dict())
    result = make_result(end, loop.start_step, validation, ranks)
    if report is not None:
        values = asdict(result)
        report.record("end", end.step, values)
        temporary = folder.path / ".result.json"
        temporary.write_text(json.dumps(values, indent=1))
        os.replace(temporary, folder.result)
    return result


def _claim_folder(request: RunRequest, ranks: Ranks) -> None:
    failure: object = None
    if ranks.rank == 0:
        try:
            if request.resume:
                request.folder.save_config(request.config)
            else:
                request.folder.claim(request.config, request.source)
        except ConfigError as error:
            failure = error
    failure = ranks.broadcast_object(failure)
    if isinstance(failure, ConfigError):
        raise failure


def _find_chain(request: RunRequest, ranks: Ranks) -> Chain | None:
    if request.resume:
        return agree_on_chain(request.folder.checkpoints, ranks)
    if not request.init_from:
        return None
    chain = agree_on_chain(RunFolder(path=Path(request.init_from)).checkpoints, ranks)
    if chain is None:
        raise CheckpointError(f"--init-from {request.init_from}: that run has no checkpoint")
    return chain


def _fill(
    model: ModelOnRanks,
    chain: Chain | None,
    dataset: Dataset,
    request: RunRequest,
    ranks: Ranks,
    notes: list[str],
) -> RestoredRun | None:
    """Give the model its values; return where a resumed run stands, None for a new one."""
    if chain is None:
        if request.resume:
            notes.append("the run has no checkpoint yet: starting from its beginning")
        model.fill_initial_rows(request.config.model.seed)
        return None
    started = time.perf_counter()
    restored = restore_run(chain, request.config, model.sharded, dataset, ranks, position=request.resume)
    notes.extend(restored.notes)
    what = "the run" if request.resume else f"weights and optimizer state of {request.init_from}"
    notes.append(f"restored {what} at step {restored.step} in {time.perf_counter() - started:.1f} s")
    if not request.resume:
        return None
    if not restored.same_ranks:
        notes.append("the number of ranks changed: rows and state are exact, losses agree to rounding")
    return restored


def _introduce(
    report: RunReport,
    model: ModelOnRanks,
    dataset: Dataset,
    loader: TrainLoader,
    ranks: Ranks,
    start_step: int,
    config: Config,
    notes: list[str],
) -> None:
    for note in notes:
        report.say(note)
    report.say(describe_plan(model.sharded.plan_rows(), model.sharded.optimizer_owners()))
    factor = multiplier(config.schedule, start_step, loader.total_steps)
    report.say(
        f"{dataset.split_rows('train'):,} training rows, {loader.steps_per_epoch:,} steps an epoch, "
        f"{config.train.epochs} epochs, {ranks.ranks} ranks on {ranks.device.type}; starting at step {start_step} with "
        f"learning rates {config.dense_optimizer.learning_rate * factor:g} (dense) and "
        f"{config.sparse_optimizer.learning_rate * factor:g} (tables)"
    )
    if loader.dropped_rows:
        report.say(f"data.drop_last: {loader.dropped_rows:,} rows of each epoch are dropped")
    report.record(
        "start",
        start_step,
        {"ranks": ranks.ranks, "version": __version__, "torch": torch.__version__, "time": time.time()},
    )
