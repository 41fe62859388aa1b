"""Averages of replicated gradients that don't depend on buckets, timing or history.

With three or more ranks the order of a floating-point sum matters in the last bit. DDP puts gradients into new buckets
after its first pass, and gloo's order depends on a gradient's place in its bucket, so a resumed process would differ
from an uninterrupted one. Here each rank gathers all gradients and adds them in the order of ranks.
"""

import torch
import torch.distributed as dist
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from dlrm_scale.sharding.ranks import Ranks

__all__ = ["sum_in_rank_order"]


def sum_in_rank_order(module: nn.Module, ranks: Ranks) -> None:
    """Make the DDP of the dense part add gradients in the order of ranks, on CPU with three or more.

    Data-parallel tables keep DDP's sum: TorchRec gives their kernel a DDP of its own, with one gradient, whose place
    and order are the same from the first pass on. A run on three ranks that is resumed has the uninterrupted one's
    bits.

    Two ranks need nothing: a sum of two has one order. On GPUs nccl keeps its own order and speed. Gathering moves
    (N-1) times a gradient's bytes where a ring all-reduce moves 2 (N-1)/N times.
    """
    if ranks.ranks < 3 or ranks.device.type != "cpu":
        return
    for part in module.modules():
        if isinstance(part, DistributedDataParallel):
            part.register_comm_hook(None, _gather_and_average)


def _gather_and_average(state: object, bucket: dist.GradBucket) -> torch.futures.Future[torch.Tensor]:
    gradient = bucket.buffer()
    parts = [torch.empty_like(gradient) for _ in range(dist.get_world_size())]
    work = dist.all_gather(parts, gradient, async_op=True)
    assert work is not None

    def average(_: object) -> torch.Tensor:
        total = parts[0]
        for part in parts[1:]:
            total += part
        return total.div_(len(parts))

    averaged: torch.futures.Future[torch.Tensor] = work.get_future().then(average)
    return averaged
