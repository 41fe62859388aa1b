"""Why a plan takes as long as it does: the phase and rank that decide, what is there, what would relieve them."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from dlrm_scale.planning.plan.cost_models import CostModel
from dlrm_scale.planning.plan.proposal import Proposal
from dlrm_scale.planning.solver.moves import Work, moves_of, without_type
from dlrm_scale.planning.solver.plan_state import PlanState
from dlrm_scale.units import format_bytes

__all__ = ["Bottleneck", "Relief", "TableShare", "TypeDropped", "TypeShare", "describe_bottleneck", "explain"]

_TABLES_SHOWN = 5
_TABLES_TRIED = 3
_ALIKE = 0.01
"""Ranks this close to the slowest count as equally slow."""
_WORTH_TELLING = 0.002
"""Gains below this share of the step are noise of the model."""
_RATINGS = 20_000
"""Of whole plans, to look for relief."""
_TYPE_TOLD = 0.05
"""Share of the step from which what a type costs by being in use is told."""
_FIXED = "dense"
"""The phase that no plan changes."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TableShare:
    """One table on the bottleneck rank.

    Attributes:
        table: its name.
        sharding_type: of its shards.
        milliseconds: what they add to the phase there, beyond what the type costs without them.
    """

    table: str
    sharding_type: str
    milliseconds: float


@dataclass(frozen=True, kw_only=True, slots=True)
class TypeShare:
    """One sharding type, whatever its tables.

    Attributes:
        sharding_type: in use.
        milliseconds: what being in use costs: constants, and the starts of its collectives.
    """

    sharding_type: str
    milliseconds: float


@dataclass(frozen=True, kw_only=True, slots=True)
class TypeDropped:
    """All tables of a sharding type sharded otherwise, all others as they are.

    Attributes:
        sharding_type: that is given up.
        tables: how many had it.
        to: types that they would get, with how many.
        step_ms: of the plan then.
    """

    sharding_type: str
    tables: int
    to: tuple[tuple[str, int], ...]
    step_ms: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Relief:
    """One table sharded otherwise, all others as they are.

    Attributes:
        table: its name.
        sharding_type: it would get.
        columns: of its shards then.
        step_ms: of the plan then.
        missing_bytes: what the fullest rank would lack; 0 where it fits.
    """

    table: str
    sharding_type: str
    columns: int
    step_ms: float
    missing_bytes: int


@dataclass(frozen=True, kw_only=True)
class Bottleneck:
    """What decides a plan's step.

    Attributes:
        phase: that takes longest of those that depend on the plan.
        share: of the step.
        phases_ms: what each phase adds to the step, the longest first; together they are the step.
        fixed_ms: of the step, what no plan changes: the dense part.
        rank: the slowest in `phase`; the first where several are.
        ranks_alike: how many are as slow, within 1 %.
        phase_ms: on that rank.
        mean_ms: over all ranks.
        types: in use, with what that adds to the phase on that rank; with all tables' shares the phase.
        tables: that add most to it there.
        rest_ms: of the tables that aren't named.
        types_step_ms: in use, with what that adds to the step over all phases.
        relief: the best change of one table that fits; None if none helps.
        relief_with_memory: the best that doesn't fit, where it helps more; None if none does.
        type_dropped: the best sharding type to give up; None if that doesn't help.
    """

    phase: str
    share: float
    phases_ms: Mapping[str, float]
    fixed_ms: float
    rank: int
    ranks_alike: int
    phase_ms: float
    mean_ms: float
    types: tuple[TypeShare, ...]
    tables: tuple[TableShare, ...]
    rest_ms: float
    types_step_ms: tuple[TypeShare, ...]
    relief: Relief | None
    relief_with_memory: Relief | None
    type_dropped: TypeDropped | None


def explain(proposal: Proposal, model: CostModel) -> Bottleneck:
    """Find what decides a plan's step by one model.

    Args:
        proposal: the plan, rated by the model.
        model: whose costs.
    """
    load = proposal.ratings[model.name].load
    state = PlanState(*model.place(proposal.shapes))
    by_time = sorted(load.slowest_ms, key=lambda name: -load.slowest_ms[name])
    phase = next(name for name in by_time if name != _FIXED)
    times = np.asarray(load.phases_ms[phase])
    rank = int(times.argmax())
    at = state.rater.phases.index(phase)
    tables = _tables(state, at, rank)
    relief = _relief(state, [state.problem.tables.index(share.table) for share in tables[:_TABLES_TRIED]])
    starts = {kind: state.rater.type_ms(kind, np.zeros_like(state.sizes_of(kind))) for kind in state.types}
    return Bottleneck(
        phase=phase,
        share=load.slowest_ms[phase] / load.step_ms if load.step_ms else 0.0,
        phases_ms={name: load.slowest_ms[name] for name in by_time},
        fixed_ms=state.problem.base_ms,
        rank=rank,
        ranks_alike=int((times >= times.max() * (1 - _ALIKE)).sum()),
        phase_ms=float(times[rank]),
        mean_ms=float(times.mean()),
        types=_largest({kind: float(ms[at, rank]) for kind, ms in starts.items()}),
        tables=tuple(tables[:_TABLES_SHOWN]),
        rest_ms=sum(share.milliseconds for share in tables[_TABLES_SHOWN:]),
        types_step_ms=_largest({kind: _of_step(state, ms) for kind, ms in starts.items()}),
        relief=relief[0],
        relief_with_memory=relief[1],
        type_dropped=_type_dropped(state),
    )


def describe_bottleneck(found: Bottleneck, ranks: int, *, optimal: bool | None) -> str:
    """Say it in sentences.

    Args:
        found: from `explain`.
        ranks: all of them.
        optimal: whether the plan is proven to be the best of its space.
    """
    alike = f"rank {found.rank}"
    if found.ranks_alike > 1:
        alike = (
            "all ranks alike" if found.ranks_alike == ranks else f"rank {found.rank} and {found.ranks_alike - 1} more"
        )
    first = "takes longest"
    if found.fixed_ms > found.phase_ms:
        first = f"takes longest, after the dense part's {found.fixed_ms:.3f} ms, which no plan changes"
    lines = [
        f"{found.phase} {first}: {found.phase_ms:.3f} ms on {alike}, {found.share:.0%} of the step; "
        f"the mean of all ranks is {found.mean_ms:.3f} ms"
    ]
    there = [f"{t.sharding_type} in use {t.milliseconds:.3f} ms" for t in found.types if t.milliseconds]
    there += [f"{t.table} ({t.sharding_type}) {t.milliseconds:.3f} ms" for t in found.tables]
    there += [f"other tables {found.rest_ms:.3f} ms"] if found.rest_ms else []
    if there:
        lines.append("there: " + ", ".join(there))
    if len(found.phases_ms) > 1:
        lines.append(
            "the step: " + " + ".join(f"{name} {ms:.3f}" for name, ms in found.phases_ms.items() if ms) + " ms"
        )
    step_ms = sum(found.phases_ms.values())
    in_use = [t for t in found.types_step_ms if t.milliseconds >= _TYPE_TOLD * step_ms]
    if in_use:
        told = ", ".join(f"{t.sharding_type} {t.milliseconds:.3f} ms" for t in in_use)
        lines.append(f"of it whatever the tables, because the type is in use: {told}")
    helps = found.relief is not None or found.type_dropped is not None
    if found.relief is not None:
        lines.append(f"it would help to make {_change(found.relief)}")
    if found.type_dropped is not None:
        dropped = found.type_dropped
        to = ", ".join(f"{count} {kind}" for kind, count in dropped.to)
        lines.append(
            f"it would help to give up {dropped.sharding_type}: its {dropped.tables} tables as {to}, "
            f"{dropped.step_ms:.3f} ms a step"
        )
    if not helps and (found.tables or found.types):
        proven = "; the plan is proven to be the best of its space" if optimal else ""
        lines.append(f"no other way to shard one of these tables alone helps and fits{proven}")
    if found.relief_with_memory is not None:
        more = found.relief_with_memory
        lines.append(f"with {format_bytes(more.missing_bytes)} more on a rank it would help to make {_change(more)}")
    return "\n".join(lines)


def _change(relief: Relief) -> str:
    return f"{relief.table} {relief.sharding_type} ({relief.columns} columns a shard): {relief.step_ms:.3f} ms a step"


def _tables(state: PlanState, phase: int, rank: int) -> list[TableShare]:
    """What each table adds to a phase on a rank, the most first.

    What a type's exchanges take beyond their starts is shared out by what each of its tables makes them longer; with
    the starts the shares add up to the phase.
    """
    added = [float(part.added_ms[phase, rank]) for part in state.parts]
    for kind in state.types:
        sizes = state.sizes_of(kind)
        whole = float(state.rater.type_ms(kind, sizes)[phase, rank])
        start = float(state.rater.type_ms(kind, np.zeros_like(sizes))[phase, rank])
        if whole <= start:
            continue
        own = [t for t, part in enumerate(state.parts) if part.sharding_type == kind]
        longer = {
            t: whole - float(state.rater.type_ms(kind, np.maximum(0.0, sizes - state.parts[t].sizes))[phase, rank])
            for t in own
        }
        total = sum(longer.values())
        for t in own:
            added[t] += (whole - start) * (longer[t] / total if total > 0 else 1 / len(own))
    shares = [
        TableShare(table=name, sharding_type=part.sharding_type, milliseconds=milliseconds)
        for name, part, milliseconds in zip(state.problem.tables, state.parts, added, strict=True)
        if milliseconds > 0
    ]
    return sorted(shares, key=lambda share: (-share.milliseconds, share.table))


def _of_step(state: PlanState, starts_ms: np.ndarray) -> float:
    """What the starts of a type add to the step; they are alike on all ranks."""
    now = state.phase_ms
    types = state.types
    return state.rater.step_ms(now, types) - state.rater.step_ms(now - starts_ms, types)


def _largest(milliseconds: Mapping[str, float]) -> tuple[TypeShare, ...]:
    shares = [TypeShare(sharding_type=kind, milliseconds=ms) for kind, ms in milliseconds.items()]
    return tuple(sorted(shares, key=lambda share: (-share.milliseconds, share.sharding_type)))


def _relief(state: PlanState, tables: Sequence[int]) -> tuple[Relief | None, Relief | None]:
    """Try the other options of single tables; the best that fits, and a better one that doesn't."""
    problem, work = state.problem, Work(_RATINGS)
    fitting: Relief | None = None
    larger: Relief | None = None
    for table in tables:
        for move in moves_of(state, table, work):
            if move.step_ms > state.step_ms * (1 - _WORTH_TELLING):
                continue
            option = problem.options[table][move.index]
            relief = Relief(
                table=problem.tables[table],
                sharding_type=option.sharding_type,
                columns=option.columns,
                step_ms=move.step_ms,
                missing_bytes=max(0, move.fullest_bytes - problem.memory_bytes),
            )
            if relief.missing_bytes == 0 and (fitting is None or relief.step_ms < fitting.step_ms):
                fitting = relief
            if relief.missing_bytes and (larger is None or relief.step_ms < larger.step_ms):
                larger = relief
    if larger is not None and fitting is not None and larger.step_ms >= fitting.step_ms * (1 - _WORTH_TELLING):
        larger = None
    return fitting, larger


def _type_dropped(state: PlanState) -> TypeDropped | None:
    """Try to do without each type in use."""
    work = Work(_RATINGS)
    best: TypeDropped | None = None
    for kind in state.types:
        found = without_type(state, kind, work) if work.left() else None
        if found is None or found.step_ms > min(state.step_ms, best.step_ms if best else np.inf) * (1 - _WORTH_TELLING):
            continue
        own = [t for t, part in enumerate(state.parts) if part.sharding_type == kind]
        now = [found.parts[t].sharding_type for t in own]
        to = tuple((other, now.count(other)) for other in sorted(set(now)))
        best = TypeDropped(sharding_type=kind, tables=len(own), to=to, step_ms=found.step_ms)
    return best
