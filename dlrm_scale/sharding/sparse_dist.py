"""TorchRec's SparseDist pipeline, told to say which batch a step was for.

batch i      wait -> lookup -> output all-to-all -> dense forward and backward -> fused update -> step
batch i + 1           input all-to-all (ids), under batch i's compute
batch i + 2           taken from the iterator and copied to the device
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torchrec.distributed.embeddingbag import ShardedEmbeddingBagCollection
from torchrec.distributed.train_pipeline import TrainPipelineSparseDist

from dlrm_scale.batch import Batch
from dlrm_scale.sharding.table_kernels import sharded_collections
from dlrm_scale.telemetry import StepClock

__all__ = ["ForwardOverrides", "SparseDistSteps"]


class SparseDistSteps(TrainPipelineSparseDist):
    """`TrainPipelineSparseDist` that keeps the batch whose step was done last.

    The pipeline takes up to two batches ahead, so the last batch it took isn't the one it applied.

    Args:
        model: a `DistributedModelParallel`; steps train in training mode and only score in evaluation mode.
        optimizer: has `zero_grad` and `step`.
        device: where the model is.
        phases: charged with what the main thread does in each part of a step, which may be for a later batch.
    """

    def __init__(self, model: nn.Module, optimizer: Any, device: torch.device, phases: StepClock | None = None) -> None:
        """Start with an empty pipeline."""
        self._phases = phases or StepClock()
        self._called = model
        super().__init__(model, optimizer, device, execute_all_batches=True, custom_model_fwd=self._forward)
        self.applied: Batch | None = None

    def _forward(self, batch: Any) -> Any:
        with self._phases.interval("dense_forward"):
            return self._called(batch)

    def _next_batch(self, dataloader_iter: Iterator[Batch]) -> Batch | None:
        with self._phases.interval("data_wait"):
            batch: Batch | None = super()._next_batch(dataloader_iter)
        return batch

    def copy_batch_to_gpu(self, dataloader_iter: Iterator[Batch]) -> Any:
        """Take the next batch and start its copy."""
        with self._phases.interval("copy"):
            return super().copy_batch_to_gpu(dataloader_iter)

    def start_sparse_data_dist(self, batch: Batch | None, context: Any) -> None:
        """Start the exchange of a batch's ids with that of their numbers."""
        with self._phases.interval("input_all_to_all"):
            super().start_sparse_data_dist(batch, context)

    def wait_sparse_data_dist(self, context: Any) -> None:
        """Wait for the numbers of ids, then start the exchange of the ids."""
        with self._phases.interval("input_all_to_all"):
            super().wait_sparse_data_dist(context)

    def _backward(self, losses: torch.Tensor) -> None:
        with self._phases.busy("backward"):
            super()._backward(losses)

    def _optimizer_step(self) -> None:
        with self._phases.interval("dense_optimizer"):
            super()._optimizer_step()

    def dequeue_batch(self) -> None:
        """Note the batch that the step just done was for."""
        self.applied = self.batches[0]
        super().dequeue_batch()

    def step(self, batches: Iterator[Batch]) -> tuple[Batch, torch.Tensor, torch.Tensor]:
        """Do one step.

        Raises:
            StopIteration: the iterator is empty and every batch taken from it has been applied.
        """
        with self._phases.interval("pipeline"):
            row_loss_sum, logits = self.progress(batches)
        assert self.applied is not None
        batch, self.applied = self.applied, None
        return batch, row_loss_sum, logits


class ForwardOverrides:
    """The `forward`s that a pipeline has put over those of the sharded tables, taken off and put back.

    TorchRec's pipeline replaces `forward` of each sharded collection by one that pops the ids of the batch in
    flight, and `forward` of each input all-to-all by one that only prepares it. While they are in place,
    calling the model with another batch silently scores the batch in flight and then breaks training. Both
    kinds are instance attributes over the class's methods, so taking them off restores the plain model.
    """

    def __init__(self) -> None:
        """Start with none."""
        self._forwards: list[tuple[nn.Module, Callable[..., Any]]] = []

    @classmethod
    def take(cls, model: nn.Module) -> "ForwardOverrides":
        """Take all overrides off `model`."""
        taken = cls()
        for collection in sharded_collections(model).values():
            for module in (collection, *_input_exchanges(collection)):
                forward = module.__dict__.pop("forward", None)
                if forward is not None:
                    taken._forwards.append((module, forward))
        return taken

    def put(self) -> None:
        """Put them on again, where they were taken."""
        for module, forward in self._forwards:
            module.__dict__["forward"] = forward


def _input_exchanges(collection: ShardedEmbeddingBagCollection) -> Iterator[nn.Module]:
    for input_dist in collection._input_dists:  # a plain list: `modules()` doesn't see them
        exchange = getattr(input_dist, "_dist", None)
        if exchange is not None:
            yield exchange
