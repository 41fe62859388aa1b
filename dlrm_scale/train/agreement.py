"""What all ranks must know alike after every step: stop now, save now, or a loss somewhere isn't finite.

One small all-reduce a step, started after step k and waited for after step k+1, so that it costs no wait and every
rank acts after the same step. Gloo runs the operations of a group in the order in which they are called, which is the
same on all ranks, so others may use the group meanwhile.
"""

from dataclasses import dataclass

import torch
import torch.distributed as dist

__all__ = ["StepAgreement", "Verdict"]

_RANKS_LIMIT = 1 << 20


@dataclass(frozen=True, kw_only=True)
class Verdict:
    """The agreed state.

    Attributes:
        stop: some rank wants to stop.
        save: some rank wants a checkpoint.
        nonfinite: (step, rank) of a loss that was not finite, or None.
    """

    stop: bool = False
    save: bool = False
    nonfinite: tuple[int, int] | None = None


class StepAgreement:
    """Exchanges flags between ranks.

    Args:
        rank: this rank.
        ranks: number of ranks; with one, verdicts are immediate.
        group: a gloo group over all ranks.
    """

    def __init__(self, rank: int, ranks: int, group: dist.ProcessGroup | None) -> None:
        self._rank = rank
        self._ranks = ranks
        self._group = group
        self._pending: tuple[torch.Tensor, dist.Work | None] | None = None

    def exchange(self, *, stop: bool, nonfinite_step: int | None, save: bool = False) -> Verdict:
        """Send this step's flags and return the agreed ones of the step before.

        Args:
            stop: this rank wants to stop.
            nonfinite_step: a step whose loss on this rank was not finite, or None.
            save: this rank wants a checkpoint.

        Raises:
            RuntimeError: another rank is gone.
        """
        previous = self._take()
        self._send(stop, save, nonfinite_step)
        return self._take() if self._ranks == 1 else previous

    def settle(self, *, stop: bool, nonfinite_step: int | None) -> Verdict:
        """Exchange flags and wait for the answer: before a checkpoint, a log line and at the end."""
        previous = self._take()
        self._send(stop, False, nonfinite_step)
        now = self._take()
        return Verdict(
            stop=previous.stop or now.stop, save=previous.save, nonfinite=previous.nonfinite or now.nonfinite
        )

    def _send(self, stop: bool, save: bool, nonfinite_step: int | None) -> None:
        code = 0 if nonfinite_step is None else nonfinite_step * _RANKS_LIMIT + self._rank + 1
        flags = torch.tensor([int(stop), int(save), code], dtype=torch.int64)
        work = None
        if self._ranks > 1:
            work = dist.all_reduce(flags, op=dist.ReduceOp.MAX, group=self._group, async_op=True)
        self._pending = (flags, work)

    def _take(self) -> Verdict:
        if self._pending is None:
            return Verdict()
        flags, work = self._pending
        self._pending = None
        if work is not None:
            work.wait()
        stop, save, code = flags.tolist()
        step, rank = divmod(code, _RANKS_LIMIT)
        return Verdict(stop=bool(stop), save=bool(save), nonfinite=(step, rank - 1) if code else None)
