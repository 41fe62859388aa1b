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
from dlrm_scale.train.best_file import parse_best

__all__ = ["ToldCheckpoint", "lost_note", "newest_told", "told_manifests", "with_lost_steps"]


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

    Lines that a crash has torn, and a damaged `best.json`, tell of nothing; nor does one that names another manifest
    than the log does for its step.

    Args:
        log: `log.jsonl`.
        best: `best.json`.

    Raises:
        OSError: the log can't be read.
    """
    told: ToldCheckpoint | None = None
    of_steps: dict[int, set[str]] = {}
    for found in _logged(log):
        told = found
        of_steps.setdefault(found.step, set()).add(found.manifest)
    kept = _kept(best)
    if kept is not None and kept.manifest not in of_steps.get(kept.step, {kept.manifest, ""}):
        kept = None
    if kept is not None and (told is None or checkpoint_age(kept.manifest) > checkpoint_age(told.manifest)):
        if told is None or told.manifest or kept.step >= told.step:
            return kept
    return told


def told_manifests(log: Path) -> dict[str, int]:
    """Steps of all committed checkpoints that a log tells of, by name of the manifest.

    Raises:
        OSError: the log can't be read.
    """
    return {found.manifest: found.step for found in _logged(log) if found.manifest}


def lost_note(told: ToldCheckpoint | None, newest: str, newest_step: int | None) -> str | None:
    """A line on a checkpoint that was committed after the newest there is; None if there is no such one."""
    if told is None or not told.is_newer_than(newest, newest_step):
        return None
    name = told.manifest or "its manifest"
    return f"step {told.step} is lost: {told.source} tells that it was committed, and {name} is missing"


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


def _kept(best: Path) -> ToldCheckpoint | None:
    try:
        record = parse_best(best.read_bytes())
        return ToldCheckpoint(step=int(str(record["step"])), manifest=str(record["manifest"]), source=best.name)
    except (OSError, ValueError, KeyError):
        return None


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
