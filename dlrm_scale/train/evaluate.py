"""Metrics over exactly the rows of a split, whatever the batch size and number of ranks, in bounded memory."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from dlrm_scale.batch import Batch
from dlrm_scale.sharding.ranks import Ranks
from dlrm_scale.train.metrics.click_sums import ClickSums
from dlrm_scale.train.metrics.metrics import ClickMetrics, metrics_of
from dlrm_scale.train.metrics.row_slices import RowSlices
from dlrm_scale.train.metrics.score_ranking import AucKind, Ranking, make_ranking
from dlrm_scale.train.stop import StopRequest

__all__ = [
    "Evaluation",
    "MetricParts",
    "ScoredRows",
    "evaluate_batches",
    "evaluate_slices",
    "first_local_row",
    "gather_scores",
    "stop_wanted",
    "true_rows",
]

Run = Callable[[Iterable[Batch]], Iterable[tuple[Batch, torch.Tensor, torch.Tensor]]]

_BATCHES_AT_ONCE = 16
"""Scores leave the device, and a small all-reduce asks whether a rank was told to stop, every so many batches."""
_SLICE_BITS = 16
"""Binned AUC of a slice takes 1.5 MiB; that of all rows has 64 times as many bins."""


@dataclass(frozen=True, kw_only=True)
class ScoredRows:
    """Logits and labels of true rows.

    Attributes:
        logits: `[N]` float32.
        labels: `[N]` uint8.
    """

    logits: NDArray[np.float32]
    labels: NDArray[np.uint8]


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """Metrics of all rows and of slices of them.

    Attributes:
        metrics: over all rows.
        slices: by name; their rows and sums add up to those of all rows.
    """

    metrics: ClickMetrics
    slices: Mapping[str, ClickMetrics] = field(default_factory=dict)


class MetricParts:
    """What metrics of some rows are made of, on one rank.

    Args:
        auc: how AUC is computed.
        bits: of a binned AUC.
    """

    def __init__(self, auc: AucKind, *, bits: int = 22) -> None:
        self._sums = ClickSums()
        self._ranking: Ranking = make_ranking(auc, bits=bits)

    def add(self, logits: NDArray[np.float32], labels: NDArray[np.uint8]) -> None:
        """Add rows of this rank: logits `[N]` float32, labels `[N]` uint8."""
        self._sums.add(logits, labels)
        finite = np.isfinite(logits)
        if not finite.all():
            logits, labels = logits[finite], labels[finite]
        self._ranking.add(logits, labels)

    def metrics(self, ranks: Ranks) -> ClickMetrics:
        """Metrics over the rows of all ranks, the same on each; a collective, called once."""
        total = ClickSums()
        for sums in ranks.gather_objects(self._sums) if ranks.ranks > 1 else [self._sums]:
            assert isinstance(sums, ClickSums)
            total.merge(sums)
        return metrics_of(total, self._ranking.auc(ranks))


def true_rows(batch: Batch, logits: torch.Tensor) -> torch.Tensor:
    """`[rows_local, 2]` float32, a copy: logit and label of each true row of this rank.

    A copy, because the loader reuses a batch's buffers; on the batch's device, so that nothing waits for a GPU.
    """
    n = batch.rows_local
    return torch.stack((logits[:n].float(), batch.labels[:n]), dim=1)


def gather_scores(scored: list[torch.Tensor], ranks: Ranks) -> ScoredRows | None:
    """Bring all ranks' rows to rank 0, in the order of ranks; None elsewhere.

    Args:
        scored: this rank's `true_rows`.
        ranks: the process group.
    """
    local = torch.cat(scored).cpu() if scored else torch.empty((0, 2))
    if ranks.ranks > 1:
        counts = torch.zeros(ranks.ranks, dtype=torch.int64)
        counts[ranks.rank] = len(local)
        dist.all_reduce(counts, group=ranks.control_group)
        padded = torch.zeros((int(counts.max()), 2))
        padded[: len(local)] = local
        parts = [torch.empty_like(padded) for _ in range(ranks.ranks)] if ranks.rank == 0 else None
        dist.gather(padded, parts, dst=0, group=ranks.control_group)
        if parts is None:
            return None
        local = torch.cat([part[:count] for part, count in zip(parts, counts.tolist(), strict=True)])
    return ScoredRows(logits=local[:, 0].contiguous().numpy(), labels=local[:, 1].numpy().astype(np.uint8))


def evaluate_batches(
    run: Run,
    batches: Iterable[Batch],
    ranks: Ranks,
    stop: StopRequest | None = None,
    *,
    auc: AucKind = "exact",
) -> ClickMetrics | None:
    """Score every batch and return the global metrics, the same on every rank; see `evaluate_slices`."""
    evaluation = evaluate_slices(run, batches, ranks, stop, auc=auc)
    return None if evaluation is None else evaluation.metrics


def evaluate_slices(
    run: Run,
    batches: Iterable[Batch],
    ranks: Ranks,
    stop: StopRequest | None = None,
    *,
    auc: AucKind = "exact",
    slices: RowSlices | None = None,
) -> Evaluation | None:
    """Score every batch; return the metrics of all rows and of each slice, the same on every rank.

    Equal logits give metrics that are equal to the last bit, whatever the batches and ranks.

    Args:
        run: an evaluation pipeline's `run`.
        batches: this rank's share; equal numbers of batches on all ranks.
        ranks: the process group.
        stop: ends the evaluation early, on all ranks after the same batch.
        auc: how AUC is computed.
        slices: which slice a row is in. Batches must then be those of `EvalLoader`.

    Returns:
        The metrics; None if it was ended.
    """
    whole = MetricParts(auc)
    names = slices.names if slices is not None else ()
    parts = [MetricParts(auc, bits=_SLICE_BITS) for _ in names]
    scored: list[torch.Tensor] = []
    places: list[torch.Tensor] = []

    def flush() -> None:
        rows = torch.cat(scored).cpu() if scored else torch.empty((0, 2))
        logits, labels = rows[:, 0].contiguous().numpy(), rows[:, 1].numpy().astype(np.uint8)
        whole.add(logits, labels)
        place = torch.cat(places).cpu().numpy() if places else np.empty(0, np.int64)
        for index in np.unique(place).tolist():
            inside = place == index
            parts[index].add(logits[inside], labels[inside])
        scored.clear()
        places.clear()

    rows_before = 0
    for number, (batch, _, logits) in enumerate(run(batches), start=1):
        scored.append(true_rows(batch, logits))
        if slices is not None:
            places.append(slices.of(batch, rows_before + first_local_row(batch, ranks)))
        rows_before += batch.rows_global
        if number % _BATCHES_AT_ONCE == 0:
            flush()
            if stop is not None and stop_wanted(stop, ranks):
                return None
    flush()
    return Evaluation(
        metrics=whole.metrics(ranks),
        slices={name: part.metrics(ranks) for name, part in zip(names, parts, strict=True)},
    )


def first_local_row(batch: Batch, ranks: Ranks) -> int:
    """Number in its global batch of the first row that `EvalLoader` gives this rank."""
    return batch.rows_global * ranks.rank // ranks.ranks


def stop_wanted(stop: StopRequest, ranks: Ranks) -> bool:
    """Whether any rank was told to stop; a collective."""
    flag = torch.tensor([int(stop.requested)])
    if ranks.ranks > 1:
        dist.all_reduce(flag, op=dist.ReduceOp.MAX, group=ranks.control_group)
    return bool(flag.item())
