"""More readers read side by side, and change nothing else."""

import json
import threading
from collections.abc import Iterator
from itertools import islice
from pathlib import Path

import numpy as np
import pytest
import torch

from dlrm_scale.batch import Batch
from dlrm_scale.config import DataConfig
from dlrm_scale.data.dataset.dataset import Dataset, Rows
from dlrm_scale.data.dataset.manifest import read_manifest
from dlrm_scale.data.loading.loader import EvalLoader, TrainLoader
from dlrm_scale.data.loading.readers import Readers
from dlrm_scale.errors import DatasetError
from tests.support.datasets import make_dataset
from tests.support.loader_steps import rows_of

MULTI_HOT = {"C1": 3, "C17": 1, "C26": 40}
SPLIT = {"train": [(5, 9_000), (11_000, 30_001)], "validation": [(9_100, 10_500)], "test": [(30_001, 30_002)]}


@pytest.fixture(scope="module", params=["one-hot", "multi-hot"])
def dataset(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    """Uneven parts, one empty; ranges that start and end inside record batches."""
    return make_dataset(
        tmp_path_factory.mktemp("dataset"),
        [10_000, 0, 1_137, 20_000],
        split=SPLIT,
        multi_hot=MULTI_HOT if request.param == "multi-hot" else None,
    )


def _loader(dataset: Dataset, config: DataConfig, **arguments: object) -> TrainLoader:
    return TrainLoader(dataset, config, **{"rank": 0, "ranks": 1, "epochs": 2, **arguments})


def _check_equal(a: Batch, b: Batch) -> None:
    assert a.cursor == b.cursor
    assert a.rows_global == b.rows_global
    assert torch.equal(a.dense_features, b.dense_features)
    assert torch.equal(a.labels, b.labels)
    assert torch.equal(a.weights, b.weights)
    assert torch.equal(a.sparse_features.values(), b.sparse_features.values())
    assert torch.equal(a.sparse_features.lengths(), b.sparse_features.lengths())


@pytest.mark.parametrize("readers", [2, 3, 11])
@pytest.mark.parametrize(
    ("batch_size", "window_rows", "streams", "drop_last"),
    [(1_024, 5_000, 0, False), (1_024, 16_384, 2, True), (4_000, 700, 0, False), (32_768, 500, 8, False)],
)
def test_batches_do_not_depend_on_the_readers(
    dataset: Dataset, readers: int, batch_size: int, window_rows: int, streams: int, drop_last: bool
) -> None:
    config = DataConfig(
        batch_size=batch_size, window_rows=window_rows, streams=streams, drop_last=drop_last, prefetch_batches=1
    )
    for rank, ranks in ((0, 1), (1, 2)):
        one = _loader(dataset, config, rank=rank, ranks=ranks)
        many = _loader(dataset, config.model_copy(update={"readers": readers}), rank=rank, ranks=ranks)
        for a, b in zip(one, many, strict=True):
            _check_equal(a, b)


def test_a_run_goes_on_anywhere_with_another_number_of_readers(dataset: Dataset) -> None:
    config = DataConfig(batch_size=4_096, window_rows=2_000, seed=1)
    straight = list(_loader(dataset, config))
    for at, batch in enumerate(straight):
        cursor = json.loads(json.dumps(batch.cursor))
        resumed = _loader(dataset, config.model_copy(update={"readers": 1 + (at + 1) % 4}), cursor=cursor)
        for a, b in zip(straight[at + 1 :], resumed, strict=True):
            _check_equal(a, b)


@pytest.mark.parametrize("batch_size", [700, 40_000])
@pytest.mark.parametrize(("split", "limit_rows"), [("validation", 0), ("train", 12_345), ("train", 0), ("test", 0)])
def test_an_evaluation_does_not_depend_on_the_readers(
    dataset: Dataset, split: str, limit_rows: int, batch_size: int
) -> None:
    for rank, ranks in ((0, 1), (0, 3), (2, 3)):
        one, many = (
            EvalLoader(
                dataset,
                split=split,
                batch_size=batch_size,
                rank=rank,
                ranks=ranks,
                limit_rows=limit_rows,
                readers=readers,
            )
            for readers in (1, 3)
        )
        for _ in range(2):
            for a, b in zip(one, many, strict=True):
                _check_equal(a, b)


class _Watched(Dataset):
    """A dataset whose reads are watched; `make_dataset` writes it."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, read_manifest(path))
        self.together: threading.Barrier | None = None
        self.entered = threading.Semaphore(0)
        self.allowed: threading.Event | None = None

    def read(self, part_index: int, record_batch_index: int) -> Rows:
        self.entered.release()
        if self.allowed is not None:
            self.allowed.wait(60)
        if self.together is not None:
            self.together.wait(60)
        return super().read(part_index, record_batch_index)


@pytest.fixture
def watched(tmp_path: Path) -> _Watched:
    """One record batch a window and a stream: 16 of them."""
    make_dataset(tmp_path, [8_192] * 16)
    return _Watched(tmp_path)


_WINDOWED = DataConfig(batch_size=1_024, window_rows=8_192, streams=2, readers=4)


def test_as_many_reads_as_there_are_readers_are_under_way_at_once(watched: _Watched) -> None:
    watched.together = threading.Barrier(4)  # a read ends only when four have begun
    assert sum(batch.rows_local for batch in _loader(watched, _WINDOWED, epochs=1)) == 16 * 8_192
    evaluation = EvalLoader(watched, split="train", batch_size=1_024, rank=0, ranks=1, readers=4)
    assert sum(batch.rows_local for batch in evaluation) == 16 * 8_192


def test_a_damaged_file_is_an_error_where_its_rows_would_have_come(tmp_path: Path) -> None:
    dataset = make_dataset(tmp_path, [8_192] * 8)
    config = DataConfig(batch_size=1_024, window_rows=8_192, streams=1, readers=3)
    order = TrainLoader(dataset, config, rank=0, ranks=1, epochs=1).order
    # a window is a part, and lasts 8 steps
    part = int(order.row_numbers(0, 40)[0]) // 8_192
    with (tmp_path / f"part-{part:05d}.arrow").open("r+b") as file:
        file.write(b"damaged!")
    loader = _loader(dataset, config, epochs=1)
    for step in range(40):
        assert np.array_equal(rows_of(next(loader)), order.row_numbers(0, step))
    for _ in range(2):
        with pytest.raises(DatasetError, match=f"part-{part:05d}.arrow"):
            next(loader)
    loader.close()
    assert not _reader_threads()


def _reader_threads() -> list[threading.Thread]:
    return [t for t in threading.enumerate() if t.name.startswith(("window-reader", "file-reader", "train-loader"))]


def test_close_ends_all_threads_also_those_that_read(watched: _Watched) -> None:
    watched.allowed = threading.Event()
    loader = _loader(watched, _WINDOWED)
    loader.read_ahead()
    for _ in range(4):
        assert watched.entered.acquire(timeout=60)
    assert len(_reader_threads()) == 5
    watched.allowed.set()
    loader.close()
    assert not _reader_threads()
    assert next(loader, None) is None


def test_an_evaluation_that_is_left_ends_its_threads(watched: _Watched) -> None:
    batches = iter(EvalLoader(watched, split="train", batch_size=64, rank=0, ranks=1, readers=3))
    next(batches)
    assert len([t for t in _reader_threads() if t.name.startswith("file-reader")]) == 3
    batches.close()
    assert not _reader_threads()


def test_a_reader_that_nobody_asks_makes_two_items(tmp_path: Path) -> None:
    made: list[int] = []
    second = [threading.Event() for _ in range(3)]

    def source(number: int) -> Iterator[int]:
        for turn, item in enumerate(islice(range(100), number, None, 3)):
            made.append(item)
            if turn == 1:
                second[number].set()
            yield item

    readers = Readers([source(number) for number in range(3)], name="window-reader")
    readers.start()
    assert all(event.wait(60) for event in second)
    assert sorted(made) == list(range(6))
    assert list(readers) == list(range(100))
    readers.close()
    assert not _reader_threads()


def test_reading_by_several_threads_counts_as_reading_not_as_waiting(dataset: Dataset) -> None:
    loader = _loader(dataset, DataConfig(batch_size=2_048, window_rows=4_096, readers=3))
    assert sum(1 for _ in loader) == loader.total_steps
    loader.close()
    assert loader.fetch_seconds > 0
    assert loader.prep_seconds > 0
