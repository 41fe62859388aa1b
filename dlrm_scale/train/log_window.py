"""What happened between two log lines."""

import math
from collections import deque
from collections.abc import Mapping

import torch

from dlrm_scale.batch import Batch
from dlrm_scale.config import Config
from dlrm_scale.data.loading.loader import TrainLoader
from dlrm_scale.sharding.ranks import Ranks
from dlrm_scale.telemetry import StepClock
from dlrm_scale.train.attribution.attribution import Attribution, IntervalWindow, RankTime, share_values
from dlrm_scale.train.attribution.gpu_intervals import GpuIntervals
from dlrm_scale.train.evaluate import gather_scores, true_rows
from dlrm_scale.train.metrics.metrics import global_auc

__all__ = ["LogWindow", "idle_seconds"]

_AUC_ROWS = 65536
"""Rows of the newest steps in the AUC of a log line; sorting them takes about 10 ms."""


def idle_seconds(clock: StepClock) -> float:
    """Seconds so far that aren't training: `samples_per_second` leaves them out."""
    seconds = clock.seconds
    return seconds.get("evaluation", 0.0) + seconds.get("profile", 0.0)


class LogWindow:
    """Collects steps; the next window begins where one is closed.

    What it holds of losses and scores goes into each checkpoint, so that a resumed run logs what the uninterrupted one
    would have; times are those of this start alone.

    Args:
        clock: of the main thread.
        loader: its waiting is told.
        config: batch size, and the norm that gradients are clipped to.
        gpu: the clock's intervals on the GPU, if there is one; to be read before a window is closed.

    Attributes:
        steps: in this window so far.
        loss: mean of the last closed window; None before the first.
    """

    def __init__(self, clock: StepClock, loader: TrainLoader, config: Config, gpu: GpuIntervals | None = None) -> None:
        self._clock = clock
        self._loader = loader
        self._intervals = IntervalWindow(clock, gpu)
        self.loss: float | None = None
        self._scored: deque[torch.Tensor] = deque(maxlen=max(1, _AUC_ROWS // config.data.batch_size))
        self._full_steps = config.train.log_every_steps
        self._clip_norm = config.train.gradient_clip_norm
        self._device = torch.device("cpu")
        self._open()

    def _open(self) -> None:
        self._training_seconds_before = self._training_seconds()
        self._wait_seconds_before = self._loader.wait_seconds
        self._loss_sums: list[torch.Tensor] = []
        self._gradient_norms: list[torch.Tensor] = []
        self._rows_global = self._rows_before = 0
        self.steps = 0

    def state(self) -> dict[str, torch.Tensor]:
        """This rank's part of what a resumed run needs to go on with the window, by name.

        On all ranks together 8 bytes for each row that counts for the AUC, 512 KiB if batches aren't larger, and 4 or 8
        for each step.

        Returns:
            `log/window`: `[2]` int64, steps and global rows; `log/loss_sums` and `log/gradient_norms`: `[steps]` as
            noted, the latter empty without clipping; `log/scored`: `[N, 2]` float32, as `true_rows`, of the steps
            that count for the AUC, and `log/scored_rows`: their rows, int64.
        """
        scored, device = list(self._scored), self._device
        return {
            "log/window": torch.tensor([self.steps, self._rows_global], dtype=torch.int64),
            "log/loss_sums": _stacked(self._loss_sums, device),
            "log/gradient_norms": _stacked(self._gradient_norms, device),
            "log/scored": torch.cat(scored) if scored else torch.empty((0, 2), device=device),
            "log/scored_rows": torch.tensor([len(rows) for rows in scored], dtype=torch.int64),
        }

    def go_on_from(self, state: Mapping[str, torch.Tensor], device: torch.device) -> None:
        """Take up the window of a checkpoint; one that was written without it leaves an empty one.

        Args:
            state: from `state` of the same rank among as many, other names too.
            device: of the training.
        """
        if "log/window" not in state:
            return
        self._device = device
        self.steps, self._rows_global = state["log/window"].tolist()
        self._rows_before = self._rows_global
        self._loss_sums = list(state["log/loss_sums"].to(device))
        self._gradient_norms = list(state["log/gradient_norms"].to(device))
        self._scored.extend(torch.split(state["log/scored"].to(device), state["log/scored_rows"].tolist()))

    def note(
        self, batch: Batch, row_loss_sum: torch.Tensor, logits: torch.Tensor, gradient_norm: torch.Tensor | None
    ) -> None:
        """Take in a step; waits for nothing.

        Args:
            batch: what was trained on.
            row_loss_sum: `[]`, of this rank.
            logits: `[B]`.
            gradient_norm: `[]`, of all dense gradients before clipping; None without clipping.
        """
        self._device = row_loss_sum.device
        self._loss_sums.append(row_loss_sum)
        self._rows_global += batch.rows_global
        self.steps += 1
        self._scored.append(true_rows(batch, logits))
        if gradient_norm is not None:
            self._gradient_norms.append(gradient_norm)

    def close(self, ranks: Ranks, *, go_on: bool = False) -> dict[str, object]:
        """Sum up and begin the next window. A collective.

        Args:
            ranks: the process group.
            go_on: leave the window open: the checkpoint of a start that ends within it is to hold it.

        Returns:
            `loss`, the mean over all ranks' rows of `window_steps`; `partial_window`, whether those are fewer than
            usual, as at the end or after a resume on other ranks; `auc` of the newest rows, `auc_rows`, both on rank 0
            alone; `samples_per_second`; `data_wait_share` of this rank; `interval_seconds` of rank 0, on a GPU also its
            `gpu_seconds`; with several ranks `slowest_rank` and `compute_imbalance`, as in `Attribution`; where
            gradients are clipped `gradient_norm`, the mean norm of the dense ones before that (None if it isn't
            finite), and `clipped_share` of the steps.
        """
        seconds = self._training_seconds() - self._training_seconds_before
        waited_seconds = self._loader.wait_seconds - self._wait_seconds_before
        loss_sum = torch.stack([loss.double() for loss in self._loss_sums]).sum().item()
        by_rank = share_values([loss_sum, *self._intervals.take()], ranks)
        scores = gather_scores(list(self._scored), ranks)
        times = tuple(IntervalWindow.rank_time(intervals) for _, *intervals in by_rank)
        self.loss = sum(loss for loss, *_ in by_rank) / max(1, self._rows_global)
        values: dict[str, object] = {
            "loss": self.loss,
            "window_steps": self.steps,
            "partial_window": self.steps < self._full_steps,
            "auc": global_auc(scores.logits, scores.labels) if scores is not None else None,
            "auc_rows": len(scores.labels) if scores is not None else None,
            "samples_per_second": (self._rows_global - self._rows_before) / seconds,
            "data_wait_share": waited_seconds / seconds,
            **_time_values(times),
            **self._clipping_values(),
        }
        if not go_on:
            self._open()
        return values

    def _clipping_values(self) -> dict[str, object]:
        """Fetch the norms from the device, where nobody has waited for them. All ranks have the same."""
        if not self._gradient_norms:
            return {}
        norms = torch.stack([norm.double() for norm in self._gradient_norms]).tolist()
        mean = sum(norms) / len(norms)
        return {
            "gradient_norm": mean if math.isfinite(mean) else None,
            "clipped_share": sum(not norm <= self._clip_norm for norm in norms) / len(norms),
        }

    def _training_seconds(self) -> float:
        return self._clock.elapsed() - idle_seconds(self._clock)


def _stacked(values: list[torch.Tensor], device: torch.device) -> torch.Tensor:
    return torch.stack(values) if values else torch.empty(0, device=device)


def _time_values(times: tuple[RankTime, ...]) -> dict[str, object]:
    attribution = Attribution(times=times)
    values: dict[str, object] = {"interval_seconds": times[0].seconds}
    if times[0].gpu_seconds:
        values["gpu_seconds"] = times[0].gpu_seconds
    if len(times) > 1:
        values |= {"slowest_rank": attribution.slowest_rank, "compute_imbalance": attribution.compute_imbalance}
    return values
