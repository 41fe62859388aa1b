"""The exchange of ids: TorchRec's permute, all-to-all of lengths and values, and cutting ids by row ranges."""

from collections.abc import Callable
from itertools import product

import torch
import torch.distributed as dist
from torchrec.distributed.dist_data import KJTAllToAll
from torchrec.distributed.embedding_sharding import bucketize_kjt_before_all2all
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from dlrm_scale.planning.cluster.cluster import Constant, Curve, InputCosts
from dlrm_scale.planning.measuring.calibration_fit import fit_times
from dlrm_scale.planning.measuring.micro_timing import RankTimer
from dlrm_scale.sharding.ranks import Ranks

__all__ = ["measure_input"]

_MOST_IDS = 300_000


def measure_input(
    ranks: Ranks, timer: RankTimer, all_to_all: Curve, *, quick: bool, progress: Callable[[str], None]
) -> tuple[InputCosts, dict[str, float]]:
    """Measure and fit what the exchange of ids costs beyond a bare all-to-all. A collective.

    Args:
        ranks: the process group.
        timer: of all ranks.
        all_to_all: the bare collective over all ranks, by bytes.
        quick: fewer shapes.
        progress: told once it is done.

    Returns:
        Costs, and the errors of both fits.
    """
    features, times, bare, cut_features, cut_times = [], [], [], [], []
    counts, bags, batches = ((2, 8), (1, 10), (512,)) if quick else ((2, 4, 10, 26), (1, 10), (512, 2048))
    shapes = [s for s in product(counts, bags, batches) if s[0] * s[1] * s[2] <= _MOST_IDS]
    for tables, ids, rows in shapes:
        batch = _Ids(ranks, tables, ids, rows)
        exchanged, cut = timer.time(batch.exchange, batch.cut)
        a_million_bags, a_million_ids = tables * rows / 1e6, tables * rows * ids / 1e6
        features.append([1.0, a_million_bags, a_million_ids])
        bare.append(all_to_all.milliseconds(4e6 * a_million_bags + 8e6 * a_million_ids))
        times.append(exchanged.milliseconds)
        cut_features.append([1.0, a_million_ids])
        cut_times.append(cut.milliseconds)
    fit, cut_fit = fit_times(features, times, bare), fit_times(cut_features, cut_times)
    progress(f"exchange of ids: {len(shapes)} shapes")
    source = f"calibrate: {len(shapes)} exchanges of ids, less the bare all-to-all"
    costs = InputCosts(
        call_ms=Constant(value=fit.values[0], source=source),
        bag_ms=Constant(value=fit.values[1], source=source),
        value_ms=Constant(value=fit.values[2], source=source),
        bucketize_ms=Constant(value=cut_fit.values[1], source=f"calibrate: {len(shapes)} batches cut by row ranges"),
    )
    return costs, {"input": fit.error, "bucketize": cut_fit.error}


class _Ids:
    """A rank's own ids, of as many tables for each rank as go evenly."""

    def __init__(self, ranks: Ranks, tables: int, ids: int, rows: int) -> None:
        self._keys = [f"C{i}" for i in range(tables)]
        self._values = torch.randint(0, 1000, (tables * rows * ids,), device=ranks.device)
        self._lengths = torch.full((tables * rows,), ids, dtype=torch.int32, device=ranks.device)
        self._order = list(range(tables))[::-1]
        self._order_tensor = torch.tensor(self._order, dtype=torch.int32, device=ranks.device)
        whole = dist.group.WORLD
        assert whole is not None
        splits = [tables // ranks.ranks + (rank < tables % ranks.ranks) for rank in range(ranks.ranks)]
        self._all_to_all = KJTAllToAll(whole, splits)
        self._ranks = ranks.ranks
        self._blocks = torch.full((tables,), -(-1000 // ranks.ranks), dtype=torch.int64, device=ranks.device)

    def _made(self) -> KeyedJaggedTensor:
        return KeyedJaggedTensor(self._keys, self._values, lengths=self._lengths)

    def exchange(self) -> None:
        self._all_to_all(self._made().permute(self._order, self._order_tensor)).wait().wait()

    def cut(self) -> None:
        bucketize_kjt_before_all2all(self._made(), self._ranks, self._blocks)
