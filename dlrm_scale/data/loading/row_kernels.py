"""Kernels that move rows between record batches, windows and batches; they hold no GIL and make nothing.

A row is 40 words of 4 bytes: label, 13 dense features (their bits), 26 ids. Where columns are multi-hot it is ragged:
a word of a multi-hot column holds the length of the row's bag, and word 40 the place of the row's bags in a pool of
ids, where they stand one after the other in the order of columns.

Places in pools are unsigned: numba lets signed indices wrap, and a check for that in the innermost loop costs a third.

Shapes: S streams of W rows a window, n rows of a record batch, B rows of a batch, T of them true, M multi-hot columns.
"""

import numba
import numpy as np
import numpy.typing as npt

from dlrm_scale.schema import RAW_COLUMNS

__all__ = [
    "RAGGED_ROW_WORDS",
    "ROW_WORDS",
    "Float32s",
    "Int32s",
    "Int64s",
    "copy_ragged_rows",
    "copy_rows",
    "count_ids",
    "emit_rows",
    "scatter_bags",
    "scatter_rows",
]

Int32s = npt.NDArray[np.int32]
Int64s = npt.NDArray[np.int64]
Float32s = npt.NDArray[np.float32]
UInt32s = npt.NDArray[np.uint32]

ROW_WORDS = len(RAW_COLUMNS)
RAGGED_ROW_WORDS = ROW_WORDS + 1


@numba.njit(cache=True, nogil=True)
def scatter_rows(
    labels: npt.NDArray[np.uint8],  # [n]
    dense: Int32s,  # [13, n], bits of float32
    ids: Int32s,  # [26, n]
    skip: int,
    places: UInt32s,  # [rows]; unsigned, so that numba doesn't wrap indices
    words: Int32s,  # [W, 40 or 41]
) -> None:
    """Copy rows of a record batch, those after `skip`, to their places. Tiles and row-wise copies were slower."""
    for k in range(len(places)):
        row = words[places[k]]
        row[0] = labels[skip + k]
        for c in range(13):
            row[1 + c] = dense[c, skip + k]
        for c in range(26):
            row[14 + c] = ids[c, skip + k]


@numba.njit(cache=True, nogil=True)
def scatter_bags(
    ids: Int32s,  # the bags of all multi-hot columns, one column after the other
    starts: Int64s,  # [M, rows + 1] where each row's bag starts in `ids`
    columns: Int64s,  # [M] the multi-hot columns, ascending
    places: UInt32s,  # [rows]
    words: Int32s,  # [W, 41]
    pool: Int32s,  # has room for all ids
    used: int,
) -> int:
    """Append the bags of rows to the pool, and lengths and place to the rows; returns the ids in the pool."""
    end = np.uint64(used)
    for k in range(len(places)):
        row = words[places[k]]
        row[40] = end
        for m in range(len(columns)):
            first = np.uint64(starts[m, k])
            length = np.uint64(starts[m, k + 1]) - first
            row[14 + columns[m]] = length
            for i in range(length):
                pool[end + i] = ids[first + i]
            end += length
    return int(end)


@numba.njit(cache=True, nogil=True)
def copy_rows(
    windows: Int32s,  # [slots, W, 40]
    slots: Int64s,  # [S] the slot that holds each stream's window
    begin: Int64s,  # [S] the row of each window that comes next; moved on
    left: Int64s,  # [S] rows from there to the end of the window; lowered
    missing: Int64s,  # [S] rows that the batch still needs of each stream; lowered
    target: Int64s,  # [S] where they go in the batch; moved on
    labels: Float32s,  # [B]
    dense: Int32s,  # [B, 13], bits of float32
    ids: Int64s,  # [26, T]
) -> int:
    """Copy rows to a batch until it is complete, or a stream's window ends: that stream is returned, else -1."""
    for s in range(len(begin)):
        count = min(missing[s], left[s])
        window = windows[slots[s]]
        # Tiles of 32 rows stay in the first-level cache while their ids are turned into columns.
        for tile in range(0, count, 32):
            n = min(32, count - tile)
            a, t = begin[s] + tile, target[s] + tile
            for k in range(n):
                labels[t + k] = window[a + k, 0]
                for c in range(13):
                    dense[t + k, c] = window[a + k, 1 + c]
            for c in range(26):
                for k in range(n):
                    ids[c, t + k] = window[a + k, 14 + c]
        begin[s] += count
        left[s] -= count
        missing[s] -= count
        target[s] += count
        if missing[s] > 0:
            return s
    return -1


@numba.njit(cache=True, nogil=True)
def copy_ragged_rows(
    windows: Int32s,  # [slots, W, 41]
    slots: Int64s,  # [S] as in copy_rows
    pools: Int32s,  # [S, ids of a window]
    begin: Int64s,  # [S]
    left: Int64s,  # [S]
    missing: Int64s,  # [S]
    target: Int64s,  # [S]
    is_multi_hot: npt.NDArray[np.bool_],  # [26]
    words: Int32s,  # [B, 41] the batch's rows
    pool: Int32s,  # their bags
    used: int,
) -> tuple[int, int]:
    """Copy rows as `copy_rows` does, with their bags; also returns the ids in the batch's pool.

    When the pool has too little room for a row, returns S: call again with a larger pool that holds what this one did.
    """
    for s in range(len(begin)):
        window = windows[slots[s]]
        while missing[s] > 0 and left[s] > 0:
            source, row = window[begin[s]], words[target[s]]
            count = 0
            for c in range(26):
                if is_multi_hot[c]:
                    count += source[14 + c]
            if used + count > len(pool):
                return len(begin), used
            for c in range(40):
                row[c] = source[c]
            row[40] = used
            first, end = np.uint64(source[40]), np.uint64(used)
            window_pool = pools[s]
            for i in range(np.uint64(count)):
                pool[end + i] = window_pool[first + i]
            used += count
            begin[s] += 1
            left[s] -= 1
            missing[s] -= 1
            target[s] += 1
        if missing[s] > 0:
            return s, used
    return -1, used


@numba.njit(cache=True, nogil=True)
def count_ids(
    words: Int32s,  # [T, 41]
    is_multi_hot: npt.NDArray[np.bool_],  # [26]
    counts: Int64s,  # [26]
) -> None:
    """Count the ids of every column in a batch."""
    counts[:] = 0
    for t in range(len(words)):
        for c in range(26):
            counts[c] += words[t, 14 + c] if is_multi_hot[c] else 1


@numba.njit(cache=True, nogil=True)
def emit_rows(
    words: Int32s,  # [T, 41]
    pool: Int32s,
    is_multi_hot: npt.NDArray[np.bool_],  # [26]
    counts: Int64s,  # [26]
    labels: Float32s,  # [B]
    dense: Int32s,  # [B, 13], bits of float32
    values: Int64s,  # [sum of counts] column after column
    lengths: Int32s,  # [26 * B]
    offsets: Int32s,  # [26 * B + 1]
) -> None:
    """Turn rows into the columns of a batch; rows T to B are padding with empty bags."""
    rows = len(labels)
    ends = np.cumsum(counts)
    place = ends - counts  # of the next id of each column in `values`
    for t in range(len(words)):
        row = words[t]
        labels[t] = row[0]
        for c in range(13):
            dense[t, c] = row[1 + c]
        first = np.uint64(row[40])
        for c in range(26):
            offsets[c * rows + t] = place[c]
            if is_multi_hot[c]:
                length = np.uint64(row[14 + c])
                lengths[c * rows + t] = length
                target = np.uint64(place[c])
                for i in range(length):
                    values[target + i] = pool[first + i]
                first += length
                place[c] += row[14 + c]
            else:
                lengths[c * rows + t] = 1
                values[place[c]] = row[14 + c]
                place[c] += 1
    for c in range(26):
        for t in range(len(words), rows):
            lengths[c * rows + t] = 0
            offsets[c * rows + t] = ends[c]
    offsets[26 * rows] = ends[25]
