"""What made a loss NaN or infinite: the input, rows of a table, or the dense part.

Once the step with that loss is over, its update has carried the damage into every row that it looked up and into the
whole dense part, so the cause is sought between forward and backward pass:

    features [n, 13] --> bottom MLP --+
    ^ the input                       +--> interaction --> top MLP --> logits [n]
    ids --> pooled vectors [n, F, D] -+                        ^ bad without the rest: the dense part
            ^ bad: rows of these bags

On CPU a look at the loss after every forward pass costs about 9 us under load, and only a bad loss is looked into. On a
GPU nothing may wait: each forward pass leaves one flag for every pooled vector on the device, and they are read when a
loss turns out not to be finite.
"""

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from dlrm_scale.batch import Batch
from dlrm_scale.data.loading.loader import TrainLoader
from dlrm_scale.schema import INTEGER_COLUMNS
from dlrm_scale.sharding.shard import ShardedModel
from dlrm_scale.sharding.table_kernels import sharded_collections

__all__ = ["FiniteCause", "dataset_rows"]

_NAMED = 5
"""Rows that a message names; the rest is counted."""
_FORWARDS_KEPT = 4
"""On a GPU: forward passes whose flags are kept. A loss is known one step late, on all ranks another step later."""


@dataclass(frozen=True, kw_only=True)
class _Forward:
    """One forward pass: B rows, n of them true, F tables.

    Attributes:
        batch: what was scored.
        row_loss_sum: `[]`.
        logits: `[B]`.
        tables: names of the F tables, in the order of the vectors.
        bad_vectors: `[B, F]` bool, pooled vectors with a value that isn't finite.
    """

    batch: Batch
    row_loss_sum: torch.Tensor
    logits: torch.Tensor
    tables: list[str]
    bad_vectors: torch.Tensor


def dataset_rows(loader: TrainLoader) -> Callable[[Batch], NDArray[np.int64] | None]:
    """Return what gives the numbers in the dataset of a training batch's true rows, `[n]`; None without a cursor."""

    def numbers(batch: Batch) -> NDArray[np.int64] | None:
        if batch.cursor is None:
            return None
        after = int(str(batch.cursor["epoch"])) * loader.steps_per_epoch + int(str(batch.cursor["step_in_epoch"]))
        return loader.row_numbers(*divmod(after - 1, loader.steps_per_epoch))

    return numbers


class FiniteCause:
    """Watches the forward passes of a model in training on this rank.

    Args:
        sharded: the model.
        row_numbers: numbers in the dataset of a batch's true rows, `[n]`, or None where they aren't known.
        deferred: read flags late, as on a GPU; by default on one. A parameter for tests.
    """

    def __init__(
        self,
        sharded: ShardedModel,
        row_numbers: Callable[[Batch], NDArray[np.int64] | None] = lambda batch: None,
        *,
        deferred: bool | None = None,
    ) -> None:
        self._sharded = sharded
        self._row_numbers = row_numbers
        self._deferred = sharded.ranks.device.type != "cpu" if deferred is None else deferred
        self._pooled: Any = None
        self._recent: deque[_Forward] = deque(maxlen=_FORWARDS_KEPT)
        self._found: str | None = None
        model: nn.Module = sharded.module.module
        model.register_forward_hook(self._after_forward)
        for collection in sharded_collections(model).values():
            collection.register_forward_hook(self._after_lookup)

    def describe(self) -> str:
        """Say what the first bad loss of this rank came from; never raises for want of a cause."""
        if self._found is None:
            for forward in self._recent:
                if not bool(torch.isfinite(forward.row_loss_sum)):
                    self._found = "; ".join(self._examine(forward))
                    break
        return self._found or "no cause was seen"

    def _after_lookup(self, module: nn.Module, arguments: object, output: Any) -> None:
        # A KeyedTensor that may still be on its way: the model waits for it where it needs it.
        self._pooled = output

    def _after_forward(
        self,
        module: nn.Module,
        arguments: tuple[Batch, ...],
        output: tuple[torch.Tensor, tuple[torch.Tensor, torch.Tensor]],
    ) -> None:
        pooled, self._pooled = self._pooled, None
        if not module.training or self._found is not None:
            return
        batch, (row_loss_sum, logits) = arguments[0], output[1]
        if not self._deferred and bool(torch.isfinite(row_loss_sum)):
            return
        tables = list(pooled.keys())
        vectors = pooled.values().detach().unflatten(1, (len(tables), -1))
        forward = _Forward(
            batch=batch,
            row_loss_sum=row_loss_sum,
            logits=logits,
            tables=tables,
            bad_vectors=~torch.isfinite(vectors).all(dim=2),
        )
        if self._deferred:
            self._recent.append(forward)
        else:
            self._found = "; ".join(self._examine(forward))

    def _examine(self, forward: _Forward) -> Iterator[str]:
        n = forward.batch.rows_local
        numbers = self._row_numbers(forward.batch)
        if numbers is not None and len(numbers) != n:
            numbers = None
        explained = False
        for text in (*self._features(forward, numbers), *self._tables(forward)):
            explained = True
            yield text
        if not explained:
            yield self._dense_part(forward)
        bad_rows = (~torch.isfinite(forward.logits[:n])).nonzero().squeeze(1).tolist()
        if bad_rows:
            yield f"predictions that aren't finite: {_rows(bad_rows, numbers)}"

    def _features(self, forward: _Forward, numbers: NDArray[np.int64] | None) -> Iterator[str]:
        bad = ~torch.isfinite(forward.batch.dense_features[: forward.batch.rows_local])
        for column in bad.any(dim=0).nonzero().squeeze(1).tolist():
            rows = bad[:, column].nonzero().squeeze(1).tolist()
            value = forward.batch.dense_features[rows[0], column].item()
            yield f"the input is not finite: {INTEGER_COLUMNS[column]} is {value} in {_rows(rows, numbers)}"

    def _tables(self, forward: _Forward) -> Iterator[str]:
        bad = forward.bad_vectors[: forward.batch.rows_local].cpu()
        features = forward.batch.sparse_features
        keys, values, offsets = features.keys(), features.values().cpu(), features.offsets().cpu()
        stride = features.stride()
        for index, table in enumerate(forward.tables):
            bags = bad[:, index].nonzero().squeeze(1)
            if len(bags) == 0:
                continue
            first = keys.index(table) * stride
            parts = [values[offsets[first + bag] : offsets[first + bag + 1]] for bag in bags]
            yield self._table(table, [part.unique().tolist() for part in parts])

    def _table(self, name: str, bags: list[list[int]]) -> str:
        """Name the rows at fault: those seen not to be finite here, and bags of one row; else the bags' rows."""
        looked_up = sorted({row for bag in bags for row in bag})
        bad_here = self._bad_rows_here(name, looked_up)
        certain = sorted({bag[0] for bag in bags if len(bag) == 1} | bad_here.keys())
        if certain:
            shown = [f"{row}{bad_here.get(row, '')}" for row in certain[:_NAMED]]
            verb = "is" if len(certain) == 1 else "are"
            return f"table {name}: row {', '.join(shown)}{_more(len(certain))} {verb} not finite"
        shown = [str(row) for row in looked_up[:_NAMED]]
        return f"table {name}: one of the rows {', '.join(shown)}{_more(len(looked_up))} is not finite"

    def _bad_rows_here(self, name: str, rows: list[int]) -> dict[int, str]:
        """Of these rows, those with a bad value in a shard of this rank: the row, and its first bad column in words."""
        bad: dict[int, str] = {}
        wanted = torch.tensor(rows)
        for shard in self._sharded.local_shards:
            region = shard.region
            if region.table != name or not region.columns:
                continue
            here = wanted[(wanted >= region.row_start) & (wanted < region.row_end)]
            weights = shard.weight[(here - region.row_start).to(shard.weight.device)].cpu()
            for row, column in (~torch.isfinite(weights)).nonzero().tolist():
                value = weights[row, column].item()
                bad.setdefault(int(here[row]), f" (column {region.column_start + column} is {value})")
        return bad

    def _dense_part(self, forward: _Forward) -> str:
        names = [name for name, p in self._sharded.dense_parameters.items() if not bool(torch.isfinite(p).all())]
        if names:
            late = ", after the update that followed" if self._deferred else ""
            return f"dense parameters that aren't finite{late}: {', '.join(names[:_NAMED])}{_more(len(names))}"
        return "input, table rows and dense parameters are finite: the forward pass overflowed"


def _rows(positions: list[int], numbers: NDArray[np.int64] | None) -> str:
    what = "batch row" if numbers is None else "row"
    shown = [str(p if numbers is None else numbers[p]) for p in positions[:_NAMED]]
    where = " of this rank" if numbers is None else " of the dataset"
    return f"{what} {', '.join(shown)}{_more(len(positions))}{where}"


def _more(count: int) -> str:
    return f" and {count - _NAMED:,} more" if count > _NAMED else ""
