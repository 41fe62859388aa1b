"""A CPU kernel's lookups and updates on several threads, which fbgemm leaves to one.

fbgemm 1.8's CPU wheel is built without OpenMP: whatever torch is told, all tables of a kernel are looked up, and
updated, one after the other on the calling thread. With 26 tables of 100,000 x 64, B = 2048 and 10 ids a bag one of two
threads was idle for 57 of 124 ms a step. Tables share no memory, so here the threads take some after the others, those
with the most ids first, each with fbgemm's own operators. Every row is added up in the order in which fbgemm adds it:
results are equal to the bit.
"""

import ctypes
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from fbgemm_gpu.split_table_batched_embeddings_ops_training import SplitTableBatchedEmbeddingBagsCodegen

from dlrm_scale.sharding.table_kernels import TableKernel

__all__ = ["TableThreads", "look_up_in_threads"]

Task = Callable[[], None]

_TASKS_A_THREAD = 4
"""Tables with few ids are taken together into about so many tasks: 1, 4 and 13 take the same time where all are alike,
and more balance better where they aren't."""


class TableThreads:
    """Threads that work on tasks together with the caller.

    Args:
        threads: how many work, the caller included.
    """

    def __init__(self, threads: int) -> None:
        """Prepare; threads start with the first tasks."""
        self.threads = threads
        self._pool = ThreadPoolExecutor(max(1, threads - 1), "tables", initializer=_leave_other_threads_alone)

    def run(self, tasks: list[tuple[int, Task]]) -> None:
        """Do all tasks and return; the first failure is raised once no task runs any more.

        Args:
            tasks: with the size of each, in any unit; no task may depend on another.
        """
        left = [task for _, task in sorted(tasks, key=lambda sized: sized[0])]

        def work() -> None:
            with torch.no_grad():
                while True:
                    try:
                        task = left.pop()
                    except IndexError:
                        return
                    task()

        others = [self._pool.submit(work) for _ in range(min(self.threads, len(tasks)) - 1)]
        try:
            with _one_openmp_thread():
                work()
        finally:
            left.clear()
            for other in others:
                other.result()


def look_up_in_threads(kernels: list[TableKernel], threads: int) -> None:
    """Make every fused CPU kernel of several tables use threads, in the forward and in the backward pass.

    Args:
        kernels: of this rank; changed in place. Call it after `support_empty_shards`.
        threads: how many may work; with one nothing changes.
    """
    fused = [k.module.emb_module for k in kernels if k.fused and k.module.emb_module.use_cpu]
    if threads < 2 or not fused:
        return
    workers = TableThreads(threads)
    for tables in fused:
        if tables.optimizer in _UPDATES:
            lookup = _ThreadedLookup(tables, workers)
            if len(lookup.cuts) > 2:
                tables.__dict__["forward"] = lookup


@dataclass(frozen=True, kw_only=True)
class _Part:
    """Some neighbouring tables' share of a kernel's arguments.

    Attributes:
        features: of the kernel.
        columns: of the pooled vectors `[B, total_D]`.
        placements: `[features]` int32.
        weight_starts: `[features]`, where their tables begin in the kernel's memory.
        state_starts: `[features]`, the same for the optimizer's; None without a state.
        column_starts: `[features + 1]` int32, in the pooled vectors of all features.
        own_column_starts: `[features + 1]` int32, in those of the part.
        row_starts: `[features + 1]`, where the rows of their tables begin among those of all tables.
    """

    features: slice
    columns: slice
    placements: torch.Tensor
    weight_starts: torch.Tensor
    state_starts: torch.Tensor | None
    column_starts: torch.Tensor
    own_column_starts: torch.Tensor
    row_starts: torch.Tensor


class _ThreadedLookup:
    """Stands in for `forward` of a kernel."""

    def __init__(self, tables: SplitTableBatchedEmbeddingBagsCodegen, workers: TableThreads) -> None:
        self._tables = tables
        self._workers = workers
        self.cuts = _separable_features(tables)
        self._parts: dict[tuple[int, int], _Part] = {}

    def __call__(
        self, indices: torch.Tensor, offsets: torch.Tensor, per_sample_weights: torch.Tensor | None = None
    ) -> torch.Tensor:
        """Look up `[B, total_D]` float32.

        Args:
            indices: `[ids]`, feature after feature.
            offsets: `[features * B + 1]`.
            per_sample_weights: None; this project's bags have no weights.
        """
        assert per_sample_weights is None
        indices, offsets, *_ = self._tables.prepare_inputs(indices, offsets)  # checks their bounds
        placeholder = self._tables.placeholder_autograd_tensor
        pooled: torch.Tensor = _Lookup.apply(placeholder, self, indices, offsets)  # type: ignore[no-untyped-call]
        return pooled

    def look_up(self, indices: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
        tables = self._tables
        weights = tables.weights_host.detach()
        rows = (len(offsets) - 1) // (len(tables.D_offsets) - 1)
        pooled = torch.empty(rows, tables.total_D)

        def look_up_part(part: _Part, part_offsets: torch.Tensor) -> None:
            pooled[:, part.columns] = torch.ops.fbgemm.split_embedding_codegen_forward_cpu(
                weights,
                part.weight_starts,
                part.own_column_starts,
                part.columns.stop - part.columns.start,
                part.row_starts,
                indices,
                part_offsets,
                tables.pooling_mode,
                None,
                tables.output_dtype,
            )

        self._for_each_part(look_up_part, offsets, rows)
        return pooled

    def update(self, gradient: torch.Tensor, indices: torch.Tensor, offsets: torch.Tensor) -> None:
        tables = self._tables
        gradient = gradient.contiguous()
        update_part = _UPDATES[tables.optimizer]

        def update(part: _Part, part_offsets: torch.Tensor) -> None:
            update_part(tables, part, gradient, indices, part_offsets)

        self._for_each_part(update, offsets, len(gradient))

    def _for_each_part(self, work: Callable[[_Part, torch.Tensor], None], offsets: torch.Tensor, rows: int) -> None:
        starts = offsets[::rows].tolist()
        tasks: list[tuple[int, Task]] = []
        for first, end in pairwise(self._balanced_cuts(starts)):
            part = self._parts.get((first, end)) or _part(self._tables, slice(first, end))
            self._parts[first, end] = part
            tasks.append((starts[end] - starts[first], partial(work, part, offsets[first * rows : end * rows + 1])))
        self._workers.run(tasks)

    def _balanced_cuts(self, starts: list[int]) -> list[int]:
        """Cut where another share of the ids is full: tables with few ids go together.

        Args:
            starts: `[features + 1]`, where the ids of each feature begin.
        """
        shares = self._workers.threads * _TASKS_A_THREAD
        full = [starts[cut] * shares // max(1, starts[-1]) for cut in self.cuts]
        ends = [cut for cut, before, now in zip(self.cuts[1:], full, full[1:], strict=False) if now > before]
        return [0, *ends[:-1], self.cuts[-1]] if ends else [0, self.cuts[-1]]


class _Lookup(torch.autograd.Function):
    """The backward pass updates the tables and gives no gradient: fbgemm's fused optimizer."""

    @staticmethod
    def forward(
        ctx: Any, placeholder: torch.Tensor, lookup: _ThreadedLookup, indices: torch.Tensor, offsets: torch.Tensor
    ) -> torch.Tensor:
        ctx.lookup = lookup
        ctx.save_for_backward(indices, offsets)
        return lookup.look_up(indices, offsets)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[None, None, None, None]:
        ctx.lookup.update(gradient, *ctx.saved_tensors)
        return None, None, None, None


def _separable_features(tables: SplitTableBatchedEmbeddingBagsCodegen) -> list[int]:
    """List, with 0 and the end, the features where fbgemm sees a new table: the one before has rows."""
    starts = tables.hash_size_cumsum.tolist()
    features = len(starts) - 1
    return [0, *(f for f in range(1, features) if starts[f] != starts[f - 1]), features]


def _part(tables: SplitTableBatchedEmbeddingBagsCodegen, features: slice) -> _Part:
    ends = slice(features.start, features.stop + 1)
    column_starts = tables.D_offsets[ends]
    first, *_, end = column_starts.tolist()
    state_starts = getattr(tables, "momentum1_offsets", None)
    return _Part(
        features=features,
        columns=slice(first, end),
        placements=tables.weights_placements[features],
        weight_starts=tables.weights_offsets[features],
        state_starts=None if state_starts is None or not len(state_starts) else state_starts[features],
        column_starts=column_starts,
        own_column_starts=column_starts - first,
        row_starts=tables.hash_size_cumsum[ends],
    )


def _update_by_sgd(
    tables: SplitTableBatchedEmbeddingBagsCodegen,
    part: _Part,
    gradient: torch.Tensor,
    indices: torch.Tensor,
    offsets: torch.Tensor,
) -> None:
    torch.ops.fbgemm.split_embedding_backward_codegen_sgd_cpu(
        *_update_arguments(tables, part, gradient, indices, offsets), tables.learning_rate_tensor, tables.output_dtype
    )


def _update_by_rowwise_adagrad(
    tables: SplitTableBatchedEmbeddingBagsCodegen,
    part: _Part,
    gradient: torch.Tensor,
    indices: torch.Tensor,
    offsets: torch.Tensor,
) -> None:
    assert part.state_starts is not None
    options = tables.optimizer_args
    torch.ops.fbgemm.split_embedding_backward_codegen_rowwise_adagrad_cpu(
        *_update_arguments(tables, part, gradient, indices, offsets),
        tables.momentum1_host.detach(),
        part.placements,
        part.state_starts,
        tables.learning_rate_tensor,
        options.eps,
        options.weight_decay,
        options.weight_decay_mode,
        options.max_norm,
        tables.output_dtype,
    )


def _update_arguments(
    tables: SplitTableBatchedEmbeddingBagsCodegen,
    part: _Part,
    gradient: torch.Tensor,
    indices: torch.Tensor,
    offsets: torch.Tensor,
) -> tuple[object, ...]:
    return (
        gradient,
        tables.weights_host.detach(),
        part.placements,
        part.weight_starts,
        part.column_starts,
        tables.max_D,
        part.row_starts,
        tables.total_hash_size_bits,
        indices,
        offsets,
        tables.pooling_mode,
        None,
        tables.optimizer_args.stochastic_rounding,
    )


_UPDATES = {
    EmbOptimType.EXACT_SGD: _update_by_sgd,
    EmbOptimType.EXACT_ROWWISE_ADAGRAD: _update_by_rowwise_adagrad,
}


def _leave_other_threads_alone() -> None:
    # The sort of a table's ids is the one part that does start OpenMP threads: torch brings the same function, and its
    # is taken. For 20,000 ids that costs more than it saves, and here the other threads are busy with other tables.
    _set_openmp_threads(1)


@contextmanager
def _one_openmp_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    _set_openmp_threads(1)
    try:
        yield
    finally:
        _set_openmp_threads(before)


def _set_openmp_threads(threads: int) -> None:
    """Set how many OpenMP threads the calling thread starts; `torch.set_num_threads` would set it for all.

    Does nothing where OpenMP isn't found among the libraries that torch has loaded.
    """
    torch.get_num_threads()  # the first call of a thread sets the number that all have
    set_threads = getattr(ctypes.CDLL(None), "omp_set_num_threads", None)
    if set_threads is not None:
        set_threads(threads)
