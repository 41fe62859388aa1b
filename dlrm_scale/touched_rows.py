"""Which rows changed since the last commit, in two generations.

The lookup marks rows in the current generation. A snapshot swaps generations: marks go on in a fresh one while
the frozen one is written. After the commit the frozen one is released; after a failure it is merged back, so that
no row is ever forgotten.

A byte a row, two while a generation is frozen: marking costs 0.03-0.23 % of a step, sets and `unique` more (measured
on 8.4 M rows). Ids, 4 or 8 bytes a row, are left to whoever needs them.
"""

from collections.abc import Sequence

import torch

__all__ = ["TouchedRows"]


class TouchedRows:
    """Byte maps over the rows of each local shard.

    Args:
        rows_per_shard: number of rows of each local shard, in the order of the rank's `LocalShard` list.
        device: where the ids of the lookups are.
    """

    def __init__(self, rows_per_shard: Sequence[int], device: torch.device | str = "cpu") -> None:
        self._current = [torch.zeros(n, dtype=torch.uint8, device=device) for n in rows_per_shard]
        self._frozen: list[torch.Tensor] | None = None
        self.enabled = False
        """Marks are taken only while this is true: the lookup hook fires in evaluation too."""

    def mark(self, shard_index: int, row_ids_local: torch.Tensor) -> None:
        """Note rows as touched; `row_ids_local` is 1-D int32 or int64 with ids local to the shard."""
        if self.enabled:
            self._current[shard_index].index_fill_(0, row_ids_local.long(), 1)

    def current(self, shard_index: int) -> torch.Tensor:
        """The live `[rows]` uint8 map of the current generation, to be merged with other ranks'."""
        return self._current[shard_index]

    def freeze(self) -> list[torch.Tensor]:
        """Swap generations: marks go into fresh maps from now on.

        Returns:
            The frozen maps, `[rows]` uint8 of each shard, 1 where a row was touched, on the lookups' device. Not to be
            written to.

        Raises:
            RuntimeError: a frozen generation is still neither released nor merged back.
        """
        if self._frozen is not None:
            raise RuntimeError("a frozen generation is still open")
        fresh = [torch.zeros_like(marks) for marks in self._current]
        self._frozen, self._current = self._current, fresh
        return list(self._frozen)

    def release(self) -> None:
        """Forget the frozen generation: its rows are committed."""
        self._frozen = None

    def merge_back(self) -> None:
        """Put the frozen generation's marks back into the current one: its checkpoint failed."""
        if self._frozen is not None:
            for current, frozen in zip(self._current, self._frozen, strict=True):
                current |= frozen
        self._frozen = None
