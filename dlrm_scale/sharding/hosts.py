"""How many ranks count as one host, as TorchRec sees it."""

import os
from collections.abc import Iterator
from contextlib import contextmanager

from torchrec.distributed import comm

from dlrm_scale.errors import ConfigError
from dlrm_scale.sharding.ranks import Ranks

__all__ = ["host_groups", "ranks_per_host"]


def ranks_per_host(requested: int, ranks: Ranks) -> int:
    """Settle the size of a host group.

    Args:
        requested: `sharding.ranks_per_host`; 0 takes the launcher's local ranks.
        ranks: this process among the others.

    Raises:
        ConfigError: the size doesn't divide the number of ranks; TorchRec would silently take one big host.
    """
    size = requested or ranks.local_ranks
    if size > ranks.ranks or ranks.ranks % size:
        legal = [n for n in range(1, ranks.ranks + 1) if ranks.ranks % n == 0]
        raise ConfigError(
            f"sharding.ranks_per_host: {size} doesn't divide {ranks.ranks} ranks into equal hosts",
            remedy=f"set sharding.ranks_per_host to one of {', '.join(map(str, legal))}",
        )
    return size


@contextmanager
def host_groups(size: int, ranks: Ranks) -> Iterator[None]:
    """Make TorchRec see hosts of `size` ranks inside the `with` block.

    TorchRec reads LOCAL_WORLD_SIZE while it plans and shards, and keeps the host groups that it makes in module
    globals; they are dropped here when their size differs.
    """
    if comm._INTRA_PG is not None and comm._INTRA_PG.size() != size:
        comm._INTRA_PG = None
        comm._CROSS_PG = None
    # "utilizing LOCAL_WORLD_SIZE instead" is what an unset TORCHREC_RESOLVED_POD_SIZE means, and what we want.
    wanted = {"LOCAL_WORLD_SIZE": str(size), "LOCAL_RANK": str(ranks.rank % size)}
    before = {name: os.environ.get(name) for name in wanted}
    os.environ.update(wanted)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value
