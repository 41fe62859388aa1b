"""Scoring rows with a run's checkpoint, on any number of ranks, into one file in the order of the rows."""

import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from numpy.typing import NDArray

from dlrm_scale.config import Config
from dlrm_scale.data.dataset.dataset import Dataset, RowRange
from dlrm_scale.data.loading.loader import EvalLoader
from dlrm_scale.errors import DatasetError
from dlrm_scale.install import check_install
from dlrm_scale.scoring.evaluate_run import interrupted, restored_pipeline
from dlrm_scale.scoring.score_file import RowPlaces, ScoreFormat, ScoreWriter
from dlrm_scale.scoring.score_progress import ScoreProgress
from dlrm_scale.sharding.ranks import Ranks, close_ranks, init_ranks
from dlrm_scale.train.evaluate import MetricParts, ScoredRows, gather_scores, stop_wanted, true_rows
from dlrm_scale.train.memory.memory_check import ScoringMemory
from dlrm_scale.train.memory.memory_use import memory_use
from dlrm_scale.train.metrics.click_sums import ClickSums
from dlrm_scale.train.metrics.metrics import ClickMetrics
from dlrm_scale.train.metrics.score_ranking import auc_kind
from dlrm_scale.train.setup import device_kind, set_threads
from dlrm_scale.train.stop import StopRequest

__all__ = ["PredictRequest", "PredictResult", "is_labeled", "predict_rank", "scored_ranges"]

_ROWS_AT_ONCE = 1 << 16
"""Scores go to rank 0 and into the file about so many rows at a time, whatever the length of the input."""


@dataclass(frozen=True, kw_only=True)
class PredictRequest:
    """What to score.

    Attributes:
        config: the run's saved config.
        run: its folder.
        step: checkpoint of this step; None for the newest.
        manifest: name of the checkpoint's manifest, which goes before `step`; or "".
        data: folder of the dataset with the rows.
        places: which rows are scored, and where they come from.
        file: the new file, on rank 0's host.
        format: of the file.
    """

    config: Config
    run: str
    step: int | None
    manifest: str
    data: str
    places: RowPlaces
    file: str
    format: ScoreFormat


@dataclass(frozen=True, kw_only=True)
class PredictResult:
    """What was scored.

    Attributes:
        step: of the checkpoint.
        rows: rows in the file.
        mean_prediction: mean predicted probability; None without rows, or when one isn't finite.
        nonfinite: rows whose logit isn't finite.
        metrics: where rows have labels.
        notes: damaged checkpoints that were skipped, memory that is short.
        seconds: wall time of the scoring.
        memory: predicted and used, see `memory_use`.
    """

    step: int
    rows: int
    mean_prediction: float | None
    nonfinite: int
    metrics: ClickMetrics | None
    notes: list[str]
    seconds: float
    memory: Mapping[str, object]


def is_labeled(dataset: Dataset) -> bool:
    """Whether the rows of a dataset have labels."""
    return dataset.manifest.statistics.get("labeled") is not False


def scored_ranges(dataset: Dataset, split: str) -> tuple[tuple[int, int], ...]:
    """Rows of a split, or of `all`, as ascending (start, end).

    Raises:
        DatasetError: no such split.
    """
    if split == "all":
        return ((0, dataset.rows),) if dataset.rows else ()
    return tuple((r.start, r.end) for r in dataset.split_ranges(split))


def predict_rank(request: PredictRequest, stop: StopRequest) -> PredictResult:
    """Restore, score, and write on rank 0; called on every rank with the same request.

    Raises:
        CheckpointError: no checkpoint, or one that doesn't fit.
        DatasetError: a dataset that doesn't fit, or the file can't be written.
        PlanError: not enough memory.
        TrainingError: a signal ended it.
    """
    config = request.config
    kind = device_kind(config)
    check_install(device=kind)
    ranks = init_ranks(kind, config.train.collective_timeout_seconds)
    try:
        set_threads(config, ranks.local_ranks)
        dataset = Dataset.open(Path(request.data))
        return _predict(request, dataset, ranks, stop)
    finally:
        close_ranks()


def _predict(request: PredictRequest, dataset: Dataset, ranks: Ranks, stop: StopRequest) -> PredictResult:
    config = request.config
    labeled = is_labeled(dataset)
    scored_rows = _only(dataset, request.places.ranges)
    memory = ScoringMemory(config, dataset, scored_rows.split_rows("test"), ranks)
    restored, pipeline = restored_pipeline(config, dataset, ranks, request.run, request.step, request.manifest, memory)
    batches = EvalLoader(
        scored_rows,
        split="test",
        batch_size=config.train.validation_batch_size or config.data.batch_size,
        rank=ranks.rank,
        ranks=ranks.ranks,
        pin_memory=ranks.device.type == "cuda",
        readers=config.data.readers,
    )
    started = time.monotonic()
    parts = MetricParts(auc_kind(config.train.auc, batches.rows)) if labeled else None
    sums = ClickSums()
    scored: list[torch.Tensor] = []
    rows_global: list[int] = []
    try:
        with ExitStack() as stack:
            progress = stack.enter_context(ScoreProgress(batches.rows, shown=ranks.rank == 0))
            writer = None
            if ranks.rank == 0:
                writer = ScoreWriter(Path(request.file), request.format, request.places, labeled=labeled)
                stack.enter_context(writer)

            def flush() -> None:
                if parts is not None and scored:
                    local = torch.cat(scored).cpu()
                    parts.add(local[:, 0].contiguous().numpy(), local[:, 1].numpy().astype(np.uint8))
                gathered = gather_scores(scored, ranks)
                if writer is not None and gathered is not None and rows_global:
                    ordered = _in_order(gathered, rows_global, ranks.ranks)
                    writer.write(ordered.logits, ordered.labels)
                    sums.add(ordered.logits, ordered.labels)
                progress.add(sum(rows_global))
                scored.clear()
                rows_global.clear()

            for batch, _, logits in pipeline.run(batches):
                scored.append(true_rows(batch, logits))
                rows_global.append(batch.rows_global)
                if sum(rows_global) >= _ROWS_AT_ONCE:
                    flush()
                    if stop_wanted(stop, ranks):
                        raise interrupted(stop)
            flush()
    except OSError as error:
        raise DatasetError(
            f"the scores can't be written: {error}", remedy="free space, or name another --out"
        ) from error
    return PredictResult(
        step=restored.step,
        rows=batches.rows,
        mean_prediction=sums.mean_prediction if sums.rows and not sums.nonfinite else None,
        nonfinite=sums.nonfinite,
        metrics=parts.metrics(ranks) if parts is not None else None,
        notes=[*memory.warnings, *restored.notes],
        seconds=time.monotonic() - started,
        memory=memory_use(memory.estimate, ranks),
    )


def _only(dataset: Dataset, ranges: Sequence[tuple[int, int]]) -> Dataset:
    """The same dataset with these rows as its test split."""
    split = {"train": (), "validation": (), "test": tuple(RowRange(start=start, end=end) for start, end in ranges)}
    return Dataset(dataset.path, replace(dataset.manifest, split=split))


def _in_order(gathered: ScoredRows, rows_global: Sequence[int], ranks: int) -> ScoredRows:
    """Turn rows by rank, then batch, into rows by batch, then rank."""
    cuts: NDArray[np.int64] = np.array(
        [[n * rank // ranks for n in rows_global] for rank in range(ranks + 1)], np.int64
    )
    shares = cuts[1:] - cuts[:-1]  # [ranks, batches]
    ends = np.cumsum(shares.reshape(-1)).reshape(shares.shape)
    order = np.concatenate(
        [
            np.arange(ends[rank, batch] - shares[rank, batch], ends[rank, batch])
            for batch in range(len(rows_global))
            for rank in range(ranks)
        ]
    )
    return ScoredRows(logits=gathered.logits[order], labels=gathered.labels[order])
