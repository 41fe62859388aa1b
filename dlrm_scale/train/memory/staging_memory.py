"""Allocates each rank's memory for snapshots, and sees to it that all ranks know where it is short."""

from collections.abc import Sequence
from dataclasses import dataclass

from dlrm_scale.checkpoint.saving.staging import HostStaging
from dlrm_scale.sharding.ranks import Ranks
from dlrm_scale.train.memory.staging_plan import StagingPlan
from dlrm_scale.units import format_bytes

__all__ = ["StagingMemory", "allocate_staging"]


@dataclass(frozen=True, kw_only=True)
class StagingMemory:
    """A rank's memory for snapshots.

    Attributes:
        staging: it.
        is_short: on some rank it doesn't hold all rows; equal on all ranks.
        notes: lines for the user, on every rank.
    """

    staging: HostStaging
    is_short: bool
    notes: list[str]


def allocate_staging(plans: Sequence[StagingPlan], ranks: Ranks) -> StagingMemory:
    """Allocate what was planned. A collective.

    A rank that can't goes without, as one whose plan is short does: that costs stalls, and no run.

    Args:
        plans: of all ranks.
        ranks: the process group.
    """
    size_bytes = plans[ranks.rank].size_bytes
    failure: str | None = None
    try:
        staging = HostStaging(size_bytes, pinned=ranks.device.type == "cuda")
    except (RuntimeError, MemoryError) as error:
        failure, staging = str(error).splitlines()[0], HostStaging(0)
    failures = ranks.gather_objects(failure)
    notes = [
        f"warning: rank {rank} can't allocate {format_bytes(plans[rank].size_bytes)} to copy the rows of checkpoints "
        f"to, so training waits until they are written: {why}"
        for rank, why in enumerate(failures)
        if why is not None
    ]
    return StagingMemory(staging=staging, is_short=bool(notes) or any(plan.is_short for plan in plans), notes=notes)
