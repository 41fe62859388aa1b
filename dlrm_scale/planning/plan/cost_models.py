"""The two models that plans are rated by: ours and TorchRec's, behind one face."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Protocol, TypeVar

from dlrm_scale.errors import PlanError
from dlrm_scale.planning.plan.request import PlanRequest
from dlrm_scale.planning.plan.shapes import assignment_of
from dlrm_scale.planning.plan.torchrec_peer import torchrec_setup
from dlrm_scale.planning.solver.problem import Assignment, Problem
from dlrm_scale.planning.solver.rate import rate
from dlrm_scale.sharding.shard_shapes import TableShape

T = TypeVar("T", int, float)

__all__ = ["CostModel", "OurCosts", "PlanLoad", "TorchRecModel", "restricted"]


@dataclass(frozen=True, kw_only=True)
class PlanLoad:
    """What a plan asks of every rank by one model.

    Attributes:
        step_ms: of the slowest ranks, over all phases.
        phases_ms: by phase, by rank.
        slowest_ms: what each phase adds to the step: its slowest rank, less what is hidden under other phases.
        memory_bytes: by part, by rank.
        memory_limit_bytes: that these parts may take together on a rank.
    """

    step_ms: float
    phases_ms: Mapping[str, tuple[float, ...]]
    slowest_ms: Mapping[str, float]
    memory_bytes: Mapping[str, tuple[int, ...]]
    memory_limit_bytes: int

    @property
    def memory_by_rank(self) -> tuple[int, ...]:
        """All parts together."""
        return tuple(map(sum, zip(*self.memory_bytes.values(), strict=True)))

    @property
    def fits(self) -> bool:
        """Whether every rank has the memory."""
        return max(self.memory_by_rank) <= self.memory_limit_bytes


class CostModel(Protocol):
    """One model of costs, for one request."""

    name: str

    @property
    def problem(self) -> Problem:
        """What a solver gets: the request's space and constraints."""

    @property
    def everything(self) -> Problem:
        """The same without constraints, in the wide space, for rating plans that were made elsewhere."""

    def load(self, shapes: Sequence[TableShape]) -> PlanLoad:
        """Rate a plan exactly, whoever made it."""

    def place(self, shapes: Sequence[TableShape]) -> tuple[Problem, Assignment]:
        """Find a plan in the problem, or in the problem of everything."""


class _Model(ABC):
    """What both models do alike.

    Args:
        request: what is planned.
    """

    name = ""

    def __init__(self, request: PlanRequest) -> None:
        self._request = request

    @property
    @abstractmethod
    def problem(self) -> Problem:
        """See `CostModel`."""

    @property
    @abstractmethod
    def everything(self) -> Problem:
        """See `CostModel`."""

    def place(self, shapes: Sequence[TableShape]) -> tuple[Problem, Assignment]:
        """See `CostModel`."""
        try:
            return self.problem, assignment_of(self.problem, shapes)
        except (ValueError, PlanError):
            return self.everything, assignment_of(self.everything, shapes)


class OurCosts(_Model):
    """Phases by the cluster file.

    Args:
        request: what is planned.
    """

    name = "dlrm_scale"

    @cached_property
    def problem(self) -> Problem:
        """See `CostModel`."""
        return self._make(self._request.wide, self._request.types)

    @cached_property
    def everything(self) -> Problem:
        """See `CostModel`."""
        return self._make(True, {})

    def load(self, shapes: Sequence[TableShape]) -> PlanLoad:
        """See `CostModel`."""
        from dlrm_scale.planning.costs.step_model import predict

        request = self._request
        found = predict(
            request.tables,
            request.cluster,
            shapes,
            ranks=request.ranks,
            ranks_per_host=request.ranks_per_host,
            batch_size_per_rank=request.batch_size_per_rank,
            **request.step_settings,
        )
        return PlanLoad(
            step_ms=found.step_ms,
            phases_ms=_by_name(found.phases, found.phase_ms.tolist()),
            slowest_ms=found.slowest_ms,
            memory_bytes=_by_name(found.memory_parts, found.memory_bytes.tolist()),
            memory_limit_bytes=found.capacity_bytes,
        )

    def _make(self, wide: bool, types: Mapping[str, tuple[str, ...]]) -> Problem:
        from dlrm_scale.planning.costs.step_model import make_problem

        request = self._request
        return make_problem(
            request.tables,
            request.cluster,
            ranks=request.ranks,
            ranks_per_host=request.ranks_per_host,
            batch_size_per_rank=request.batch_size_per_rank,
            wide=wide,
            types=types,
            **request.step_settings,
        )


class TorchRecModel(_Model):
    """TorchRec's performance and storage model, with its default bandwidths and the cluster's memory and reserve.

    Args:
        request: what is planned.
    """

    name = "torchrec"

    @cached_property
    def problem(self) -> Problem:
        """See `CostModel`."""
        return restricted(self._make(self._request.wide), self._request.types)

    @cached_property
    def everything(self) -> Problem:
        """See `CostModel`."""
        return self._make(True)

    def load(self, shapes: Sequence[TableShape]) -> PlanLoad:
        """See `CostModel`."""
        problem, assignment = self.place(shapes)
        rating = rate(problem, assignment)
        return PlanLoad(
            step_ms=rating.step_ms,
            phases_ms=_by_name(problem.phases, rating.load_ms.tolist()),
            slowest_ms={name: float(row.max()) for name, row in zip(problem.phases, rating.load_ms, strict=True)},
            memory_bytes={"shards": tuple(map(int, rating.memory_bytes))},
            memory_limit_bytes=problem.memory_bytes,
        )

    def _make(self, wide: bool) -> Problem:
        from dlrm_scale.planning.costs.torchrec_problem import make_torchrec_problem

        return make_torchrec_problem(self._request.tables, torchrec_setup(self._request), wide=wide)


def _by_name(names: Sequence[str], rows: Sequence[Sequence[T]]) -> dict[str, tuple[T, ...]]:
    return {name: tuple(row) for name, row in zip(names, rows, strict=True)}


def restricted(problem: Problem, types: Mapping[str, Sequence[str]]) -> Problem:
    """Leave tables only options of these types.

    Raises:
        PlanError: none is left for a table.
    """
    if not types:
        return problem
    options = []
    for name, offered in zip(problem.tables, problem.options, strict=True):
        kept = tuple(o for o in offered if name not in types or o.sharding_type in types[name])
        if not kept:
            there = sorted({o.sharding_type for o in offered})
            raise PlanError(
                f"table {name}: none of {', '.join(types[name])} is possible here; there is {', '.join(there)}",
                remedy="allow more sharding types for it",
            )
        options.append(kept)
    return replace(problem, options=tuple(options))
