"""Data-parallel tables: the dense gradient, its copy for the all-reduce and back, and the optimizer over all rows."""

from collections.abc import Callable

import torch
from fbgemm_gpu.split_table_batched_embeddings_ops_training import DenseTableBatchedEmbeddingBagsCodegen
from torchrec.distributed.composable.table_batched_embedding_slice import TableBatchedEmbeddingSlice
from torchrec.optim.rowwise_adagrad import RowWiseAdagrad

from dlrm_scale.planning.cluster.cluster import Constant, ReplicaCosts
from dlrm_scale.planning.measuring.calibration_fit import fit_times
from dlrm_scale.planning.measuring.micro_timing import RankTimer
from dlrm_scale.sharding.ranks import Ranks

__all__ = ["measure_replicas"]

_SAMPLES = 256


def measure_replicas(
    ranks: Ranks, timer: RankTimer, *, quick: bool, progress: Callable[[str], None]
) -> tuple[ReplicaCosts, dict[str, float]]:
    """Measure and fit what a step does for every row of a data-parallel table. A collective.

    Few ids are looked up, so that nearly all of the time is for the rows.
    """
    sizes = (1_000, 20_000) if quick else (100, 1_000, 10_000, 50_000)
    features, times = [], []
    for rows in sizes:
        for dim in (16, 64):
            (timing,) = timer.time(_Replica(ranks, rows, dim).step)
            features.append([1.0, rows * dim / 1e6])
            times.append(timing.milliseconds)
    fit = fit_times(features, times)
    progress(f"data-parallel tables: {len(times)} sizes")
    source = f"calibrate: {len(times)} data-parallel tables without their all-reduce"
    costs = ReplicaCosts(
        call_ms=Constant(value=fit.values[0], source=source), element_ms=Constant(value=fit.values[1], source=source)
    )
    return costs, {"replicas": fit.error}


class _Replica:
    def __init__(self, ranks: Ranks, rows: int, dim: int) -> None:
        on_cpu = ranks.device.type == "cpu"
        self._table = DenseTableBatchedEmbeddingBagsCodegen([(rows, dim)], use_cpu=on_cpu)
        (self._parameter,) = self._table.parameters()
        self._parameter.detach().zero_()
        # what TorchRec gives the optimizer: the rows of one table in the kernel's flat memory
        table = TableBatchedEmbeddingSlice(self._parameter, 0, rows * dim, rows, dim)
        self._optimizer = RowWiseAdagrad([table], lr=0.01)
        self._ids = torch.randint(0, rows, (_SAMPLES,), device=ranks.device)
        self._offsets = torch.arange(_SAMPLES + 1, device=ranks.device)
        self._bucket = torch.empty_like(self._parameter)
        self._gradient = torch.full((_SAMPLES, dim), 1e-3, device=ranks.device)

    def step(self) -> None:
        self._parameter.grad = None
        self._table(self._ids, self._offsets).backward(self._gradient)
        assert self._parameter.grad is not None
        self._bucket.copy_(self._parameter.grad)  # as DDP does before its all-reduce, and after it
        self._parameter.grad.copy_(self._bucket)
        self._optimizer.step()
