"""Pooled lookups and fused updates through the trainer's own kernels, by columns, ids a bag and distinct rows."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
    ComputeDevice,
    EmbeddingLocation,
    SplitTableBatchedEmbeddingBagsCodegen,
)

from dlrm_scale.planning.cluster.cluster import Constant, LookupCosts
from dlrm_scale.planning.measuring.calibration_fit import fit_times
from dlrm_scale.planning.measuring.micro_timing import RankTimer
from dlrm_scale.sharding.memory_pages import on_huge_pages
from dlrm_scale.sharding.ranks import Ranks
from dlrm_scale.sharding.table_kernels import TableKernel
from dlrm_scale.sharding.table_threads import look_up_in_threads

__all__ = ["LookupShape", "lookup_shapes", "measure_lookups", "skewed_ids"]

_BATCHES = 3
"""Different ids in turn, so that a repeat doesn't find its rows in the cache."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LookupShape:
    """One kernel's work.

    Attributes:
        tables: alike.
        dim: their columns.
        rows: of each.
        samples: of the global batch.
        ids: a bag.
        skew: ids are `rows * u ** skew` of even u; 1 is even.
    """

    tables: int
    dim: int
    rows: int
    samples: int
    ids: int
    skew: float


def lookup_shapes(*, quick: bool) -> list[LookupShape]:
    """List shapes from a cache's rows to memory's, from one id a bag to 30."""
    dims, bags = ((16, 64), (1, 10)) if quick else ((16, 32, 64, 128), (1, 8, 30))
    rows = ((2_000, 3.0), (200_000, 1.0)) if quick else ((1_000, 3.0), (50_000, 3.0), (500_000, 1.0), (500_000, 3.0))
    shapes = [
        LookupShape(tables=1, dim=dim, rows=count, samples=2048, ids=ids, skew=skew)
        for dim in dims
        for ids in bags
        for count, skew in rows
    ]
    several = (4, 12) if quick else (4, 12, 26)
    for tables in several:
        for dim in dims[-2:]:
            for samples in (1024,) if quick else (1024, 4096):
                shapes.append(LookupShape(tables=tables, dim=dim, rows=20_000, samples=samples, ids=1, skew=3.0))
    return shapes


def measure_lookups(
    ranks: Ranks, timer: RankTimer, shapes: list[LookupShape], progress: Callable[[str], None]
) -> tuple[LookupCosts, LookupCosts, dict[str, float]]:
    """Measure and fit lookups and updates. A collective.

    Returns:
        Costs forward and backward, and the errors of both fits.
    """
    features, forward, backward = [], [], []
    for number, shape in enumerate(shapes, 1):
        work = _Kernel(shape, ranks, seed=number)
        looked_up, updated = timer.time(work.look_up, work.update)
        features.append(_features(shape, work.unique_rows))
        forward.append(looked_up.milliseconds)
        backward.append(updated.milliseconds)
        if number % 8 == 0 or number == len(shapes):
            progress(f"lookups and updates: {number} of {len(shapes)} shapes")
    fits = [fit_times(features, times) for times in (forward, backward)]
    costs = [
        LookupCosts(
            **{
                f"{name}_ms": Constant(value=value, source=f"calibrate: {len(shapes)} shapes of {what}")
                for name, value in zip(_NAMES, fit.values, strict=True)
            }
        )
        for fit, what in zip(fits, ("lookups", "updates"), strict=True)
    ]
    return costs[0], costs[1], {"lookup": fits[0].error, "update": fits[1].error}


def skewed_ids(rows: int, count: int, skew: float, generator: torch.Generator) -> torch.Tensor:
    """Draw `[count]` int64 ids below `rows`; a skew above 1 makes low ids frequent."""
    drawn = torch.rand(count, generator=generator, dtype=torch.float64).pow(skew) * rows
    return drawn.long().clamp_(max=rows - 1)


_NAMES = ("call", "table", "lookup", "element", "unique_row", "unique_element", "output_element")


def _features(shape: LookupShape, unique_rows: float) -> list[float]:
    lookups = shape.tables * shape.samples * shape.ids / 1e6
    unique = shape.tables * unique_rows / 1e6
    output = shape.tables * shape.samples * shape.dim / 1e6
    return [1.0, shape.tables, lookups, lookups * shape.dim, unique, unique * shape.dim, output]


class _Kernel:
    """One fused kernel with ids to look up."""

    def __init__(self, shape: LookupShape, ranks: Ranks, seed: int) -> None:
        on_gpu = ranks.device.type == "cuda"
        place = EmbeddingLocation.DEVICE if on_gpu else EmbeddingLocation.HOST
        device = ComputeDevice.CUDA if on_gpu else ComputeDevice.CPU
        self._tables = SplitTableBatchedEmbeddingBagsCodegen(
            [(shape.rows, shape.dim, place, device)] * shape.tables,
            optimizer=EmbOptimType.EXACT_ROWWISE_ADAGRAD,
            learning_rate=0.01,
            device=ranks.device if on_gpu else None,
        )
        for name in ("weights_host", "momentum1_host"):
            memory = getattr(self._tables, name, None)
            if isinstance(memory, torch.Tensor) and memory.numel():
                on_huge_pages(memory.detach())
                memory.detach().fill_(0.01)
        module: Any = SimpleNamespace(emb_module=self._tables)
        look_up_in_threads([TableKernel(module=module, regions=(), features=(), fused=True)], torch.get_num_threads())
        generator = torch.Generator().manual_seed(1000 * seed + ranks.rank)
        bag, count = shape.ids, shape.samples * shape.ids
        drawn = [
            [skewed_ids(shape.rows, count, shape.skew, generator) for _ in range(shape.tables)] for _ in range(_BATCHES)
        ]
        self.unique_rows = float(np.mean([len(np.unique(ids.numpy())) for batch in drawn for ids in batch]))
        self._ids = self._in_turn([torch.cat(batch).to(ranks.device) for batch in drawn])
        self._offsets = torch.arange(0, shape.tables * count + 1, bag).to(ranks.device)
        self._gradient = torch.full((shape.samples, shape.tables * shape.dim), 1e-3, device=ranks.device)
        self._pooled: torch.Tensor | None = None

    def look_up(self) -> None:
        self._pooled = self._tables.forward(next(self._ids), self._offsets)

    def update(self) -> None:
        assert self._pooled is not None
        self._pooled.backward(self._gradient)  # type: ignore[no-untyped-call]
        self._pooled = None

    @staticmethod
    def _in_turn(batches: list[torch.Tensor]) -> Iterator[torch.Tensor]:
        while True:
            yield from batches
