"""Choosing a plan by measuring the few that are predicted to be best.

Predictions order plans well and can't be trusted to a few percent. The plan of TorchRec's planner is measured with
them, so that auto ends with nothing slower, and table-wise with the longest first: what is won over it is what planning
was good for.
"""

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from dlrm_scale.batch import Batch
from dlrm_scale.errors import DlrmScaleError
from dlrm_scale.planning.measuring.best_predicted import best_predicted
from dlrm_scale.planning.measuring.plan_groups import group_plans
from dlrm_scale.planning.measuring.plan_matrix import longest_first
from dlrm_scale.planning.measuring.plan_rounds import RoundsResult, measure_plans
from dlrm_scale.planning.measuring.plan_steps import predicted_plan_file
from dlrm_scale.planning.measuring.plan_workload import PlanWorkload
from dlrm_scale.planning.measuring.ranking import Measured, measured
from dlrm_scale.planning.plan.cost_models import OurCosts, PlanLoad
from dlrm_scale.planning.plan.request import PlanRequest
from dlrm_scale.planning.plan.torchrec_peer import torchrec_plan
from dlrm_scale.sharding.plan_file import PlanFile
from dlrm_scale.sharding.ranks import Ranks
from dlrm_scale.sharding.shard_shapes import TableShape
from dlrm_scale.units import format_bytes

__all__ = [
    "BASELINE",
    "TORCHREC",
    "AutoCandidate",
    "AutoChoice",
    "auto_candidates",
    "choose_by_measuring",
    "torchrec_candidate",
]

BASELINE = "table-wise, longest first"
TORCHREC = "TorchRec's plan"

_TORCHREC_SECONDS = 3
"""For TorchRec's planner to try proposals: 26 tables take it 0.1 s on 2 ranks, 2 s on 64, 10 s on 256."""
_PREDICTED = ("predicted best", "predicted second", "predicted third")
_MOST_ROUNDS = 30
_SECONDS = 10.0
"""Of measuring plans that are alive together, without building them."""
_PASSES, _ROUNDS_A_PASS = 3, 8
"""Where only one plan is alive at a time: each is built three times, so that a slow minute meets all alike."""


@dataclass(frozen=True, kw_only=True)
class AutoCandidate:
    """A plan that is worth measuring.

    Attributes:
        name: which.
        shapes: by table.
        load: predicted.
    """

    name: str
    shapes: tuple[TableShape, ...]
    load: PlanLoad


@dataclass(frozen=True, kw_only=True)
class AutoChoice:
    """What was chosen and why.

    Attributes:
        plan: that is kept, with its prediction.
        kept: name of it.
        times: measured, by name; empty where nothing was measured.
        notes: lines for the user.
    """

    plan: PlanFile
    kept: str
    times: dict[str, Measured]
    notes: tuple[str, ...]


def auto_candidates(request: PlanRequest, *, least_columns: int = 4) -> list[AutoCandidate]:
    """Predict all and keep the best few of different mixtures of types, and the baseline where it fits.

    Args:
        request: what is planned.
        least_columns: column shards may be no narrower.

    Raises:
        PlanError: nothing fits.
        ConfigError: the cluster has no costs for so many ranks.
    """
    model = OurCosts(request)
    found: list[AutoCandidate] = []
    for shapes in best_predicted(request, 2 * len(_PREDICTED)):
        if not _narrow(request, shapes, least_columns) and len(found) < len(_PREDICTED):
            found.append(AutoCandidate(name=_PREDICTED[len(found)], shapes=shapes, load=model.load(shapes)))
    baseline = longest_first(request)
    allowed = all("table_wise" in kinds for kinds in request.types.values())
    load = model.load(baseline)
    if allowed and load.fits and baseline not in [candidate.shapes for candidate in found]:
        found.append(AutoCandidate(name=BASELINE, shapes=baseline, load=load))
    return found


def torchrec_candidate(
    request: PlanRequest,
    others: Sequence[AutoCandidate],
    *,
    least_columns: int = 4,
    limit_seconds: int = _TORCHREC_SECONDS,
) -> tuple[list[AutoCandidate], list[str]]:
    """Let TorchRec's planner plan too.

    Args:
        request: what is planned.
        others: a plan that is one of these isn't measured again.
        least_columns: column shards may be no narrower.
        limit_seconds: for trying proposals; after that its best plan so far counts.

    Returns:
        Its plan or none, and a line for the user wherever it isn't one plan more, made to the end.
    """
    try:
        made = torchrec_plan(request, limit_seconds=limit_seconds)
    except DlrmScaleError as error:
        return [], [f"{TORCHREC}: there is none: {error.message}"]
    except Exception as error:  # a fault of TorchRec's planner ends no run that has plans without it
        return [], [f"{TORCHREC}: there is none: its planner failed with {error!r}"]
    shapes = made.shapes
    cut_off = [f"{TORCHREC} is the best that its planner had after {made.seconds:.0f} s"] if made.cut_off else []
    load = OurCosts(request).load(shapes)
    same = next((other.name for other in others if other.shapes == shapes), None)
    if same is not None:
        return [], [*cut_off, f"{TORCHREC} is the same as {same}"]
    refusal = ""
    for table, shape in zip(request.tables.tables, shapes, strict=True):
        if shape.sharding_type not in request.types.get(table.name, (shape.sharding_type,)):
            refusal = f"table {table.name} is {shape.sharding_type} there, which wasn't asked for"
    if _narrow(request, shapes, least_columns):
        refusal = f"it has column shards narrower than {least_columns}"
    if not load.fits:
        needed, limit = format_bytes(max(load.memory_by_rank)), format_bytes(load.memory_limit_bytes)
        refusal = f"its fullest rank needs {needed} of {limit}"
    if refusal:
        return [], [*cut_off, f"{TORCHREC}: not measured, {refusal}"]
    return [AutoCandidate(name=TORCHREC, shapes=shapes, load=load)], cut_off


def _narrow(request: PlanRequest, shapes: Sequence[TableShape], least_columns: int) -> bool:
    return any(
        shape.columns < min(least_columns, table.dim)
        for table, shape in zip(request.tables.tables, shapes, strict=True)
    )


def choose_by_measuring(
    request: PlanRequest,
    workload: PlanWorkload,
    candidates: Sequence[AutoCandidate],
    batches: Sequence[Batch],
    ranks: Ranks,
    *,
    free_bytes: int,
    asked_to_stop: Callable[[], bool],
    progress: Callable[[str], None],
) -> AutoChoice:
    """Measure candidates on batches and keep the fastest. A collective; equal on all ranks.

    Nothing of it stays: the models and their weights are thrown away.

    Args:
        request: what is planned.
        workload: the run's model and settings.
        candidates: the same on every rank, best predicted first.
        batches: this rank's; without any, the first candidate is kept as predicted.
        ranks: the process group.
        free_bytes: of a host; plans are alive together only where they fit it, otherwise one at a time.
        asked_to_stop: looked at after every round.
        progress: told what is done.
    """
    by_name = {candidate.name: candidate for candidate in candidates}
    shapes = {name: candidate.shapes for name, candidate in by_name.items()}
    sizes = {name: candidate.load.memory_by_rank for name, candidate in by_name.items()}
    notes: list[str] = []
    if len(candidates) == 1 or not batches:
        why = "there is one plan alone" if len(candidates) == 1 else "no batch was taken"
        return _kept(request, candidates[0], {}, [f"nothing was measured, for {why}"], candidates)
    started = time.perf_counter()
    groups, _ = group_plans(sizes, ranks.local_ranks, free_bytes, candidates[0].name)
    together = len(groups) == 1 and len(groups[0]) == len(candidates)

    def measure(groups: list[list[str]], rounds: int, seed: int) -> RoundsResult:
        return measure_plans(
            workload,
            shapes,
            groups,
            batches,
            ranks,
            ranks_per_host=request.ranks_per_host,
            rounds=rounds,
            seed=seed,
            time_limit_seconds=_SECONDS / len(groups),
            asked_to_stop=asked_to_stop,
            progress=progress,
        )

    results = []
    if together:
        results = [measure([list(by_name)], _MOST_ROUNDS, 0)]
    else:
        alone = [name for name, size in sizes.items() if _fits_alone(size, ranks.local_ranks, free_bytes)]
        notes += [
            f"{name}: not measured, it needs {format_bytes(sum(sizes[name]))} and {format_bytes(free_bytes)} are free"
            for name in by_name
            if name not in alone
        ]
        for turn in range(_PASSES):
            order = np.random.default_rng(turn).permutation(alone).tolist() if alone else []
            if not order or (results and results[-1].stopped):
                break
            results.append(measure([[name] for name in order], _ROUNDS_A_PASS, turn))
    walls: dict[str, list[float]] = {}
    for result in results:
        for turn_of_plan in result.turns:
            walls.setdefault(turn_of_plan.plan, []).append(turn_of_plan.wall_ms)
        notes += [f"{name}: not kept: {why}" for name, why in result.refused.items()]
    # Rank 0's times: all have the same, and its word counts.
    times = ranks.broadcast_object(measured(walls) if walls else {})
    assert isinstance(times, dict)
    seconds = time.perf_counter() - started
    usable = [candidate for candidate in candidates if not any(candidate.name in r.refused for r in results)]
    best = min(times, key=lambda name: times[name].median_ms, default=usable[0].name if usable else candidates[0].name)
    how = "side by side" if together else "one at a time, for memory"
    rounds = max((time_.rounds for time_ in times.values()), default=0)
    notes.insert(0, f"measured {len(times)} plans {how}, {rounds} rounds on {len(batches)} batches in {seconds:.0f} s")
    return _kept(request, by_name[best], times, notes, candidates)


def _fits_alone(sizes: Sequence[int], ranks_per_host: int, free_bytes: int) -> bool:
    return max(sum(sizes[i : i + ranks_per_host]) for i in range(0, len(sizes), ranks_per_host)) <= free_bytes


def _kept(
    request: PlanRequest,
    kept: AutoCandidate,
    times: dict[str, Measured],
    notes: list[str],
    candidates: Sequence[AutoCandidate],
) -> AutoChoice:
    lines = list(notes)
    for candidate in candidates:
        time_ = times.get(candidate.name)
        told = "not measured" if time_ is None else f"{time_.median_ms:.2f} ms ({time_.low_ms:.2f}-{time_.high_ms:.2f})"
        counts = Counter(shape.sharding_type for shape in candidate.shapes)
        kinds = ", ".join(f"{count} {kind}" for kind, count in sorted(counts.items()))
        lines.append(f"{candidate.name}: {told}, predicted {candidate.load.step_ms:.2f} ms; {kinds}")
    lines.append(f"kept: {kept.name}{_won(kept, times, candidates)}")
    return AutoChoice(
        plan=predicted_plan_file(request, kept.shapes, kept.load), kept=kept.name, times=times, notes=tuple(lines)
    )


def _won(kept: AutoCandidate, times: dict[str, Measured], candidates: Sequence[AutoCandidate]) -> str:
    if kept.name not in times or len(times) < 2:
        return ""
    baseline = next((c.name for c in candidates if c.name == BASELINE and c.name in times), None)
    if baseline is not None and baseline != kept.name:
        gain = 1 - times[kept.name].median_ms / times[baseline].median_ms
        tie = ", within the noise" if times[baseline].ties_with_best else ""
        return f", {gain:.1%} less a step than {baseline}{tie}"
    second = min((time for name, time in times.items() if name != kept.name), key=lambda time: time.median_ms)
    tie = ", within the noise" if second.ties_with_best else ""
    return f", {1 - times[kept.name].median_ms / second.median_ms:.1%} less a step than the next{tie}"
