"""Measuring plans in turns: every round in another order, so that whatever disturbs a round disturbs all alike."""

import gc
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from dlrm_scale.batch import Batch
from dlrm_scale.errors import DlrmScaleError
from dlrm_scale.planning.measuring.calibration_noise import load_average
from dlrm_scale.planning.measuring.micro_timing import RankTimer
from dlrm_scale.planning.measuring.plan_steps import PlanSteps
from dlrm_scale.planning.measuring.plan_workload import PlanWorkload
from dlrm_scale.planning.measuring.process_peak import PeakMemory
from dlrm_scale.sharding.ranks import Ranks
from dlrm_scale.sharding.shard_shapes import TableShape

__all__ = ["CHECKED_STEPS", "LOSS_TOLERANCE", "PlanRound", "RoundsResult", "measure_plans"]

CHECKED_STEPS = 3
"""Steps after which losses of all plans must still agree: an update has gone into each but the first."""
LOSS_TOLERANCE = 1e-5
"""Relative. Plans differ in the order of sums alone."""

_FEWEST_ROUNDS = 5
"""That are taken whatever the time limit says."""

_SPLIT = ("column_wise", "table_column_wise", "grid_shard")


@dataclass(frozen=True, kw_only=True, slots=True)
class PlanRound:
    """One plan's turn in one round.

    Attributes:
        plan: its name.
        number: of the round, from 0.
        group: of plans that were alive together.
        wall_ms: a step, of the slowest rank in each; mean over the turn's steps.
        cpu_ms: processor time of the rank that took most, likewise.
        delay_ms: of the elapsed time, what the slowest rank's main thread waited for a core.
        slowest_rank: that most often took longest.
        load_average: of the last minute, on the busiest host.
    """

    plan: str
    number: int
    group: int
    wall_ms: float
    cpu_ms: float
    delay_ms: float
    slowest_rank: int
    load_average: float


@dataclass(kw_only=True)
class RoundsResult:
    """What was measured; rank 0's is the one to use.

    Attributes:
        turns: of all finished rounds, in the order in which they were taken.
        peak_bytes: by plan, `[ranks]`: most memory while it was built and did its first steps, beyond what was there.
        losses: by plan: mean loss over the global batch of its first steps.
        refused: plans that couldn't be measured, with the reason.
        stopped: a signal ended it early.
        worst_loss_difference: relative, over all steps that plans have in common; types that split a row's state are
            compared in the first step alone.
    """

    turns: list[PlanRound] = field(default_factory=list)
    peak_bytes: dict[str, tuple[int, ...]] = field(default_factory=dict)
    losses: dict[str, tuple[float, ...]] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)
    stopped: bool = False
    worst_loss_difference: float = 0.0


def measure_plans(
    workload: PlanWorkload,
    plans: Mapping[str, Sequence[TableShape]],
    groups: Sequence[Sequence[str]],
    batches: Sequence[Batch],
    ranks: Ranks,
    *,
    ranks_per_host: int,
    rounds: int,
    steps: int = 2,
    warmup_steps: int = 1,
    seed: int = 0,
    time_limit_seconds: float | None = None,
    asked_to_stop: Callable[[], bool] = lambda: False,
    progress: Callable[[str], None] = lambda text: None,
) -> RoundsResult:
    """Measure the steps of every plan. A collective.

    Args:
        workload: model and settings.
        plans: by name.
        groups: names of plans that are alive together; see `plan_groups`.
        batches: this rank's, on its device.
        ranks: the process group.
        ranks_per_host: that count as one host.
        rounds: of each group.
        steps: that count, a turn.
        warmup_steps: before them, which don't: another plan's turn has emptied the caches.
        seed: of the order.
        time_limit_seconds: of a group's rounds; none is begun after it but the first few.
        asked_to_stop: looked at after every round.
        progress: told what was done.
    """
    result = RoundsResult()
    timer = RankTimer(ranks, repeats=1)
    _warm_up(workload, plans, groups, batches, ranks, ranks_per_host)
    for group, names in enumerate(groups):
        at_work = _build(workload, plans, names, batches, ranks, ranks_per_host, result, progress)
        begun = time.perf_counter()
        for number in range(rounds):
            order = np.random.default_rng([seed, group, number]).permutation(sorted(at_work)).tolist()
            times = np.zeros((len(order), steps, 3))
            for turn, name in enumerate(order):
                for _ in range(warmup_steps):
                    at_work[name].step()
                for step in range(steps):
                    times[turn, step] = timer.once(at_work[name].step)
            load = max(float(str(view)) for view in ranks.gather_objects(load_average()))
            result.turns += _turns(order, _gathered(times, ranks), number, group, load)
            progress(_told(result.turns, number, rounds, group, len(groups)))
            result.stopped = any(bool(view) for view in ranks.gather_objects(asked_to_stop()))
            late = time_limit_seconds is not None and time.perf_counter() - begun > time_limit_seconds
            if result.stopped or (number + 1 >= _FEWEST_ROUNDS and ranks.broadcast_object(late)):
                break
        result.worst_loss_difference = max(result.worst_loss_difference, _compare_all(at_work, plans, ranks))
        del at_work
        gc.collect()
        if result.stopped:
            break
    return result


def _warm_up(
    workload: PlanWorkload,
    plans: Mapping[str, Sequence[TableShape]],
    groups: Sequence[Sequence[str]],
    batches: Sequence[Batch],
    ranks: Ranks,
    ranks_per_host: int,
) -> None:
    """Do a few steps that nobody counts: libraries and buffers that all plans share belong to none of them."""
    if not groups:
        return
    first = PlanSteps(workload, plans[groups[0][0]], batches, ranks, ranks_per_host)
    for _ in range(CHECKED_STEPS):
        first.step()


def _build(
    workload: PlanWorkload,
    plans: Mapping[str, Sequence[TableShape]],
    names: Sequence[str],
    batches: Sequence[Batch],
    ranks: Ranks,
    ranks_per_host: int,
    result: RoundsResult,
    progress: Callable[[str], None],
) -> dict[str, PlanSteps]:
    """Make each plan's model in turn, measure its memory in its first steps and compare its losses."""
    at_work: dict[str, PlanSteps] = {}
    for name in names:
        peak = PeakMemory(ranks.device)
        plan, fault = _tried(workload, plans[name], batches, ranks, ranks_per_host)
        if plan is None:
            result.refused[name] = fault
            continue
        if name not in result.peak_bytes:
            taken = [size for size in ranks.gather_objects(peak.bytes_taken()) if isinstance(size, int)]
            if len(taken) == ranks.ranks:
                result.peak_bytes[name] = tuple(taken)
        rows = [batches[step % len(batches)].rows_global for step in range(CHECKED_STEPS)]
        result.losses[name] = tuple(float(loss) for loss in _losses(plan, ranks)[:CHECKED_STEPS] / np.array(rows))
        fault = _disagreement(name, result.losses, plans)
        if fault:
            result.refused[name] = fault
            del plan
            continue
        at_work[name] = plan
        progress(f"built {name}")
    return at_work


def _tried(
    workload: PlanWorkload,
    shapes: Sequence[TableShape],
    batches: Sequence[Batch],
    ranks: Ranks,
    ranks_per_host: int,
) -> tuple[PlanSteps | None, str]:
    """Build a plan and do its first steps; None with the reason where a rank can't."""
    plan: PlanSteps | None = None
    fault = ""
    try:
        plan = PlanSteps(workload, shapes, batches, ranks, ranks_per_host)
        for _ in range(CHECKED_STEPS):
            plan.step()
    except DlrmScaleError as error:
        fault = error.message
    except (NotImplementedError, RuntimeError, ValueError, TypeError, AssertionError) as error:
        # What a library says of a type that it doesn't have on this device: one line in place of its stack (B24).
        said = str(error).strip().splitlines()
        fault = f"not supported here: {said[0] if said else type(error).__name__}"
    faults = [view for view in ranks.gather_objects(fault) if view]
    return (plan, "") if plan is not None and not faults else (None, str(faults[0]))


def _losses(plan: PlanSteps, ranks: Ranks) -> NDArray[np.float64]:
    """`[steps]`, summed over all rows of all ranks."""
    mine = torch.stack([loss.double() for loss in plan.loss_sums]).cpu()
    dist.all_reduce(mine, group=ranks.control_group)
    return np.asarray(mine.numpy())


def _disagreement(name: str, losses: Mapping[str, Sequence[float]], plans: Mapping[str, Sequence[TableShape]]) -> str:
    """Why a plan doesn't do the work of the first one; "" if it does."""
    reference = next(iter(losses))
    for step, (loss, expected) in enumerate(zip(losses[name], losses[reference], strict=True)):
        if step and (_splits_state(plans[name]) or _splits_state(plans[reference])):
            break
        if not abs(loss - expected) <= LOSS_TOLERANCE * abs(expected):
            return (
                f"it doesn't do the same work: its loss in step {step + 1} is {loss:.8g}, that of {reference} "
                f"{expected:.8g}"
            )
    return ""


def _splits_state(shapes: Sequence[TableShape]) -> bool:
    """Whether a row may get several states, which is another algorithm from the second step on."""
    return any(shape.sharding_type in _SPLIT for shape in shapes)


def _compare_all(at_work: Mapping[str, PlanSteps], plans: Mapping[str, Sequence[TableShape]], ranks: Ranks) -> float:
    whole = [_losses(plan, ranks) for name, plan in at_work.items() if not _splits_state(plans[name])]
    if len(whole) < 2:
        return 0.0
    steps = min(len(losses) for losses in whole)
    table = np.stack([losses[:steps] for losses in whole])
    return float(np.max(np.abs(table - table[0]) / np.abs(table[0])))


def _gathered(times: NDArray[np.float64], ranks: Ranks) -> NDArray[np.float64]:
    """`[ranks, turns, steps, 3]` seconds."""
    mine = torch.from_numpy(np.ascontiguousarray(times))
    everyone = [torch.empty_like(mine) for _ in range(ranks.ranks)]
    dist.all_gather(everyone, mine, group=ranks.control_group)
    return np.asarray(torch.stack(everyone).numpy())


def _turns(order: Sequence[str], times: NDArray[np.float64], number: int, group: int, load: float) -> list[PlanRound]:
    found = []
    for turn, name in enumerate(order):
        elapsed, delayed, busy = 1e3 * times[:, turn].transpose(2, 0, 1)
        slowest = elapsed.argmax(axis=0)
        found.append(
            PlanRound(
                plan=name,
                number=number,
                group=group,
                wall_ms=round(float(elapsed.max(axis=0).mean()), 4),
                cpu_ms=round(float(busy.max(axis=0).mean()), 4),
                delay_ms=round(float(delayed[slowest, np.arange(len(slowest))].mean()), 4),
                slowest_rank=int(np.bincount(slowest).argmax()),
                load_average=round(load, 2),
            )
        )
    return found


def _told(turns: Sequence[PlanRound], number: int, rounds: int, group: int, groups: int) -> str:
    """Which plan was fastest in a round."""
    last = [turn for turn in turns if turn.number == number and turn.group == group]
    where = f" of group {group + 1} of {groups}" if groups > 1 else ""
    if not last:
        return f"round {number + 1} of {rounds}{where}"
    fastest = min(last, key=lambda turn: turn.wall_ms)
    return f"round {number + 1} of {rounds}{where}: fastest {fastest.plan}, {fastest.wall_ms:.1f} ms"
