"""Whether the predicted memory is there, on every host and GPU, before anything large is allocated."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch

from dlrm_scale.config import Config
from dlrm_scale.data.dataset.dataset import Dataset
from dlrm_scale.data.loading.loader import TrainLoader
from dlrm_scale.errors import PlanError
from dlrm_scale.host_memory import host_memory
from dlrm_scale.layout import ShardLayout
from dlrm_scale.sharding.ranks import Ranks
from dlrm_scale.train.memory.batch_memory import mean_ids
from dlrm_scale.train.memory.estimate_peak import (
    MemoryEstimate,
    MemoryItem,
    estimate_dense,
    estimate_memory,
)
from dlrm_scale.train.memory.estimate_scoring import estimate_scoring
from dlrm_scale.train.memory.staging_plan import StagingNeed, plan_staging, staging_memory_bytes
from dlrm_scale.units import format_bytes

__all__ = ["MemoryCheck", "RankMemory", "ScoringMemory", "check_memory", "describe_memory", "gather_memory"]

_RANKS_SHOWN = 8


@dataclass(frozen=True, kw_only=True)
class RankMemory:
    """What one rank needs and sees.

    Attributes:
        estimate: what it needs.
        host_free_bytes: main memory that its host, or its container, has left.
        device_free_bytes: memory that its GPU has left; None on CPU.
    """

    estimate: MemoryEstimate
    host_free_bytes: int
    device_free_bytes: int | None


class MemoryCheck:
    """Estimates and checks: the dense part before it is built, everything once the plan is known.

    Args:
        config: the whole run's.
        dataset: what it trains on.
        loader: before it has read anything.
        ranks: the process group.

    Attributes:
        estimate: this rank's, after `check`.
        needs: of all ranks, after `check`, also after one that refuses.
        staging: every rank's memory for snapshots, after `check`; equal on all ranks.
        warnings: what `check_memory` returned.
    """

    def __init__(self, config: Config, dataset: Dataset, loader: TrainLoader, ranks: Ranks) -> None:
        self._config, self._dataset, self._loader, self._ranks = config, dataset, loader, ranks
        self.needs: list[RankMemory] = []
        self.warnings: list[str] = []

    def check_dense(self) -> None:
        """Before the model is built: see `check_memory`, for its dense part alone. A collective."""
        estimate = estimate_dense(self._config, len(self._dataset.table_rows), self._ranks)
        check_memory(gather_memory(estimate, self._ranks), self._ranks.local_ranks, self._config.train.memory_check)

    def check(self, layout: ShardLayout) -> None:
        """See `check_memory`. A collective."""
        estimate = estimate_memory(self._config, self._dataset, layout, self._loader, self._ranks)
        need = StagingNeed.of_rank(
            self._config,
            layout,
            self._ranks.rank,
            mean_ids(self._dataset),
            free_bytes=host_memory().free_bytes,
            other_bytes=estimate.host_bytes,
        )
        needs = [view for view in self._ranks.gather_objects(need) if isinstance(view, StagingNeed)]
        setting_bytes = staging_memory_bytes(self._config.checkpoint)
        self.staging = plan_staging(needs, self._ranks.local_ranks, setting_bytes)
        mine = self.staging[self._ranks.rank]
        item = MemoryItem(name="staging of checkpoints", size_bytes=mine.size_bytes + mine.ids_bytes)
        self.estimate = replace(estimate, items=(*estimate.items, item))
        self.needs = gather_memory(self.estimate, self._ranks)
        self.warnings = check_memory(self.needs, self._ranks.local_ranks, self._config.train.memory_check)


class ScoringMemory:
    """As `MemoryCheck`, where rows are only scored.

    Args:
        config: of the run.
        dataset: what is scored.
        rows: rows that are scored, over all ranks.
        ranks: the process group.
        slices: of rows, with metrics of their own.

    Attributes:
        estimate: this rank's, after `check`.
        warnings: what `check_memory` returned.
    """

    def __init__(self, config: Config, dataset: Dataset, rows: int, ranks: Ranks, *, slices: int = 0) -> None:
        self._config, self._dataset, self._rows, self._ranks, self._slices = config, dataset, rows, ranks, slices
        self.warnings: list[str] = []

    def check_dense(self) -> None:
        """Before the model is built: see `check_memory`, for its dense part alone. A collective."""
        self._compare(estimate_dense(self._config, len(self._dataset.table_rows), self._ranks, trains=False))

    def check(self, layout: ShardLayout) -> None:
        """See `check_memory`. A collective."""
        self.estimate = estimate_scoring(
            self._config, self._dataset, layout, self._rows, self._ranks, slices=self._slices
        )
        self.warnings = self._compare(self.estimate)

    def _compare(self, estimate: MemoryEstimate) -> list[str]:
        needs = gather_memory(estimate, self._ranks)
        return check_memory(needs, self._ranks.local_ranks, self._config.train.memory_check)


def gather_memory(estimate: MemoryEstimate, ranks: Ranks) -> list[RankMemory]:
    """What all ranks need and see, by rank. A collective.

    Args:
        estimate: this rank's.
        ranks: the process group.
    """
    device_free = torch.cuda.mem_get_info(ranks.device)[0] if ranks.device.type == "cuda" else None
    mine = RankMemory(estimate=estimate, host_free_bytes=host_memory().free_bytes, device_free_bytes=device_free)
    return [view for view in ranks.gather_objects(mine) if isinstance(view, RankMemory)]


def check_memory(needs: Sequence[RankMemory], local_ranks: int, policy: Literal["refuse", "warn"]) -> list[str]:
    """Compare what all ranks need with what there is.

    Args:
        needs: of all ranks; those of one host follow one another.
        local_ranks: how many a host has.
        policy: `train.memory_check`.

    Returns:
        Warnings, equal on all ranks; empty if the memory is there.

    Raises:
        PlanError: it isn't, and `policy` is `refuse`; on every rank, with the numbers of each rank that is concerned.
    """
    problem = _problem(needs, local_ranks)
    if problem is None:
        return []
    if policy == "refuse":
        raise problem
    return [f"train.memory_check = warn: {problem.message}"]


def describe_memory(estimate: MemoryEstimate) -> str:
    """One line: the sum and its items, largest first, those below a hundredth of it left out."""
    total = sum(item.size_bytes for item in estimate.items)
    return f"rank {estimate.rank}: {format_bytes(total)}: {_items(estimate)}"


def _problem(views: Sequence[RankMemory], local_ranks: int) -> PlanError | None:
    for view in views:
        free = view.device_free_bytes
        if free is not None and view.estimate.device_bytes > free:
            what = f"the GPU of rank {view.estimate.rank} has {format_bytes(free)} left"
            return _error(what, [view.estimate], view.estimate.device_bytes)
    for first in range(0, len(views), local_ranks):
        host = views[first : first + local_ranks]
        free = min(view.host_free_bytes for view in host)
        needed = sum(view.estimate.host_bytes for view in host)
        if needed > free:
            which = f"ranks {first} to {first + len(host) - 1}" if len(host) > 1 else f"rank {first}"
            what = f"the host of {which} has {format_bytes(free)} left"
            return _error(what, [view.estimate for view in host], needed)
    return None


def _error(what: str, estimates: Sequence[MemoryEstimate], needed: int) -> PlanError:
    fullest = sorted(estimates, key=lambda e: -(e.host_bytes + e.device_bytes))
    lines = [describe_memory(e) for e in sorted(fullest[:_RANKS_SHOWN], key=lambda e: e.rank)]
    if len(estimates) > _RANKS_SHOWN:
        lines.append(f"and {len(estimates) - _RANKS_SHOWN} ranks that need less")
    return PlanError(
        f"not enough memory: {what}, and {format_bytes(needed)} are needed. Nothing was allocated.\n  "
        + "\n  ".join(lines),
        remedy=f"{_remedy(fullest[0])}; train.memory_check=warn tries it all the same",
    )


def _remedy(estimate: MemoryEstimate) -> str:
    largest = max(estimate.items, key=lambda item: item.size_bytes).name
    table = estimate.largest_table
    if "scores" in largest:
        return "use train.auc=binned, or more ranks"
    if estimate.trains_nothing and ("batches" in largest or "activations" in largest):
        return "use a smaller train.validation_batch_size, or more ranks"
    if "data-parallel" in largest:
        return f'use another type than data_parallel for {table}, as in sharding.tables.{table} = "row_wise"'
    if "windows" in largest:
        return "use a smaller data.window_rows, fewer data.readers, or more ranks"
    if "batches" in largest or "activations" in largest:
        return "use a smaller data.batch_size, data.prefetch_batches or more train.micro_batches"
    if "staging" in largest:
        return "set a smaller checkpoint.staging_memory, or leave it at auto"
    if "dense" in largest:
        return "use smaller layers (model.dense_layers, model.over_layers)"
    smaller = "use more hosts, a smaller model.dim, or fewer rows in the tables (preprocess with --max-rows)"
    if estimate.largest_table_type != "table_wise":
        return smaller
    return f'{smaller}, or divide the largest table evenly with sharding.tables.{table} = "row_wise"'


def _items(estimate: MemoryEstimate) -> str:
    total = sum(item.size_bytes for item in estimate.items)
    ordered = sorted(estimate.items, key=lambda item: -item.size_bytes)
    ordered = [item for item in ordered if 100 * item.size_bytes >= total]
    return ", ".join(f"{item.name} {format_bytes(item.size_bytes)}" for item in ordered)
