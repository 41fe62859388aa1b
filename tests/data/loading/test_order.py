"""The order of training rows."""

import hashlib

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dlrm_scale.data.dataset.dataset import ROWS_PER_RECORD_BATCH, RowRange
from dlrm_scale.data.loading.order import Order
from dlrm_scale.data.loading.pieces import Pieces, pieces_of


def _order(pieces: Pieces, **changes: int) -> Order:
    settings = {"seed": 3, "streams": 8, "window_rows": 16384, "batch_size": 64} | changes
    return Order(pieces, **settings)


def _epoch(order: Order, epoch: int, ranks: int = 1) -> list[np.ndarray]:
    """Rows of every global batch, those of rank 0 first."""
    return [
        np.concatenate([order.row_numbers(epoch, step, rank, ranks) for rank in range(ranks)])
        for step in range(order.steps_per_epoch)
    ]


# Rows of parts, and a range that starts and ends inside record batches.
datasets = st.lists(st.integers(0, 3 * ROWS_PER_RECORD_BATCH), min_size=1, max_size=4).filter(
    lambda rows: sum(rows) > 0
)


@st.composite
def ranges_of_datasets(draw: st.DrawFn) -> tuple[list[int], list[RowRange]]:
    part_rows = draw(datasets)
    total = sum(part_rows)
    cuts = sorted(draw(st.lists(st.integers(0, total), min_size=2, max_size=4)))
    if len(cuts) % 2:
        cuts.append(total)
    ranges = [RowRange(start=a, end=z) for a, z in zip(cuts[::2], cuts[1::2], strict=True) if a < z]
    return part_rows, ranges or [RowRange(start=0, end=total)]


@given(ranges_of_datasets())
@settings(max_examples=60, deadline=None)
def test_pieces_cover_the_ranges_once_and_stay_inside_record_batches(case: tuple[list[int], list[RowRange]]) -> None:
    part_rows, ranges = case
    pieces = pieces_of(part_rows, ranges)
    rows = [np.arange(start, start + n) for start, n in zip(pieces.start_global, pieces.rows, strict=True)]
    assert np.array_equal(np.concatenate(rows), np.concatenate([np.arange(r.start, r.end) for r in ranges]))
    assert (pieces.rows >= 1).all()
    assert (pieces.skip + pieces.rows <= ROWS_PER_RECORD_BATCH).all()
    part_starts = np.concatenate([[0], np.cumsum(part_rows)])
    inside = pieces.start_global - part_starts[pieces.part]
    assert np.array_equal(inside, pieces.record_batch * ROWS_PER_RECORD_BATCH + pieces.skip)
    assert (inside + pieces.rows <= np.array(part_rows)[pieces.part]).all()


@given(
    case=ranges_of_datasets(),
    batch_per_stream=st.integers(1, 700),
    streams=st.sampled_from([1, 2, 8, 64]),
    window_rows=st.sampled_from([1, 100, 8192, 16384, 50_000]),
    ranks=st.integers(1, 9),
    seed=st.integers(0, 2**64 - 1),
)
@settings(max_examples=60, deadline=None)
def test_every_row_is_used_once_and_global_batches_do_not_depend_on_the_ranks(
    case: tuple[list[int], list[RowRange]],
    batch_per_stream: int,
    streams: int,
    window_rows: int,
    ranks: int,
    seed: int,
) -> None:
    part_rows, ranges = case
    pieces = pieces_of(part_rows, ranges)
    batch_size = batch_per_stream * streams
    # Many tiny batches cost time and show nothing more.
    batch_size *= max(1, pieces.total_rows // (batch_size * 12))
    order = _order(pieces, seed=seed, streams=streams, window_rows=window_rows, batch_size=batch_size)
    batches = _epoch(order, 0)
    assert [len(b) for b in batches[:-1]] == [batch_size] * (len(batches) - 1)
    expected = np.concatenate([np.arange(r.start, r.end) for r in ranges])
    assert np.array_equal(np.sort(np.concatenate(batches)), expected)
    ranks = min(ranks, streams)
    assert all(np.array_equal(a, b) for a, b in zip(batches, _epoch(order, 0, ranks), strict=True))
    for step, batch in enumerate(batches):
        assert order.step_rows_per_rank(step, ranks).sum() == len(batch)
    largest = max(
        order.epoch(0).window_at(v, offset).rows
        for v in range(streams)
        for offset in range(0, int(order.stream_rows[v]), ROWS_PER_RECORD_BATCH)
    )
    assert largest <= order.largest_window_rows


@pytest.mark.parametrize("rows", [1, 7, 64, 65, 6_379, 100_000])
@pytest.mark.parametrize("streams", [1, 8, 64])
def test_streams_differ_by_at_most_one_row(rows: int, streams: int) -> None:
    order = _order(pieces_of([rows], [RowRange(start=0, end=rows)]), streams=streams, batch_size=64)
    assert order.stream_rows.sum() == rows
    assert order.stream_rows.max() - order.stream_rows.min() <= 1


def test_epochs_seeds_and_streams_have_orders_of_their_own() -> None:
    pieces = pieces_of([30_000], [RowRange(start=0, end=30_000)])
    orders = [
        np.concatenate(_epoch(_order(pieces, batch_size=1024), 0)),
        np.concatenate(_epoch(_order(pieces, batch_size=1024), 1)),
        np.concatenate(_epoch(_order(pieces, batch_size=1024, seed=4), 0)),
        np.concatenate(_epoch(_order(pieces, batch_size=1024, streams=16), 0)),
    ]
    for i, a in enumerate(orders):
        for b in orders[:i]:
            assert (a == b).mean() < 0.01


def test_a_batch_mixes_rows_of_the_whole_dataset() -> None:
    rows = 40 * ROWS_PER_RECORD_BATCH
    order = _order(pieces_of([rows], [RowRange(start=0, end=rows)]), streams=64, batch_size=2048)
    for step in (0, 60, 150):
        batch = order.row_numbers(0, step)
        tenths = np.bincount(batch * 10 // rows, minlength=10) / len(batch)
        assert tenths.min() > 0.02
        assert tenths.max() < 0.3
        assert np.abs(np.diff(batch) == 1).mean() < 0.01


def test_the_order_is_the_same_for_ever() -> None:
    pieces = pieces_of([20_000, 1_137], [RowRange(start=5, end=19_000), RowRange(start=19_500, end=21_137)])
    order = _order(pieces, seed=7, streams=16, window_rows=4096, batch_size=1024)
    digest = hashlib.blake2b(digest_size=8)
    for epoch in (0, 5):
        digest.update(np.concatenate(_epoch(order, epoch)).astype("<i8").tobytes())
    # A change here means that runs can't be resumed: raise ORDER_VERSION in data/loading/cursor.py with it.
    assert digest.hexdigest() == "5acabb5aef5cedde"


def test_drop_last_drops_the_short_batch_and_says_how_many_rows() -> None:
    pieces = pieces_of([1000], [RowRange(start=0, end=1000)])
    kept = Order(pieces, seed=3, streams=8, window_rows=100, batch_size=64)
    dropped = Order(pieces, seed=3, streams=8, window_rows=100, batch_size=64, drop_last=True)
    assert (kept.steps_per_epoch, kept.dropped_rows) == (16, 0)
    assert (dropped.steps_per_epoch, dropped.dropped_rows) == (15, 40)
    assert all(np.array_equal(a, b) for a, b in zip(_epoch(kept, 0), _epoch(dropped, 0), strict=False))


def test_a_position_in_a_terabyte_epoch_is_computed_without_replay() -> None:
    rows = 4_373_472_329
    pieces = pieces_of([rows], [RowRange(start=0, end=rows)])
    order = _order(pieces, streams=64, batch_size=65_536)
    step = order.steps_per_epoch * 2 // 3
    first = order.row_numbers(1, step)
    second = order.row_numbers(1, step + 1)
    assert len(np.union1d(first, second)) == 2 * 65_536
    assert first.max() < rows
