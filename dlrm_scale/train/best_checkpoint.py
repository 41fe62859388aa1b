"""The best checkpoint by a validation metric: which it is, kept where a crash can't lose it.

validation improves      a checkpoint of the step is saved (if there is none); its record says what it is worth
it is committed          best.json is replaced, in one step; only then retention may take the best before it
a crash in between       the next start finds the record in the newest checkpoint and writes best.json
"""

import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Literal

from dlrm_scale.checkpoint import Chain, SaveOutcome
from dlrm_scale.checkpoint.files.manifest_files import has_checkpoint
from dlrm_scale.errors import CheckpointError, MissingCheckpointError
from dlrm_scale.train.best_file import best_text, parse_best
from dlrm_scale.train.metrics.metrics import ClickMetrics

__all__ = ["BestCheckpoint", "BestKeeper", "best_manifest", "read_best", "undefined_warning"]

_SMALLER_IS_BETTER = {"logloss": True, "auc": False}


@dataclass(frozen=True, kw_only=True)
class BestCheckpoint:
    """A checkpoint and what it is worth.

    Attributes:
        metric: `logloss` or `auc`.
        value: of the metric, on the validation split.
        rows: rows that were scored; values over other rows aren't compared.
        step: completed steps.
        manifest: the checkpoint's name; "" in a checkpoint's own record.
    """

    metric: str
    value: float
    rows: int
    step: int
    manifest: str

    def beats(self, other: "BestCheckpoint | None") -> bool:
        """Whether this takes the place of another, which may be of another metric or over other rows."""
        if other is None or (self.metric, self.rows) != (other.metric, other.rows):
            return True
        return self.value < other.value if _SMALLER_IS_BETTER[self.metric] else self.value > other.value

    def as_dict(self) -> dict[str, object]:
        """JSON-ready values by name."""
        return asdict(self)


def read_best(path: Path) -> BestCheckpoint | None:
    """Read best.json; None where there is none.

    Raises:
        CheckpointError: it is damaged.
    """
    try:
        return _from_json(parse_best(path.read_bytes()))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{path} can't be read: {error!r}", remedy="remove it, or put it back") from None


def best_manifest(path: Path) -> str:
    """Name of the best checkpoint's manifest, for `--step best`.

    Raises:
        MissingCheckpointError: there is no best checkpoint.
        CheckpointError: best.json is damaged.
    """
    best = read_best(path)
    if best is None:
        raise MissingCheckpointError(
            f"{path} is absent: no validation has told the best checkpoint",
            remedy="name a step, or train with rows in the validation split and train.best_metric",
        )
    return best.manifest


def undefined_warning(metric: Literal["logloss", "auc", "none"], metrics: ClickMetrics) -> str | None:
    """Say that a validation can't tell the best checkpoint, as its metric is undefined; None if it can."""
    if metric == "none" or getattr(metrics, metric) is not None:
        return None
    return f'train.best_metric = "{metric}" can\'t tell the best checkpoint: {metrics.note or "it is undefined"}'


class BestKeeper:
    """Decides on rank 0 which checkpoint is the best, and remembers it in best.json.

    Args:
        metric: what tells; `none` keeps no best.
        path: best.json.
    """

    def __init__(self, metric: Literal["logloss", "auc", "none"], path: Path) -> None:
        self._metric = metric
        self._path = path
        self._pending: list[BestCheckpoint] = []
        """Improvements whose checkpoints aren't committed yet, each better than the one before."""
        self._committed = ""
        self.best: BestCheckpoint | None = None
        """Of committed checkpoints."""

    def resume(self, chain: Chain) -> list[str]:
        """Take up the best so far of a run that goes on from `chain`; returns lines for the user."""
        self._committed = chain.name
        notes = []
        best: BestCheckpoint | None = None
        try:
            best = read_best(self._path)
        except CheckpointError as error:
            notes.append(f"{error.message}: the best checkpoint before isn't known")
        if best is not None and not has_checkpoint(chain.storage, best.manifest):
            notes.append(f"the best checkpoint {best.manifest} (step {best.step}) is gone")
            best = None
        recorded = chain.tip.extra.get("best")
        if isinstance(recorded, Mapping):
            told = _from_json({**recorded, "manifest": recorded.get("manifest") or chain.name})
            same = best is not None and (told.metric, told.rows) == (best.metric, best.rows)
            newer = best is None or told.step > best.step
            if has_checkpoint(chain.storage, told.manifest) and (told.beats(best) if same else newer):
                best = told
                try:
                    _write(self._path, best)
                except OSError as error:
                    notes.append(f"warning: {self._path} can't be written: {error}")
        self.best = best
        return notes

    def improved_by(self, metrics: ClickMetrics, step: int) -> bool:
        """Whether a validation beats the best so far; one with an undefined metric doesn't.

        Afterwards `record` tells of it: the checkpoint that is saved next carries it.
        """
        value = None if self._metric == "none" else getattr(metrics, self._metric)
        if value is None:
            return False
        told = BestCheckpoint(metric=self._metric, value=value, rows=metrics.rows, step=step, manifest="")
        if not told.beats(self._pending[-1] if self._pending else self.best):
            return False
        self._pending.append(told)
        return True

    def named(self, manifest: str) -> bool:
        """Say which checkpoint the improvement is saved in; whether that is committed already.

        Raises:
            OSError: as `note`.
        """
        self._pending[-1] = replace(self._pending[-1], manifest=manifest)
        return self._settle()

    @property
    def record(self) -> dict[str, object] | None:
        """JSON-ready, for the next checkpoint: the best so far, one that isn't committed yet included."""
        told = self._pending[-1] if self._pending else self.best
        return None if told is None else told.as_dict()

    @property
    def pinned(self) -> set[str]:
        """Manifests of checkpoints that must stay: the best one, and those that are to follow it."""
        known = [*self._pending, self.best]
        return {told.manifest for told in known if told is not None and told.manifest}

    def note(self, outcome: SaveOutcome) -> bool:
        """Hear how a save ended; whether it made a new best.

        Raises:
            OSError: best.json can't be written. The new best is known all the same.
        """
        if outcome.committed:
            self._committed = outcome.manifest
        else:
            self._pending = [told for told in self._pending if told.manifest != outcome.manifest]
        return self._settle()

    def _settle(self) -> bool:
        names = [told.manifest for told in self._pending]
        if not self._committed or self._committed not in names:
            return False
        at = names.index(self._committed)
        self.best = self._pending[at]
        del self._pending[: at + 1]
        _write(self._path, self.best)
        return True


def _from_json(values: Mapping[str, object]) -> BestCheckpoint:
    told = BestCheckpoint(
        metric=str(values["metric"]),
        value=float(str(values["value"])),
        rows=int(str(values["rows"])),
        step=int(str(values["step"])),
        manifest=str(values["manifest"]),
    )
    if told.metric not in _SMALLER_IS_BETTER:
        raise ValueError(f"metric {told.metric!r}")
    return told


def _write(path: Path, best: BestCheckpoint) -> None:
    temporary = path.with_name(f".{path.name}-{os.getpid()}")
    with temporary.open("w") as file:
        file.write(best_text(best.as_dict()))
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
    folder = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)
