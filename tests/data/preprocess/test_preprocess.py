"""Raw files to a dataset, end to end."""

import gzip
import json
import math
import os
import shutil
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dlrm_scale.data.dataset.dataset import MANIFEST_FILE, Dataset
from dlrm_scale.data.dataset.split import parse_split_rule, row_ranges
from dlrm_scale.data.preprocess import write_pass
from dlrm_scale.data.preprocess.passes import PassProgress, ProgressReport
from dlrm_scale.data.preprocess.preprocess import PreprocessOptions, PreprocessResult, preprocess
from dlrm_scale.data.preprocess.staging import Staging
from dlrm_scale.data.source.inputs import InputFile, find_inputs
from dlrm_scale.data.source.row_sources import ReadOptions
from dlrm_scale.data.source.text_layout import TextLayout
from dlrm_scale.data.vocabulary.vocabulary import hashed_vocabulary
from dlrm_scale.errors import ConfigError, DataError, DatasetError
from dlrm_scale.schema import CATEGORY_COLUMNS
from tests.support.raw_rows import Row, make_row, make_rows, slow_parse, write_rows


def _run(paths: Path | list[Path], out: Path, **options: Any) -> PreprocessResult:
    return preprocess([paths] if isinstance(paths, Path) else paths, out, PreprocessOptions(**options))


def _read(out: Path) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    dataset = Dataset.open(out)
    blocks = [
        dataset.read(part, batch)
        for part, about in enumerate(dataset.manifest.parts)
        for batch in range(-(-about.rows // 8192))
    ]
    labels, dense, ids = ([getattr(block, name) for block in blocks] for name in ("labels", "dense", "ids"))
    return np.concatenate(labels), np.concatenate(dense, 1), np.concatenate(ids, 1)


def _files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir()) if path.is_file()}


def _rows(data: bytes) -> list[Row]:
    return [row for _, row in slow_parse(data)[0]]


def _slow_dense(value: int | None) -> np.float32:
    return np.float32(math.log1p(max(value or 0, 0)))


def _check_against_slow(out: Path, rows: list[Row], training_rows: int, threshold: int = 2) -> None:
    """Compare every value of a dataset with frequency vocabularies with a slow computation."""
    labels, dense, ids = _read(out)
    manifest = Dataset.open(out).manifest
    assert labels.tolist() == [row.label for row in rows]
    assert np.array_equal(dense, np.array([[_slow_dense(x) for x in row.integers] for row in rows], np.float32).T)
    for column in range(26):
        raw = [row.categories[column] for row in rows]
        counts = Counter(id for id in raw[:training_rows] if id is not None)
        kept = {id for id, count in counts.items() if count >= threshold}
        info = manifest.columns[column]
        assert info.table_rows == 2 + len(kept)
        assert info.statistics["unique_ids"] == len(counts)
        rows_of: dict[int, set[int]] = {}
        for id, row in zip(raw, ids[column].tolist(), strict=True):
            if id is None:
                assert row == 0
            elif id not in kept:
                assert row == 1
            else:
                rows_of.setdefault(id, set()).add(row)
        # Each kept id has one row of its own, and together they are all the rows.
        assert sorted(row for found in rows_of.values() for row in found) == list(range(2, 2 + len(kept)))


def test_a_single_file_is_split_in_its_last_seventh_and_every_value_is_right(tmp_path: Path) -> None:
    rows = make_rows(300)
    _run(write_rows(tmp_path / "train.txt", rows), tmp_path / "out")
    dataset = Dataset.open(tmp_path / "out")
    assert [(r.start, r.end) for r in dataset.split_ranges("train")] == [(0, 258)]
    assert [(r.start, r.end) for r in dataset.split_ranges("validation")] == [(258, 300)]
    assert dataset.split_ranges("test") == ()
    _check_against_slow(tmp_path / "out", _rows(b"\n".join(rows)), 258)


def test_days_are_read_in_numeric_order_and_the_last_validates(tmp_path: Path) -> None:
    # I1 marks the day; day_10 must come after day_2, and day_3 to day_9 are absent.
    for day in (0, 1, 2, 10, 11):
        (tmp_path / f"day_{day}.gz").write_bytes(gzip.compress(make_row(day % 2, [day], [day] * 26) + b"\n"))
    (tmp_path / "day_0.bak").write_bytes(b"nonsense")
    (tmp_path / "README").write_bytes(b"nonsense")
    result = _run(tmp_path, tmp_path / "out", threshold=1)
    _, dense, _ = _read(tmp_path / "out")
    assert dense[0].tolist() == [_slow_dense(day) for day in (0, 1, 2, 10, 11)]
    dataset = Dataset.open(tmp_path / "out")
    assert [part.source for part in dataset.manifest.parts] == [f"day_{day}.gz" for day in (0, 1, 2, 10, 11)]
    assert [(r.start, r.end) for r in dataset.split_ranges("validation")] == [(4, 5)]
    assert "days 3 to 9 are absent between day 2 and day 10" in result.notes
    assert any("2 other entries were left out (README, day_0.bak)" in note for note in result.notes)
    given_backwards = [tmp_path / f"day_{day}.gz" for day in (11, 2, 10, 1, 0)]
    assert _run(given_backwards, tmp_path / "out", threshold=1).up_to_date


def test_day_23_of_24_is_half_validation_and_half_test() -> None:
    rule = parse_split_rule(None, files=24)
    ranges = row_ranges(rule, [10] * 23 + [7], [10] * 23 + [0])
    assert [(r.start, r.end) for r in ranges["train"]] == [(0, 230)]
    assert [(r.start, r.end) for r in ranges["validation"]] == [(230, 234)]
    assert [(r.start, r.end) for r in ranges["test"]] == [(234, 237)]


def test_a_fraction_splits_over_all_files_and_none_holds_nothing_out(tmp_path: Path) -> None:
    rows = make_rows(100)
    files = [write_rows(tmp_path / f"day_{i}.tsv", rows[start : start + 25]) for i, start in enumerate((0, 25, 50, 75))]
    _run(files, tmp_path / "a", validation="0.3")
    dataset = Dataset.open(tmp_path / "a")
    assert [(r.start, r.end) for r in dataset.split_ranges("train")] == [(0, 70)]
    assert [(r.start, r.end) for r in dataset.split_ranges("validation")] == [(70, 100)]
    _check_against_slow(tmp_path / "a", _rows(b"\n".join(rows)), 70)
    _run(files, tmp_path / "b", validation="none")
    assert Dataset.open(tmp_path / "b").split_rows("train") == 100
    _check_against_slow(tmp_path / "b", _rows(b"\n".join(rows)), 100)


def test_no_row_is_in_two_splits_and_all_are_in_one(tmp_path: Path) -> None:
    for rows in (1, 2, 6, 7, 8, 13, 100):
        for rule in ("1/7", "0.5", "0.99", "none"):
            parsed = parse_split_rule(rule, files=1)
            train = rows - int(rows * parsed.fraction)
            ranges = row_ranges(parsed, [rows], [train])
            seen = [row for split in ranges.values() for r in split for row in range(r.start, r.end)]
            assert sorted(seen) == list(range(rows))


def test_the_vocabulary_counts_training_rows_only(tmp_path: Path) -> None:
    known, held_out = make_row(1, [], [5] * 26), make_row(0, [], [6] * 26)
    files = [
        write_rows(tmp_path / "day_0.tsv", [known] * 10),
        write_rows(tmp_path / "day_1.tsv", [held_out] * 10 + [known]),
    ]
    _run(files, tmp_path / "out")
    _, _, ids = _read(tmp_path / "out")
    assert ids[3].tolist() == [2] * 10 + [1] * 10 + [2]
    facts = Dataset.open(tmp_path / "out").manifest.columns[3].statistics
    assert (facts["unique_ids"], facts["coverage"]) == (1, 1.0)
    assert facts["held_out_out_of_vocabulary_rate"] == pytest.approx(10 / 11)


def test_a_fraction_is_cut_in_lines_so_that_bad_rows_move_no_row_into_training(tmp_path: Path) -> None:
    rows = make_rows(20)
    lines = [*rows[:5], b"bad", *rows[5:]]
    _run(write_rows(tmp_path / "x.tsv", lines), tmp_path / "out", validation="1/3", max_bad_rows=1)
    dataset = Dataset.open(tmp_path / "out")
    # 21 lines, 14 train, one of them bad.
    assert (dataset.split_rows("train"), dataset.split_rows("validation")) == (13, 7)
    _check_against_slow(tmp_path / "out", _rows(b"\n".join(rows)), 13)


def test_ids_of_all_32_bits_get_valid_rows_that_are_the_same_everywhere(tmp_path: Path) -> None:
    # 200 rows with every id in 80000000..ffffffff, as in training; then the same ids mapped for evaluation.
    rows = [
        make_row(i % 2, [i], [2**31 + (i % 50) * 42_949_672 + c for c in range(25)] + [2**32 - 1]) for i in range(200)
    ]
    train = write_rows(tmp_path / "train.tsv", rows)
    for name, options in (
        ("frequency", {}),
        ("hash", {"vocabulary": "hash", "max_rows_per_table": 33}),
        ("modulo", {"vocabulary": "modulo", "max_rows_per_table": 33}),
    ):
        out, again = tmp_path / name, tmp_path / f"{name}-evaluation"
        _run(train, out, validation="none", **options)
        _run(write_rows(tmp_path / "evaluation.tsv", rows[::-1]), again, validation="none", vocabulary_from=out)
        _, _, ids = _read(out)
        _, _, mapped = _read(again)
        limits = np.array([Dataset.open(out).table_rows[f"C{c}"] for c in range(1, 27)])[:, None]
        assert np.all((ids >= 2) & (ids < limits)), name
        assert np.array_equal(ids, mapped[:, ::-1]), name
        if name == "modulo":
            assert set(ids[25].tolist()) == {2 + (2**32 - 1) % 31}
        if name == "frequency":
            assert len(set(ids[0].tolist())) == 50


def test_negative_integers_give_the_same_finite_features_in_every_file(tmp_path: Path) -> None:
    values: list[object] = [-1, -2, -3, -100, -(2**31), 0, "", 1, 3, 65_535, 65_536, 1_293_837, 2**31 - 1]
    rows = [make_row(0, ["", value]) for value in values]
    # Only the second file holds negative values; a shift by the file's minimum would change the others.
    files = [write_rows(tmp_path / "day_0.tsv", rows[5:]), write_rows(tmp_path / "day_1.tsv", rows)]
    _run(files, tmp_path / "out")
    _, dense, _ = _read(tmp_path / "out")
    first, second = dense[1, :8], dense[1, 8:]
    assert np.array_equal(first, second[5:])
    assert np.isfinite(dense).all()
    assert second[:7].tolist() == [0.0] * 7
    expected = [0.6931471805599453, 1.3862943611198906, 16 * math.log(2), math.log(65_537), math.log(1_293_838)]
    assert second[7:12].tolist() == [float(np.float32(x)) for x in expected]
    assert second[12] == np.float32(31 * math.log(2))
    assert Dataset.open(tmp_path / "out").manifest.transforms["dense"] == {
        "function": "log1p(max(x, 0))",
        "missing": 0.0,
        "dtype": "float32",
    }


def test_columns_that_are_always_empty_are_fine(tmp_path: Path) -> None:
    rows = [make_row(i % 2) for i in range(20)]
    _run(write_rows(tmp_path / "x.tsv", rows), tmp_path / "out")
    _, dense, ids = _read(tmp_path / "out")
    assert not dense.any()
    assert not ids.any()
    facts = Dataset.open(tmp_path / "out").manifest.columns[0].statistics
    assert (facts["missing_rate"], facts["unique_ids"], facts["coverage"]) == (1.0, 0, None)


def test_statistics_are_the_slow_ones(tmp_path: Path) -> None:
    lines = make_rows(400, seed=3)
    _run(write_rows(tmp_path / "x.tsv", lines), tmp_path / "out")
    rows, manifest = _rows(b"\n".join(lines)), Dataset.open(tmp_path / "out").manifest
    train, held_out = rows[:343], rows[343:]
    raw = [row.categories[8] for row in train]
    counts = Counter(id for id in raw if id is not None)
    facts: dict[str, Any] = manifest.columns[8].statistics
    kept = {id: count for id, count in counts.items() if count >= 2}
    lookups = sorted([*kept.values(), raw.count(None), sum(counts.values()) - sum(kept.values())], reverse=True)
    assert facts["rows"] == 343
    assert facts["missing_rate"] == raw.count(None) / 343
    assert facts["coverage"] == pytest.approx(sum(kept.values()) / sum(counts.values()))
    assert facts["hot_row_curve"]["0.1"] == pytest.approx(sum(lookups[: math.ceil(len(lookups) / 10)]) / 343)
    seen = [id for row in held_out if (id := row.categories[8]) is not None]
    assert facts["held_out_out_of_vocabulary_rate"] == pytest.approx(sum(id not in kept for id in seen) / len(seen))
    assert facts["pooling"] == 1.0
    integers: Any = manifest.statistics["integers"]
    values = [x for row in rows if (x := row.integers[4]) is not None]
    assert (integers["I5"]["min"], integers["I5"]["max"]) == (min(values), max(values))
    assert integers["I5"]["negative_rate"] == sum(x < 0 for x in values) / len(values)
    about: Any = manifest.statistics
    assert about["train"]["positive_rate"] == sum(row.label for row in train) / 343
    assert about["held_out"]["rows"] == 57


def test_the_hot_row_curve_of_hashed_tables_counts_lookups(tmp_path: Path) -> None:
    rows = [make_row(0, [], [7] * 26)] * 90 + [make_row(1, [], [i] * 26) for i in range(100, 110)]
    _run(
        write_rows(tmp_path / "x.tsv", rows),
        tmp_path / "out",
        validation="none",
        vocabulary="hash",
        max_rows_per_table=1000,
    )
    facts: Any = Dataset.open(tmp_path / "out").manifest.columns[0].statistics
    assert facts["hot_row_curve"]["0.001"] == pytest.approx(0.9)
    assert facts["rows_looked_up"] == 11
    assert facts["unique_ids"] == 11


@pytest.mark.parametrize("jobs", [1, 3])
def test_the_dataset_does_not_depend_on_jobs(tmp_path: Path, jobs: int) -> None:
    files = [write_rows(tmp_path / f"day_{i}.tsv", make_rows(400 + i, seed=i)) for i in range(5)]
    _run(files, tmp_path / "reference")
    _run(files, tmp_path / "out", jobs=jobs)
    assert _files(tmp_path / "out") == _files(tmp_path / "reference")


def test_the_same_input_and_options_are_up_to_date_and_others_are_refused(tmp_path: Path) -> None:
    file, out = write_rows(tmp_path / "x.tsv", make_rows(50)), tmp_path / "out"
    assert not _run(file, out).up_to_date
    before = _files(out)
    assert _run(file, out).up_to_date
    assert _run(file, out, jobs=2).up_to_date
    assert _files(out) == before
    with pytest.raises(DatasetError, match="holds a dataset that was made with other vocabulary"):
        _run(file, out, threshold=3)
    with pytest.raises(DatasetError, match="made with other validation"):
        _run(file, out, validation="none")
    # Another file of the same name and size.
    data = file.read_bytes()
    file.write_bytes(b"1" + data[1:])
    os.utime(file, ns=(1, 1))
    with pytest.raises(DatasetError, match="made with other inputs"):
        _run(file, out)
    assert _files(out) == before
    assert not _run(file, out, force=True).up_to_date
    assert _read(out)[0][0] == 1


def test_force_leaves_nothing_of_the_old_dataset(tmp_path: Path) -> None:
    files = [write_rows(tmp_path / f"day_{i}.tsv", [*make_rows(40, seed=i), b"bad"]) for i in range(3)]
    out = tmp_path / "out"
    _run(files, out, max_bad_rows=3)
    assert {"part-00002.arrow", "rejected.tsv"} <= set(_files(out))
    clean = write_rows(tmp_path / "clean.tsv", make_rows(60))
    _run(clean, out, force=True)
    _run(clean, tmp_path / "fresh")
    assert _files(out) == _files(tmp_path / "fresh")
    assert sorted(path.name for path in out.iterdir()) == sorted(_files(out))


def test_bad_rows_are_errors_beyond_the_limit_and_kept_with_reasons_within(tmp_path: Path) -> None:
    rows = make_rows(30)
    bad = [rows[0] + b"\t", b"x\t\x00\xff"]
    file = write_rows(tmp_path / "x.tsv", [*rows[:10], bad[0], *rows[10:], bad[1]])
    with pytest.raises(DataError, match=r"bad row: .*x\.tsv, line 11, column row: expected 40 .*, found 41"):
        _run(file, tmp_path / "out")
    assert not (tmp_path / "out").exists()
    with pytest.raises(DataError, match=r"more than 1 bad rows[^\n]*\n  .*line 11.*\n  .*line 32"):
        _run(file, tmp_path / "out", max_bad_rows=1)
    result = _run(file, tmp_path / "out", max_bad_rows=2)
    assert _read(tmp_path / "out")[0].tolist() == [row[0] - 48 for row in rows]
    lines = (tmp_path / "out" / "rejected.tsv").read_text().splitlines()
    assert lines[0] == "file\tline\tcolumn\texpected\tfound\trow"
    assert lines[1].startswith("x.tsv\t11\trow\t40 tab-separated fields\t41")
    assert lines[2].startswith("x.tsv\t32\trow\t40 tab-separated fields\t2")
    assert lines[2].endswith("\tx\\t\\x00\\xff")
    assert result.manifest.statistics["bad_rows"] == 2
    assert any("2 bad rows were left out" in note for note in result.notes)


def test_the_limit_of_bad_rows_holds_over_all_files(tmp_path: Path) -> None:
    files = [write_rows(tmp_path / f"day_{i}.tsv", [*make_rows(5), b"bad"]) for i in range(3)]
    with pytest.raises(DataError, match="more than 2 bad rows"):
        _run(files, tmp_path / "out", max_bad_rows=2)
    assert _run(files, tmp_path / "out", max_bad_rows=3).manifest.rows == 15


@pytest.mark.parametrize("vocabulary", ["frequency", "hash"])
def test_a_truncated_gzip_leaves_no_dataset(tmp_path: Path, vocabulary: str) -> None:
    data = gzip.compress(b"\n".join(make_rows(2000)) + b"\n")
    (tmp_path / "day_0.gz").write_bytes(data)
    (tmp_path / "day_1.gz").write_bytes(data[: len(data) * 6 // 10])
    with pytest.raises(DataError, match=r"day_1\.gz: gzip file ends in the middle .* stored bytes"):
        _run(
            [tmp_path / "day_0.gz", tmp_path / "day_1.gz"],
            tmp_path / "out",
            vocabulary=vocabulary,
            max_rows_per_table=50,
            max_bad_rows=10,
        )
    assert not (tmp_path / "out" / MANIFEST_FILE).exists()


def test_an_empty_file_is_noted_and_an_input_without_rows_is_an_error(tmp_path: Path) -> None:
    full, empty = write_rows(tmp_path / "day_0.tsv", make_rows(5)), write_rows(tmp_path / "day_1.tsv", [])
    result = _run([full, empty], tmp_path / "out", validation="none")
    assert [part.rows for part in result.manifest.parts] == [5, 0]
    assert any("day_1.tsv is empty: 0 rows" in note for note in result.notes)
    (tmp_path / "b").mkdir()
    swapped = [write_rows(tmp_path / "b" / "day_0.tsv", []), write_rows(tmp_path / "b" / "day_1.tsv", make_rows(5))]
    for paths, message in (
        (empty, "no good rows"),
        (write_rows(tmp_path / "bad.tsv", [b"1\t2"]), "no good rows"),
        (swapped, "none are left to train"),
    ):
        with pytest.raises(DataError, match=message):
            _run(paths, tmp_path / "out2", max_bad_rows=1)
        assert not (tmp_path / "out2" / MANIFEST_FILE).exists()


def test_odd_inputs_and_contradicting_options_are_refused(tmp_path: Path) -> None:
    file = write_rows(tmp_path / "day_0.tsv", make_rows(5))
    out = tmp_path / "out"
    (tmp_path / "day_0.tsv.gz").write_bytes(gzip.compress(file.read_bytes()))
    (tmp_path / "folder").mkdir()
    os.mkfifo(tmp_path / "pipe")
    for error, message, paths, options in (
        (DataError, "no such file", tmp_path / "absent", {}),
        (DataError, "is no regular file", tmp_path / "pipe", {}),
        (DataError, "are the same day", [file, tmp_path / "day_0.tsv.gz"], {}),
        (DataError, "are the same file", [file, file], {}),
        (DataError, "holds no files named day_0", tmp_path / "folder", {}),
        (ConfigError, "leaves no training rows", file, {"validation": "last-file"}),
        (ConfigError, "is not a rule", file, {"validation": "1.5"}),
        (ConfigError, "needs the number of rows", file, {"vocabulary": "hash"}),
        (ConfigError, "--max-rows-per-table must be between 3", file, {"max_rows_per_table": 2}),
        (ConfigError, "--threshold must be at least 1", file, {"threshold": 0}),
        (
            ConfigError,
            "--threshold has no meaning",
            file,
            {"vocabulary": "modulo", "threshold": 2, "max_rows_per_table": 9},
        ),
        (ConfigError, "--threshold contradicts --vocabulary-from", file, {"vocabulary_from": out, "threshold": 2}),
        (DatasetError, "is not a dataset", file, {"vocabulary_from": out}),
        (DatasetError, "is not a dataset", file, {"vocabulary_from": tmp_path / "absent"}),
    ):
        with pytest.raises(error, match=message):
            _run(paths, out, **options)
    assert not out.exists()


def test_a_folder_with_other_things_is_not_written_to(tmp_path: Path) -> None:
    file = write_rows(tmp_path / "x.tsv", make_rows(5))
    with pytest.raises(DatasetError, match="is not empty and holds no dataset"):
        _run(file, tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["x.tsv"]


def test_a_second_process_in_the_same_folder_is_refused(tmp_path: Path) -> None:
    file = write_rows(tmp_path / "x.tsv", make_rows(5))
    with Staging(tmp_path / "out", {"a": 1}), pytest.raises(DatasetError, match="another process is writing"):
        _run(file, tmp_path / "out")


def test_a_failed_run_leaves_no_dataset_and_a_rerun_redoes_only_what_is_unfinished(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = [write_rows(tmp_path / f"day_{i}.tsv", [*make_rows(50, seed=i), b"bad"]) for i in range(3)]
    out, options = tmp_path / "out", {"max_bad_rows": 3}
    _run(files, tmp_path / "reference", **options)
    open_rows, written = write_pass.open_rows, []

    def fails_at_two(file: InputFile, options: ReadOptions) -> Any:
        written.append(files.index(file.path))
        if file.path == files[2] and len(written) == 3:
            raise OSError(28, "No space left on device")
        return open_rows(file, options)

    monkeypatch.setattr(write_pass, "open_rows", fails_at_two)
    with pytest.raises(DatasetError, match="No space left on device"):
        _run(files, out, **options)
    assert not (out / MANIFEST_FILE).exists()
    assert _files(out) == {}
    with pytest.raises(DatasetError, match="not a finished dataset"):
        Dataset.open(out)
    written.clear()
    (out / ".building" / "vocabularies.json").unlink()
    reports: list[ProgressReport] = []
    preprocess(files, out, PreprocessOptions(**options), on_progress=reports.append)
    assert written == [2]
    # The counts of all files and two parts were finished before; speed and time left come from the rest.
    last = {report.name: report for report in reports}
    assert (last["count"].rows, last["count"].earlier_rows) == (150, 150)
    assert (last["write"].rows, last["write"].earlier_rows, last["write"].bad_rows) == (150, 100, 3)
    assert last["write"].earlier_bytes == sum(file.stat().st_size for file in files[:2])
    assert _files(out) == _files(tmp_path / "reference")
    assert not (out / ".building").exists()


def test_half_made_files_of_another_request_are_not_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    files = [write_rows(tmp_path / f"day_{i}.tsv", make_rows(50, seed=i)) for i in range(2)]
    out = tmp_path / "out"
    monkeypatch.setattr(Staging, "publish", lambda *_: (_ for _ in ()).throw(OSError(5, "Input/output error")))
    with pytest.raises(DatasetError, match="Input/output error"):
        _run(files, out)
    monkeypatch.undo()
    _run(files, out, threshold=1)
    _run(files, tmp_path / "fresh", threshold=1)
    assert _files(out) == _files(tmp_path / "fresh")


def test_the_bad_rows_of_files_that_were_finished_before_count_towards_the_limit(tmp_path: Path) -> None:
    paths = [write_rows(tmp_path / f"day_{i}.tsv", [*make_rows(9, seed=i), b"bad", b"bad"]) for i in range(2)]
    files = find_inputs(paths).files
    vocabularies = [hashed_vocabulary(column, "modulo", rows=9) for column in CATEGORY_COLUMNS]

    def write(staging: Staging, max_bad_rows: int) -> None:
        write_pass.write_parts(
            files,
            [None, None],
            vocabularies,
            staging,
            ReadOptions(max_bad_rows=max_bad_rows),
            first_part=0,
            multi_hot=(),
            jobs=1,
            count_memory_bytes=None,
            progress=PassProgress("write", 1, 1, files, None),
        )

    with Staging(tmp_path / "out", {}) as staging:
        write(staging, 4)
        write(staging, 4)  # both finished before
        (staging.path / "part-00000.arrow.json").unlink()  # the first isn't: its rows are counted again, then day_1's
        with pytest.raises(DataError, match=r"more than 3 bad rows") as caught:
            write(staging, 3)
    assert f"{paths[0]}, line 10" in caught.value.message
    assert f"{paths[1]}: 2 bad rows, found before" in caught.value.message
    assert "--max-bad-rows N" in (caught.value.remedy or "")


def test_files_are_durable_before_anything_says_that_they_are_finished(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    events: list[tuple[str, str]] = []
    real_fsync, real_replace = os.fsync, os.replace

    def fsync(descriptor: int) -> None:
        real_fsync(descriptor)
        events.append(("sync", Path(os.readlink(f"/proc/self/fd/{descriptor}")).name))

    def replace(source: Path, target: Path) -> None:
        real_replace(source, target)
        folder = "" if Path(target).parent.name == "out" else "staged "
        events.append((f"{folder}name", Path(target).name))

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(os, "replace", replace)
    _run(write_rows(tmp_path / "x.tsv", [*make_rows(20), b"bad"]), tmp_path / "out", max_bad_rows=1)

    def at(*event: str) -> int:
        return events.index((event[0], event[1]))

    vocabularies = [f"vocabulary-{column}.parquet" for column in CATEGORY_COLUMNS]
    assert max(at("sync", name) for name in vocabularies) < at("staged name", "vocabularies.json")
    part, note = "part-00000.arrow", ("staged name", "part-00000.arrow.json")
    assert at("sync", f"{part}.tmp") < at("staged name", part) < at(*note)
    assert ("sync", ".building") in events[at("staged name", part) : at(*note)]
    assert at("sync", "part-00000.arrow.rejected.tsv") < at(*note)
    assert at("sync", "rejected.tsv") < at("name", "rejected.tsv")
    published = max(at("name", name) for name in (part, "rejected.tsv", *vocabularies))
    manifest = at("name", MANIFEST_FILE)
    assert published < manifest
    assert ("sync", "out") in events[published:manifest]
    assert ("sync", f"{MANIFEST_FILE}.tmp") in events[published:manifest]
    assert ("sync", "out") in events[manifest:]


@pytest.mark.parametrize("replaced", [False, True])
def test_death_at_any_step_of_publishing_is_made_good_by_a_rerun(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, replaced: bool
) -> None:
    files = [write_rows(tmp_path / f"day_{i}.tsv", make_rows(9, seed=i)) for i in range(2)]
    _run(files, tmp_path / "reference")
    reference = _files(tmp_path / "reference")
    _run(write_rows(tmp_path / "old.tsv", [*make_rows(9), b"bad"]), tmp_path / "old", max_bad_rows=1, threshold=1)
    real_replace, real_unlink = os.replace, Path.unlink
    step, out = 0, tmp_path / "never"
    while True:
        out = tmp_path / f"out{step}"
        if replaced:
            shutil.copytree(tmp_path / "old", out)
        calls = 0

        def dies(real: Any, *arguments: Any, at: int = step, folder: Path = out) -> Any:
            nonlocal calls
            if Path(arguments[-1]).parent == folder or (len(arguments) == 1 and Path(arguments[0]).parent == folder):
                calls += 1
                if calls > at:
                    raise _DeathError
            return real(*arguments)

        with monkeypatch.context() as patch:
            patch.setattr(os, "replace", lambda *a: dies(real_replace, *a))
            patch.setattr(
                Path, "unlink", lambda self, missing_ok=False: dies(lambda p: real_unlink(p, missing_ok), self)
            )
            died = False
            try:
                _run(files, out, force=replaced)
            except _DeathError:
                died = True
        if died:
            if (out / MANIFEST_FILE).exists():
                Dataset.open(out).verify()
            _run(files, out, force=replaced)
        assert _files(out) == reference, step
        if not died:
            break
        step += 9 if step > 2 else 1
    assert step > 10


class _DeathError(BaseException):
    """Stands for SIGKILL: nothing may catch it."""


def test_an_input_that_changes_while_it_is_read_is_refused(tmp_path: Path) -> None:
    file = write_rows(tmp_path / "x.tsv", make_rows(50))

    def on_progress(report: ProgressReport) -> None:
        if report.name == "write":
            os.utime(file, ns=(1, 1))

    with pytest.raises(DataError, match="was changed while it was read"):
        preprocess([file], tmp_path / "out", PreprocessOptions(), on_progress=on_progress)
    assert not (tmp_path / "out" / MANIFEST_FILE).exists()


def test_progress_counts_bytes_rows_and_bad_rows_of_each_pass(tmp_path: Path) -> None:
    file = write_rows(tmp_path / "x.tsv", [*make_rows(50), b"bad"])
    reports: list[ProgressReport] = []
    preprocess([file], tmp_path / "out", PreprocessOptions(max_bad_rows=1), on_progress=reports.append)
    last = {report.name: report for report in reports}
    assert [(r.name, r.step, r.steps) for r in last.values()] == [("lines", 1, 3), ("count", 2, 3), ("write", 3, 3)]
    for name in ("count", "write"):
        assert (last[name].rows, last[name].bad_rows) == (50, 1)
        assert last[name].done_bytes == last[name].total_bytes == file.stat().st_size


def test_padded_rows_equal_intact_ones(tmp_path: Path, shared_data: Path) -> None:
    stripped = shared_data / "kaggle" / "stripped_tabs_100.tsv"
    with pytest.raises(DataError, match=r"stripped_tabs_100\.tsv, line 3, column row: expected 40 .*, found 38"):
        _run(stripped, tmp_path / "padded")
    result = _run(stripped, tmp_path / "padded", layout=TextLayout(pad_short_rows=True))
    _run(shared_data / "kaggle" / "intact_100.tsv", tmp_path / "intact")
    padded, intact = _files(tmp_path / "padded"), _files(tmp_path / "intact")
    for name in padded:
        if name.startswith(("part", "vocabulary")):
            assert padded[name] == intact[name]
    assert result.manifest.statistics["padded_rows"] == 51
    assert result.manifest.columns == Dataset.open(tmp_path / "intact").manifest.columns


def test_the_real_kaggle_rows_make_the_slow_dataset(tmp_path: Path, shared_data: Path) -> None:
    file = shared_data / "kaggle" / "kaggle_union.tsv"
    _run(file, tmp_path / "out")
    _check_against_slow(tmp_path / "out", _rows(file.read_bytes()), 6379 - 6379 // 7)


def test_the_real_terabyte_rows_make_the_slow_dataset(tmp_path: Path, shared_data: Path) -> None:
    file = shared_data / "terabyte" / "day_0_head_10000.tsv"
    _run(file, tmp_path / "out", validation="0.2", threshold=3)
    _check_against_slow(tmp_path / "out", _rows(file.read_bytes()), 8000, threshold=3)
    integers: Any = Dataset.open(tmp_path / "out").manifest.statistics["integers"]
    assert (integers["I12"]["max"], integers["I8"]["min"]) == (1_293_837, -1)


def test_real_gzip_days_make_the_dataset_of_all_days(tmp_path: Path, shared_data: Path) -> None:
    days = [shared_data / "kaggle" / "gz_days" / f"day_{i}.gz" for i in range(5)]
    _run(days, tmp_path / "days")
    everything = shared_data / "kaggle" / "gz_days" / "alldays.txt"
    _run(everything, tmp_path / "all", validation="1/5")
    for days_part, all_part in zip(_read(tmp_path / "days"), _read(tmp_path / "all"), strict=True):
        assert np.array_equal(days_part, all_part)
    assert Dataset.open(tmp_path / "days").split_rows("validation") == 50
    _check_against_slow(tmp_path / "days", _rows(everything.read_bytes()), 200)


def _mapping(out: Path) -> str:
    categories: Any = Dataset.open(out).manifest.transforms["categories"]
    return str(categories["mapping_fingerprint"])


def test_vocabularies_of_equal_size_over_other_ids_have_another_fingerprint(tmp_path: Path) -> None:
    for name, ids in (("a", (1, 2)), ("b", (1, 3)), ("c", (2, 1))):
        rows = [make_row(0, [], [id] * 26) for id in ids]
        _run(write_rows(tmp_path / f"{name}.tsv", rows), tmp_path / name, validation="none", threshold=1)
    assert Dataset.open(tmp_path / "a").table_rows == Dataset.open(tmp_path / "b").table_rows
    assert _mapping(tmp_path / "a") != _mapping(tmp_path / "b")
    assert _mapping(tmp_path / "a") == _mapping(tmp_path / "c")


@pytest.mark.slow
def test_memory_does_not_grow_with_rows(tmp_path: Path) -> None:
    rows = make_rows(2000)
    peaks = []
    for copies in (20, 200):
        file = write_rows(tmp_path / f"{copies}.tsv", rows * copies)
        # VmHWM and not ru_maxrss, which a child inherits from the process that forked it.
        command = (
            "import re, sys\n"
            "from dlrm_scale.cli import main\n"
            "try: main(sys.argv[1:])\n"
            "finally: sys.stderr.write(re.search(r'VmHWM:\\s*(\\d+)', open('/proc/self/status').read())[1])"
        )
        arguments = [sys.executable, "-c", command, "preprocess", str(file), "--out", str(tmp_path / str(copies))]
        done = subprocess.run(arguments, capture_output=True, text=True, check=True, timeout=200)
        peaks.append(int(done.stderr) / 1024)
    assert peaks[1] < peaks[0] + 40, peaks
    assert peaks[1] < 400, peaks


def test_new_days_map_through_an_older_dataset(tmp_path: Path) -> None:
    old = write_rows(tmp_path / "day_0.tsv", make_rows(200, seed=1))
    _run(old, tmp_path / "old", validation="none")
    _run(old, tmp_path / "same", validation="none", vocabulary_from=tmp_path / "old")
    for a, b in zip(_read(tmp_path / "old"), _read(tmp_path / "same"), strict=True):
        assert np.array_equal(a, b)
    first, second = (Dataset.open(tmp_path / name).manifest.columns for name in ("old", "same"))
    for a, b in zip(first, second, strict=True):
        assert (a.table_rows, a.method) == (b.table_rows, b.method)
        assert a.statistics["hot_row_curve"] == b.statistics["hot_row_curve"]
    _run(write_rows(tmp_path / "day_1.tsv", make_rows(50, seed=2)), tmp_path / "new", vocabulary_from=tmp_path / "old")
    assert Dataset.open(tmp_path / "new").table_rows == Dataset.open(tmp_path / "old").table_rows
    assert _mapping(tmp_path / "new") == _mapping(tmp_path / "same") == _mapping(tmp_path / "old")
    request = json.loads((tmp_path / "new" / "preprocess.json").read_text())
    assert request["vocabulary"] == {"from_dataset": Dataset.open(tmp_path / "old").fingerprint}
