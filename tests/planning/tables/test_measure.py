"""What is measured of a dataset is what its rows hold."""

from pathlib import Path

import numpy as np
import pyarrow.parquet as pq
import pytest

from dlrm_scale.data.dataset.dataset import Dataset
from dlrm_scale.errors import ConfigError, DatasetError
from dlrm_scale.planning.tables.load import load_tables
from dlrm_scale.planning.tables.measure import Sampling, measure_tables
from dlrm_scale.planning.tables.tables_file import format_tables, save_tables
from tests.planning.tables.uses_of_rows import share_of_rows
from tests.support.command_line import run_command
from tests.support.datasets import make_dataset
from tests.support.raw_rows import make_rows, write_rows

_MULTI_HOT = {"C3": 9, "C20": 1}


@pytest.fixture(scope="module")
def multi_hot(tmp_path_factory: pytest.TempPathFactory) -> Dataset:
    return make_dataset(
        tmp_path_factory.mktemp("measure") / "bags", [9000, 3000], [30 * k for k in range(1, 27)], multi_hot=_MULTI_HOT
    )


def _columns(dataset: Dataset) -> list[tuple[np.ndarray, np.ndarray]]:
    """Ids and offsets of each column, in file order."""
    read = [dataset.read(0, 0), dataset.read(0, 1), dataset.read(1, 0)]
    found = []
    for k in range(26):
        name = f"C{k + 1}"
        if name in _MULTI_HOT:
            ids = np.concatenate([rows.bags[name].values for rows in read])
            lengths = np.concatenate([np.diff(rows.bags[name].offsets) for rows in read])
        else:
            ids = np.concatenate([rows.ids[k] for rows in read])
            lengths = np.ones(len(ids), np.int64)
        found.append((ids, lengths))
    return found


def test_bags_distinct_rows_and_hot_rows_are_those_of_all_rows(multi_hot: Dataset) -> None:
    made = measure_tables(multi_hot, dim=8, sampling=Sampling(samples=12_000, batch_sizes=(12_000,)))
    for table, (ids, lengths) in zip(made.tables, _columns(multi_hot), strict=True):
        assert table.rows == multi_hot.table_rows[table.name]
        assert table.lookups_per_sample == pytest.approx(lengths.mean(), rel=1e-12)
        assert table.lookups_per_sample_p99 == np.percentile(lengths, 99, method="inverted_cdf")
        assert dict(table.unique_rows)[12_000] == len(np.unique(ids))
        counts = np.bincount(ids, minlength=table.rows)
        hottest = np.cumsum(np.sort(counts)[::-1]) / len(ids)
        for rows, share in table.hot_rows:
            assert share == pytest.approx(hottest[rows - 1], abs=1e-6)
        before = np.cumsum(counts) / len(ids)
        for row, share in table.lookups_before_row:
            assert share == pytest.approx(before[row - 1], abs=0.004)
        for start in range(0, table.rows, 10):
            expected = counts[start : start + 10].sum() / len(ids)
            assert share_of_rows(table, start, start + 10) == pytest.approx(expected, abs=0.03)


def test_small_batches_are_like_random_rows(multi_hot: Dataset) -> None:
    made = measure_tables(multi_hot, dim=8, sampling=Sampling(samples=12_000, batch_sizes=(200, 3000)))
    random = np.random.default_rng(0)
    for number, (ids, lengths) in enumerate(_columns(multi_hot)):
        starts = np.cumsum(lengths) - lengths
        distinct = []
        for _ in range(40):
            rows = random.choice(12_000, 200, replace=False)
            distinct.append(len(np.unique(np.concatenate([ids[starts[r] : starts[r] + lengths[r]] for r in rows]))))
        assert dict(made.tables[number].unique_rows)[200] == pytest.approx(np.mean(distinct), rel=0.04)


def test_a_large_batch_put_together_is_the_batch_that_training_gets(tmp_path: Path) -> None:
    from dlrm_scale.config import DataConfig
    from dlrm_scale.data.loading.loader import TrainLoader

    dataset = make_dataset(tmp_path / "a", 50_000, 100_000, skew=2)
    made = measure_tables(dataset, dim=8, sampling=Sampling(samples=1, batch_sizes=(24_576,)))
    loader = TrainLoader(dataset, DataConfig(batch_size=24_576), rank=0, ranks=1, epochs=1)
    features = next(loader).sparse_features
    loader.close()
    values = features.values().numpy().reshape(26, -1)
    assert [dict(t.unique_rows)[24_576] for t in made.tables] == [len(np.unique(ids)) for ids in values]


def test_equal_datasets_and_flags_give_equal_bytes(multi_hot: Dataset) -> None:
    texts = {
        format_tables(measure_tables(multi_hot, dim=8, sampling=Sampling(samples=3000, batch_sizes=(1000,))), ".toml")
        for _ in range(2)
    }
    assert len(texts) == 1


def test_vocabularies_tell_where_hot_rows_lie(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    raw = write_rows(tmp_path / "day_0", make_rows(3000, ids=400))
    assert run_command("preprocess", raw, "--out", tmp_path / "a", "--validation", "none", "--threshold", 3) == 0
    made = load_tables(tmp_path / "a", dim=4, sampling=Sampling(batch_sizes=(3000,)))
    dataset = Dataset.open(tmp_path / "a")
    ids = dataset.read(0, 0).ids
    for table, column in zip(made.tables, ids, strict=True):
        counts = np.bincount(column, minlength=table.rows)
        vocabulary = pq.read_table(tmp_path / "a" / f"vocabulary-{table.name}.parquet")
        assert counts[2:].tolist() == vocabulary["count"].to_pylist()
        assert share_of_rows(table, 0, 1) == pytest.approx(counts[0] / 3000, abs=0.001)
        assert share_of_rows(table, 1, 2) == pytest.approx(counts[1] / 3000, abs=0.001)
        hottest = int(counts.argmax())
        assert share_of_rows(table, hottest, hottest + 1) == pytest.approx(counts.max() / 3000, abs=0.001)
        assert table.share_of_hottest(8) == pytest.approx(np.sort(counts)[-8:].sum() / 3000, abs=0.001)


def test_a_config_gives_dim_optimizer_and_dataset(multi_hot: Dataset, tmp_path: Path) -> None:
    overrides = [f"data.path={multi_hot.path}", "sparse_optimizer.kind=sgd"]
    sampling = Sampling(samples=1000, batch_sizes=(1000,))
    made = load_tables("criteo_kaggle", overrides=overrides, sampling=sampling)
    assert (made.optimizer, {t.dim for t in made.tables}) == ("sgd", {16})
    other = load_tables("criteo_kaggle", overrides=overrides, sampling=sampling, dim=32, optimizer="adam")
    assert (other.optimizer, {t.dim for t in other.tables}) == ("adam", {32})
    save_tables(made, tmp_path / "a.toml")
    assert load_tables(tmp_path / "a.toml") == made
    assert load_tables(tmp_path / "a.toml", dim=64, optimizer="adam").tables[3].dim == 64


def test_what_names_no_tables_is_refused(multi_hot: Dataset, tmp_path: Path) -> None:
    (tmp_path / "mine.toml").write_text("[model]\ndim = 16\n")
    for source, values, said in (
        ("mlperf_dcn", {}, "did you mean 'mlperf_dcnv2'"),
        ("sample", {}, "sample names no dataset"),
        (tmp_path / "mine.toml", {}, "names no dataset"),
        (multi_hot.path, {}, "doesn't say how many columns"),
        (multi_hot.path, {"dim": 6}, "nearest allowed: 4 or 8"),
        (multi_hot.path, {"dim": 8, "overrides": ["data.seed=1"]}, "is no config"),
        (multi_hot.path, {"dim": 8, "sampling": Sampling(batch_sizes=(20_000,))}, "has 12,000 training rows"),
    ):
        with pytest.raises(ConfigError, match=said):
            load_tables(source, **values)  # type: ignore[arg-type]
    with pytest.raises(DatasetError, match="no dataset"):
        load_tables(tmp_path, dim=8)
    empty = make_dataset(tmp_path / "empty", 100, split={"validation": [(0, 100)]})
    with pytest.raises(DatasetError, match="no training rows"):
        load_tables(empty.path, dim=8)
