"""What a merge makes of a chain: nothing, one delta of several, or a new baseline.

baseline    when live deltas have more bytes than the baseline, or a restore costs more than twice the baseline's
delta       when the chain is long: those at its end that are small beside what comes after them
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from dlrm_scale.checkpoint.chain.chain_search import restore_cost_bytes
from dlrm_scale.checkpoint.files.manifest import Manifest, ParentRecord

__all__ = ["MergePlan", "MergeTarget", "plan_merge"]

MergeTarget = Literal["delta", "baseline", "auto"]

MOST_DELTAS = 8
"""Deltas of a chain that `auto` leaves alone."""


@dataclass(frozen=True, kw_only=True)
class MergePlan:
    """What is to be merged.

    Attributes:
        kind: of the result.
        manifests: oldest first.
        equal_to: the last one's checkpoint, and the result's.
        reason: in words.
    """

    kind: Literal["delta", "baseline"]
    manifests: tuple[Manifest, ...]
    equal_to: ParentRecord
    reason: str

    @property
    def source_bytes(self) -> int:
        """Bytes of the data files that are read."""
        return sum(manifest.size_bytes for manifest in self.manifests)


def plan_merge(manifests: Sequence[Manifest], checkpoint: ParentRecord, to: MergeTarget) -> MergePlan | None:
    """Choose what to merge of a chain.

    With `auto` every row is written a number of times that grows with the logarithm of the deltas: a delta is merged
    again only once those after it have half of its bytes.

    Args:
        manifests: the chain, its baseline first.
        checkpoint: what it leads to.
        to: what the user wants.

    Returns:
        The plan; None where there is nothing to merge.
    """
    baseline, deltas = manifests[0], tuple(manifests[1:])
    if to == "baseline":
        return _to_baseline(manifests, checkpoint, "asked for") if deltas else None
    if to == "delta":
        return (
            MergePlan(kind="delta", equal_to=checkpoint, manifests=deltas, reason="asked for")
            if len(deltas) > 1
            else None
        )
    delta_bytes = sum(delta.size_bytes for delta in deltas)
    if delta_bytes > baseline.size_bytes:
        return _to_baseline(manifests, checkpoint, "the deltas have more bytes than the baseline")
    if deltas and sum(map(restore_cost_bytes, manifests)) > 2 * restore_cost_bytes(baseline):
        return _to_baseline(manifests, checkpoint, "a restore is predicted to cost more than twice the baseline's")
    if len(deltas) <= MOST_DELTAS:
        return None
    first, later_bytes = len(deltas) - 2, deltas[-1].size_bytes + deltas[-2].size_bytes
    while first > 0 and deltas[first - 1].size_bytes <= 2 * later_bytes:
        first -= 1
        later_bytes += deltas[first].size_bytes
    reason = f"the chain has {len(deltas)} deltas, more than {MOST_DELTAS}"
    return MergePlan(kind="delta", equal_to=checkpoint, manifests=deltas[first:], reason=reason)


def _to_baseline(manifests: Sequence[Manifest], checkpoint: ParentRecord, reason: str) -> MergePlan:
    return MergePlan(kind="baseline", manifests=tuple(manifests), equal_to=checkpoint, reason=reason)
