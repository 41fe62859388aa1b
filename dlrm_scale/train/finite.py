"""Whether losses are finite, without waiting for a GPU in every step."""

import torch

__all__ = ["FiniteWatch"]


class FiniteWatch:
    """Looks at each step's loss; on a GPU one step late, when the answer has arrived by itself."""

    def __init__(self) -> None:
        self._pending: tuple[int, torch.Tensor, torch.cuda.Event | None] | None = None

    def note(self, step: int, loss: torch.Tensor) -> int | None:
        """Take a step's loss `[]` and return a step known by now whose loss is not finite, or None."""
        flag = torch.isfinite(loss)
        if loss.device.type == "cpu":
            self._pending = (step, flag, None)
            return self.settle()
        known = self.settle()
        host = torch.empty((), dtype=torch.bool, pin_memory=True)
        host.copy_(flag, non_blocking=True)
        arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
        arrived.record()
        self._pending = (step, host, arrived)
        return known

    def settle(self) -> int | None:
        """Wait for the newest loss; return its step if it is not finite."""
        if self._pending is None:
            return None
        step, flag, arrived = self._pending
        self._pending = None
        if arrived is not None:
            arrived.synchronize()
        return None if bool(flag) else step
