"""Why a plan takes as long as it does: the phase and rank that decide, the tables there, what would relieve them."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from dlrm_scale.planning.plan.cost_models import CostModel
from dlrm_scale.planning.plan.proposal import Proposal
from dlrm_scale.planning.solver.problem import Assignment, Option, Problem
from dlrm_scale.planning.solver.rate import rate
from dlrm_scale.units import format_bytes

__all__ = ["Bottleneck", "Relief", "TableShare", "describe_bottleneck", "explain"]

_TABLES_SHOWN = 5
_TABLES_TRIED = 3
_ALIKE = 0.01
"""Ranks this close to the slowest count as equally slow."""
_WORTH_TELLING = 0.002
"""Gains below this share of the step are noise of the model."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TableShare:
    """One table on the bottleneck rank.

    Attributes:
        table: its name.
        sharding_type: of its shards.
        milliseconds: what they add to the phase there.
    """

    table: str
    sharding_type: str
    milliseconds: float


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
        fixed_ms: of the step, what no plan changes: the dense part.
        rank: the slowest in it; the first where several are.
        ranks_alike: how many are as slow, within 1 %.
        phase_ms: on that rank.
        mean_ms: over all ranks.
        tables: that add most to it there.
        relief: the best change of one table that fits; None if none helps.
        relief_with_memory: the best that doesn't fit, where it helps more; None if none does.
    """

    phase: str
    share: float
    fixed_ms: float
    rank: int
    ranks_alike: int
    phase_ms: float
    mean_ms: float
    tables: tuple[TableShare, ...]
    relief: Relief | None
    relief_with_memory: Relief | None


def explain(proposal: Proposal, model: CostModel) -> Bottleneck:
    """Find what decides a plan's step by one model.

    Args:
        proposal: the plan, rated by the model.
        model: whose costs.
    """
    load = proposal.ratings[model.name].load
    problem, assignment = model.place(proposal.shapes)
    phase = max(problem.phases, key=lambda name: load.slowest_ms[name])
    times = np.asarray(load.phases_ms[phase])
    rank = int(times.argmax())
    shares = _shares(problem, assignment, problem.phases.index(phase), rank)
    relief = _relief(problem, assignment, [share.table for share in shares[:_TABLES_TRIED]])
    return Bottleneck(
        phase=phase,
        share=load.slowest_ms[phase] / load.step_ms if load.step_ms else 0.0,
        fixed_ms=problem.base_ms,
        rank=rank,
        ranks_alike=int((times >= times.max() * (1 - _ALIKE)).sum()),
        phase_ms=float(times[rank]),
        mean_ms=float(times.mean()),
        tables=tuple(shares[:_TABLES_SHOWN]),
        relief=relief[0],
        relief_with_memory=relief[1],
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
    if found.tables:
        lines.append(
            "there: " + ", ".join(f"{t.table} ({t.sharding_type}) {t.milliseconds:.3f} ms" for t in found.tables)
        )
    if found.relief is not None:
        lines.append(f"it would help to make {_change(found.relief)}")
    elif found.tables:
        proven = "; the plan is proven to be the best of its space" if optimal else ""
        lines.append(f"no other way to shard one of these tables alone helps and fits{proven}")
    if found.relief_with_memory is not None:
        more = found.relief_with_memory
        lines.append(f"with {format_bytes(more.missing_bytes)} more on a rank it would help to make {_change(more)}")
    return "\n".join(lines)


def _change(relief: Relief) -> str:
    return f"{relief.table} {relief.sharding_type} ({relief.columns} columns a shard): {relief.step_ms:.3f} ms a step"


def _shares(problem: Problem, assignment: Assignment, phase: int, rank: int) -> list[TableShare]:
    found = []
    for name, options, index, ranks in zip(
        problem.tables, problem.options, assignment.chosen, assignment.ranks, strict=True
    ):
        option = options[index]
        shards = 1 if option.placement == "all_ranks" else ranks.count(rank)
        if shards and option.costs_ms[phase]:
            found.append(
                TableShare(table=name, sharding_type=option.sharding_type, milliseconds=shards * option.costs_ms[phase])
            )
    return sorted(found, key=lambda share: (-share.milliseconds, share.table))


def _relief(problem: Problem, assignment: Assignment, tables: Sequence[str]) -> tuple[Relief | None, Relief | None]:
    """Try the other options of single tables; the best that fits, and a better one that doesn't."""
    before = rate(problem, assignment).step_ms
    fitting: Relief | None = None
    larger: Relief | None = None
    for name in tables:
        table = problem.tables.index(name)
        for index, option in enumerate(problem.options[table]):
            changed = _placed(problem, assignment, table, index, option)
            rating = rate(problem, changed)
            if rating.step_ms > before * (1 - _WORTH_TELLING):
                continue
            relief = Relief(
                table=name,
                sharding_type=option.sharding_type,
                columns=option.columns,
                step_ms=rating.step_ms,
                missing_bytes=max(0, int(rating.memory_bytes.max()) - problem.memory_bytes),
            )
            if relief.missing_bytes == 0 and (fitting is None or relief.step_ms < fitting.step_ms):
                fitting = relief
            if relief.missing_bytes and (larger is None or relief.step_ms < larger.step_ms):
                larger = relief
    if larger is not None and fitting is not None and larger.step_ms >= fitting.step_ms * (1 - _WORTH_TELLING):
        larger = None
    return fitting, larger


def _placed(problem: Problem, assignment: Assignment, table: int, index: int, option: Option) -> Assignment:
    """Give one table another option, on the ranks that have least to do without it."""
    chosen = (*assignment.chosen[:table], index, *assignment.chosen[table + 1 :])
    if option.placement == "all_ranks":
        return Assignment(chosen=chosen, ranks=_with(assignment.ranks, table, ()))
    alone = rate(problem, assignment).load_ms.sum(axis=0) - _own(problem, assignment, table)
    local = problem.ranks_per_host
    by_host = alone.reshape(-1, local)
    if option.placement == "ranks":
        order = np.argsort(alone, kind="stable")
        ranks = tuple(int(order[i % len(order)]) for i in range(option.shards))
    elif option.placement == "one_host":
        host = int(by_host.max(axis=1).argmin())
        order = np.argsort(by_host[host], kind="stable")
        ranks = tuple(int(host * local + order[i % local]) for i in range(option.shards))
    else:
        hosts = np.argsort(by_host.max(axis=1), kind="stable")[: option.shards // local]
        ranks = tuple(int(host) * local + rank for host in hosts for rank in range(local))
    return Assignment(chosen=chosen, ranks=_with(assignment.ranks, table, ranks))


def _own(problem: Problem, assignment: Assignment, table: int) -> np.ndarray:
    """What one table adds to each rank, over all phases."""
    alone = replace(problem, tables=problem.tables[table : table + 1], options=problem.options[table : table + 1])
    part = Assignment(chosen=assignment.chosen[table : table + 1], ranks=assignment.ranks[table : table + 1])
    found: np.ndarray = rate(alone, part).load_ms.sum(axis=0)
    return found


def _with(ranks: tuple[tuple[int, ...], ...], table: int, own: tuple[int, ...]) -> tuple[tuple[int, ...], ...]:
    return (*ranks[:table], own, *ranks[table + 1 :])
