"""One rank's run from start to end: wires dataset, model, checkpoints and loop."""

import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path

import torch

from dlrm_scale import __version__
from dlrm_scale.checkpoint import Chain, CheckpointEngine, Retries, open_storage
from dlrm_scale.checkpoint.chain.starts import RunIdentity
from dlrm_scale.checkpoint.saving.cadence import Cadence
from dlrm_scale.checkpoint.upkeep.leftovers import unread_starts
from dlrm_scale.config import Config
from dlrm_scale.data.dataset.dataset import Dataset
from dlrm_scale.data.loading.loader import EvalLoader, TrainLoader
from dlrm_scale.errors import ConfigError, TrainingError
from dlrm_scale.install import check_install
from dlrm_scale.layout import ShardLayout
from dlrm_scale.sharding.given_plan import plan_path
from dlrm_scale.sharding.pipeline import make_eval_pipeline, make_train_pipeline
from dlrm_scale.sharding.plan_file import save_plan
from dlrm_scale.sharding.ranks import Ranks, close_ranks, init_ranks
from dlrm_scale.sharding.step_phases import mark_phases
from dlrm_scale.telemetry import StepClock
from dlrm_scale.touched_rows import TouchedRows
from dlrm_scale.train.attribution.gpu_intervals import GpuIntervals
from dlrm_scale.train.attribution.profile import StepProfiler
from dlrm_scale.train.auto_plan import choose_auto_plan
from dlrm_scale.train.best_checkpoint import BestKeeper, undefined_warning
from dlrm_scale.train.deterministic import deterministic_algorithms
from dlrm_scale.train.evaluate import evaluate_batches
from dlrm_scale.train.feature_mapping import feature_mapping
from dlrm_scale.train.finite_cause import FiniteCause, dataset_rows
from dlrm_scale.train.loop import TrainingLoop
from dlrm_scale.train.memory.memory_check import MemoryCheck, describe_memory
from dlrm_scale.train.memory.memory_use import memory_use
from dlrm_scale.train.memory.staging_memory import allocate_staging
from dlrm_scale.train.memory.staging_plan import describe_staging
from dlrm_scale.train.metrics.collapse import collapse_warning
from dlrm_scale.train.metrics.metrics import ClickMetrics
from dlrm_scale.train.metrics.score_ranking import auc_kind
from dlrm_scale.train.micro_batch_rows import check_micro_batches
from dlrm_scale.train.plan_table import describe_plan
from dlrm_scale.train.report import RunReport
from dlrm_scale.train.resume import RestoreReport
from dlrm_scale.train.run_folder import RunFolder, RunRequest
from dlrm_scale.train.run_result import RunResult, make_result
from dlrm_scale.train.run_saver import INTERVAL_KEY, RunSaver
from dlrm_scale.train.running_trainer import refuse_running_trainer
from dlrm_scale.train.schedule import multiplier
from dlrm_scale.train.setup import (
    ModelOnRanks,
    build_on_ranks,
    compile_layers,
    compile_warnings,
    device_kind,
    exchange_notes,
    pipeline_kind,
    plan_notes,
    precision_notes,
    retention_notes,
    set_threads,
)
from dlrm_scale.train.starting_values import choose_start, fill_model
from dlrm_scale.train.stop import StopRequest

__all__ = ["check_equal_runs", "train_rank"]


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
    with deterministic_algorithms(config.train.deterministic):
        ranks = init_ranks(kind, config.train.collective_timeout_seconds)
        try:
            set_threads(config, ranks.local_ranks)
            return _train(request, stop, ranks)
        finally:
            close_ranks()


def _train(request: RunRequest, stop: StopRequest, ranks: Ranks) -> RunResult:
    config = request.config
    clock = StepClock()
    dataset = Dataset.open(Path(config.data.path))
    check_equal_runs(request, dataset, ranks)
    check_micro_batches(config, ranks.ranks)
    chain, continues = choose_start(request, ranks)
    loaders = _Loaders(dataset, config, ranks)
    try:
        result = _train_on(dataset, loaders, chain, continues, request, stop, ranks, clock)
    except BaseException:
        # what went wrong matters, not that the reading thread is slow to end
        with suppress(TrainingError):
            loaders.close()
        raise
    loaders.close()
    return result


class _Loaders:
    """The run's loader, and another one if it turns out that the run goes on from an older position."""

    def __init__(self, dataset: Dataset, config: Config, ranks: Ranks) -> None:
        self._dataset, self._config, self._ranks = dataset, config, ranks
        self._open: TrainLoader | None = None

    def at(self, cursor: Mapping[str, object] | None) -> TrainLoader:
        """Close what is open and open a loader at a position; None for the beginning."""
        self.close()
        self._open = TrainLoader(
            self._dataset,
            self._config.data,
            rank=self._ranks.rank,
            ranks=self._ranks.ranks,
            epochs=self._config.train.epochs,
            cursor=cursor,
            pin_memory=self._ranks.device.type == "cuda",
        )
        return self._open

    def close(self) -> None:
        """End the reading; TrainingError if that takes too long."""
        if self._open is not None:
            self._open.close()


def _train_on(
    dataset: Dataset,
    loaders: _Loaders,
    chain: Chain | None,
    continues: bool,
    request: RunRequest,
    stop: StopRequest,
    ranks: Ranks,
    clock: StepClock,
) -> RunResult:
    config, folder = request.config, request.folder
    cursor = (chain.tip.cursor or None) if chain is not None and continues else None
    loader = loaders.at(cursor)
    memory = MemoryCheck(config, dataset, loader, ranks)
    memory.check_dense()
    auto = choose_auto_plan(request, dataset, cursor, ranks, stop)

    def before_allocation(layout: ShardLayout) -> None:
        memory.check(layout)
        # the first batch is ready by the time that the model is
        loader.read_ahead()

    model = build_on_ranks(config, dataset, ranks, before_allocation, auto.plan)
    sharded = model.sharded
    notes = [f"changed by --set: {path} from {before} to {after}" for path, before, after in request.changes]
    notes += [f"warning: {warning}" for warning in memory.warnings]
    notes += [*auto.notes, *plan_notes(config, sharded.plan, ranks)]
    notes += [*precision_notes(config, ranks.device), *exchange_notes(config, sharded.layout)]
    notes += retention_notes(config)
    notes += compile_layers(model, config, ranks)
    restored = fill_model(model, chain, continues, dataset, request, ranks, notes)
    resumed = restored if continues else None
    start_step = resumed.step if resumed else 0
    if resumed is not None and chain is not None and resumed.chain.name != chain.name:
        loader = loaders.at(resumed.cursor)
    assert loader.start_step == start_step
    # only now: a mistake found above leaves no folder behind
    total_steps = min(config.train.max_steps or loader.total_steps, loader.total_steps)
    report, run = _open_folder(request, model, total_steps, start_step, ranks)
    staging = allocate_staging(memory.staging, ranks)
    notes += staging.notes
    touched = TouchedRows([shard.region.rows for shard in sharded.local_shards], ranks.device)
    sharded.track(touched)
    best = BestKeeper(config.train.best_metric if ranks.rank == 0 else "none", folder.best)
    if resumed is not None and ranks.rank == 0:
        notes.extend(best.resume(resumed.chain))
    storage = open_storage(request.checkpoints, retries=Retries(give_up_seconds=_patience_seconds(config)))
    engine = CheckpointEngine(
        storage,
        layout=sharded.layout,
        shards=sharded.local_shards,
        touched=touched,
        rank=ranks.rank,
        ranks=ranks.ranks,
        store=ranks.store if ranks.ranks > 1 else None,
        config=config.checkpoint,
        optimizer=config.sparse_optimizer.kind,
        resumed_from=resumed.chain if resumed else None,
        run=run,
        lossy_restores=restored.lossy_restores if restored else 0,
        pinned=best.pinned,
        staging=staging.staging,
        staging_is_short=staging.is_short,
    )
    notes += [f"warning: {warning}" for warning in storage.warnings]
    notes += unread_starts(storage) if report is not None else []
    pipeline = pipeline_kind(config, ranks.device)
    evaluation = make_eval_pipeline(sharded, pipeline)

    def validate(limit_rows: int) -> ClickMetrics | None:
        batches = EvalLoader(
            dataset,
            split="validation",
            batch_size=config.train.validation_batch_size or config.data.batch_size,
            rank=ranks.rank,
            ranks=ranks.ranks,
            limit_rows=limit_rows,
            pin_memory=ranks.device.type == "cuda",
            readers=config.data.readers,
        )
        auc = auc_kind(config.train.auc, batches.rows)
        return evaluate_batches(evaluation.run, batches, ranks, stop, auc=auc)

    backward = mark_phases(sharded, clock)
    gpu = GpuIntervals() if ranks.device.type == "cuda" else None
    if gpu is not None:
        clock.listeners.append(gpu.mark)
    loop = TrainingLoop(
        config=config,
        ranks=ranks,
        sharded=sharded,
        loader=loader,
        pipeline=make_train_pipeline(sharded, pipeline, clock),
        stop=stop,
        cause=FiniteCause(sharded, dataset_rows(loader)),
        validate=validate,
        report=report,
        clock=clock,
        profiler=StepProfiler(config.train.profile_steps, folder.profile, ranks.rank, clock, backward),
        gpu=gpu,
        start_step=start_step,
        rows_before=(resumed.rows_consumed or 0) if resumed else 0,
        cursor=resumed.cursor if resumed else None,
        rank_state=resumed.rank_state if resumed else {},
        saver=RunSaver(
            config=config.checkpoint,
            engine=engine,
            cadence=_cadence(config, resumed.chain if resumed else None),
            ranks=ranks,
            sharded=sharded,
            touched=touched,
            best=best,
            record={"feature_mapping": feature_mapping(dataset), "precision": config.train.precision},
            clock=clock,
            report=report,
            saved_step=start_step,
            saved_as=resumed.chain.name if resumed else "",
        ),
    )
    restore_report = restored.report if restored else None
    if report is None:
        result = _finish(loop, dataset, None, folder, memory, restore_report, ranks)
    else:
        with report:
            report.say(f"memory to come, predicted: {describe_memory(memory.estimate)}")
            report.say(describe_staging(memory.staging, config.checkpoint.staging_memory))
            _introduce(report, model, dataset, loader, ranks, start_step, config, notes)
            result = _finish(loop, dataset, report, folder, memory, restore_report, ranks)
    engine.close()
    return result


def _cadence(config: Config, resumed_from: Chain | None) -> Cadence:
    reached = resumed_from.tip.extra.get(INTERVAL_KEY) if resumed_from is not None else None
    return Cadence(config.checkpoint, first_steps=reached if isinstance(reached, int) else 0)


def _finish(
    loop: TrainingLoop,
    dataset: Dataset,
    report: RunReport | None,
    folder: RunFolder,
    memory: MemoryCheck,
    restore_report: RestoreReport | None,
    ranks: Ranks,
) -> RunResult:
    end = loop.run()
    validation = None
    if end.state == "finished" and dataset.split_rows("validation"):
        with loop.clock.whole("evaluation"):
            validation = loop.validate(0)
    if validation is not None:
        loop.judge_last(validation)
    result = make_result(end, loop.start_step, validation, loop.rank_time(), ranks)
    collapse = None if validation is None else collapse_warning(validation.as_dict())
    told = [*compile_warnings(loop.sharded, loop.config, ranks)]
    undefined = None if validation is None else undefined_warning(loop.config.train.best_metric, validation)
    told += [] if undefined is None else [undefined]
    result = replace(
        result,
        memory=memory_use(memory.estimate, ranks),
        restore=None if restore_report is None else restore_report.as_dict(),
        warnings=[*memory.warnings, *told, *([] if collapse is None else [collapse])],
    )
    best = loop.saver.best.best
    if best is not None:
        result = replace(result, best=best.as_dict())
    if report is not None:
        for warning in told:
            report.say(f"warning: {warning}")
        if validation is not None:
            report.record("validation", end.step, validation.as_dict())
        values = asdict(result)
        report.record("end", end.step, values)
        if end.rows or not folder.result.exists():
            report.save_result(folder, values)
        else:
            report.say("nothing was left to train; result.json keeps the summary of the last start that trained")
    return result


def check_equal_runs(request: RunRequest, dataset: Dataset, ranks: Ranks) -> None:
    """Refuse ranks that were started with different settings or data, on every rank.

    Paths may differ between hosts; everything else would train a mixture or hang.
    """
    values = request.config.model_dump(mode="json")
    values["run"].pop("path")
    values["data"].pop("path")
    values["checkpoint"].pop("path")
    if plan_path(request.config.sharding) is not None:
        values["sharding"]["plan"] = "a file"
    values["sharding"].pop("cluster")
    init = None if request.warm_start is None else request.warm_start.options
    mine = {"config": values, "resume": request.resume, "init": init, "data": dataset.fingerprint}
    views = ranks.gather_objects(mine)
    for rank, view in enumerate(views):
        if view != views[0]:
            assert isinstance(view, dict)
            assert isinstance(views[0], dict)
            names = [name for name in mine if view[name] != views[0][name]]
            raise ConfigError(
                f"rank {rank} was started with another {' and '.join(names)} than rank 0",
                remedy="give every host the same command and the same dataset",
            )


def _patience_seconds(config: Config) -> float:
    # Shorter than the time after which the other ranks take a silent one for dead.
    return 0.8 * config.checkpoint.vote_timeout_seconds


def _open_folder(
    request: RunRequest, model: ModelOnRanks, total_steps: int, start_step: int, ranks: Ranks
) -> tuple[RunReport | None, RunIdentity | None]:
    """Claim or reopen the run's folder on rank 0; what fails there fails on every rank.

    Returns:
        On rank 0 where to tell what happens, and which run it is.

    Raises:
        ConfigError: the folder can't be written or is taken.
    """
    report: RunReport | None = None
    run: RunIdentity | None = None
    failure: object = None
    if ranks.rank == 0:
        folder = request.folder
        try:
            if request.resume:
                # once more: another one may have claimed the folder since the first look
                refuse_running_trainer(open_storage(request.checkpoints), folder.log)
                folder.save_config(request.config)
            else:
                folder.claim(request.config, request.source, request.warm_start)
            save_plan(folder.plan, model.sharded.plan)
            report = RunReport(folder, total_steps, start_step)
            run = folder.give_id()
        except ConfigError as error:
            failure = error
        except OSError as error:
            failure = ConfigError(f"run.path {folder.path}: {error}")
    failure = ranks.broadcast_object(failure)
    if isinstance(failure, ConfigError):
        raise failure
    return report, run


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
