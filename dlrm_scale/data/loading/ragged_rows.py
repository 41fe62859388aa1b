"""Rows with bags on their way into a batch: first row by row, then as its columns.

The columns of a batch lie one after the other, so none has a place until all rows of the batch are known, and rows come
from windows that are read over meanwhile. See `row_kernels` for what a row looks like.
"""

from collections.abc import Sequence

import numpy as np

from dlrm_scale.data.dataset.dataset import Rows
from dlrm_scale.data.loading.row_kernels import (
    RAGGED_ROW_WORDS,
    Float32s,
    Int32s,
    Int64s,
    UInt32s,
    count_ids,
    emit_rows,
    scatter_bags,
    scatter_rows,
)
from dlrm_scale.errors import ConfigError
from dlrm_scale.schema import CATEGORY_COLUMNS

__all__ = ["BagColumns", "RaggedRows", "with_room"]

_MOST_IDS = (1 << 31) - 1


class BagColumns:
    """The multi-hot columns of a dataset, as the kernels want them.

    Args:
        names: the columns, in order; at least one.

    Attributes:
        flags: `[26]` bool, whether a category column is multi-hot.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self.flags = np.isin(CATEGORY_COLUMNS, names)
        self._names = tuple(names)
        self._joined = np.empty(0, np.int32)
        self._indices = np.flatnonzero(self.flags)

    def scatter(
        self, rows: Rows, skip: int, places: UInt32s, words: Int32s, pools: Int32s, used: int, pool_index: int = 0
    ) -> tuple[Int32s, int]:
        """Copy rows of a record batch to their places and append their bags to a pool.

        Args:
            rows: the record batch.
            skip: rows of it that come before.
            places: `[n]` uint32, where each goes in `words`.
            words: `[W, 41]` int32.
            pools: `[P, capacity]` int32.
            used: ids in the pool that is appended to.
            pool_index: which of the pools that is.

        Returns:
            The pools, which are new ones with the same content if the ids didn't fit, and the ids in the pool.
        """
        ids, starts = self._ids_of(rows, skip, len(places))
        pools = with_room(pools, used + len(ids))
        scatter_rows(rows.labels, rows.dense.view(np.int32), rows.ids, skip, places, words)
        return pools, scatter_bags(ids, starts, self._indices, places, words, pools[pool_index], used)

    def _ids_of(self, rows: Rows, skip: int, count: int) -> tuple[Int32s, Int64s]:
        """Return the ids of some rows, column after column, and where bags start among them: `[M, count + 1]`.

        The ids' memory is used again by the next call.
        """
        ids: list[Int32s] = []
        starts, done = np.empty((len(self._names), count + 1), np.int64), 0
        for m, name in enumerate(self._names):
            offsets = rows.bags[name].offsets[skip : skip + count + 1]
            ids.append(rows.bags[name].values[offsets[0] : offsets[-1]])
            np.add(offsets, done - int(offsets[0]), out=starts[m], dtype=np.int64)
            done += len(ids[-1])
        if done > len(self._joined):
            self._joined = np.empty(done + done // 4, np.int32)
        return np.concatenate(ids, out=self._joined[:done]), starts


class RaggedRows:
    """The rows of one batch after another.

    Args:
        columns: the multi-hot columns.

    Attributes:
        words: `[T, 41]` int32.
        pools: `[1, capacity]` int32.
        used: ids in the pool.
    """

    def __init__(self, columns: BagColumns) -> None:
        self.columns = columns
        self.words: Int32s = np.empty((0, RAGGED_ROW_WORDS), np.int32)
        self.pools: Int32s = np.empty((1, 0), np.int32)
        self.used = 0
        self._counts = np.empty(len(CATEGORY_COLUMNS), np.int64)

    def begin(self, rows: int) -> None:
        """Forget the last batch; the next has so many true rows, T."""
        base = self.words if self.words.base is None else self.words.base
        self.words = base[:rows] if len(base) >= rows else np.empty((rows, RAGGED_ROW_WORDS), np.int32)
        self.used = 0

    def add(self, rows: Rows, skip: int, count: int, target: int) -> None:
        """Copy rows `[skip, skip + count)` of a record batch to the batch's rows from `target` on."""
        places = np.arange(target, target + count, dtype=np.uint32)
        self.pools, self.used = self.columns.scatter(rows, skip, places, self.words, self.pools, self.used)

    def count(self) -> Int64s:
        """Return the ids of each column: `[26]`.

        Raises:
            ConfigError: a batch has more ids than the int32 offsets of its bags can count.
        """
        count_ids(self.words, self.columns.flags, self._counts)
        total = int(self._counts.sum())
        if total > _MOST_IDS:
            raise ConfigError(
                f"a rank's batch of {len(self.words):,} rows has {total:,} ids, {_MOST_IDS:,} is the most",
                remedy="use a smaller batch size, or more ranks",
            )
        return self._counts

    def emit(self, labels: Float32s, dense: Float32s, values: Int64s, lengths: Int32s, offsets: Int32s) -> None:
        """Fill a batch of B rows, whose rows beyond T are padding with empty bags; call `count` before.

        Args:
            labels: `[B]`; padding is left as it is, as in `dense`.
            dense: `[B, 13]`.
            values: `[sum of counts]`, column after column.
            lengths: `[26 * B]`.
            offsets: `[26 * B + 1]`.
        """
        emit_rows(
            self.words,
            self.pools[0],
            self.columns.flags,
            self._counts,
            labels,
            dense.view(np.int32),
            values,
            lengths,
            offsets,
        )


def with_room(pools: Int32s, needed: int, setting: str = "data.window_rows") -> Int32s:
    """Return pools for `needed` ids each: `[P, capacity]`, the same ones if they are large enough.

    Args:
        pools: `[P, capacity]`.
        needed: ids.
        setting: what decides on the number of rows whose ids the pools hold.

    Raises:
        ConfigError: rows keep the place of their bags as int32.
    """
    if needed <= pools.shape[1]:
        return pools
    if needed > _MOST_IDS:
        raise ConfigError(
            f"{needed:,} ids of multi-hot columns must be in memory at once, {_MOST_IDS:,} is the most",
            remedy=f"use a smaller {setting}",
        )
    larger = np.empty((len(pools), min(needed + needed // 4, _MOST_IDS)), np.int32)
    larger[:, : pools.shape[1]] = pools
    return larger
