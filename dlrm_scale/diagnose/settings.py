"""Settings that may help against a verdict, and how much they could gain at best. Pure functions."""

from collections.abc import Sequence
from dataclasses import dataclass

from dlrm_scale.config import Config
from dlrm_scale.diagnose.data import Source
from dlrm_scale.diagnose.measurements import Interval, Measurements, interval
from dlrm_scale.diagnose.verdict import Verdict
from dlrm_scale.recipes import validate_config

__all__ = ["Candidate", "Trial", "candidates", "is_better", "predicted_gain", "recommended", "with_setting"]

_GAIN = 1.03
"""Less isn't worth a change, and a busy machine makes such differences by itself."""
_BF16_RATE = 2.0
"""Matrix products at most, on CPUs with AVX512-BF16 or AMX."""
_NEARLY = 0.95
"""Gains this near each other are alike: the setting that comes first wins."""
_CAUTION = 1.25
"""How much more a setting must gain if it changes what is trained."""
_READERS = 4
"""As many hide a storage that takes three times as long as the step, and keep four cores busy."""
_RATES_CHANGE = "another global batch trains differently: tune the learning rates again"


@dataclass(frozen=True, kw_only=True)
class Candidate:
    """A setting that is worth a trial.

    Attributes:
        key: `section.key`.
        value: TOML-ready.
        source: kind of rounds in which its effect would show.
        rebuilds: it needs a model of its own.
        caution: what else it changes, or "".
    """

    key: str
    value: str | int
    source: Source
    rebuilds: bool = False
    caution: str = ""

    @property
    def setting(self) -> str:
        """As `--set` takes it."""
        return f"{self.key}={self.value}"

    @property
    def is_plan(self) -> bool:
        """Whether it changes how tables are spread, and nothing else."""
        return self.key.startswith("sharding.")


@dataclass(frozen=True, kw_only=True)
class Trial:
    """What a setting did.

    Attributes:
        setting: `section.key=value`.
        predicted: rows/s with it over rows/s without it, at best; None where nothing predicts it.
        measured: the same, measured in pairs of rounds; None if it wasn't tried.
        better: it was measured to be better, beyond the spread of the rounds.
        note: what else it changes, or why it wasn't tried; or "".
    """

    setting: str
    predicted: float | None
    measured: Interval | None
    better: bool
    note: str


def candidates(config: Config, verdict: Verdict, *, cores_per_rank: int, heaviest_table: str | None) -> list[Candidate]:
    """List settings against a verdict, those that change least first.

    Args:
        config: of the run.
        verdict: what holds it back.
        cores_per_rank: CPU threads that a rank could have.
        heaviest_table: of the slowest rank, if a split would relieve it.
    """
    data, threads = config.data, config.train.threads_per_rank or cores_per_rank
    if verdict.bound == "compute-bound":
        found = []
        if threads < cores_per_rank:
            found.append(Candidate(key="train.threads_per_rank", value=cores_per_rank, source="synthetic"))
        if config.train.precision == "fp32":
            found.append(_rebuilt("train.precision", "bf16", "the dense part computes in bf16: compare the AUC"))
        return found
    if verdict.bound in ("fetch-bound", "prep-bound"):
        source: Source = "cold" if verdict.bound == "fetch-bound" else "warm"
        found = [
            Candidate(key="data.prefetch_batches", value=4 * data.prefetch_batches, source=source),
            Candidate(
                key="data.readers", value=_READERS if data.readers < _READERS else 2 * data.readers, source=source
            ),
        ]
        if data.window_rows >= 4096:
            found.append(
                Candidate(
                    key="data.window_rows",
                    value=data.window_rows // 4,
                    source=source,
                    caution="rows are shuffled in smaller windows",
                )
            )
        if source == "warm" and threads > 1:
            found.append(Candidate(key="train.threads_per_rank", value=threads - 1, source=source))
        double = Candidate(key="data.batch_size", value=2 * data.batch_size, source=source, caution=_RATES_CHANGE)
        return [*found, double]
    if verdict.bound == "memory-bound":
        return []
    found = []
    if verdict.bound == "imbalanced plan" and heaviest_table is not None:
        found.append(_rebuilt(f"sharding.tables.{heaviest_table}", "row_wise"))
    for kind in ("row_wise", "auto", *(("table_wise",) if verdict.bound == "communication-bound" else ())):
        if config.sharding.kind != kind:
            found.append(_rebuilt("sharding.kind", kind))
    if verdict.bound == "communication-bound":
        if config.sharding.all_to_all_precision == "fp32":
            found.append(_rebuilt("sharding.all_to_all_precision", "fp16", "vectors travel in fp16: compare the AUC"))
        double = Candidate(key="data.batch_size", value=2 * data.batch_size, source="synthetic", caution=_RATES_CHANGE)
        found.append(double)
    return found


def _rebuilt(key: str, value: str, caution: str = "") -> Candidate:
    return Candidate(key=key, value=value, source="synthetic", rebuilds=True, caution=caution)


def predicted_gain(
    candidate: Candidate, m: Measurements, verdict: Verdict, *, config: Config, loader_seconds: float | None
) -> float:
    """Predict rows/s with a setting over rows/s without it, at best.

    A step can't be faster than its computation with batches in memory, nor than the loader alone with the setting; a
    plan, or an exchange, can save no more than the share that the verdict names.

    Args:
        candidate: the setting.
        m: measured without it.
        verdict: reached without it.
        config: without it.
        loader_seconds: of the loader alone with the setting, a step; None where it doesn't matter.
    """
    compute = interval(m.synthetic_seconds).median
    now = {"synthetic": compute, "warm": interval(m.warm_seconds).median, "cold": m.step_seconds}[candidate.source]
    growth = 1.0
    if candidate.key == "data.batch_size":
        growth = int(candidate.value) / config.data.batch_size
    if candidate.key == "train.precision":
        return _BF16_RATE
    if candidate.is_plan:
        return 1 / max(1 - verdict.share, 0.05)
    if candidate.key == "train.threads_per_rank" and candidate.source == "synthetic":
        return int(candidate.value) / config.train.threads_per_rank
    if loader_seconds is None:
        # the transfer's fixed costs are shared by more rows
        return 1 / max(1 - verdict.share * (1 - 1 / growth), 0.05)
    return growth * now / max(growth * compute, loader_seconds)


def is_better(ratios: Interval) -> bool:
    """Whether pairs of rounds show a gain beyond their spread."""
    return ratios.median >= _GAIN and ratios.low > 1


def recommended(trials: Sequence[Trial]) -> Trial | None:
    """Choose among settings that were measured to be better; None if none was.

    One that changes nothing but speed wins over one that also changes what is trained, unless that gains much more.

    Args:
        trials: in the order of preference where gains are alike.
    """
    worth = [(t.measured.median / (_CAUTION if t.note else 1), t) for t in trials if t.better and t.measured]
    best = max((gain for gain, _ in worth), default=0.0)
    return next((t for gain, t in worth if gain >= _NEARLY * best), None)


def with_setting(config: Config, candidate: Candidate) -> Config:
    """Apply a setting.

    Raises:
        ConfigError: its value isn't allowed.
    """
    values = config.model_dump(mode="json")
    *sections, key = candidate.key.split(".")
    inner = values
    for section in sections:
        inner = inner.setdefault(section, {})
    inner[key] = candidate.value
    return validate_config(values, f"--set {candidate.setting}")
