"""AUC over the rows of all ranks, without bringing the rows together.

A float32 logit becomes a whole number that keeps the order (its bits, turned round for negative ones). AUC needs, for
each positive row, how many negative rows lie below it:

    exact    each rank keeps its rows' numbers, 4 bytes a row. The ranks add up how many rows share their upper 16 bits,
             which cuts the scores into up to 65,536 ranges. Range by range a few million numbers at a time go to rank
             0; a range with more rows than that becomes counts of its lower 16 bits, which are exact too.
    binned   rows are counted by the upper bits alone, in memory that doesn't grow. Inside a bin the order is unknown
             and counts as a tie, so that the error is at most the sum over bins of positives * negatives / 2, over all
             pairs. A bin whose rows all have the same score has no error.
"""

from dataclasses import dataclass
from typing import Literal, Protocol

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray

from dlrm_scale.sharding.ranks import Ranks

__all__ = [
    "AucValue",
    "BinnedRanking",
    "ExactRanking",
    "Ranking",
    "auc_kind",
    "make_ranking",
    "order_numbers",
]

AucKind = Literal["exact", "binned"]
Numbers = NDArray[np.uint32]

_EXACT_ROWS = 1 << 28
"""`auto` is exact up to so many rows: 1 GiB over all ranks."""
_GROUP_ROWS = 1 << 22
_HALF_BITS = 16
_SIGN = np.uint32(1 << 31)


def auc_kind(setting: Literal["auto", "exact", "binned"], rows: int) -> AucKind:
    """Settle `train.auc` for so many rows over all ranks."""
    if setting == "auto":
        return "exact" if rows <= _EXACT_ROWS else "binned"
    return setting


@dataclass(frozen=True, kw_only=True)
class AucValue:
    """An area under the ROC curve.

    Attributes:
        value: ties count half; None when a class is absent.
        error_bound: the exact value is at most so far away; 0 if this is it, None with `value`.
    """

    value: float | None
    error_bound: float | None


class Ranking(Protocol):
    """Takes rows of this rank and tells the AUC over all ranks."""

    def add(self, logits: NDArray[np.float32], labels: NDArray[np.uint8]) -> None:
        """Add rows: logits `[N]` float32, finite; labels `[N]` uint8."""
        ...

    def auc(self, ranks: Ranks | None) -> AucValue:
        """AUC over the rows of all ranks, the same on each; a collective. Nothing may be added after it."""
        ...


def make_ranking(kind: AucKind, *, bits: int = 22) -> Ranking:
    """Make an empty one; `bits` is for bins."""
    return ExactRanking() if kind == "exact" else BinnedRanking(bits=bits)


def order_numbers(logits: NDArray[np.float32]) -> Numbers:
    """Numbers in the order of the logits, `[N]` uint32; equal logits, -0 and 0 among them, get equal numbers."""
    bits = (np.ascontiguousarray(logits, np.float32) + np.float32(0)).view(np.uint32)
    return np.where(bits & _SIGN, ~bits, bits | _SIGN)


class ExactRanking:
    """Keeps the numbers of all rows of this rank.

    Args:
        group_rows: numbers that go to rank 0 at a time.
    """

    def __init__(self, *, group_rows: int = _GROUP_ROWS) -> None:
        self._chunks: tuple[list[Numbers], list[Numbers]] = ([], [])
        self._group_rows = group_rows

    def add(self, logits: NDArray[np.float32], labels: NDArray[np.uint8]) -> None:
        """Add rows."""
        numbers = order_numbers(logits)
        positive = labels != 0
        self._chunks[0].append(numbers[~positive])
        self._chunks[1].append(numbers[positive])

    def auc(self, ranks: Ranks | None) -> AucValue:
        """AUC over the rows of all ranks; a collective."""
        negative, positive = _sorted(self._chunks[0]), _sorted(self._chunks[1])
        if ranks is None or ranks.ranks == 1:
            return _value(_twice_below(negative, positive), len(negative), len(positive))
        counts = np.stack([np.bincount(part >> _HALF_BITS, minlength=1 << _HALF_BITS) for part in (negative, positive)])
        total = _sum_over_ranks(counts, ranks)
        negatives, positives = (int(n) for n in total.sum(axis=1))
        if negatives and positives:
            twice = ranks.broadcast_object(self._twice_below_on_rank_0(negative, positive, total, ranks))
            assert isinstance(twice, int)
        else:
            twice = 0
        return _value(twice, negatives, positives)

    def _twice_below_on_rank_0(
        self, negative: Numbers, positive: Numbers, total: NDArray[np.int64], ranks: Ranks
    ) -> int:
        """Twice the pairs in order; 0 on the other ranks, which send their numbers."""
        twice = negatives_before = 0
        for first, last in _groups(total.sum(axis=0), self._group_rows):
            if not total[1, first:last].any():
                negatives_before += int(total[0, first:last].sum())
                continue
            here = [_between(part, first, last) for part in (negative, positive)]
            if last == first + 1 and int(total[:, first].sum()) > self._group_rows:
                low = np.stack([np.bincount(part & 0xFFFF, minlength=1 << _HALF_BITS) for part in here])
                counts = _sum_over_ranks(low, ranks)
                pairs, negatives_here = _twice_below_counted(counts[0], counts[1]), int(counts[0].sum())
            else:
                gathered = [_gather(part, ranks) for part in here]
                pairs = _twice_below(np.sort(gathered[0]), np.sort(gathered[1]))
                negatives_here = len(gathered[0])
            twice += pairs + 2 * negatives_before * int(total[1, first:last].sum())
            negatives_before += negatives_here
        return twice


class BinnedRanking:
    """Counts rows by the upper bits of their numbers.

    Args:
        bits: so many of them; 2^bits bins of 24 bytes.
    """

    def __init__(self, *, bits: int = 22) -> None:
        bins = 1 << bits
        self._shift = np.uint32(32 - bits)
        self._counts = np.zeros((2, bins), np.int64)
        self._least = np.full(bins, 0xFFFFFFFF, np.uint32)
        self._greatest = np.zeros(bins, np.uint32)

    def add(self, logits: NDArray[np.float32], labels: NDArray[np.uint8]) -> None:
        """Add rows."""
        numbers = order_numbers(logits)
        for label in (0, 1):
            part = np.sort(numbers[(labels != 0) == bool(label)])
            if not len(part):
                continue
            bins, first = np.unique(part >> self._shift, return_index=True)
            ends = np.append(first[1:], len(part))
            self._counts[label, bins] += ends - first
            self._least[bins] = np.minimum(self._least[bins], part[first])
            self._greatest[bins] = np.maximum(self._greatest[bins], part[ends - 1])

    def auc(self, ranks: Ranks | None) -> AucValue:
        """AUC over the rows of all ranks; a collective."""
        counts = self._counts
        least, greatest = self._least.astype(np.int64), self._greatest.astype(np.int64)
        if ranks is not None and ranks.ranks > 1:
            counts = _sum_over_ranks(counts, ranks)
            least = _extreme_over_ranks(least, ranks, dist.ReduceOp.MIN)
            greatest = _extreme_over_ranks(greatest, ranks, dist.ReduceOp.MAX)
        negatives, positives = (int(n) for n in counts.sum(axis=1))
        mixed = (least < greatest) & (counts[0] > 0) & (counts[1] > 0)
        unsure = _dot(counts[0, mixed], counts[1, mixed])
        return _value(_twice_below_counted(counts[0], counts[1]), negatives, positives, unsure=unsure)


def _value(twice_below: int, negatives: int, positives: int, *, unsure: int = 0) -> AucValue:
    pairs = negatives * positives
    if pairs == 0:
        return AucValue(value=None, error_bound=None)
    return AucValue(value=twice_below / (2 * pairs), error_bound=unsure / (2 * pairs))


def _sorted(chunks: list[Numbers]) -> Numbers:
    """One sorted array; chunks are freed as they are taken over, so that memory doesn't double."""
    whole = np.empty(sum(map(len, chunks)), np.uint32)
    end = len(whole)
    while chunks:
        chunk = chunks.pop()
        whole[end - len(chunk) : end] = chunk
        end -= len(chunk)
    whole.sort()
    return whole


def _twice_below(negative: Numbers, positive: Numbers) -> int:
    """Twice the pairs (negative below positive), ties counted half; both sorted."""
    twice = 0
    for start in range(0, len(positive), _GROUP_ROWS):
        some = positive[start : start + _GROUP_ROWS]
        twice += int(np.searchsorted(negative, some, side="left").sum())
        twice += int(np.searchsorted(negative, some, side="right").sum())
    return twice


def _twice_below_counted(negatives: NDArray[np.int64], positives: NDArray[np.int64]) -> int:
    """The same from counts by score, ascending."""
    below = np.cumsum(negatives) - negatives
    return _dot(positives, 2 * below + negatives)


def _dot(first: NDArray[np.int64], second: NDArray[np.int64]) -> int:
    """Inner product of counts, in whole numbers of any size."""
    used = (first > 0) & (second > 0)
    first, second = first[used], second[used]
    if not len(first):
        return 0
    if int(first.max()) * int(second.max()) * len(first) < 1 << 63:
        return int(first @ second)
    return sum(a * b for a, b in zip(first.tolist(), second.tolist(), strict=True))


def _groups(rows: NDArray[np.int64], limit: int) -> list[tuple[int, int]]:
    """Cut ranges into runs with at most `limit` rows in all; a larger one stands alone. Empty ends are left out."""
    occupied = np.flatnonzero(rows)
    groups: list[tuple[int, int]] = []
    held = 0
    for index in occupied.tolist():
        count = int(rows[index])
        if groups and held + count <= limit:
            groups[-1] = (groups[-1][0], index + 1)
            held += count
        else:
            groups.append((index, index + 1))
            held = count
    return groups


def _between(numbers: Numbers, first: int, last: int) -> Numbers:
    """The part of sorted numbers whose upper halves are in `[first, last)`."""
    low = np.searchsorted(numbers, np.uint32(first << _HALF_BITS))
    high = len(numbers) if last == 1 << _HALF_BITS else np.searchsorted(numbers, np.uint32(last << _HALF_BITS))
    return numbers[low:high]


def _sum_over_ranks(counts: NDArray[np.int64], ranks: Ranks) -> NDArray[np.int64]:
    total = torch.from_numpy(np.ascontiguousarray(counts, np.int64).copy())
    if ranks.ranks > 1:
        dist.all_reduce(total, group=ranks.control_group)
    summed: NDArray[np.int64] = total.numpy()
    return summed


def _extreme_over_ranks(numbers: NDArray[np.int64], ranks: Ranks, op: dist.ReduceOp.RedOpType) -> NDArray[np.int64]:
    total = torch.from_numpy(numbers)
    dist.all_reduce(total, op=op, group=ranks.control_group)
    extreme: NDArray[np.int64] = total.numpy()
    return extreme


def _gather(numbers: Numbers, ranks: Ranks) -> Numbers:
    """All ranks' numbers on rank 0; none elsewhere."""
    counts = np.zeros(ranks.ranks, np.int64)
    counts[ranks.rank] = len(numbers)
    counts = _sum_over_ranks(counts, ranks)
    padded = np.zeros(int(counts.max()), np.int32)
    padded[: len(numbers)] = numbers.view(np.int32)
    here = torch.from_numpy(padded)
    parts = [torch.empty_like(here) for _ in range(ranks.ranks)] if ranks.rank == 0 else None
    dist.gather(here, parts, dst=0, group=ranks.control_group)
    if parts is None:
        return np.empty(0, np.uint32)
    whole: Numbers = np.concatenate(
        [part.numpy()[:count] for part, count in zip(parts, counts.tolist(), strict=True)]
    ).view(np.uint32)
    return whole
