"""Hooks that tell a clock which part of a forward pass the main thread is in.

Under the plain pipeline an interval is that part of the step, whole. Under SparseDist and on GPUs parts are in flight
while the main thread does something else; what is charged is what the main thread spends on starting them and waiting
for them.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import nn
from torch.autograd.profiler import record_function
from torchrec.distributed.embeddingbag import ShardedEmbeddingBagCollection
from torchrec.distributed.types import Awaitable

from dlrm_scale.sharding.shard import ShardedModel
from dlrm_scale.sharding.table_kernels import TableKernel, sharded_collections
from dlrm_scale.telemetry import StepClock

__all__ = ["BackwardRanges", "mark_phases"]


def mark_phases(sharded: ShardedModel, clock: StepClock) -> "BackwardRanges":
    """Charge the input all-to-all, the lookup and the output all-to-all of every forward pass, from now on.

    What the hooks of the collection cover but those inside it don't is the input all-to-all: it is done by the
    collection itself. Values, gradients and the order of operations stay as they were.

    Args:
        sharded: its sharded collections get hooks, after all other changes to them. Only once.
        clock: evaluation runs under it too and must be inside a `whole` interval.

    Returns:
        What splits the backward pass of a profiled step.
    """
    ranges = BackwardRanges(sharded.kernels)
    for collection in sharded_collections(sharded.module.module).values():
        _hook(collection, clock, "input_all_to_all")
        for lookup in collection._lookups:
            _hook(lookup, clock, "lookup")
        for output_dist in collection._output_dists:
            _hook(output_dist, clock, "output_all_to_all")
        collection.register_forward_hook(_OutputWait(clock, ranges))
    return ranges


def _charge_waits(awaitable: Awaitable[Any], clock: StepClock, name: str) -> None:
    """Charge waiting for a request to `name`."""
    wait: Callable[[], Any] = awaitable.wait

    def timed() -> Any:
        # While it is there the request refers to itself: pooled vectors of many steps would wait for the collector.
        del awaitable.wait
        with clock.interval(name):
            return wait()

    awaitable.wait = timed


def _hook(module: nn.Module, clock: StepClock, name: str) -> None:
    module.register_forward_pre_hook(lambda *_: clock.begin(name))
    module.register_forward_hook(lambda *_: clock.end(), always_call=True)


class _OutputWait:
    """Forward hook of a collection: the exchange of pooled vectors ends where the model first uses them."""

    def __init__(self, clock: StepClock, ranges: "BackwardRanges") -> None:
        self._clock = clock
        self._ranges = ranges

    def __call__(self, module: ShardedEmbeddingBagCollection, arguments: object, output: Any) -> None:
        if not isinstance(output, Awaitable):
            return
        _charge_waits(output, self._clock, "output_all_to_all")
        if self._ranges.enabled:
            output.callbacks.append(self._ranges.watch)


class BackwardRanges:
    """Names the parts of a backward pass in a profiler's trace: dense, gradient all-to-all, tables with their update.

    The hooks sit on the autograd graph of one step and go with it. On a GPU they and their ranges run in autograd's
    thread.

    Args:
        kernels: of this rank.

    Attributes:
        enabled: whether the next forward pass gets hooks.
    """

    def __init__(self, kernels: Iterable[TableKernel]) -> None:
        """Prepare; see the class."""
        self.enabled = False
        self._range: record_function | None = None
        self._tables_left = 0
        for kernel in kernels:
            kernel.module.register_forward_hook(self._watch_lookup)

    def watch(self, pooled: Any) -> Any:
        """Take the waited-for output of a lookup (a callback of TorchRec's awaitables) and return it."""
        values: torch.Tensor = pooled.values()
        if values.requires_grad:
            values.register_hook(self._on_vectors)  # type: ignore[no-untyped-call]
        return pooled

    def _watch_lookup(self, module: nn.Module, arguments: object, output: torch.Tensor) -> None:
        node = output.grad_fn
        if not self.enabled or node is None:
            return
        self._tables_left += 1
        node.register_prehook(lambda *_: self._switch("backward: tables and their update"))
        node.register_hook(lambda *_: self._after_tables())

    def _on_vectors(self, _: torch.Tensor) -> None:
        self._switch("backward: gradient all-to-all" if self._tables_left else None)

    def _after_tables(self) -> None:
        self._tables_left -= 1
        self._on_vectors(torch.empty(0))

    def _switch(self, name: str | None) -> None:
        if self._range is not None:
            self._range.__exit__(None, None, None)
        self._range = None if name is None else record_function(name)
        if self._range is not None:
            self._range.__enter__()  # type: ignore[no-untyped-call]
