"""Scoring batches without disturbing a training pipeline that has batches in flight."""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch

from dlrm_scale.batch import Batch
from dlrm_scale.sharding.shard import ShardedModel
from dlrm_scale.sharding.sparse_dist import ForwardOverrides, SparseDistSteps

__all__ = ["EvalPipeline"]


class EvalPipeline:
    """Scores batches with the current weights.

    Nothing that training depends on changes: no gradients, no touched rows, no optimizer step counts, and
    the overrides of a training pipeline are taken off for each step and put back after it. So steps of `run` and of
    training may even alternate, as long as all ranks do the same.

    Args:
        sharded: the model that is being trained.
        overlapped: run TorchRec's SparseDist pipeline, with overrides of its own, instead of the plain model.
    """

    def __init__(self, sharded: ShardedModel, *, overlapped: bool) -> None:
        """Evaluate `sharded`."""
        self._sharded = sharded
        self._overlapped = overlapped

    def run(self, batches: Iterable[Batch]) -> Iterator[tuple[Batch, torch.Tensor, torch.Tensor]]:
        """Yield each batch with `sum(weights * row_loss)` `[]` and its logits `[B]`, in order.

        A collective: every rank runs equally many batches.
        """
        iterator = iter(batches)
        if not self._overlapped:
            for batch in iterator:
                yield self._score(batch.to(self._sharded.ranks.device))
            return
        # A pipeline a run: what an abandoned run left in flight must not show up in the next one.
        steps = SparseDistSteps(self._sharded.module, None, self._sharded.ranks.device)
        own = ForwardOverrides()
        while True:
            with self._undisturbed():
                own.put()
                try:
                    result = steps.step(iterator)
                except StopIteration:
                    return
                finally:
                    own = ForwardOverrides.take(self._sharded.module.module)
            yield result

    def _score(self, batch: Batch) -> tuple[Batch, torch.Tensor, torch.Tensor]:
        with self._undisturbed():
            _, (row_loss_sum, logits) = self._sharded.module(batch)
        return batch, row_loss_sum, logits

    @contextmanager
    def _undisturbed(self) -> Iterator[None]:
        """Evaluation mode inside the block; afterwards everything is as it was.

        Entered for each step and left before the caller gets its result: `no_grad` around a `yield` would
        hold in the caller's code too.
        """
        module, touched = self._sharded.module, self._sharded.touched
        training, enabled = module.training, touched is not None and touched.enabled
        overrides = ForwardOverrides.take(module.module)
        module.eval()
        if touched is not None:
            touched.enabled = False
        try:
            with torch.no_grad():
                yield
        finally:
            if touched is not None:
                touched.enabled = enabled
            module.train(training)
            # fbgemm's kernels count forward passes, not updates.
            self._sharded.set_table_iterations(self._sharded.table_iterations())
            overrides.put()
