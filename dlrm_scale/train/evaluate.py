"""Metrics over exactly the rows of a split, whatever the batch size and number of ranks."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from dlrm_scale.batch import Batch
from dlrm_scale.sharding.ranks import Ranks
from dlrm_scale.train.metrics import ClickMetrics, click_metrics
from dlrm_scale.train.stop import StopRequest

__all__ = ["ScoredRows", "evaluate_batches", "gather_scores", "true_rows"]

_BATCHES_BETWEEN_LOOKS = 16
"""A small all-reduce every so many batches asks whether a rank was told to stop."""


@dataclass(frozen=True, kw_only=True)
class ScoredRows:
    """Logits and labels of true rows.

    Attributes:
        logits: `[N]` float32.
        labels: `[N]` uint8.
    """

    logits: NDArray[np.float32]
    labels: NDArray[np.uint8]


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
    run: Callable[[Iterable[Batch]], Iterable[tuple[Batch, torch.Tensor, torch.Tensor]]],
    batches: Iterable[Batch],
    ranks: Ranks,
    stop: StopRequest | None = None,
) -> ClickMetrics | None:
    """Score every batch and return the global metrics, the same on every rank.

    Args:
        run: an evaluation pipeline's `run`.
        batches: this rank's share; equal numbers of batches on all ranks.
        ranks: the process group.
        stop: ends the evaluation early, on all ranks after the same batch.

    Returns:
        The metrics; None if it was ended.
    """
    scored = []
    for number, (batch, _, logits) in enumerate(run(batches), start=1):
        scored.append(true_rows(batch, logits))
        if stop is not None and number % _BATCHES_BETWEEN_LOOKS == 0 and _any_rank(stop.requested, ranks):
            return None
    rows = gather_scores(scored, ranks)
    result: list[ClickMetrics | None] = [click_metrics(rows.logits, rows.labels) if rows is not None else None]
    if ranks.ranks > 1:
        dist.broadcast_object_list(result, src=0, group=ranks.control_group)
    return result[0]


def _any_rank(wanted: bool, ranks: Ranks) -> bool:
    flag = torch.tensor([int(wanted)])
    dist.all_reduce(flag, op=dist.ReduceOp.MAX, group=ranks.control_group)
    return bool(flag.item())
