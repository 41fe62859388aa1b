"""Metrics of slices are those of their rows, on any number of ranks, and add up to those of all rows."""

from collections.abc import Iterable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch

from dlrm_scale.batch import Batch
from dlrm_scale.data.dataset.dataset import Dataset
from dlrm_scale.data.loading.loader import EvalLoader
from dlrm_scale.data.preprocess.options import PreprocessOptions
from dlrm_scale.data.preprocess.preprocess import preprocess
from dlrm_scale.errors import ConfigError
from dlrm_scale.sharding.ranks import close_ranks, init_ranks
from dlrm_scale.train.evaluate import Evaluation, evaluate_slices
from dlrm_scale.train.metrics.metrics import click_metrics
from dlrm_scale.train.metrics.row_slices import make_slices
from dlrm_scale.train.metrics.score_ranking import AucKind
from tests.support.datasets import make_dataset
from tests.support.rank_runner import run_ranks
from tests.support.raw_rows import make_row, write_rows


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("data") / "dataset"
    split = {"train": [(0, 50)], "validation": [(50, 300), (310, 9000)], "test": [(300, 310)]}
    make_dataset(path, (200, 8700, 100), table_rows=30, split=split, multi_hot={"C2": 3})
    return path


def _rows(dataset: Path) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Logits, labels, part and C5 of the validation rows."""
    opened = Dataset.open(dataset)
    pieces = [(opened.read(part, index), part) for part, index in ((0, 0), (1, 0), (1, 1), (2, 0))]
    keep = [*range(50, 300), *range(310, 9000)]
    logits = np.concatenate([rows.dense[1] * 4 - 2 for rows, _ in pieces])[keep].astype(np.float32)
    labels = np.concatenate([rows.labels for rows, _ in pieces])[keep]
    part = np.concatenate([np.full(len(rows.labels), part) for rows, part in pieces])[keep]
    ids = np.concatenate([rows.ids[4] for rows, _ in pieces])[keep]
    return logits, labels, part, ids


def _evaluate(path: str, by: str, auc: AucKind) -> Evaluation | None:
    dataset = Dataset.open(path)
    ranks = init_ranks("cpu", 60)

    def score(given: Iterable[Batch]) -> Iterator[tuple[Batch, torch.Tensor, torch.Tensor]]:
        for batch in given:
            yield batch, torch.zeros(()), batch.dense_features[:, 1] * 4 - 2

    try:
        batches = EvalLoader(dataset, split="validation", batch_size=70, rank=ranks.rank, ranks=ranks.ranks)
        slices = make_slices(by, dataset, "validation", 4)
        return evaluate_slices(score, batches, ranks, auc=auc, slices=slices)
    finally:
        close_ranks()


@pytest.mark.parametrize("by", ["day", "C5"])
def test_each_slice_has_the_metrics_of_its_rows(by: str, dataset: Path) -> None:
    logits, labels, part, ids = _rows(dataset)
    if by == "day":
        expected = {f"day_{k}": part == k for k in range(3)}
    else:
        found, counts = np.unique(ids, return_counts=True)
        top = found[np.argsort(-counts, kind="stable")[:4]].tolist()
        names = {value: f"C5 row {value}" if value else "C5 missing" for value in top}
        expected = {names[value]: ids == value for value in top} | {"rest": ~np.isin(ids, top)}
    for ranks in (1, 2, 3):
        exact = run_ranks(ranks, _evaluate, str(dataset), by, "exact")
        assert exact == [exact[0]] * ranks
        assert list(exact[0].slices) == list(expected)
        for name, inside in expected.items():
            made, direct = exact[0].slices[name].as_dict(), click_metrics(logits[inside], labels[inside]).as_dict()
            assert made.pop("auc") == pytest.approx(direct.pop("auc"), abs=1e-12)
            assert made == direct
        assert exact[0].metrics.rows == sum(m.rows for m in exact[0].slices.values()) == len(logits)
    binned = run_ranks(2, _evaluate, str(dataset), by, "binned")[0]
    for name, metrics in binned.slices.items():
        assert abs(metrics.auc - exact[0].slices[name].auc) <= metrics.auc_error_bound < 0.01
    assert binned.metrics.logloss == exact[0].metrics.logloss


def test_what_cannot_be_sliced_is_refused(dataset: Path) -> None:
    opened = Dataset.open(dataset)
    for by, values, message in (
        ("I14", 4, "allowed: day, or a column I1 to I13, C1 to C26"),
        ("I5", 4, "took its dense features ready-made"),
        ("C2", 4, "several ids"),
        ("C5", 0, "leaves no value"),
    ):
        with pytest.raises(ConfigError, match=message):
            make_slices(by, opened, "validation", values)


def test_an_integer_is_in_the_slice_of_its_power_of_two(tmp_path: Path) -> None:
    integers = ["", -3, 0, 1, 2, 3, 4, 7, 8, 1023, 1024, 65535, 65536, 2**20 - 1, 2**20, 2**30, 2**31 - 1]
    rows = [make_row(k % 2, ["", *[5] * 3, integer]) for k, integer in enumerate(integers)]
    options = PreprocessOptions(validation="none", threshold=1)
    preprocess([write_rows(tmp_path / "day_0", rows)], tmp_path / "dataset", options)
    dataset = Dataset.open(tmp_path / "dataset")
    slices = make_slices("I5", dataset, "train", 4)
    found: list[str] = []
    for batch in EvalLoader(dataset, split="train", batch_size=5, rank=0, ranks=1):
        found += [slices.names[place] for place in slices.of(batch, len(found)).tolist()]
    names = ["below 1 or missing"] * 3 + ["1", "2 to 3", "2 to 3", "4 to 7", "4 to 7", "8 to 15", "512 to 1,023"]
    names += ["1,024 to 2,047", "32,768 to 65,535", "65,536 to 131,071", "524,288 to 1,048,575"]
    names += ["1,048,576 to 2,097,151", *["1,073,741,824 to 2,147,483,647"] * 2]
    assert found == [f"I5 {name}" for name in names]
