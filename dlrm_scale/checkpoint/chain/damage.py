"""What damage means for somebody who asked for a checkpoint: which steps are lost, and which one is whole."""

from collections.abc import Mapping

from dlrm_scale.checkpoint.chain.chain import Chain, find_chain
from dlrm_scale.errors import CheckpointError

__all__ = ["damage_met", "lost_steps"]


def lost_steps(chain: Chain) -> CheckpointError:
    """What to raise for a chain that isn't the newest: the others are damaged, and nobody has asked for this one."""
    steps = [skip.step for skip in chain.skipped if skip.step is not None and skip.step > chain.step]
    lost = f", so steps up to {max(steps)} would be lost" if steps else ""
    listed = "\n  ".join(map(str, chain.skipped))
    return CheckpointError(
        f"the newest whole checkpoint in {chain.storage.address} is that of step {chain.step}{lost}:\n  {listed}",
        remedy=f"put the named files back from a copy, or take the older checkpoint with --step {chain.step}",
    )


def damage_met(chain: Chain, damaged: Mapping[str, str]) -> CheckpointError:
    """What to raise where reading a chain has met damage and no other files have the same checkpoint.

    Args:
        chain: that was read.
        damaged: what is wrong with data files, by their names.
    """
    try:
        whole = find_chain(chain.storage, damaged=damaged)
    except CheckpointError:
        whole = None
    other = "no other checkpoint is whole" if whole is None else f"or take a whole checkpoint with --step {whole.step}"
    return CheckpointError(
        f"{chain.name} (step {chain.step}) in {chain.storage.address} is damaged:\n  " + "\n  ".join(damaged.values()),
        remedy=f"put the named files back from a copy{';' if whole is None else ','} {other}",
    )
