"""What torch, TorchRec and fbgemm log at start-up, silenced by logger name.

Not `logging.disable`: a global switch would hide the warnings that matter, such as TorchRec's note that a
quantized all-to-all falls back from BF16 to FP16 on CPU.
"""

import logging
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["quiet_start_up"]

# The names and why each says nothing that a user can act on.
_START_UP_LOGGERS = (
    # "Could not determine LOCAL_WORLD_SIZE": `hosts.host_groups` sets it; "intra_group: [0] -> [..]" is a trace.
    "torchrec.distributed.comm",
    # Planner statistics as a wide table on every start; `ShardedModel.plan_rows` is ours.
    "torchrec.distributed.planner.stats",
    "torchrec.distributed.planner.planners",
    "torchrec.distributed.planner.proposers",
    "torchrec.distributed.planner.enumerators",
    "torchrec.distributed.planner.storage_reservations",
    # Repeats the config of each fused kernel, one block a kernel.
    "torchrec.distributed.batched_embedding_kernel",
    "torchrec.distributed.embedding_lookup",
    # fbgemm's description of each kernel; it logs through the root of its own package.
    "fbgemm_gpu",
    # torch's note that ShardedTensor is superseded by DTensor: TorchRec's choice, not ours.
    "torch.distributed._shard",
)


@contextmanager
def quiet_start_up() -> Iterator[None]:
    """Raise the named loggers to ERROR while a model is planned and sharded; levels come back afterwards."""
    loggers = [logging.getLogger(name) for name in _START_UP_LOGGERS]
    levels = [logger.level for logger in loggers]
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
