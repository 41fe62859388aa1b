"""Running training steps: a plain loop, or one that overlaps the next batch's input all-to-all."""

from collections.abc import Iterator
from typing import Literal, Protocol

import torch

from dlrm_scale.batch import Batch
from dlrm_scale.sharding.eval_pipeline import EvalPipeline
from dlrm_scale.sharding.shard import ShardedModel
from dlrm_scale.sharding.sparse_dist import SparseDistSteps
from dlrm_scale.telemetry import StepClock

__all__ = ["EvalPipeline", "TrainPipeline", "make_eval_pipeline", "make_train_pipeline"]

PipelineKind = Literal["plain", "sparse_dist"]


class TrainPipeline(Protocol):
    """One whole step a call: zero gradients, forward, backward, optimizer step."""

    def progress(self, batches: Iterator[Batch]) -> tuple[Batch, torch.Tensor, torch.Tensor]:
        """Do one step. A collective: every rank does equally many.

        Args:
            batches: the same iterator in every call; a pipeline may take batches ahead.

        Returns:
            The batch whose step was applied, on the rank's device; `sum(weights * row_loss)` as `[]`, and the logits
            `[B]`, both detached and from before the update.

        Raises:
            StopIteration: `batches` is empty and every batch taken from it has been applied.
            Exception: what the iterator raises.
        """


def make_train_pipeline(sharded: ShardedModel, kind: PipelineKind, phases: StepClock | None = None) -> TrainPipeline:
    """Make a training pipeline; make only one of a model.

    Args:
        sharded: what is trained.
        kind: `plain` has nothing in flight between steps. `sparse_dist` overlaps on GPUs; on CPU it costs 10-17 % and
            hides nothing. Losses are equal bit for bit on CPU.
        phases: charged with the parts of each step; `step_phases.mark_phases` splits the forward pass.
    """
    phases = phases or StepClock()
    return _OverlappedSteps(sharded, phases) if kind == "sparse_dist" else _PlainSteps(sharded, phases)


def make_eval_pipeline(sharded: ShardedModel, kind: PipelineKind) -> EvalPipeline:
    """Make an evaluation pipeline of the same kind as the training pipeline, or of the other."""
    return EvalPipeline(sharded, overlapped=kind == "sparse_dist")


class _PlainSteps:
    def __init__(self, sharded: ShardedModel, phases: StepClock) -> None:
        self._sharded = sharded
        self._phases = phases

    def progress(self, batches: Iterator[Batch]) -> tuple[Batch, torch.Tensor, torch.Tensor]:
        phases = self._phases
        with phases.interval("data_wait"):
            taken = next(batches)
        with phases.interval("copy"):
            batch = taken.to(self._sharded.ranks.device)
        with phases.interval("dense_optimizer"):
            self._sharded.zero_grad()
        with phases.interval("dense_forward"):
            loss, (row_loss_sum, logits) = self._sharded.module(batch)
        with phases.busy("backward"):
            loss.backward()
        with phases.interval("dense_optimizer"):
            self._sharded.step()
        return batch, row_loss_sum, logits


class _OverlappedSteps:
    def __init__(self, sharded: ShardedModel, phases: StepClock) -> None:
        self._steps = SparseDistSteps(sharded.module, sharded, sharded.ranks.device, phases)

    def progress(self, batches: Iterator[Batch]) -> tuple[Batch, torch.Tensor, torch.Tensor]:
        return self._steps.step(batches)
