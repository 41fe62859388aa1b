"""What the memory of a rank forces on a plan: the same request planned again with more of it."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from dlrm_scale.planning.plan.shapes import shapes_of
from dlrm_scale.planning.solver.problem import Problem
from dlrm_scale.planning.solver.solve import Solution
from dlrm_scale.sharding.shard_shapes import TableShape
from dlrm_scale.units import format_bytes

__all__ = ["LargerMemory", "MemoryCaps", "describe_memory_caps", "what_memory_forces"]

_FACTORS = (1.25, 1.5, 2.0, 3.0, 4.0)
_WORTH_TELLING = 0.005
"""A step that gets less than this share shorter isn't forced by memory."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LargerMemory:
    """The request planned again.

    Attributes:
        memory_bytes: for the tables of a rank.
        factor: of what there is; infinite where memory was no limit.
        step_ms: of the best plan found then.
        bound_ms: of its problem.
        changed: tables that are sharded otherwise: (table, type now, type then).
    """

    memory_bytes: int
    factor: float
    step_ms: float
    bound_ms: float
    changed: tuple[tuple[str, str, str], ...]


@dataclass(frozen=True, kw_only=True)
class MemoryCaps:
    """What memory forces.

    Attributes:
        memory_bytes: for the tables of a rank, as it is.
        step_ms: of the plan as it is.
        larger: with more memory, least first; empty where more wouldn't help.
    """

    memory_bytes: int
    step_ms: float
    larger: tuple[LargerMemory, ...]


def what_memory_forces(
    problem: Problem, now: Sequence[TableShape], step_ms: float, solver: Callable[[Problem], Solution]
) -> MemoryCaps:
    """Plan again with more memory, up to where more doesn't help.

    Args:
        problem: as it was planned.
        now: its plan.
        step_ms: of that plan.
        solver: the same solver.
    """
    everything = sum(max(o.memory_bytes * o.shards for o in options) for options in problem.options)
    if everything <= problem.memory_bytes:
        return MemoryCaps(memory_bytes=problem.memory_bytes, step_ms=step_ms, larger=())
    unlimited = _again(problem, everything, float("inf"), now, solver)
    larger: list[LargerMemory] = []
    if unlimited.step_ms < step_ms * (1 - _WORTH_TELLING):
        best = step_ms
        for factor in _FACTORS:
            found = _again(problem, int(problem.memory_bytes * factor), factor, now, solver)
            if found.step_ms < best * (1 - _WORTH_TELLING):
                larger.append(found)
                best = found.step_ms
            if best <= unlimited.step_ms * (1 + _WORTH_TELLING):
                break
        else:
            larger.append(unlimited)
    return MemoryCaps(memory_bytes=problem.memory_bytes, step_ms=step_ms, larger=tuple(larger))


def describe_memory_caps(caps: MemoryCaps) -> str:
    """Say it in sentences."""
    now = f"tables may take {format_bytes(caps.memory_bytes)} on a rank"
    if not caps.larger:
        return f"{now}; more memory wouldn't make the step shorter"
    lines = [f"{now}, and that costs time:"]
    for larger in caps.larger:
        size = "without a limit" if larger.factor == float("inf") else f"with {larger.factor:g} times as much"
        gain = 1 - larger.step_ms / caps.step_ms
        lines.append(f"  {size} {larger.step_ms:.3f} ms ({gain:.1%} less){_changes(larger.changed)}")
    return "\n".join(lines)


def _changes(changed: Sequence[tuple[str, str, str]]) -> str:
    if not changed:
        return ""
    shown = ", ".join(f"{table} {before} -> {after}" for table, before, after in changed[:4])
    return f": {shown}" + (f" and {len(changed) - 4} more tables" if len(changed) > 4 else "")


def _again(
    problem: Problem,
    memory_bytes: int,
    factor: float,
    now: Sequence[TableShape],
    solver: Callable[[Problem], Solution],
) -> LargerMemory:
    relaxed = replace(problem, memory_bytes=memory_bytes)
    solution = solver(relaxed)
    then = shapes_of(relaxed, solution.assignment)
    changed = tuple(
        (table, a.sharding_type, b.sharding_type)
        for table, a, b in zip(problem.tables, now, then, strict=True)
        if a.sharding_type != b.sharding_type
    )
    return LargerMemory(
        memory_bytes=memory_bytes, factor=factor, step_ms=solution.step_ms, bound_ms=solution.bound_ms, changed=changed
    )
