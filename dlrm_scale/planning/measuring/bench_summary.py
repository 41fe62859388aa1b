"""What a benchmark of plans found: each plan's time beside its predictions, and how far predictions can be trusted."""

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass

import numpy as np

from dlrm_scale.planning.measuring.micro_timing import Clock
from dlrm_scale.planning.measuring.plan_bench import BenchRequest
from dlrm_scale.planning.measuring.plan_rounds import PlanRound, RoundsResult
from dlrm_scale.planning.measuring.ranking import Agreement, Measured, NoiseFloor, agreement, measured, noise_floor

__all__ = ["BenchSummary", "PlanRow", "summarize"]


@dataclass(frozen=True, kw_only=True)
class PlanRow:
    """One plan.

    Attributes:
        name: of the plan.
        types: how many tables have which sharding type.
        time: by the clock that plans are compared by; None for plans that weren't measured.
        wall_ms: median elapsed time of the slowest rank.
        cpu_ms: median processor time of the rank that took most.
        ours_ms: predicted by our costs.
        torchrec_ms: predicted by TorchRec's.
        slowest_ms: predicted, by phase.
        peak_bytes: measured, by rank.
        predicted_bytes: what that should be.
        same_as: the plan that it equals.
        reason: why it wasn't measured.
    """

    name: str
    types: tuple[tuple[str, int], ...] = ()
    time: Measured | None = None
    wall_ms: float | None = None
    cpu_ms: float | None = None
    ours_ms: float | None = None
    torchrec_ms: float | None = None
    slowest_ms: Mapping[str, float] | None = None
    peak_bytes: tuple[int, ...] = ()
    predicted_bytes: tuple[int, ...] = ()
    same_as: str = ""
    reason: str = ""

    @property
    def memory_error(self) -> float | None:
        """Predicted against measured peak on the fullest rank, relative."""
        if not self.peak_bytes or not self.predicted_bytes:
            return None
        rank = int(np.argmax(self.peak_bytes))
        return self.predicted_bytes[rank] / self.peak_bytes[rank] - 1 if self.peak_bytes[rank] else None


@dataclass(frozen=True, kw_only=True)
class BenchSummary:
    """All of it.

    Attributes:
        rows: measured plans, fastest first, then the others.
        clock: by which plans are compared.
        anchor: plan by which the scaled error is scaled.
        ours: our predictions against the measurements; None with fewer than two plans.
        torchrec: TorchRec's.
        noise: what two halves of the rounds agree on.
        memory_error: mean absolute relative error of the fullest rank's peak.
        rounds: finished.
        stopped: a signal ended it early.
        loads: load average by turn: least, median, most.
        cores: of a host.
        loss_difference: largest relative one between plans.
        groups: of plans that were alive together.
    """

    rows: tuple[PlanRow, ...]
    clock: Clock
    anchor: str
    ours: Agreement | None
    torchrec: Agreement | None
    noise: NoiseFloor | None
    memory_error: float | None
    rounds: int
    stopped: bool
    loads: tuple[float, float, float]
    cores: int
    loss_difference: float
    groups: int

    @property
    def busy(self) -> bool:
        """Whether much more ran than there are cores, so that elapsed times mean little.

        Two ranks alone on two cores have a load average of 2.3 to 2.5: gloo's and autograd's threads count too.
        """
        return self.loads[1] > 1.5 * self.cores

    @property
    def best(self) -> PlanRow | None:
        """The fastest plan."""
        return self.rows[0] if self.rows and self.rows[0].time is not None else None

    def as_dict(self) -> dict[str, object]:
        """JSON-ready values by name."""
        values = asdict(self) | {"busy": self.busy}
        values["plans"] = [
            {**plan, "types": dict(row.types), "memory_error": row.memory_error}
            for row, plan in zip(self.rows, values.pop("rows"), strict=True)
        ]
        return values


def summarize(request: BenchRequest, result: RoundsResult, cores: int) -> BenchSummary:
    """Bring measurements and predictions together.

    Args:
        request: what was measured.
        result: rank 0's.
        cores: of a host.
    """
    wall = _by_plan(result.turns, "wall_ms", request.anchor)
    cpu = _by_plan(result.turns, "cpu_ms", request.anchor)
    times = wall if request.clock == "elapsed" else cpu
    found = measured(times, seed=request.seed) if times else {}
    medians = {name: time.median_ms for name, time in found.items()}
    ours = {name: p.ours.step_ms for name, p in request.predictions.items()}
    theirs = {name: p.torchrec_ms for name, p in request.predictions.items() if p.torchrec_ms is not None}
    rows = []
    for plan in request.plans:
        prediction = request.predictions.get(plan.name)
        time = found.get(plan.same_as or plan.name)
        kinds = Counter(shape.sharding_type for shape in plan.shapes or ())
        rows.append(
            PlanRow(
                name=plan.name,
                types=tuple(sorted(kinds.items(), key=lambda item: (-item[1], item[0]))),
                time=time,
                wall_ms=_median(wall, plan.same_as or plan.name),
                cpu_ms=_median(cpu, plan.same_as or plan.name),
                ours_ms=prediction.ours.step_ms if prediction else None,
                torchrec_ms=prediction.torchrec_ms if prediction else None,
                slowest_ms=dict(prediction.ours.slowest_ms) if prediction else None,
                peak_bytes=result.peak_bytes.get(plan.same_as or plan.name, ()),
                predicted_bytes=prediction.measurable_bytes if prediction else (),
                same_as=plan.same_as,
                reason=plan.reason
                or (prediction.reason if prediction else "")
                or result.refused.get(plan.same_as or plan.name, "")
                or ("" if time else "a signal came before its first round"),
            )
        )
    rows.sort(key=lambda row: (row.time is None, row.time.median_ms if row.time else 0.0, bool(row.same_as)))
    errors = [abs(row.memory_error) for row in rows if row.memory_error is not None and not row.same_as]
    loads = [turn.load_average for turn in result.turns] or [0.0]
    anchor = request.anchor if request.anchor in medians else None
    return BenchSummary(
        rows=tuple(rows),
        clock=request.clock,
        anchor=request.anchor,
        ours=agreement(ours, medians, anchor=anchor),
        torchrec=agreement(theirs, medians, anchor=anchor),
        noise=noise_floor(_equally_many(times)) if times else None,
        memory_error=float(np.mean(errors)) if errors else None,
        rounds=min((len(series) for series in times.values()), default=0),
        stopped=result.stopped,
        loads=(min(loads), float(np.median(loads)), max(loads)),
        cores=cores,
        loss_difference=result.worst_loss_difference,
        groups=1 + max((turn.group for turn in result.turns), default=0),
    )


def _by_plan(turns: Sequence[PlanRound], value: str, anchor: str) -> dict[str, list[float]]:
    """Times of each plan by round; those of later groups are scaled by the anchor, which all groups have."""
    by_group: dict[int, dict[str, list[float]]] = {}
    for turn in turns:
        by_group.setdefault(turn.group, {}).setdefault(turn.plan, []).append(getattr(turn, value))
    if not by_group:
        return {}
    first = next(iter(by_group.values()))
    found = dict(first)
    for group, times in by_group.items():
        if group == 0:
            continue
        scale = 1.0
        if anchor in times and anchor in first:
            scale = float(np.median(first[anchor]) / np.median(times[anchor]))
        found |= {name: [scale * t for t in series] for name, series in times.items() if name not in found}
    return found


def _median(times: Mapping[str, Sequence[float]], name: str) -> float | None:
    return float(np.median(times[name])) if name in times else None


def _equally_many(times: Mapping[str, Sequence[float]]) -> dict[str, list[float]]:
    """Cut to the rounds that all plans have: a signal may have come within a group."""
    rounds = min(len(series) for series in times.values())
    return {name: list(series[:rounds]) for name, series in times.items()}
