"""One set of tables on more and more devices: step, balance, memory and efficiency, and where more stop to pay."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from dlrm_scale.errors import PlanError
from dlrm_scale.planning.costs.step_setting import check_rank_count
from dlrm_scale.planning.plan.cost_models import CostModel
from dlrm_scale.planning.plan.request import PlanRequest
from dlrm_scale.planning.plan.shapes import shapes_of
from dlrm_scale.planning.solver.problem import Problem
from dlrm_scale.planning.solver.solve import Solution

__all__ = ["KNEE_RULE", "WIDE_GAP", "Scale", "Simulation", "simulate", "sizes_between"]

_PAYS = 1.5
KNEE_RULE = (
    f"the knee is the largest number of devices with at least {_PAYS:g} times the samples a second of the size before "
    f"it where that has half as many, which is half of what doubling can bring; for another step between sizes, "
    f"1 + {_PAYS - 1:g} (m - 1) times for m times the devices; where no step pays, the smallest size that fits"
)
WIDE_GAP = 0.05
"""A gap from which a plan's step says little of what is possible."""
_SPACE_LIMITS = 0.01
"""A step that the wide space makes shorter by this share is limited by the space."""


@dataclass(frozen=True, kw_only=True)
class Scale:
    """One number of devices.

    Attributes:
        ranks: how many.
        step_ms: of the best plan found; None where nothing fits.
        bound_ms: of its problem.
        gap: `(step_ms - bound_ms) / bound_ms`.
        samples_per_second: of all devices.
        efficiency: samples a second and device, against the smallest number that fits.
        balance: mean over ranks of what the plan makes them wait for, over the slowest rank's; 1 is even.
        memory_bytes: of the fullest rank.
        memory_limit_bytes: that a rank has for them.
        types: how many tables have which sharding type.
        reason: why nothing fits; "" where something does.
    """

    ranks: int
    step_ms: float | None = None
    bound_ms: float | None = None
    gap: float | None = None
    samples_per_second: float | None = None
    efficiency: float | None = None
    balance: float | None = None
    memory_bytes: int | None = None
    memory_limit_bytes: int | None = None
    types: tuple[tuple[str, int], ...] = ()
    reason: str = ""


@dataclass(frozen=True, kw_only=True)
class Simulation:
    """All numbers of devices.

    Attributes:
        request: what was asked, with its first number of ranks.
        scales: by rising ranks.
        knee: see `KNEE_RULE`; None where nothing fits.
        wide_at_knee: the knee's number of devices in the wide space; None for a wide request, or where nothing fits.
    """

    request: PlanRequest
    scales: tuple[Scale, ...]
    knee: int | None
    wide_at_knee: Scale | None = None

    @property
    def at_knee(self) -> Scale | None:
        """The knee's number of devices, as asked."""
        return next((scale for scale in self.scales if scale.ranks == self.knee), None)

    @property
    def space_limits(self) -> bool:
        """Whether types that cut columns make the knee's step shorter by more than 1 %."""
        ours, wide = self.at_knee, self.wide_at_knee
        if ours is None or wide is None or ours.step_ms is None or wide.step_ms is None:
            return False
        return wide.step_ms < ours.step_ms * (1 - _SPACE_LIMITS)


def sizes_between(first: int, last: int) -> list[int]:
    """Double from `first` to `last`, which is one of them whatever it is.

    Raises:
        ConfigError: `last` is more than plans are made for.
    """
    check_rank_count(last)
    sizes = [first]
    while sizes[-1] * 2 <= last:
        sizes.append(sizes[-1] * 2)
    return sizes if sizes[-1] == last else [*sizes, last]


def simulate(
    request: PlanRequest,
    sizes: Sequence[int],
    make_model: Callable[[PlanRequest], CostModel],
    solver: Callable[[Problem], Solution],
    say: Callable[[str], None] = lambda line: None,
) -> Simulation:
    """Plan for each number of ranks; the rows of a batch a rank stay the same.

    Args:
        request: tables, cluster, batch and hosts.
        sizes: numbers of ranks, rising.
        make_model: costs of a request.
        solver: ours.
        say: told what begins.
    """
    scales: list[Scale] = []
    first: Scale | None = None
    for ranks in sizes:
        say(f"planning for {ranks} devices")
        scale = _scale(replace(request, ranks=ranks, ranks_per_host=_hosts(request, ranks)), make_model, solver)
        if scale.samples_per_second is not None:
            first = first or scale
            assert first.samples_per_second is not None
            alone = first.samples_per_second / first.ranks
            scale = replace(scale, efficiency=scale.samples_per_second / ranks / alone)
        scales.append(scale)
    knee = _knee(scales)
    wide = None
    if knee is not None and knee > 1 and not request.wide:
        say(f"planning for {knee} devices with types that cut columns")
        there = replace(request, wide=True, ranks=knee, ranks_per_host=_hosts(request, knee))
        wide = _scale(there, make_model, solver)
    return Simulation(request=request, scales=tuple(scales), knee=knee, wide_at_knee=wide)


def _hosts(request: PlanRequest, ranks: int) -> int:
    return min(ranks, request.ranks_per_host)


def _scale(
    request: PlanRequest, make_model: Callable[[PlanRequest], CostModel], solver: Callable[[Problem], Solution]
) -> Scale:
    model = make_model(request)
    try:
        problem = model.problem
        solution = solver(problem)
    except PlanError as error:
        return Scale(ranks=request.ranks, reason=error.message.splitlines()[0])
    shapes = shapes_of(problem, solution.assignment)
    load = model.load(shapes)
    kinds = [shape.sharding_type for shape in shapes]
    slowest = sum(max(times) for times in load.phases_ms.values())
    mean = sum(sum(times) / len(times) for times in load.phases_ms.values())
    return Scale(
        ranks=request.ranks,
        step_ms=load.step_ms,
        bound_ms=solution.bound_ms,
        gap=load.step_ms / solution.bound_ms - 1 if solution.bound_ms else None,
        samples_per_second=1000 * request.ranks * request.batch_size_per_rank / load.step_ms,
        balance=mean / slowest if slowest else 1.0,
        memory_bytes=max(load.memory_by_rank),
        memory_limit_bytes=load.memory_limit_bytes,
        types=tuple((kind, kinds.count(kind)) for kind in sorted(set(kinds))),
    )


def _knee(scales: Sequence[Scale]) -> int | None:
    fitting = [scale for scale in scales if scale.samples_per_second is not None]
    if not fitting:
        return None
    knee = fitting[0]
    for before, after in pairwise(fitting):
        assert before.samples_per_second is not None
        assert after.samples_per_second is not None
        needed = 1 + (_PAYS - 1) * (after.ranks / before.ranks - 1)
        if after.samples_per_second >= needed * before.samples_per_second:
            knee = after
    return knee.ranks
