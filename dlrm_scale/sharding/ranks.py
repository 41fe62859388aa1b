"""Joining and leaving the process group."""

import os
from dataclasses import dataclass
from datetime import timedelta
from typing import Literal

import torch
import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous
from torchrec.distributed import collective_utils, comm

from dlrm_scale.errors import ConfigError
from dlrm_scale.sharding.third_party_logs import silence_known_warnings

__all__ = ["Ranks", "close_ranks", "init_ranks"]


@dataclass(frozen=True, kw_only=True)
class Ranks:
    """This process among the others.

    Attributes:
        rank: 0-based, over all hosts.
        ranks: how many there are.
        local_ranks: how many this host has.
        device: where this rank computes.
        store: a client of the rendezvous store of its own, under a prefix of its own. A background thread may
            block on it without holding up the process group.
        control_group: gloo group over all ranks for small CPU collectives (plans, flags, touched rows).
    """

    rank: int
    ranks: int
    local_ranks: int
    device: torch.device
    store: dist.Store
    control_group: dist.ProcessGroup

    def broadcast_object(self, value: object, *, source: int = 0) -> object:
        """Return `source`'s value on every rank; the others' is ignored. Blocks until all ranks call it."""
        holder = [value]
        dist.broadcast_object_list(holder, src=source, group=self.control_group)
        return holder[0]

    def gather_objects(self, value: object) -> list[object]:
        """Return every rank's value, by rank. Blocks until all ranks call it."""
        values: list[object] = [None] * self.ranks
        dist.all_gather_object(values, value, group=self.control_group)
        return values


def init_ranks(device: Literal["cpu", "cuda"], timeout_seconds: float) -> Ranks:
    """Join the process group of the launcher, or make one of a single process.

    Reads RANK, WORLD_SIZE, LOCAL_RANK, LOCAL_WORLD_SIZE, MASTER_ADDR and MASTER_PORT, which torchrun and torch's
    elastic launcher set. Without RANK and WORLD_SIZE this process is the only rank. A process group that
    already exists is used as it is. Known warnings of third parties are silenced in this process from here on.

    Args:
        device: `cpu` (gloo) or `cuda` (nccl; one GPU a local rank).
        timeout_seconds: how long a collective waits for the other ranks.

    Raises:
        ConfigError: `cuda` without a GPU for this local rank.
    """
    # Before any thread starts: numba, compiling in the loader's, puts back the filters that it found, and with them
    # undoes what was added meanwhile.
    silence_known_warnings()
    timeout = timedelta(seconds=timeout_seconds)
    rank, ranks = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    if dist.is_initialized():
        rank, ranks = dist.get_rank(), dist.get_world_size()
    local_ranks = int(os.environ.get("LOCAL_WORLD_SIZE", str(ranks)))
    local_rank = int(os.environ.get("LOCAL_RANK", str(rank % local_ranks)))
    torch_device = _device(device, local_rank)
    if dist.is_initialized():
        store = dist.distributed_c10d._get_default_store()
    else:
        _forget_past_groups()
        store = next(iter(rendezvous("env://", timeout=timeout)))[0] if ranks > 1 else dist.HashStore()
        dist.init_process_group(
            "nccl" if device == "cuda" else "gloo",
            store=dist.PrefixStore("process_group", store),
            rank=rank,
            world_size=ranks,
            timeout=timeout,
        )
    own_store: dist.Store = store.clone()  # type: ignore[attr-defined]  # missing in torch 2.13's stubs
    return Ranks(
        rank=rank,
        ranks=ranks,
        local_ranks=local_ranks,
        device=torch_device,
        store=dist.PrefixStore("dlrm_scale", own_store),
        control_group=dist.new_group(backend="gloo", timeout=timeout),
    )


def close_ranks() -> None:
    """Leave the process group; safe to call twice."""
    if dist.is_initialized():
        dist.destroy_process_group()
    _forget_past_groups()


def _forget_past_groups() -> None:
    # TorchRec keeps host groups and a once-only broadcast in module globals. They belong to a group that has ended;
    # kept, the next group in this process would use dead groups or skip a collective on some ranks.
    comm._INTRA_PG = None
    comm._CROSS_PG = None
    collective_utils._INITIALIZED = False


def _device(device: str, local_rank: int) -> torch.device:
    if device == "cpu":
        return torch.device("cpu")
    gpus = torch.cuda.device_count()
    if local_rank >= gpus:
        raise ConfigError(
            f"local rank {local_rank} has no GPU: this host has {gpus}",
            remedy="start at most one rank a GPU, or set train.device=cpu",
        )
    torch.cuda.set_device(local_rank)
    return torch.device("cuda", local_rank)
