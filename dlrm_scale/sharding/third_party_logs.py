"""What torch, TorchRec and fbgemm say at start-up and in the first steps, silenced by logger and by message.

Not `logging.disable`: a global switch would hide the warnings that matter, such as TorchRec's note that a
quantized all-to-all falls back from BF16 to FP16 on CPU.
"""

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager

__all__ = ["quiet_start_up", "silence_known_warnings"]

# The names and why each says nothing that a user can act on.
_START_UP_LOGGERS = (
    # "Could not determine LOCAL_WORLD_SIZE": `hosts.host_groups` sets it; "intra_group: [0] -> [..]" is a trace.
    "torchrec.distributed.comm",
    # "caching params will be ignored" for every data-parallel table: there is no cache.
    "torchrec.distributed.utils",
    # "known issue with TorchRec's dense tensor size": where a cluster is only described, there is no dense part.
    "torchrec.distributed.planner.storage_reservations",
)

_DEPRECATIONS = (
    # TorchRec 1.8 calls these by their old names; only TorchRec can change it.
    r"`broadcast_buffers` is deprecated",
    r"`torch\.distributed\.reduce_scatter_tensor` is deprecated",
    r"`torch\.distributed\.all_gather_into_tensor` is deprecated",
    r"HeuristicalStorageReservation is known to cause issues",
)
# fbgemm 1.8 differentiates its dense lookup inside the operator; the gradients are right (tests/sharding).
_UNREGISTERED_AUTOGRAD = r"fbgemm::dense_embedding_codegen_lookup_function: an autograd kernel was not registered"


def silence_known_warnings() -> None:
    """Ignore third-party warnings that a user can't act on, each by its text, from now on in this process."""
    for message in _DEPRECATIONS:
        warnings.filterwarnings("ignore", message=message, category=FutureWarning)
    warnings.filterwarnings("ignore", message=_UNREGISTERED_AUTOGRAD, category=UserWarning)
    # "is_fx_tracing will return true for both fx.symbolic_trace and torch.export": advice to library authors.
    logging.getLogger("torch.fx._symbolic_trace").setLevel(logging.ERROR)


@contextmanager
def quiet_start_up() -> Iterator[None]:
    """Raise the named loggers to ERROR while a model is planned and sharded; levels come back afterwards."""
    loggers = [logging.getLogger(name) for name in _START_UP_LOGGERS]
    levels = [logger.level for logger in loggers]
    root = logging.getLogger()
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    root.addFilter(_not_known_at_root)
    try:
        yield
    finally:
        root.removeFilter(_not_known_at_root)
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)


def _not_known_at_root(record: logging.LogRecord) -> bool:
    # TorchRec's planner logs one line a data-parallel table through the root logger: it has no shards to list.
    return not record.getMessage().startswith("Sharding spec not found for ")
