"""What a run says of the checkpoint that it begins with, before or after it is read."""

from collections.abc import Mapping

from dlrm_scale.checkpoint import Chain
from dlrm_scale.checkpoint.chain.lossy import stored_codecs
from dlrm_scale.checkpoint.chain.schema_match import SchemaChanges
from dlrm_scale.checkpoint.files.manifest_files import checkpoint_age
from dlrm_scale.config import CheckpointConfig
from dlrm_scale.units import format_count

__all__ = ["chain_notes", "change_notes", "lossy_notes", "trained_precision_notes"]


def chain_notes(chain: Chain, damaged: Mapping[str, str]) -> list[str]:
    """Damage that was met, steps that are lost by it, and newer checkpoints that are left behind on purpose.

    Args:
        chain: what is restored.
        damaged: what was wrong with files that the restore met, by their names.
    """
    notes = [f"skipped a newer checkpoint, {reason}" for reason in chain.skipped]
    listed = " ".join(notes)
    notes += [
        f"went by other files, as {reason}" for reason in [*damaged.values(), *chain.detours] if reason not in listed
    ]
    steps = [skip.step for skip in chain.skipped if skip.step is not None]
    if steps and max(steps) > chain.step:
        lost = max(steps) - chain.step
        notes.append(f"{lost:,} steps are lost: step {chain.step} is the newest that can be restored")
    if not chain.skipped and checkpoint_age(chain.newest_seen) > checkpoint_age(chain.name):
        notes.append(
            f"going back to step {chain.step}: what was saved after it, up to {chain.newest_seen}, is left behind once "
            "this start has saved (`checkpoint ls` marks it)"
        )
    return notes


def change_notes(changes: SchemaChanges) -> list[str]:
    """Tables that differ from the checkpoint's."""
    notes = [f"table {name} is new: all its rows have initial values" for name in changes.new]
    for name, (before, now) in changes.resized.items():
        if now > before:
            notes.append(f"table {name} has grown from {before:,} to {now:,} rows: the new ones have initial values")
        else:
            notes.append(f"table {name} has shrunk from {before:,} to {now:,} rows: {before - now:,} are cut off")
    return notes


def lossy_notes(chain: Chain, lossy_restores: int, config: CheckpointConfig) -> list[str]:
    """Values in the chain that were rounded, and what follows from how often that has been.

    Args:
        chain: what is restored.
        lossy_restores: of the run so far, this one included.
        config: what is expected.
    """
    notes = []
    codecs = stored_codecs(chain.manifests)
    if codecs or any(manifest.lossy for manifest in chain.manifests):
        kinds = f" ({', '.join(codecs)})" if codecs else ""
        notes.append(
            f"not bit-exact: rows or state in this chain were rounded{kinds}; lossy restores of the run so far: "
            f"{format_count(lossy_restores)} of {config.expected_restores} expected"
        )
    if config.delta_rows == "int8" and lossy_restores >= config.expected_restores:
        notes.append(
            f"warning: checkpoint.delta_rows = int8 is off: the run has had {lossy_restores} lossy restores, and "
            f"checkpoint.expected_restores is {config.expected_restores}; deltas keep their rows in fp32"
        )
    return notes


def trained_precision_notes(trained: str, now: str) -> list[str]:
    """That the dense part runs in another precision from here on."""
    if trained == now:
        return []
    return [f"the checkpoint was trained with train.precision = {trained!r}; from here on the dense part runs in {now}"]
