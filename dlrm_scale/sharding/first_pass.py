"""A first pass that changes nothing, so that the order of gradient sums is settled before training."""

import torch

from dlrm_scale.batch import make_batch
from dlrm_scale.sharding.shard import ShardedModel

__all__ = ["settle_gradient_order"]


def settle_gradient_order(sharded: ShardedModel, num_dense: int) -> None:
    """Let DDP see one backward pass, of padding alone. A collective.

    DDP puts gradients into other buckets after its first pass, and with three or more ranks gloo's order of summation
    depends on a gradient's place in its bucket. Without this, the first step of a resumed process would differ from the
    same step of an uninterrupted one in the last bit.

    Padding looks up no row and has no loss: no row, state or parameter changes; counters are put back.

    Args:
        sharded: a model that hasn't trained yet in this process.
        num_dense: number of dense features.
    """
    ranks = sharded.ranks
    if ranks.ranks == 1:
        return
    steps = sharded.table_iterations()
    keys = [table.spec.name for table in sharded.layout.tables]
    padding = make_batch(
        dense_features=torch.zeros(1, num_dense),
        ids=torch.empty(len(keys), 0, dtype=torch.int64),
        labels=torch.zeros(1),
        rows_global=1,
        ranks=ranks.ranks,
        keys=keys,
    ).to(ranks.device)
    loss, _ = sharded.module(padding)
    loss.backward()
    sharded.zero_grad()
    sharded.set_table_iterations(steps)
