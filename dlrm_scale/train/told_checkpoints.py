"""The newest checkpoint that a run's own files tell of: what a missing or unreadable manifest has cost.

Manifests say what can be restored, and nothing in them says that a newer one was there: whoever loses the newest file
of `manifests/` would go on from an older step. `log.jsonl` has a line for each committed checkpoint, written after its
commit, and `best.json` names one. Retention never removes the newest, and a start that has gone back on purpose commits
under a higher number, so what is told and newer than what is there is lost.
"""

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from dlrm_scale.checkpoint import Chain
from dlrm_scale.checkpoint.chain.chain import Skipped
from dlrm_scale.checkpoint.files.manifest_files import checkpoint_age
from dlrm_scale.errors import CheckpointError, ConfigError
from dlrm_scale.sharding.ranks import Ranks
from dlrm_scale.train.best_checkpoint import read_best
from dlrm_scale.train.run_folder import RunFolder

__all__ = ["ToldCheckpoint", "newest_told", "told_on_all_ranks", "with_lost_steps"]


@dataclass(frozen=True, kw_only=True)
class ToldCheckpoint:
    """A checkpoint that was committed.

    Attributes:
        step: its step.
        manifest: name of the trainer's manifest; "" in logs from before they named it.
        source: the file that tells of it, by its name.
    """

    step: int
    manifest: str
    source: str

    def is_newer_than(self, manifest: str, step: int | None) -> bool:
        """Whether it was committed after another one: by name, and where that isn't known by step."""
        if self.manifest:
            return checkpoint_age(self.manifest) > checkpoint_age(manifest)
        return step is not None and self.step > step


def newest_told(log: Path, best: Path) -> ToldCheckpoint | None:
    """The newest committed checkpoint that a run's log or `best.json` tells of; None if they tell of none.

    Lines that a crash has torn, and a damaged `best.json`, tell of nothing.

    Args:
        log: `log.jsonl`.
        best: `best.json`.

    Raises:
        OSError: the log can't be read.
    """
    told: ToldCheckpoint | None = None
    for found in _logged(log):
        told = found
    try:
        kept = read_best(best)
    except CheckpointError:
        kept = None
    if kept is not None and (told is None or checkpoint_age(kept.manifest) > checkpoint_age(told.manifest)):
        at_best = ToldCheckpoint(step=kept.step, manifest=kept.manifest, source=best.name)
        if told is None or told.manifest or kept.step >= told.step:
            return at_best
    return told


def told_on_all_ranks(folder: RunFolder, ranks: Ranks) -> ToldCheckpoint | None:
    """The newest committed checkpoint that a run's files tell of, on all ranks; a collective, and rank 0 reads.

    To be called before the checkpoints are looked at: what is committed in between is newer, and not missed.

    Raises:
        ConfigError: the log can't be read.
    """
    told: object = None
    if ranks.rank == 0:
        try:
            told = newest_told(folder.log, folder.best)
        except OSError as error:
            told = ConfigError(f"{folder.log} can't be read: {error.strerror}", remedy="check its permissions")
    told = ranks.broadcast_object(told)
    if isinstance(told, ConfigError):
        raise told
    return told if isinstance(told, ToldCheckpoint) else None


def with_lost_steps(chain: Chain, told: ToldCheckpoint | None) -> Chain:
    """Count what was told and isn't there among the newer checkpoints that a chain does without.

    Args:
        chain: the newest that can be restored.
        told: the newest that was committed, as the run's files tell.
    """
    if told is None or not told.is_newer_than(chain.name, chain.step):
        return chain
    skipped = list(chain.skipped)
    for index, skip in enumerate(skipped):
        # an unreadable manifest doesn't tell its step
        if skip.name == told.manifest or (not told.manifest and skip.step in (None, told.step)):
            skipped[index] = replace(skip, step=told.step)
            return replace(chain, skipped=tuple(skipped))
    lost = Skipped(
        name=told.manifest or "a checkpoint",
        step=told.step,
        reason=f"it is missing, and {told.source} tells that it was committed",
    )
    return replace(chain, skipped=(lost, *skipped))


def _logged(log: Path) -> Iterator[ToldCheckpoint]:
    """Committed checkpoints in the order of the log."""
    if not log.is_file():
        return
    with log.open(errors="replace") as lines:
        for line in lines:
            if '"checkpoint"' not in line or not line.endswith("\n"):
                continue
            try:
                record = json.loads(line)
                if record["event"] == "checkpoint" and record["committed"]:
                    manifest = str(record.get("manifest") or "")
                    yield ToldCheckpoint(step=int(record["step"]), manifest=manifest, source=log.name)
            except (ValueError, KeyError, TypeError):
                continue
