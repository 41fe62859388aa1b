"""Alternating rounds: each contender runs a few steps, then the next; ratios are taken within a round.

A busy machine then disturbs all alike. Elapsed time and CPU seconds, summed over threads, are both kept: the second
hardly sees what else runs.
"""

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

__all__ = ["Contender", "Round", "alternate", "check_equal_losses", "ratio", "show_spread", "spread"]

Ready = Callable[[], None]


def _nothing() -> None:
    return None


@dataclass(frozen=True, kw_only=True)
class Contender:
    """One side.

    Attributes:
        step: does one step and returns its loss before the update (of a floor: anything).
        enter: called, untimed, before its steps in a round.
        reset: puts it back to the weights that all sides start from.
        tolerance: how far its losses may be off the first contender's, absolutely; None: it has no losses.
        steps_share: of the steps a round that it does; slow peers do fewer.
        warm_up_steps: untimed, at the start of each of its turns: caches are cold after a switch.
    """

    step: Callable[[], float]
    enter: Ready = _nothing
    reset: Ready = _nothing
    tolerance: float | None = 1e-5
    steps_share: float = 1.0
    warm_up_steps: int = 1


@dataclass(frozen=True, kw_only=True)
class Round:
    """Milliseconds a step."""

    elapsed: float
    cpu: float


def check_equal_losses(contenders: Mapping[str, Contender], steps: int) -> dict[str, float]:
    """Train each from the same weights on the same batches.

    Returns:
        The largest difference of a loss to the first contender's, by name.

    Raises:
        SystemExit: a loss is off by more than its tolerance: the sides don't do the same work.
    """
    expected: list[float] = []
    differences: dict[str, float] = {}
    for name, contender in contenders.items():
        if contender.tolerance is None:
            continue
        contender.enter()
        contender.reset()
        losses = [contender.step() for _ in range(steps)]
        expected = expected or losses
        differences[name] = max(abs(a - b) for a, b in zip(losses, expected, strict=True))
        if not differences[name] <= contender.tolerance:
            raise SystemExit(f"not the same work: losses of {name} are {losses}, expected {expected}")
    return differences


def alternate(contenders: Mapping[str, Contender], rounds: int, steps: int) -> dict[str, list[Round]]:
    """Time all sides, in turns, in the opposite order every other round."""
    found: dict[str, list[Round]] = {name: [] for name in contenders}
    for number in range(rounds):
        names = list(contenders) if number % 2 == 0 else list(contenders)[::-1]
        for name in names:
            found[name].append(_turn(contenders[name], steps))
    return found


def _turn(contender: Contender, steps: int) -> Round:
    contender.enter()
    for _ in range(contender.warm_up_steps):
        contender.step()
    count = max(1, round(steps * contender.steps_share))
    start, cpu_start = time.perf_counter(), time.process_time()
    for _ in range(count):
        contender.step()
    elapsed, cpu = time.perf_counter() - start, time.process_time() - cpu_start
    return Round(elapsed=1000 * elapsed / count, cpu=1000 * cpu / count)


def spread(values: Sequence[float]) -> dict[str, float]:
    """Give median and range."""
    return {"median": statistics.median(values), "least": min(values), "most": max(values)}


def ratio(above: Sequence[Round], below: Sequence[Round]) -> dict[str, dict[str, float]]:
    """Divide round by round, by elapsed and by CPU time."""
    pairs = list(zip(above, below, strict=True))
    return {
        "elapsed": spread([a.elapsed / b.elapsed for a, b in pairs]),
        "cpu": spread([a.cpu / b.cpu for a, b in pairs]),
    }


def show_spread(values: Mapping[str, float], form: str) -> str:
    """Write what `spread` gave, as in `1.2 (1.1 to 1.4)`."""
    return f"{values['median']:{form}} ({values['least']:{form}} to {values['most']:{form}})"
