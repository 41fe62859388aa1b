"""A whole plan rated exactly, with what each table adds to it, so that a change of one table is rated by itself."""

from collections.abc import Collection, Sequence
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from dlrm_scale.planning.solver.problem import Assignment, Option, Part, PlanRater, Problem
from dlrm_scale.planning.solver.rate import charged_ms

__all__ = ["LinearRater", "PlanState", "rater_of"]

Numbers = NDArray[np.float64]


class LinearRater:
    """The costs of a problem's options, taken as exact.

    Args:
        problem: its phases are the rater's.
    """

    def __init__(self, problem: Problem) -> None:
        self._problem = problem

    @property
    def phases(self) -> tuple[str, ...]:
        """See `PlanRater`."""
        return self._problem.phases

    @property
    def base_ms(self) -> Numbers:
        """See `PlanRater`; what every plan costs alike is part of no phase here."""
        return np.zeros(len(self._problem.phases))

    def part(self, table: int, option: Option, ranks: tuple[int, ...]) -> Part:
        """See `PlanRater`."""
        count = np.ones(self._problem.ranks, dtype=np.int64)
        if option.placement != "all_ranks":
            count = np.bincount(np.array(ranks, dtype=np.int64), minlength=self._problem.ranks)
        return Part(
            sharding_type=option.sharding_type,
            added_ms=np.array(option.costs_ms)[:, None] * count,
            sizes=np.zeros((0, self._problem.ranks)),
            memory_bytes=(option.memory_bytes * count)[None],
        )

    def type_ms(self, sharding_type: str, sizes: Numbers) -> Numbers:
        """See `PlanRater`; charges may be of several types together and are no part of a phase."""
        return np.zeros((len(self._problem.phases), self._problem.ranks))

    def step_ms(self, phase_ms: Numbers, types: Collection[str]) -> float:
        """See `PlanRater`."""
        return float(phase_ms.max(axis=1).sum()) + charged_ms(self._problem, types) + self._problem.base_ms


def rater_of(problem: Problem) -> PlanRater:
    """The problem's own, or one of its options' costs."""
    return problem.exact if problem.exact is not None else LinearRater(problem)


class PlanState:
    """A plan with its parts.

    Args:
        problem: of the plan.
        assignment: the plan.
        parts: those of the plan, where they are known.
    """

    def __init__(self, problem: Problem, assignment: Assignment, parts: Sequence[Part] | None = None) -> None:
        self.problem = problem
        self.rater = rater_of(problem)
        self._chosen, self._ranks = list(assignment.chosen), list(assignment.ranks)
        self._parts = list(parts) if parts is not None else [self._part(t) for t in range(len(problem.tables))]
        self._sum()

    def copy(self) -> "PlanState":
        """A plan that may be changed apart from this one."""
        return PlanState(self.problem, self.assignment, self._parts)

    @property
    def assignment(self) -> Assignment:
        """The plan."""
        return Assignment(chosen=tuple(self._chosen), ranks=tuple(self._ranks))

    @property
    def parts(self) -> Sequence[Part]:
        """What each table adds."""
        return self._parts

    @property
    def types(self) -> tuple[str, ...]:
        """In use, sorted."""
        return tuple(sorted(self._sizes))

    @property
    def step_ms(self) -> float:
        """Of the plan."""
        return self._step_ms

    @property
    def fullest_bytes(self) -> int:
        """Of the rank with the least room."""
        return int(self._memory.max())

    @property
    def fits(self) -> bool:
        """Whether every rank has the memory."""
        return self.fullest_bytes <= self.problem.memory_bytes

    @cached_property
    def _base(self) -> Numbers:
        return self.rater.base_ms[:, None]

    @property
    def phase_ms(self) -> Numbers:
        """`[phases, ranks]`."""
        return self._base + self._added + sum(self._type_ms.values())

    def option(self, table: int) -> Option:
        """That a table has."""
        return self.problem.options[table][self._chosen[table]]

    def sizes_of(self, sharding_type: str) -> Numbers:
        """`[sizes, ranks]` that a type in use carries."""
        return self._sizes[sharding_type]

    def without(self, table: int) -> Numbers:
        """`[ranks]`: what each rank has to do if a table weren't there, over all phases."""
        left: Numbers = (self.phase_ms - self._parts[table].added_ms).sum(axis=0)
        return left

    def rated(self, table: int, index: int, ranks: tuple[int, ...]) -> tuple[float, int]:
        """Rate the plan with one table otherwise: its step, and the memory of the fullest rank."""
        old, new = self._parts[table], self.rater.part(table, self.problem.options[table][index], ranks)
        memory = self._memory + new.memory_bytes.sum(axis=0) - old.memory_bytes.sum(axis=0)
        sizes = {kind: self._sizes.get(kind) for kind in {old.sharding_type, new.sharding_type}}
        if old.sharding_type == new.sharding_type:
            changed = {old.sharding_type: self._sizes[old.sharding_type] - old.sizes + new.sizes}
        else:
            before = sizes[new.sharding_type]
            changed = {new.sharding_type: new.sizes if before is None else before + new.sizes}
            if self._count[old.sharding_type] > 1:
                changed[old.sharding_type] = self._sizes[old.sharding_type] - old.sizes
        kept = {kind: ms for kind, ms in self._type_ms.items() if kind not in sizes}
        added = self._added - old.added_ms + new.added_ms
        # Bytes that are taken away again may leave less than nothing behind.
        now = kept | {kind: self.rater.type_ms(kind, np.maximum(0.0, size)) for kind, size in changed.items()}
        return self.rater.step_ms(self._base + added + sum(now.values()), tuple(now)), int(memory.max())

    def change(self, table: int, index: int, ranks: tuple[int, ...]) -> None:
        """Give one table another option or other ranks."""
        self._chosen[table], self._ranks[table] = index, ranks
        self._parts[table] = self._part(table)
        self._sum()

    def _part(self, table: int) -> Part:
        return self.rater.part(table, self.option(table), self._ranks[table])

    def _sum(self) -> None:
        """Add the parts up anew, so that no rounding is left of earlier changes."""
        self._added = sum((part.added_ms for part in self._parts[1:]), self._parts[0].added_ms.copy())
        self._memory = sum(part.memory_bytes.sum(axis=0) for part in self._parts)
        self._sizes: dict[str, Numbers] = {}
        self._count: dict[str, int] = {}
        for part in self._parts:
            before = self._sizes.get(part.sharding_type)
            self._sizes[part.sharding_type] = part.sizes if before is None else before + part.sizes
            self._count[part.sharding_type] = self._count.get(part.sharding_type, 0) + 1
        self._type_ms = {kind: self.rater.type_ms(kind, self._sizes[kind]) for kind in sorted(self._sizes)}
        self._step_ms = self.rater.step_ms(self.phase_ms, self.types)
