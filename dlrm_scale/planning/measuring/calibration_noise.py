"""Whether other programs spoilt a calibration."""

import os
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from dlrm_scale.errors import TrainingError
from dlrm_scale.planning.measuring.micro_timing import Clock, Timing

__all__ = ["Noise", "judge_noise", "load_average"]

_BUSY_SPREAD, _SPOILT_SPREAD = 0.15, 0.5
"""Middle half of the repeats over their median, of the typical timing. Set by hand: with load
averages of five to seven times the cores it was 0.10 to 0.17; a quiet machine hasn't been measured."""
_BUSY_DELAY, _SPOILT_DELAY = 0.05, 0.25
"""Share of the elapsed time in which ranks waited for a core."""


@dataclass(frozen=True, kw_only=True)
class Noise:
    """What disturbed the measurements.

    Attributes:
        load_average: of the last minute before they began, on the busiest host.
        cores: that a host gives.
        spread: of the repeats of the typical timing; see `Timing`.
        delay_share: of all timings' elapsed time, what other programs took.
        busy: worth a warning.
    """

    load_average: float
    cores: int
    spread: float
    delay_share: float
    busy: bool

    @property
    def text(self) -> str:
        """One sentence."""
        verdict = "too much for good constants, measure again" if self.busy else "little"
        return (
            f"Noise: {verdict} (load average {self.load_average:.2f} on {self.cores} cores before it, repeats spread "
            f"by {self.spread:.0%}, {self.delay_share:.0%} of the time spent waiting for a core)."
        )


def load_average() -> float:
    """Of the last minute; 0 where the system doesn't say."""
    try:
        return os.getloadavg()[0]
    except OSError:
        return 0.0


def judge_noise(
    timings: Sequence[Timing], load: float, cores: int, *, clock: Clock = "elapsed", allowed: bool = False
) -> Noise:
    """Look at the spread of repeats and at what other programs took.

    Args:
        timings: of all measurements.
        load: load average before they began.
        cores: that a host gives.
        clock: processor time doesn't count waiting for a core, so that only the spread counts.
        allowed: only say it, whatever it is.

    Raises:
        TrainingError: constants fitted to such timings would mislead.
    """
    spread = float(np.median([timing.spread for timing in timings]))
    delay = float(np.mean([timing.delay_share for timing in timings]))
    waits = clock == "elapsed"
    busy = spread > _BUSY_SPREAD or (waits and (delay > _BUSY_DELAY or load > cores / 2))
    noise = Noise(load_average=load, cores=cores, spread=spread, delay_share=delay, busy=busy)
    if not allowed and (spread > _SPOILT_SPREAD or (waits and delay > _SPOILT_DELAY)):
        raise TrainingError(
            f"{noise.text} Nothing was written",
            remedy="end other programs and measure again, measure --processor-time, or write it all the same with "
            "--allow-noise",
        )
    return noise
