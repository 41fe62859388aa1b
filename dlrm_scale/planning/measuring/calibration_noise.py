"""Whether a calibration is to be trusted: what other programs took, and what repeats and the fit say against it."""

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from dlrm_scale.errors import TrainingError
from dlrm_scale.planning.measuring.micro_timing import Clock, Timing
from dlrm_scale.planning.measuring.probe_steps import TypeEvidence

__all__ = ["Noise", "judge_noise", "load_average"]

_BUSY_SPREAD, _SPOILT_SPREAD = 0.25, 0.5
"""Middle half of the repeats over their median, of the typical timing. Set by hand: two ranks alone on two quiet cores
had 0.17 of elapsed time."""
_BUSY_DELAY, _SPOILT_DELAY = 0.15, 0.3
"""Share of the elapsed time in which ranks waited for a core. The same two ranks had 0.05 of all timings and 0.13 of
whole steps, which their own threads take from one another; beside other work it was 0.36 of whole steps."""
_SPOILT_FIT, _SPOILT_STEPS = 0.5, 0.3
"""Mean relative error of a part's fit, and of that to whole steps, which corrects the parts; half as much is worth a
warning. A calibration that ordered plans well had 0.04 to 0.14 and 0.08; one beside three times as many programs as
cores had 0.37 in the exchange of ids, which is what is left when the bare all-to-all is taken off."""
_ABSURD_SHARE = 0.5
"""Of the typical step of models that use a sharding type: a constant of the type above this can't be, for these steps
have tables to look up, exchange and update as well."""
_UNTOLD_SHARE, _WIDE_SHARE = 0.2, 0.3
"""Of the same step: a constant above the first that may as well be nothing, or with a 90 % interval wider than the
second, isn't known; half as much is worth a warning. Of 40 simulated models with known constants the widest interval
was 0.07 to 0.25 of the step where steps were 3 or 10 % noisy, 0.4 or more with 40 or 100 %."""
_WORTH_TELLING = 0.5


@dataclass(frozen=True, kw_only=True)
class Noise:
    """What disturbed the measurements.

    Attributes:
        load_average: of the last minute before they began, on the busiest host.
        cores: that a host gives.
        spread: of the repeats of the typical timing; see `Timing`.
        delay_share: of all timings' elapsed time, what other programs took.
        warnings: why the constants are worth less; a phrase each.
        faults: why they would mislead; a phrase each.
    """

    load_average: float
    cores: int
    spread: float
    delay_share: float
    warnings: tuple[str, ...] = ()
    faults: tuple[str, ...] = ()

    @property
    def busy(self) -> bool:
        """Worth a warning."""
        return bool(self.warnings or self.faults)

    @property
    def text(self) -> str:
        """One sentence."""
        verdict = "too much for good constants, measure again" if self.busy else "little"
        return (
            f"Noise: {verdict} (load average {self.load_average:.2f} on {self.cores} cores before it, repeats spread "
            f"by {self.spread:.0%}, {self.delay_share:.0%} of the time spent waiting for a core)."
        )

    @property
    def reason(self) -> str:
        """All that speaks against the constants, in a sentence; "" where nothing does."""
        if not self.busy:
            return ""
        kind = "these constants mislead" if self.faults else "these constants are worth less"
        return f"measured on a busy machine or badly fitted, {kind}: {'; '.join([*self.faults, *self.warnings])}"


def load_average() -> float:
    """Of the last minute; 0 where the system doesn't say."""
    try:
        return os.getloadavg()[0]
    except OSError:
        return 0.0


def judge_noise(
    timings: Mapping[str, Sequence[Timing]],
    load: float,
    cores: int,
    *,
    clock: Clock = "elapsed",
    fit_errors: Mapping[str, float] | None = None,
    types: Sequence[TypeEvidence] = (),
    rough: bool = False,
    allowed: bool = False,
) -> Noise:
    """Look at repeats, at what other programs took, and at what the fit itself says.

    Args:
        timings: of all measurements, by what was measured.
        load: load average before they began.
        cores: that a host gives.
        clock: processor time doesn't count waiting for a core; but who makes others wait also takes their caches.
        fit_errors: mean relative error of each fit.
        types: constants of sharding types with their intervals.
        rough: few models were measured, which can't tell these constants: that is a warning then.
        allowed: only say it, whatever it is.

    Raises:
        TrainingError: constants fitted to such timings would mislead; with every reason.
    """
    every = [timing for of_part in timings.values() for timing in of_part]
    spread = float(np.median([timing.spread for timing in every]))
    delay = float(np.mean([timing.delay_share for timing in every]))
    warnings, faults = [], []
    waits = clock == "elapsed"
    if waits and load > cores / 2:
        warnings.append(f"load average {load:.1f} on {cores} cores")
    if spread > _BUSY_SPREAD:
        warnings.append(f"repeats of the typical timing spread by {spread:.0%}")
    if delay > (_BUSY_DELAY if waits else _SPOILT_DELAY):
        warnings.append(f"{delay:.0%} of the time spent waiting for a core")
    for part, of_part in timings.items():
        part_spread = float(np.median([timing.spread for timing in of_part]))
        part_delay = float(np.mean([timing.delay_share for timing in of_part]))
        if part_spread > _SPOILT_SPREAD:
            faults.append(f"{part}: repeats spread by {part_spread:.0%}")
        if waits and part_delay > _SPOILT_DELAY:
            faults.append(f"{part}: {part_delay:.0%} of the time spent waiting for a core")
    for name, error in (fit_errors or {}).items():
        share = error / (_SPOILT_STEPS if name == "step" else _SPOILT_FIT)
        if share > _WORTH_TELLING:
            (faults if share > 1 else warnings).append(f"fit of {name}: {error:.0%} off")
    faults += [fault for constant in types if (fault := _absurd(constant))]
    for constant in types:
        if _doubt(constant) > _WORTH_TELLING:
            (faults if _doubt(constant) > 1 and not rough else warnings).append(_unknown(constant))
    noise = Noise(
        load_average=load, cores=cores, spread=spread, delay_share=delay, warnings=tuple(warnings), faults=tuple(faults)
    )
    if faults and not allowed:
        raise TrainingError(
            f"{noise.text} Nothing was written, for these constants would mislead:\n  " + "\n  ".join(faults),
            remedy="end other programs and measure again, "
            + ("measure --processor-time, " if waits else "")
            + "or write it all the same with --allow-noise",
        )
    return noise


def _absurd(constant: TypeEvidence) -> str:
    if constant.value_ms <= _ABSURD_SHARE * constant.typical_step_ms:
        return ""
    return (
        f"{constant.kind}: {constant.value_ms:.3g} ms for being in use, where the typical step of models with it takes "
        f"{constant.typical_step_ms:.3g} ms"
    )


def _doubt(constant: TypeEvidence) -> float:
    """How little the steps bear a constant out: from 1 on it isn't known."""
    untold = constant.value_ms / _UNTOLD_SHARE if constant.low_ms <= 0 else 0.0
    return max(untold, (constant.high_ms - constant.low_ms) / _WIDE_SHARE) / constant.typical_step_ms


def _unknown(constant: TypeEvidence) -> str:
    return (
        f"{constant.kind}: {constant.value_ms:.3g} ms for being in use isn't borne out by the steps: with other models "
        f"it is {constant.low_ms:.3g} to {constant.high_ms:.3g} ms of a step of {constant.typical_step_ms:.3g} ms"
    )
