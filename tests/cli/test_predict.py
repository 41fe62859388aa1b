"""`dlrm-scale predict`: scores in the order of the rows, the same as `evaluate` sees, from text or a dataset."""

import gzip
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.csv as pa_csv
import pyarrow.parquet as pq
import pytest
from sklearn.metrics import log_loss, roc_auc_score

from tests.support.command_line import run_command, run_json
from tests.support.raw_rows import make_rows

_TRAIN = (
    *("--set", "train.device=cpu", "--set", "train.threads_per_rank=1", "--set", "data.batch_size=64"),
    *("--set", "model.dense_layers=[16]", "--set", "model.over_layers=[16,1]", "--set", "checkpoint.every_steps=0"),
)
_HEADER = "\t".join([*(f"I{n}" for n in range(1, 14)), *(f"C{n}" for n in range(1, 27))]).encode() + b"\n"


def _lines(count: int, seed: int) -> list[bytes]:
    return [line + b"\n" for line in make_rows(count, seed=seed)]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run trained on day_0 of a dataset whose second day validates."""
    folder = tmp_path_factory.mktemp("run")
    lines = _lines(800, 0)
    (folder / "day_0.tsv").write_bytes(b"".join(lines[:400]))
    (folder / "day_1.tsv").write_bytes(b"".join(lines[400:]))
    assert run_command("preprocess", folder / "day_0.tsv", folder / "day_1.tsv", "--out", folder / "dataset") == 0
    settings = ("--set", f"data.path={folder / 'dataset'}", "--set", f"run.path={folder / 'run'}")
    assert run_command("train", "sample", *settings, *_TRAIN) == 0
    return folder


def _read(path: Path) -> pa.Table:
    return pa_csv.read_csv(path) if path.suffix == ".csv" else pq.read_table(path)


def _column(table: pa.Table, name: str) -> list[Any]:
    values: list[Any] = table.column(name).to_pylist()
    return values


def test_scores_of_text_are_those_of_the_dataset_and_of_evaluate(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    of_dataset, of_text, of_gzip = (tmp_path / name for name in ("a.parquet", "b.parquet", "c.csv"))
    run_json(capsys, "predict", run / "run", run / "dataset", "--split", "validation", "--out", of_dataset)
    summary = run_json(capsys, "predict", run / "run", run / "day_1.tsv", "--out", of_text)
    zipped = tmp_path / "day_1.gz"
    zipped.write_bytes(gzip.compress((run / "day_1.tsv").read_bytes()))
    run_json(capsys, "predict", run / "run", zipped, "--out", of_gzip)
    evaluated = run_json(capsys, "evaluate", run / "run")
    first, second, third = _read(of_dataset), _read(of_text), _read(of_gzip)
    assert first.column_names == ["row", "source", "line", "label", "logit", "probability"]
    assert _column(first, "row") == list(range(400, 800))
    assert _column(second, "row") == _column(third, "row") == list(range(400))
    assert set(_column(first, "source")) == {"day_1.tsv"}
    assert set(_column(second, "source")) == {str(run / "day_1.tsv")}
    for table in (first, second, third):
        assert _column(table, "line") == list(range(1, 401))
        assert _column(table, "logit") == pytest.approx(_column(first, "logit"), rel=1e-7)
    assert _column(second, "logit") == _column(first, "logit")
    labels = [int(line[:1]) for line in (run / "day_1.tsv").read_bytes().splitlines()]
    assert _column(second, "label") == labels
    logits = np.array(_column(second, "logit"), np.float64)
    probabilities = 1 / (1 + np.exp(-logits))
    assert _column(second, "probability") == pytest.approx(probabilities, rel=1e-6)
    assert evaluated["logloss"] == pytest.approx(log_loss(labels, probabilities), abs=1e-9)
    assert evaluated["auc"] == pytest.approx(roc_auc_score(labels, probabilities), abs=1e-9)
    shared = ("rows", "positives", "logloss", "auc", "calibration")
    assert {name: summary["metrics"][name] for name in shared} == {name: evaluated[name] for name in shared}
    assert summary["mean_prediction"] == pytest.approx(probabilities.mean(), rel=1e-6)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a.parquet", "b.parquet", "c.csv", "day_1.gz"]


@pytest.mark.slow
def test_two_ranks_write_the_rows_in_the_same_order(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    one, two = tmp_path / "one.parquet", tmp_path / "two.parquet"
    # batches of an odd number of rows, so that the shares of ranks are unequal
    odd = ("--set", "train.validation_batch_size=63")
    run_json(capsys, "predict", run / "run", run / "dataset", "--out", one, *odd)
    run_json(capsys, "predict", run / "run", run / "dataset", "--out", two, *odd, "--nproc", "2")
    first, second = _read(one), _read(two)
    assert first.num_rows == 800
    assert first.drop_columns(["logit", "probability"]).equals(second.drop_columns(["logit", "probability"]))
    # a rank multiplies matrices of fewer rows, which may round differently
    assert _column(second, "logit") == pytest.approx(_column(first, "logit"), abs=1e-6)


def test_rows_without_labels_are_scored_alike_and_bad_ones_leave_their_line_numbers_behind(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = [line.split(b"\t", 1)[1] for line in (run / "day_1.tsv").read_bytes().splitlines(keepends=True)]
    raw = tmp_path / "unlabeled.tsv"
    raw.write_bytes(b"".join([_HEADER, rows[0], b"broken\n", b"\n", *rows[1:200], b"broken\n", *rows[200:]]))
    out, labeled = tmp_path / "scores.csv", tmp_path / "labeled.csv"
    flags = ("--unlabeled", "--header", "--max-bad-rows", "3")
    summary = run_json(capsys, "predict", run / "run", raw, "--out", out, *flags)
    run_json(capsys, "predict", run / "run", run / "day_1.tsv", "--out", labeled)
    scores = _read(out)
    assert scores.column_names == ["row", "source", "line", "logit", "probability"]
    assert _column(scores, "logit") == _column(_read(labeled), "logit")
    assert _column(scores, "line") == [2, *range(5, 204), *range(205, 405)]
    assert summary["metrics"] is None
    assert summary["rows"] == 400
    rejected = (tmp_path / "scores.csv.rejected.tsv").read_text().splitlines()
    assert [line.split("\t")[1] for line in rejected[1:]] == ["3", "4", "204"]
    assert summary["rejected"] == f"{out}.rejected.tsv"


def test_a_failure_leaves_the_old_file_and_nothing_else(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "scores.parquet"
    out.write_bytes(b"old")
    raw = tmp_path / "raw.tsv"
    raw.write_bytes(b"".join(_lines(5, 1)) + b"broken\n")
    assert run_command("predict", run / "run", raw, "--out", out) == 2
    assert "is there already" in capsys.readouterr().err
    assert run_command("predict", run / "run", raw, "--out", out, "--force") == 1
    assert "line 6" in capsys.readouterr().err
    assert out.read_bytes() == b"old"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["raw.tsv", "scores.parquet"]
    raw.write_bytes(b"".join(_lines(5, 1)))
    # what a killed process left is in nobody's way
    (tmp_path / ".scores.parquet.predict" / "dataset").mkdir(parents=True)
    (tmp_path / ".scores.parquet.predict" / "scores").write_bytes(b"half")
    assert run_command("predict", run / "run", raw, "--out", out, "--force", "--step", "best") == 0
    assert _read(out).num_rows == 5
    assert sorted(path.name for path in tmp_path.iterdir()) == ["raw.tsv", "scores.parquet"]
    assert "(best)" in capsys.readouterr().out


def test_mistakes_are_told_before_anything_is_read(
    run: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for arguments, message in (
        ((run / "dataset", "--out", "x.txt"), "the ending tells no format"),
        ((run / "dataset", run / "day_1.tsv", "--out", "x.csv"), "stands beside other input"),
        ((run / "day_1.tsv", "--split", "test", "--out", "x.csv"), "the input is raw rows"),
        ((run / "dataset", "--step", "last", "--out", "x.csv"), "allowed: best, or the step of a checkpoint"),
        ((run / "dataset", "--out", tmp_path / "no" / "x.csv"), f"folder {tmp_path / 'no'}: No such file or directory"),
    ):
        assert run_command("predict", run / "run", *arguments) == 2
        assert message in capsys.readouterr().err
    other = tmp_path / "other"
    hashed = ("--vocabulary", "modulo", "--max-rows-per-table", "64", "--validation", "none")
    assert run_command("preprocess", run / "day_0.tsv", "--out", other, *hashed) == 0
    out = tmp_path / "x.csv"
    assert run_command("predict", run / "run", run / "day_1.tsv", "--vocabulary-from", other, "--out", out) != 0
    assert not out.exists()


def test_days_and_values_add_up_to_the_whole(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    whole = run_json(capsys, "evaluate", run / "run", "--split", "train")
    days = run_json(capsys, "evaluate", run / "run", "--split", "train", "--by", "day")
    values = run_json(capsys, "evaluate", run / "run", "--split", "train", "--by", "C5", "--top", "3")
    assert list(days["slices"]) == ["day_0.tsv"]
    assert days["slices"]["day_0.tsv"] == {name: whole[name] for name in days["slices"]["day_0.tsv"]}
    assert list(values["slices"])[-1] == "rest"
    # the slices bear the raw ids
    fields = [line.split(b"\t")[18].decode() for line in (run / "day_0.tsv").read_bytes().splitlines()]
    named = {name.removeprefix("C5 "): part["rows"] for name, part in values["slices"].items()}
    common = Counter(text or "missing" for text in fields).most_common(3)
    assert [named[text] for text, _ in common] == [count for _, count in common]
    for name in ("rows", "positives"):
        assert sum(part[name] for part in values["slices"].values()) == whole[name]
    losses = sum(part["rows"] * part["logloss"] for part in values["slices"].values() if part["rows"])
    assert losses / whole["rows"] == pytest.approx(whole["logloss"], abs=1e-6)
    assert run_command("evaluate", run / "run", "--by", "C5") == 0
    assert "rest" in capsys.readouterr().out
    integers = run_json(capsys, "evaluate", run / "run", "--split", "train", "--by", "I5")
    texts = [line.split(b"\t")[5].decode() for line in (run / "day_0.tsv").read_bytes().splitlines()]
    expected = Counter(_bucket(text) for text in texts)
    assert {name: part["rows"] for name, part in integers["slices"].items()} == expected
    assert next(iter(integers["slices"])) == "I5 below 1 or missing"
    assert run_command("evaluate", run / "run", "--by", "I14") == 2
    assert "allowed: day, or a column I1 to I13, C1 to C26" in capsys.readouterr().err


def test_evaluating_a_split_without_rows_is_an_error_that_names_those_with_rows(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_command("evaluate", run / "run", "--split", "test") == 1
    told = " ".join(capsys.readouterr().err.split())
    assert "has no rows in its test split" in told
    assert "evaluate --split train or validation" in told


def _bucket(text: str) -> str:
    number = int(text or 0)
    if number < 1:
        return "I5 below 1 or missing"
    low = 1 << (number.bit_length() - 1)
    return f"I5 {low:,} to {2 * low - 1:,}" if number > 1 else "I5 1"


def test_kaggles_test_rows_are_scored(shared_data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    kaggle = shared_data / "kaggle"
    assert run_command("preprocess", kaggle / "kaggle_union.tsv", "--out", tmp_path / "dataset") == 0
    settings = ("--set", f"data.path={tmp_path / 'dataset'}", "--set", f"run.path={tmp_path / 'run'}")
    assert run_command("train", "sample", *settings, *_TRAIN) == 0
    out = tmp_path / "scores.parquet"
    raw = kaggle / "kaggle_test_nolabel_1999.tsv"
    summary = run_json(capsys, "predict", tmp_path / "run", raw, "--unlabeled", "--out", out, "--step", "best")
    assert (summary["rows"], summary["checkpoint"]) == (1999, "best")
    # about a quarter of Kaggle's rows are clicks
    assert 0.15 < summary["mean_prediction"] < 0.35
    scores = np.array(_column(_read(out), "probability"))
    assert len(scores) == 1999
    assert scores.std() > 0.05
