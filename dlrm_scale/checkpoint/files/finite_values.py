"""Refusing to write values that aren't finite: a checkpoint of a spoiled model is worth nothing to resume from.

A step whose loss is finite can still spoil the weights, by an update that overflows. The rows that a save writes are
the rows that changed, and they pass through memory block by block on their way to the file: looked at there, in the
background, they hold up no training.
"""

from collections.abc import Callable, Iterable, Iterator

import torch

from dlrm_scale.errors import CheckpointError

__all__ = ["NotFiniteError", "finite_blocks"]


class NotFiniteError(CheckpointError):
    """A value that was to be saved is NaN or infinite."""


def finite_blocks(blocks: Iterable[torch.Tensor], place: Callable[[int, int], str]) -> Iterator[torch.Tensor]:
    """Pass on the blocks of a tensor while their values are finite.

    Args:
        blocks: `[rows]` or `[rows, columns]` each, one after another; integers pass unseen.
        place: names a value by its row, counted over all blocks, and its column (0 for `[rows]`).

    Raises:
        NotFiniteError: naming the first such value of a block, and how many the block has.
    """
    row = 0
    for block in blocks:
        if block.is_floating_point() and block.numel() and not _is_finite(block):
            wrong = (~torch.isfinite(block)).view(len(block), -1) if block.dim() else ~torch.isfinite(block).view(1, 1)
            first = wrong.nonzero()[0].tolist()
            value = block.reshape(wrong.shape)[first[0], first[1]].item()
            more = int(wrong.sum()) - 1
            raise NotFiniteError(
                f"{place(row + first[0], first[1])} is {value}"
                + (f", and {more:,} values more near it" if more else "")
            )
        yield block
        row += len(block) if block.dim() else 1


def _is_finite(block: torch.Tensor) -> bool:
    # One pass without a temporary of the block's size; NaN wins over every other value in both.
    low, high = torch.aminmax(block)
    return bool(torch.isfinite(low) & torch.isfinite(high))
