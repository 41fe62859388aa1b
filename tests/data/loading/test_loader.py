"""Batches for training and evaluation."""

import gc
import json
import os
import random
import threading
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from dlrm_scale.batch import Batch
from dlrm_scale.config import DataConfig
from dlrm_scale.data.dataset.dataset import Dataset
from dlrm_scale.data.loading.loader import EvalLoader, TrainLoader
from dlrm_scale.errors import CheckpointError, ConfigError, DatasetError
from tests.support.datasets import make_dataset
from tests.support.loader_steps import Step, check_step, evaluate, rows_global, rows_of


def _train(
    dataset: Dataset,
    config: DataConfig,
    ranks: int = 1,
    epochs: int = 1,
    cursor: Mapping[str, object] | None = None,
    steps: int | None = None,
) -> list[Step]:
    """Run loaders of all ranks side by side, to the end or for some steps."""
    loaders = [TrainLoader(dataset, config, rank=r, ranks=ranks, epochs=epochs, cursor=cursor) for r in range(ranks)]
    wanted = loaders[0].total_steps - loaders[0].start_step if steps is None else steps
    found = [[next(loader) for loader in loaders] for _ in range(wanted)]
    if steps is None:
        assert all(next(loader, None) is None for loader in loaders)
    for loader in loaders:
        loader.close()
    return found


def _equal(a: Batch, b: Batch) -> bool:
    return (
        torch.equal(a.dense_features, b.dense_features)
        and torch.equal(a.labels, b.labels)
        and torch.equal(a.weights, b.weights)
        and torch.equal(a.sparse_features.values(), b.sparse_features.values())
        and torch.equal(a.sparse_features.lengths(), b.sparse_features.lengths())
        and a.cursor == b.cursor
    )


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    """Uneven parts, one empty; the training rows start and end inside record batches, as do the others."""
    return make_dataset(
        tmp_path_factory.mktemp("dataset"),
        [10_000, 0, 1_137, 20_000],
        split={"train": [(5, 9_000), (11_000, 30_001)], "validation": [(9_100, 10_500)], "test": [(30_001, 30_002)]},
    )


TRAINING_ROWS = np.concatenate([np.arange(5, 9_000), np.arange(11_000, 30_001)])


@pytest.mark.parametrize("ranks", [1, 2, 3, 5, 16])
@pytest.mark.parametrize(("batch_size", "window_rows"), [(1_024, 16_384), (4_000, 3_000), (32_768, 500)])
def test_every_row_is_used_once_an_epoch_with_its_own_features(
    dataset: Dataset, ranks: int, batch_size: int, window_rows: int
) -> None:
    config = DataConfig(batch_size=batch_size, window_rows=window_rows, seed=5)
    steps = _train(dataset, config, ranks, epochs=2)
    for step in steps:
        check_step(step)
    half = len(steps) // 2
    for epoch in (steps[:half], steps[half:]):
        assert np.array_equal(np.sort(np.concatenate([rows_global(step) for step in epoch])), TRAINING_ROWS)
    first = np.concatenate([rows_global(step) for step in steps[:half]])
    second = np.concatenate([rows_global(step) for step in steps[half:]])
    assert (first == second).mean() < 0.01
    # A slow reference: every row as it stands in the files.
    files = [dataset.read(p, b) for p, part in enumerate(dataset.manifest.parts) for b in range(-(-part.rows // 8192))]
    labels = np.concatenate([rows[0] for rows in files])
    dense = np.concatenate([rows[1] for rows in files], axis=1)
    ids = np.concatenate([rows[2] for rows in files], axis=1)
    for step in (steps[0], steps[half - 1], steps[half]):
        for batch in step:
            rows, n = rows_of(batch), batch.rows_local
            assert np.array_equal(batch.labels[:n], labels[rows])
            assert np.array_equal(batch.dense_features[:n], dense[:, rows].T)
            assert np.array_equal(batch.sparse_features.values().view(26, n), ids[:, rows])


@pytest.mark.parametrize("ranks", [2, 3, 4, 7])
def test_global_batches_do_not_depend_on_the_number_of_ranks(dataset: Dataset, ranks: int) -> None:
    config = DataConfig(batch_size=1_000, window_rows=5_000)
    one, many = _train(dataset, config, 1, epochs=2), _train(dataset, config, ranks, epochs=2)
    for a, b in zip(one, many, strict=True):
        assert np.array_equal(rows_global(a), rows_global(b))
        assert a[0].cursor == b[0].cursor


@given(
    part_rows=st.lists(st.integers(0, 40), min_size=1, max_size=3).filter(lambda rows: sum(rows) > 0),
    batch_per_stream=st.integers(1, 5),
    streams=st.sampled_from([1, 2, 4, 8]),
    ranks=st.integers(1, 4),
    window_rows=st.integers(1, 60),
    resume_at=st.integers(0, 30),
)
@settings(max_examples=25, deadline=None)
def test_any_small_dataset_is_covered_once_and_can_be_resumed_anywhere(
    tmp_path_factory: pytest.TempPathFactory,
    part_rows: list[int],
    batch_per_stream: int,
    streams: int,
    ranks: int,
    window_rows: int,
    resume_at: int,
) -> None:
    dataset = make_dataset(tmp_path_factory.mktemp("small"), part_rows, table_rows=3)
    config = DataConfig(batch_size=batch_per_stream * streams, streams=streams, window_rows=window_rows)
    ranks = min(ranks, streams)
    steps = _train(dataset, config, ranks, epochs=2)
    for step in steps:
        check_step(step)
    rows = [rows_global(step) for step in steps]
    assert np.array_equal(np.sort(np.concatenate(rows)), np.repeat(np.arange(sum(part_rows)), 2))
    at = resume_at % len(steps)
    resumed = _train(dataset, config, 1, epochs=2, cursor=steps[at][0].cursor)
    assert all(np.array_equal(a, rows_global(b)) for a, b in zip(rows[at + 1 :], resumed, strict=True))


@pytest.mark.parametrize(
    ("rows", "batch_size", "ranks"), [(1, 4, 2), (1, 4, 4), (3, 4, 2), (8, 4, 2), (10, 4, 2), (65, 64, 4), (2, 64, 3)]
)
def test_tiny_datasets_are_used_whole_on_every_number_of_ranks(
    tmp_path: Path, rows: int, batch_size: int, ranks: int
) -> None:
    steps = _train(make_dataset(tmp_path, rows), DataConfig(batch_size=batch_size), ranks)
    assert len(steps) == -(-rows // batch_size)
    for step in steps:
        check_step(step)
    assert sorted(np.concatenate([rows_global(step) for step in steps])) == list(range(rows))


@pytest.mark.parametrize("part_rows", [[1_000, 137], [300, 20, 7], [0, 1], [137, 0, 0]])
def test_ranks_take_the_same_steps_through_uneven_and_empty_files(tmp_path: Path, part_rows: list[int]) -> None:
    """Case B06: unequal numbers of batches leave a rank waiting in a collective for ever."""
    rows = sum(part_rows)
    split = {"train": [(0, rows - 1 or 1)], "validation": [(rows - 1, rows)] if rows > 1 else []}
    dataset = make_dataset(tmp_path, part_rows, split=split)
    steps = _train(dataset, DataConfig(batch_size=64), ranks=2, epochs=2)  # Checks that all loaders end together.
    for step in steps:
        check_step(step)
    expected = np.repeat(np.arange(rows - 1 or 1), 2)
    assert np.array_equal(np.sort(np.concatenate([rows_global(step) for step in steps])), expected)
    validation = evaluate(dataset, 2, split="validation", batch_size=64)
    assert [rows_global(step).tolist() for step in validation] == ([[rows - 1]] if rows > 1 else [])


@pytest.mark.parametrize("ranks", [1, 3])
def test_resuming_after_any_step_equals_the_uninterrupted_run_bit_for_bit(dataset: Dataset, ranks: int) -> None:
    config = DataConfig(batch_size=4_096, window_rows=2_000, seed=1)
    straight = _train(dataset, config, ranks, epochs=2)
    for at in range(len(straight)):  # Step 6 ends the first epoch, step 13 the run.
        cursor = json.loads(json.dumps(straight[at][0].cursor))
        resumed = _train(dataset, config, ranks, epochs=2, cursor=cursor)
        assert len(resumed) == len(straight) - at - 1
        for a, b in zip(straight[at + 1 :], resumed, strict=True):
            assert all(_equal(x, y) for x, y in zip(a, b, strict=True))


def test_resuming_twice_and_on_other_ranks_gives_the_same_global_batches(dataset: Dataset) -> None:
    config = DataConfig(batch_size=2_048)
    straight = [rows_global(step) for step in _train(dataset, config, 1, epochs=2)]
    found: list[np.ndarray] = []
    cursor = None
    for ranks, steps in ((2, 5), (1, 9), (4, 7), (3, None)):
        part = _train(dataset, config, ranks, epochs=2, cursor=cursor, steps=steps)
        cursor = part[-1][0].cursor
        found += [rows_global(step) for step in part]
    assert all(np.array_equal(a, b) for a, b in zip(straight, found, strict=True))


def test_a_resumed_run_may_have_more_epochs(dataset: Dataset) -> None:
    config = DataConfig(batch_size=8_192)
    short, long = _train(dataset, config, epochs=1), _train(dataset, config, epochs=2)
    more = _train(dataset, config, epochs=2, cursor=short[-1][0].cursor)
    assert all(_equal(a[0], b[0]) for a, b in zip(long, short + more, strict=True))


def test_a_finished_run_has_no_batches_left(dataset: Dataset) -> None:
    config = DataConfig(batch_size=8_192)
    cursor = _train(dataset, config, epochs=1)[-1][0].cursor
    loader = TrainLoader(dataset, config, rank=0, ranks=1, epochs=1, cursor=cursor)
    assert loader.start_step == loader.total_steps == 4
    assert list(loader) == []


def test_the_position_of_a_loader_is_known(dataset: Dataset) -> None:
    config = DataConfig(batch_size=4_096)
    cursor = _train(dataset, config, epochs=2, steps=9)[-1][0].cursor
    loader = TrainLoader(dataset, config, rank=0, ranks=1, epochs=3, cursor=cursor)
    assert (loader.rows, loader.steps_per_epoch, loader.total_steps, loader.start_step) == (27_996, 7, 21, 9)
    assert np.array_equal(loader.row_numbers(1, 2), rows_of(next(loader)))
    loader.close()


def test_a_loader_that_is_iterated_again_goes_on(dataset: Dataset) -> None:
    loader = TrainLoader(dataset, DataConfig(batch_size=8_192), rank=0, ranks=1, epochs=1)
    rows = [rows_of(batch) for batch, _ in zip(loader, range(2), strict=False)] + [rows_of(batch) for batch in loader]
    # zip takes one batch more than it hands on.
    assert len(np.unique(np.concatenate(rows))) == len(np.concatenate(rows))
    assert len(list(loader)) == 0


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("seed", 1),
        ("batch_size", 512),
        ("batch_size", 999),
        ("streams", 32),
        ("window_rows", 5_000),
        ("drop_last", True),
    ],
)
def test_a_changed_setting_is_refused_by_name(dataset: Dataset, field: str, value: object) -> None:
    cursor = _train(dataset, DataConfig(batch_size=1_024), steps=2)[-1][0].cursor
    config = DataConfig.model_validate({"batch_size": 1_024, field: value})
    with pytest.raises(ConfigError, match=rf"data\.{field} = {value}, the checkpoint was trained with"):
        TrainLoader(dataset, config, rank=0, ranks=1, epochs=1, cursor=cursor)


def test_another_dataset_is_refused(dataset: Dataset, tmp_path: Path) -> None:
    cursor = _train(dataset, DataConfig(), steps=2)[-1][0].cursor
    other = make_dataset(tmp_path, 30_000)
    with pytest.raises(DatasetError, match=rf"fingerprint {other.fingerprint}.*{dataset.fingerprint}"):
        TrainLoader(other, DataConfig(), rank=0, ranks=1, epochs=1, cursor=cursor)


def test_more_ranks_than_the_runs_streams_are_refused(dataset: Dataset) -> None:
    cursor = _train(dataset, DataConfig(batch_size=1_024, streams=2), steps=1)[-1][0].cursor
    assert len(_train(dataset, DataConfig(batch_size=1_024), ranks=2, cursor=cursor, steps=1)) == 1
    with pytest.raises(ConfigError, match=r"3 ranks need.*\n.*at most 2 ranks"):
        TrainLoader(dataset, DataConfig(batch_size=1_024), rank=0, ranks=3, epochs=1, cursor=cursor)


@pytest.mark.parametrize(
    "change",
    [
        {"epoch": -1},
        {"epoch": "0"},
        {"step_in_epoch": 3},
        {"step_in_epoch": 1_000, "stream_rows_consumed": 32_000},
        {"extra": 1},
        {"drop_last": 0},
        {"order_version": 2},
    ],
)
def test_a_damaged_cursor_is_refused(dataset: Dataset, change: dict[str, object]) -> None:
    cursor = _train(dataset, DataConfig(), steps=2)[-1][0].cursor
    assert cursor is not None
    with pytest.raises(CheckpointError):
        TrainLoader(dataset, DataConfig(), rank=0, ranks=1, epochs=1, cursor={**cursor, **change})


def test_a_cursor_without_a_field_is_refused(dataset: Dataset) -> None:
    with pytest.raises(CheckpointError, match="the data cursor is damaged"):
        TrainLoader(dataset, DataConfig(), rank=0, ranks=1, epochs=1, cursor={"epoch": 0})


def test_drop_last_leaves_out_the_short_batch_and_counts_it(dataset: Dataset) -> None:
    config = DataConfig(batch_size=4_096, drop_last=True)
    loader = TrainLoader(dataset, config, rank=0, ranks=1, epochs=2)
    assert (loader.steps_per_epoch, loader.dropped_rows) == (6, 27_996 - 6 * 4_096)
    assert [batch.rows_local for batch in loader] == [4_096] * 12


def test_drop_last_that_leaves_nothing_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"data\.drop_last leaves nothing: 10 training rows"):
        TrainLoader(make_dataset(tmp_path, 10), DataConfig(drop_last=True), rank=0, ranks=1, epochs=1)


def test_a_dataset_without_training_rows_is_refused(tmp_path: Path) -> None:
    dataset = make_dataset(tmp_path, 10, split={"validation": [(0, 10)]})
    with pytest.raises(DatasetError, match="no training rows"):
        TrainLoader(dataset, DataConfig(), rank=0, ranks=1, epochs=1)


def test_evaluating_in_between_does_not_move_the_training_rows(dataset: Dataset) -> None:
    config = DataConfig(batch_size=2_048)
    alone = [rows_of(step[0]) for step in _train(dataset, config, epochs=2)]
    loader = TrainLoader(dataset, config, rank=0, ranks=1, epochs=2)
    mixed = []
    for batch in loader:
        mixed.append(rows_of(batch))
        if len(mixed) % 5 == 0:
            evaluation = iter(EvalLoader(dataset, split="validation", batch_size=128, rank=0, ranks=1))
            assert rows_of(next(evaluation))[0] == 9_100
    assert all(np.array_equal(a, b) for a, b in zip(alone, mixed, strict=True))


def test_loaders_neither_read_nor_move_global_random_numbers(dataset: Dataset) -> None:
    def next_numbers() -> tuple[float, float, float]:
        return random.random(), float(np.random.rand()), float(torch.rand(()))

    def seed() -> None:
        random.seed(7)
        np.random.seed(7)
        torch.manual_seed(7)

    seed()
    expected = next_numbers()
    seed()
    rows = [rows_of(step[0]) for step in _train(dataset, DataConfig(batch_size=4_096))]
    evaluate(dataset, 1, split="validation", batch_size=100)
    assert next_numbers() == expected
    random.seed(8)
    np.random.seed(8)
    torch.manual_seed(8)
    assert all(
        np.array_equal(a, rows_of(b[0]))
        for a, b in zip(rows, _train(dataset, DataConfig(batch_size=4_096)), strict=True)
    )


def test_a_file_replaced_during_training_reaches_the_trainer(tmp_path: Path) -> None:
    dataset = make_dataset(tmp_path / "a", [60_000, 60_000])
    make_dataset(tmp_path / "b", [60_000, 60_000], seed=1)
    loader = TrainLoader(dataset, DataConfig(batch_size=4_096), rank=0, ranks=1, epochs=50)
    next(loader)
    os.replace(tmp_path / "b/part-00001.arrow", tmp_path / "a/part-00001.arrow")
    with pytest.raises(DatasetError, match=r"part-00001\.arrow was changed or replaced"):
        for _ in loader:
            pass
    loader.close()


def test_a_closed_or_forgotten_loader_leaves_no_thread(dataset: Dataset) -> None:
    before = set(threading.enumerate())
    closed = TrainLoader(dataset, DataConfig(batch_size=64), rank=0, ranks=1, epochs=9)
    forgotten = TrainLoader(dataset, DataConfig(batch_size=64), rank=0, ranks=1, epochs=9)
    evaluation = iter(EvalLoader(dataset, split="train", batch_size=64, rank=0, ranks=1))
    for loader in (closed, forgotten, evaluation):
        next(loader)
    started = set(threading.enumerate()) - before
    assert len(started) == 3
    closed.close()
    assert next(closed, None) is None
    del forgotten, evaluation, loader
    gc.collect()
    for thread in started:
        thread.join(10)
        assert not thread.is_alive()


def test_waiting_for_data_is_counted(dataset: Dataset) -> None:
    loader = TrainLoader(dataset, DataConfig(), rank=0, ranks=1, epochs=1)
    assert loader.wait_seconds == 0
    next(loader)  # The thread has only just started.
    assert loader.wait_seconds > 0
    loader.close()


def test_reading_and_preparing_are_measured_apart(dataset: Dataset, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter(range(1, 1000))  # a second passes at every look
    monkeypatch.setattr("dlrm_scale.data.loading.record_batch_cache.time.perf_counter", lambda: next(clock))
    loader = TrainLoader(dataset, DataConfig(batch_size=2_048), rank=0, ranks=1, epochs=1)
    batches = sum(1 for _ in loader)
    loader.close()
    # The thread looks before and after each batch and each read: a second a read, and for each batch one and two more
    # for each read in it.
    reads = loader.fetch_seconds
    assert reads >= 1
    assert loader.prep_seconds == batches + 2 * reads - reads


@pytest.mark.gpu
def test_pinned_batches_reach_the_gpu_with_the_same_content(dataset: Dataset) -> None:
    config = DataConfig(batch_size=2_048)
    device = torch.device("cuda")
    pinned = TrainLoader(dataset, config, rank=0, ranks=3, epochs=2, pin_memory=True)
    plain = TrainLoader(dataset, config, rank=0, ranks=3, epochs=2)
    copies = []
    for batch in pinned:  # Host buffers are reused while copies are still under way.
        assert all(t.is_pinned() for t in (batch.dense_features, batch.labels, batch.weights, batch.loss_scale))
        assert batch.sparse_features.values().is_pinned()
        assert batch.sparse_features.lengths().is_pinned()
        copies.append(batch.to(device, non_blocking=True))
    torch.cuda.synchronize()
    for copy, batch in zip(copies, plain, strict=True):
        assert copy.sparse_features.values().device.type == "cuda"
        assert _equal(copy.to(torch.device("cpu")), batch)
