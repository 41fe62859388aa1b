"""What all ranks must know alike after every step: stop now, or a loss somewhere isn't finite.

One small all-reduce a step on a gloo group of its own, started after step k and waited for after step k+1, so that
it costs no wait and every rank acts after the same step.
"""

from dataclasses import dataclass

import torch
import torch.distributed as dist

__all__ = ["StepAgreement", "Verdict"]


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """The agreed state.

    Attributes:
        stop: some rank was asked to stop.
        nonfinite_rank: the highest rank whose loss was not finite, or None.
        nonfinite_step: its step, or None.
    """

    stop: bool = False
    nonfinite_rank: int | None = None
    nonfinite_step: int | None = None


class StepAgreement:
    """Exchanges flags between ranks.

    Args:
        rank: this rank.
        ranks: number of ranks; with one, verdicts are immediate.
        group: a gloo group that nothing else uses.
    """

    def __init__(self, rank: int, ranks: int, group: dist.ProcessGroup | None) -> None:
        self._rank = rank
        self._ranks = ranks
        self._group = group
        self._pending: tuple[int, torch.Tensor, dist.Work | None] | None = None

    def exchange(self, step: int, *, stop: bool, finite: bool) -> Verdict:
        """Send this step's flags and return the agreed ones of the step before.

        Raises:
            RuntimeError: another rank is gone.
        """
        previous = self._take()
        flags = torch.tensor([int(stop), 0 if finite else self._rank + 1], dtype=torch.int64)
        work = None
        if self._ranks > 1:
            work = dist.all_reduce(flags, op=dist.ReduceOp.MAX, group=self._group, async_op=True)
        self._pending = (step, flags, work)
        return self._take() if self._ranks == 1 else previous

    def settle(self) -> Verdict:
        """Wait for the flags in flight: before a checkpoint and at the end."""
        return self._take()

    def _take(self) -> Verdict:
        if self._pending is None:
            return Verdict()
        step, flags, work = self._pending
        self._pending = None
        if work is not None:
            work.wait()
        stop, bad = flags.tolist()
        return Verdict(stop=bool(stop), nonfinite_rank=bad - 1 if bad else None, nonfinite_step=step if bad else None)
