"""One rank's run from start to end: wires dataset, model, checkpoints and loop."""

import json
import os
import resource
import time
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.distributed as dist

from dlrm_scale import __version__
from dlrm_scale.checkpoint import CheckpointEngine
from dlrm_scale.config import Config
from dlrm_scale.data.dataset import Dataset
from dlrm_scale.data.loader import EvalLoader, TrainLoader
from dlrm_scale.errors import CheckpointError, ConfigError
from dlrm_scale.sharding.pipeline import make_eval_pipeline, make_train_pipeline
from dlrm_scale.sharding.plan_file import save_plan
from dlrm_scale.sharding.ranks import Ranks, close_ranks, init_ranks
from dlrm_scale.touched_rows import TouchedRows
from dlrm_scale.train.evaluate import evaluate_batches
from dlrm_scale.train.feature_mapping import feature_mapping
from dlrm_scale.train.loop import LoopEnd, TrainingLoop
from dlrm_scale.train.metrics import ClickMetrics
from dlrm_scale.train.plan_table import describe_plan
from dlrm_scale.train.report import RunReport
from dlrm_scale.train.resume import RestoredRun, agree_on_chain, restore_run
from dlrm_scale.train.run_folder import RunFolder, RunRequest
from dlrm_scale.train.schedule import multiplier
from dlrm_scale.train.setup import ModelOnRanks, build_on_ranks, device_kind, pipeline_kind, set_threads
from dlrm_scale.train.stop import StopRequest
from dlrm_scale.units import KIB

__all__ = ["RunResult", "train_rank"]


@dataclass(frozen=True, kw_only=True)
class RunResult:
    """The summary of a start of a run; also `result.json`.

    Attributes:
        state: `finished` or `stopped`.
        step: completed steps of the run.
        start_step: step that this start began with.
        ranks: how many ranks trained.
        rows: training rows of this start.
        seconds: wall time of the loop, without evaluation.
        samples_per_second: rows over seconds.
        data_wait_share: share of seconds in which rank 0 waited for batches.
        checkpoint_stall_share: share of seconds in which rank 0 was stalled by checkpoints.
        loss: mean training loss of the last log window; None without steps.
        validation: metrics of the last validation; None after a stop or without such rows.
        baseline_bytes: bytes of the last committed baseline, or None.
        delta_bytes: mean bytes of the committed deltas, or None.
        checkpoints_committed: of this start.
        checkpoints_failed: of this start.
        peak_memory_bytes: largest resident host memory of a rank's process, over ranks.
    """

    state: str
    step: int
    start_step: int
    ranks: int
    rows: int
    seconds: float
    samples_per_second: float
    data_wait_share: float
    checkpoint_stall_share: float
    loss: float | None
    validation: dict[str, object] | None
    baseline_bytes: int | None
    delta_bytes: float | None
    checkpoints_committed: int
    checkpoints_failed: int
    peak_memory_bytes: int


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
    ranks = init_ranks(kind, config.train.collective_timeout_seconds)
    try:
        set_threads(config, ranks.local_ranks)
        return _train(request, stop, ranks)
    finally:
        close_ranks()


def _train(request: RunRequest, stop: StopRequest, ranks: Ranks) -> RunResult:
    config, folder = request.config, request.folder
    dataset = Dataset.open(Path(config.data.path))
    model = build_on_ranks(config, dataset, ranks)
    sharded = model.sharded
    notes = [f"changed by --set: {path} from {before} to {after}" for path, before, after in request.changes]

    restored = _restore(request, model, dataset, ranks, notes)
    resumed = restored if request.resume else None
    start_step = resumed.step if resumed else 0
    cursor = resumed.cursor if resumed else None

    loader = TrainLoader(
        dataset,
        config.data,
        rank=ranks.rank,
        ranks=ranks.ranks,
        epochs=config.train.epochs,
        cursor=cursor,
        pin_memory=ranks.device.type == "cuda",
    )
    loader.read_ahead()
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
        cursor=cursor,
        record={"feature_mapping": feature_mapping(dataset)},
    )
    try:
        if report is None:
            return _finish(loop, dataset, None, config, folder, ranks)
        save_plan(folder.plan, sharded.layout)
        with report:
            _introduce(report, model, dataset, loader, ranks, start_step, config, notes)
            return _finish(loop, dataset, report, config, folder, ranks)
    finally:
        loader.close()
        engine.close()


def _finish(
    loop: TrainingLoop, dataset: Dataset, report: RunReport | None, config: Config, folder: RunFolder, ranks: Ranks
) -> RunResult:
    end = loop.run()
    validation = None
    if end.state == "finished" and dataset.split_rows("validation"):
        validation = loop.validate(0)
        if report is not None:
            report.record("validation", end.step, validation.as_dict())
    result = _result(end, loop.start_step, validation, ranks)
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


def _restore(
    request: RunRequest, model: ModelOnRanks, dataset: Dataset, ranks: Ranks, notes: list[str]
) -> RestoredRun | None:
    root = request.folder.checkpoints
    if request.init_from:
        root = RunFolder(path=Path(request.init_from)).checkpoints
    chain = agree_on_chain(root, ranks) if request.resume or request.init_from else None
    if chain is None:
        if request.init_from:
            raise CheckpointError(f"--init-from {request.init_from}: that run has no checkpoint")
        if request.resume:
            notes.append("the run has no checkpoint yet: starting from its beginning")
        model.fill_initial_rows(request.config.model.seed)
        return None
    started = time.perf_counter()
    restored = restore_run(chain, request.config, model.sharded, dataset, ranks, weights_only=bool(request.init_from))
    notes.extend(restored.notes)
    what = f"weights and optimizer state of {request.init_from}" if request.init_from else "the run"
    notes.append(f"restored {what} at step {restored.step} in {time.perf_counter() - started:.1f} s")
    if request.resume and not restored.same_ranks:
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


def _peak_memory_bytes(ranks: Ranks) -> int:
    peak = torch.tensor([resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * KIB])
    dist.all_reduce(peak, op=dist.ReduceOp.MAX, group=ranks.control_group)
    return int(peak.item())


def _result(end: LoopEnd, start_step: int, validation: ClickMetrics | None, ranks: Ranks) -> RunResult:
    committed = [outcome for outcome in end.outcomes if outcome.committed]
    baselines = [outcome.bytes for outcome in committed if outcome.kind == "baseline"]
    deltas = [outcome.bytes for outcome in committed if outcome.kind == "delta"]
    return RunResult(
        state=end.state,
        step=end.step,
        start_step=start_step,
        ranks=ranks.ranks,
        rows=end.rows,
        seconds=end.seconds,
        samples_per_second=end.rows / end.seconds,
        data_wait_share=end.data_wait_seconds / end.seconds,
        checkpoint_stall_share=end.checkpoint_seconds / end.seconds,
        loss=end.final_loss,
        validation=validation.as_dict() if validation else None,
        baseline_bytes=baselines[-1] if baselines else None,
        delta_bytes=sum(deltas) / len(deltas) if deltas else None,
        checkpoints_committed=len(committed),
        checkpoints_failed=len(end.outcomes) - len(committed),
        peak_memory_bytes=_peak_memory_bytes(ranks),
    )
