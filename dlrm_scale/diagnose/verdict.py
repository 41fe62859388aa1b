"""From measurements to a verdict: what holds the training back. Pure functions.

The differential runs are those of DS-Analyzer (Mohan et al., "Analyzing and Mitigating Data Stalls in DNN Training",
VLDB 2021): with batches in memory a step takes what it must, real data from the page cache adds the prep stall, real
data from storage adds the fetch stall.
"""

from dataclasses import dataclass
from typing import Literal

from dlrm_scale.diagnose.measurements import Interval, Measurements, interval
from dlrm_scale.units import format_bytes, format_count

__all__ = ["Bound", "Verdict", "reach_verdict"]

Bound = Literal["compute-bound", "prep-bound", "fetch-bound", "communication-bound", "imbalanced plan", "memory-bound"]

_STALL_SHARE = 0.05
"""Shorter stalls aren't worth a user's time."""
_DIFFERENCE_SHARE = 0.1
"""A busy machine makes smaller differences by itself."""
_ROUNDS_FOR_DIFFERENCES = 5
_COMMUNICATION_SHARE = 0.2
"""Some communication is the price of more than one rank."""
_IMBALANCE_RATIO = 1.1
"""Slowest rank against the mean: below it no plan of whole tables does better for long."""
_MEMORY_SHARE = 0.92
"""Of a host's memory: beyond it the kernel has no page cache to speak of and kills soon."""
_FAULTS_PER_STEP = 10.0
"""A major fault costs 0.1 to 10 ms."""


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """What holds the training back.

    Attributes:
        bound: by what.
        rank: the slowest rank of an imbalanced plan, or None.
        share: of a step that would be saved if it were gone; 0 when compute-bound or memory-bound.
        words: a sentence or two for the user.
    """

    bound: Bound
    rank: int | None
    share: float
    words: str


def reach_verdict(m: Measurements) -> Verdict:
    """Name the largest part of a step that needn't be, or say that there is none."""
    memory = _memory(m)
    if memory is not None:
        return memory
    found = [v for v in (_fetch(m), _prep(m), _imbalance(m), _communication(m)) if v is not None]
    return max(found, key=lambda v: v.share) if found else _compute(m)


def _stall(waited: float, rounds: int, difference: Interval) -> float:
    """Return the share of a step that a stall costs, 0 if it isn't beyond doubt.

    Waiting is seen directly. The loader's thread also takes cores from the step, which shows only in the difference
    between two kinds of rounds; on a busy machine that needs several of them.
    """
    if waited >= _STALL_SHARE:
        return waited
    if rounds >= _ROUNDS_FOR_DIFFERENCES and difference.median >= _DIFFERENCE_SHARE and difference.low > 0:
        return difference.median
    return 0.0


def _fetch(m: Measurements) -> Verdict | None:
    share = _stall(m.fetch_wait, len(m.cold_seconds), m.fetch_stall)
    if share == 0:
        return None
    rate = m.bytes_per_row * m.rows_per_step / interval(m.cold_loader_seconds).median
    words = (
        f"Storage holds the step back: {share:.0%} of its time is gone when the files are in memory. "
        f"The loader alone gets {format_bytes(rate)}/s from storage and the step wants "
        f"{format_bytes(m.bytes_per_row * m.rows_per_step / interval(m.warm_seconds).median)}/s. "
        f"The dataset has {format_bytes(m.dataset_bytes)}"
    )
    spare = m.host_memory_bytes - m.local_ranks * max(m.peak_memory_bytes_per_rank)
    if m.dataset_bytes < spare:
        words += ": it fits into this host's spare memory, so only the first epoch is read from storage."
    else:
        words += f" and this host has {format_bytes(max(0, spare))} to keep files in: every epoch reads storage."
    return Verdict(bound="fetch-bound", rank=None, share=share, words=words)


def _prep(m: Measurements) -> Verdict | None:
    share = _stall(m.prep_wait, len(m.warm_seconds), m.prep_stall)
    if share == 0:
        return None
    alone, step = interval(m.warm_loader_seconds).median, interval(m.synthetic_seconds).median
    words = f"Making batches holds the step back: {share:.0%} of its time, with the files in memory. "
    if alone > step:
        words += (
            f"The loader alone makes {format_count(m.rows_per_step / alone)} rows/s, "
            f"the step takes {format_count(m.rows_per_step / step)}."
        )
    else:
        words += (
            f"The loader alone is fast enough ({format_count(m.rows_per_step / alone)} rows/s against "
            f"{format_count(m.rows_per_step / step)}): it comes in bursts, or its thread and the step's share cores."
        )
    return Verdict(bound="prep-bound", rank=None, share=share, words=words)


def _imbalance(m: Measurements) -> Verdict | None:
    if m.busy_imbalance is None:
        return None
    rank, ratio, share = m.busy_imbalance
    if ratio < _IMBALANCE_RATIO or share < _STALL_SHARE:
        return None
    words = (
        f"Rank {rank} has too much to do: it is busy {ratio:.2f} times as long as the ranks on average, and the others "
        f"wait for it. An even plan would save {share:.0%} of a step."
    )
    return Verdict(bound="imbalanced plan", rank=rank, share=share, words=words)


def _communication(m: Measurements) -> Verdict | None:
    share = m.exposed_communication
    if share is None or share < _COMMUNICATION_SHARE:
        return None
    words = f"Communication that nothing hides takes {share:.0%} of a step on the rank that waits least."
    if not m.collective_seconds_per_rank:
        words += " (By difference: other programs on this host are counted in.)"
    return Verdict(bound="communication-bound", rank=None, share=share, words=words)


def _memory(m: Measurements) -> Verdict | None:
    used = m.local_ranks * max(m.peak_memory_bytes_per_rank)
    if used < _MEMORY_SHARE * m.host_memory_bytes and m.major_faults_per_step < _FAULTS_PER_STEP:
        return None
    words = (
        f"Memory is short: {m.local_ranks} ranks on a host take up to {format_bytes(used)} of "
        f"{format_bytes(m.host_memory_bytes)}, and a step fetches {m.major_faults_per_step:.0f} pages back from disk. "
        "Use fewer ranks a host, a smaller model.dim, or more hosts."
    )
    return Verdict(bound="memory-bound", rank=None, share=0.0, words=words)


def _compute(m: Measurements) -> Verdict:
    rate = m.rows_per_step / interval(m.synthetic_seconds).median
    words = (
        f"The step itself sets the pace: {format_count(rate)} rows/s with batches in memory, and neither data nor "
        "communication nor an uneven plan costs more than a few percent."
    )
    return Verdict(bound="compute-bound", rank=None, share=0.0, words=words)
