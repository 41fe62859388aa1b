"""What the next save is, a baseline or a delta, and which checkpoint a delta is applied to.

    consecutive     baseline <- delta <- delta <- delta      rows touched since the checkpoint before
    one_shot        baseline <- delta                        all rows touched since the baseline;
                          ^---- delta                        each supersedes the one before
    intermittent    as one_shot, with new baselines by the history of sizes

The three are those of Check-N-Run (Eisenman et al., NSDI'22, the section on incremental checkpoints). consecutive
writes least and restores slowest; one_shot restores fastest and writes deltas that grow; intermittent bounds how far
they grow.
"""

from typing import Literal

from dlrm_scale.checkpoint.chain.chain import Chain
from dlrm_scale.checkpoint.files.manifest import Manifest, ParentRecord
from dlrm_scale.checkpoint.saving.commit import ChainState
from dlrm_scale.config import CheckpointConfig
from dlrm_scale.errors import ConfigError

__all__ = ["Policy", "chain_after", "chain_of", "check_policy", "holds_all_since_baseline", "next_kind", "parent_of"]

Policy = Literal["consecutive", "one_shot", "intermittent"]


def check_policy(config: CheckpointConfig) -> None:
    """Refuse a merger beside deltas that replace one another: it has nothing to roll up.

    Raises:
        ConfigError: `merger` with a policy other than consecutive.
    """
    if config.merger and config.policy != "consecutive":
        raise ConfigError(
            f"checkpoint.merger = true with checkpoint.policy = {config.policy}: a merger rolls up consecutive deltas, "
            "and here each delta holds all rows since the baseline already",
            remedy="set checkpoint.policy=consecutive, or checkpoint.merger=false",
        )


def holds_all_since_baseline(policy: Policy) -> bool:
    """Whether a delta holds all rows since the baseline, or those since the checkpoint before."""
    return policy != "consecutive"


def next_kind(policy: Policy, chain: ChainState, baseline_ratio: float) -> Literal["baseline", "delta"]:
    """What the save after `chain` is.

    consecutive and one_shot: a baseline once the deltas that a restore reads have more than `baseline_ratio` times
    the baseline's bytes. With the ratio 1 one_shot hardly ever gets there.

    intermittent: Check-N-Run's history rule. With the baseline as unit and S_1 to S_i the sizes of the deltas on it, a
    new baseline pays as soon as 1 + S_1 + ... + S_i <= (i + 1) * S_i. To the left is what the i + 1 checkpoints from a
    new baseline on will take if they do as the last i + 1 did; to the right what i + 1 more deltas will take at
    least, as none is smaller than the last.
    """
    if chain.needs_baseline or chain.tip_name is None:
        return "baseline"
    if policy == "intermittent":
        with_baseline = chain.baseline_bytes + chain.history_bytes
        return "baseline" if with_baseline <= (chain.history_deltas + 1) * chain.delta_bytes else "delta"
    return "baseline" if chain.delta_bytes > baseline_ratio * chain.baseline_bytes else "delta"


def parent_of(policy: Policy, chain: ChainState, kind: str) -> ParentRecord | None:
    """The checkpoint that a delta is applied to; of a baseline where it came from, or None."""
    name, sha256 = chain.tip_name, chain.tip_sha256
    if kind == "delta" and holds_all_since_baseline(policy):
        name, sha256 = chain.baseline_name, chain.baseline_sha256
    return None if name is None or sha256 is None else ParentRecord(name=name, sha256=sha256)


def chain_after(chain: ChainState, manifest: Manifest, sha256: str) -> ChainState:
    """The chain with a manifest that was just committed on it."""
    size_bytes = manifest.size_bytes
    if manifest.kind == "baseline":
        return ChainState(
            tip_name=manifest.name,
            tip_sha256=sha256,
            baseline_name=manifest.name,
            baseline_sha256=sha256,
            baseline_bytes=size_bytes,
            needs_baseline=False,
        )
    on_baseline = manifest.parent is not None and manifest.parent.name == chain.baseline_name
    delta_bytes = size_bytes if on_baseline else chain.delta_bytes + size_bytes
    return ChainState(
        tip_name=manifest.name,
        tip_sha256=sha256,
        baseline_name=chain.baseline_name,
        baseline_sha256=chain.baseline_sha256,
        baseline_bytes=chain.baseline_bytes,
        delta_bytes=delta_bytes,
        history_deltas=chain.history_deltas + 1 if on_baseline else 1,
        history_bytes=chain.history_bytes + size_bytes if on_baseline else delta_bytes,
        needs_baseline=False,
    )


def chain_of(found: Chain, *, needs_baseline: bool) -> ChainState:
    """The state of a chain that was resumed from.

    Args:
        found: it.
        needs_baseline: its tables don't fit those of today, so no delta can follow.
    """
    tip, deltas = found.tip, found.manifests[1:]
    first = deltas[0].parent if deltas else None
    alone = len(deltas) == 1
    return ChainState(
        tip_name=found.name,
        tip_sha256=found.tip_sha256,
        baseline_name=first.name if first is not None else found.name,
        baseline_sha256=first.sha256 if first is not None else found.tip_sha256,
        baseline_bytes=found.baseline_bytes,
        delta_bytes=found.delta_bytes,
        history_deltas=tip.earlier_deltas + 1 if alone else min(1, len(deltas)),
        history_bytes=tip.earlier_delta_bytes + tip.size_bytes if alone else found.delta_bytes,
        needs_baseline=needs_baseline,
    )
