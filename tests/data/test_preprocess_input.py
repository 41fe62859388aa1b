"""Preprocess on input other than Criteo's own files: other layouts, standard input, days that are added."""

import gzip
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from dlrm_scale.data.dataset import MANIFEST_FILE, Dataset
from dlrm_scale.data.preprocess import PreprocessOptions, PreprocessResult, preprocess
from dlrm_scale.data.text_layout import TextLayout
from dlrm_scale.errors import ConfigError, DataError, DatasetError
from tests.support.raw_rows import make_row, make_rows, write_rows

HEADER = b"\t".join([b"label", *(f"I{i}".encode() for i in range(1, 14)), *(f"C{i}".encode() for i in range(1, 27))])


def _run(paths: Path | list[Path], out: Path, **options: Any) -> PreprocessResult:
    return preprocess([paths] if isinstance(paths, Path) else paths, out, PreprocessOptions(**options))


def _data_files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.glob("*")) if path.suffix in (".arrow", ".parquet")}


def _files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir()) if path.is_file()}


def _ids(out: Path, column: int) -> list[int]:
    dataset = Dataset.open(out)
    return np.concatenate([dataset.read(part, 0).ids[column] for part in range(len(dataset.manifest.parts))]).tolist()


def test_a_header_commas_an_id_column_and_decimal_ids_change_no_row(tmp_path: Path) -> None:
    rows = make_rows(60, seed=4)
    _run(write_rows(tmp_path / "x.tsv", rows), tmp_path / "plain")

    def decimal(row: bytes) -> bytes:
        fields = row.split(b"\t")
        return b"\t".join([*fields[:14], *(b"%d" % int(field, 16) if field else b"" for field in fields[14:])])

    csv = [b"id," + HEADER.replace(b"\t", b","), *(b"7," + decimal(row).replace(b"\t", b",") for row in rows)]
    layout = TextLayout(delimiter="comma", header=True, id_column=True, decimal_ids=True)
    # The header is a line, so that a fraction would cut one row earlier.
    result = _run(write_rows(tmp_path / "x.csv", csv), tmp_path / "other", layout=layout, validation="none")
    _run(tmp_path / "x.tsv", tmp_path / "plain", validation="none", force=True)
    assert _data_files(tmp_path / "other") == _data_files(tmp_path / "plain")
    assert result.manifest.rows == 60


def test_the_header_of_every_day_is_skipped(tmp_path: Path) -> None:
    days = [write_rows(tmp_path / f"day_{i}.tsv", [HEADER, *make_rows(20, seed=i)]) for i in range(3)]
    manifest = _run(days, tmp_path / "out", layout=TextLayout(header=True)).manifest
    assert [part.rows for part in manifest.parts] == [20, 20, 20]


def test_unlabeled_rows_map_as_the_labeled_ones_and_become_the_test_split(tmp_path: Path) -> None:
    rows = make_rows(50, seed=1)
    _run(write_rows(tmp_path / "train.tsv", rows), tmp_path / "train", validation="none")
    unlabeled = write_rows(tmp_path / "test.tsv", [row[2:] for row in rows])
    layout = TextLayout(labeled=False)
    with pytest.raises(ConfigError, match="--unlabeled rows don't train") as caught:
        _run(unlabeled, tmp_path / "test", layout=layout)
    assert "--vocabulary-from" in str(caught.value.remedy)
    with pytest.raises(ConfigError, match="--validation has no meaning with --unlabeled"):
        _run(unlabeled, tmp_path / "test", layout=layout, vocabulary_from=tmp_path / "train", validation="none")
    manifest = _run(unlabeled, tmp_path / "test", layout=layout, vocabulary_from=tmp_path / "train").manifest
    assert {name: sum(r.end - r.start for r in ranges) for name, ranges in manifest.split.items()} == {
        "train": 0,
        "validation": 0,
        "test": 50,
    }
    assert manifest.statistics["labeled"] is False
    for column in range(26):
        assert _ids(tmp_path / "test", column) == _ids(tmp_path / "train", column)


def test_multi_hot_fields_become_bags_and_a_missing_one_the_missing_row(tmp_path: Path) -> None:
    fields: list[list[Any]] = [[5, "00000007,00000007,00000008"], [5, ""], [5, "00000009"], [6, "00000007"]]
    file = write_rows(tmp_path / "x.tsv", [make_row(1, [], row, fill="") for row in fields])
    with pytest.raises(DataError, match=r"line 1: several ids in a field \(C2\)"):
        _run(file, tmp_path / "out", validation="none")
    options: dict[str, Any] = {"layout": TextLayout(multi_hot=("C2",)), "validation": "none", "threshold": 1}
    manifest = _run(file, tmp_path / "out", **options).manifest
    assert [info.multi_hot for info in manifest.columns[:3]] == [False, True, False]
    dataset = Dataset.open(tmp_path / "out")
    assert dataset.multi_hot == ("C2",)
    bags = dataset.read(0, 0).bags["C2"]
    assert bags.offsets.tolist() == [0, 3, 4, 5, 6]
    seven, again, eight, missing, nine, last = bags.values.tolist()
    assert seven == again == last
    assert missing == 0
    assert sorted([seven, eight, nine]) == [2, 3, 4]
    facts: Any = manifest.columns[1].statistics
    assert facts["unique_ids"] == 3
    assert facts["pooling"] == pytest.approx(6 / 4)


def test_standard_input_is_read_like_a_file_compressed_or_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = b"\n".join(make_rows(300, seed=2)) + b"\n"
    (tmp_path / "x.tsv").write_bytes(data)
    _run(tmp_path / "x.tsv", tmp_path / "reference")
    for name, piped in (("plain", data), ("gzip", gzip.compress(data))):
        command = [sys.executable, "-m", "dlrm_scale", "preprocess", "-", "--out", str(tmp_path / name)]
        done = subprocess.run(command, input=piped, capture_output=True, timeout=120)
        assert done.returncode == 0, done.stderr.decode()
        assert _data_files(tmp_path / name) == _data_files(tmp_path / "reference")
        assert not (tmp_path / name / ".building").exists()
    with pytest.raises(ConfigError, match="stands beside other input"):
        _run([Path("-"), tmp_path / "x.tsv"], tmp_path / "both")
    done = subprocess.run(
        [sys.executable, "-m", "dlrm_scale", "preprocess", "-", "--out", str(tmp_path / "bad")],
        input=data + b"broken\n",
        capture_output=True,
        timeout=120,
    )
    assert done.returncode == 1
    assert b"stdin, line 301, column row: expected 40 tab-separated fields" in done.stderr
    assert not (tmp_path / "bad").exists()


def test_new_days_are_added_with_the_same_mapping_and_the_newest_validates(tmp_path: Path) -> None:
    days = [write_rows(tmp_path / f"day_{i}.tsv", make_rows(40 + i, seed=i)) for i in range(4)]
    out = tmp_path / "out"
    first = _run(days[:2], out).manifest
    before = _data_files(out)
    added = _run(days[2:], out, vocabulary_from=out)
    assert not added.up_to_date
    manifest = added.manifest
    assert [(part.source, part.rows) for part in manifest.parts] == [(f"day_{i}.tsv", 40 + i) for i in range(4)]
    assert [(r.start, r.end) for r in manifest.split["train"]] == [(0, 40 + 41 + 42)]
    assert [(r.start, r.end) for r in manifest.split["validation"]] == [(123, 166)]
    assert manifest.transforms == first.transforms
    assert [column.table_rows for column in manifest.columns] == [column.table_rows for column in first.columns]
    assert manifest.fingerprint != first.fingerprint
    assert before.items() <= _data_files(out).items()
    Dataset.open(out).verify()
    # The same rows through the same vocabularies at once: equal parts, equal statistics but for what isn't known.
    _run(days[:2], tmp_path / "vocabulary")
    _run(days, tmp_path / "at-once", vocabulary_from=tmp_path / "vocabulary")
    at_once = Dataset.open(tmp_path / "at-once").manifest
    assert _data_files(out) == _data_files(tmp_path / "at-once")
    assert {**manifest.statistics} == {**at_once.statistics}
    for a, b in zip(manifest.columns, at_once.columns, strict=True):
        assert {**a.statistics, "unique_ids": 0} == {**b.statistics, "unique_ids": 0}
        assert a.statistics["unique_ids"] is None
    # Once more it is there already; another file of that name is refused.
    assert _run(days[2:], out, vocabulary_from=out).up_to_date
    assert _run(days[2:], out, vocabulary_from=out).manifest == manifest
    (tmp_path / "elsewhere").mkdir()
    other = write_rows(tmp_path / "elsewhere" / "day_3.tsv", make_rows(9, seed=9))
    with pytest.raises(DataError, match="already has rows of a file of that name"):
        _run(other, out, vocabulary_from=out)
    with pytest.raises(ConfigError, match="can't be used when days are added"):
        _run(write_rows(tmp_path / "day_4.tsv", make_rows(9)), out, vocabulary_from=out, validation="0.5")
    assert Dataset.open(out).manifest == manifest
    # And again a day.
    again = _run(tmp_path / "day_4.tsv", out, vocabulary_from=out).manifest
    assert [part.rows for part in again.parts] == [40, 41, 42, 43, 9]
    assert _run(days[2:], out, vocabulary_from=out).up_to_date


class _DeathError(BaseException):
    """Stands for SIGKILL: nothing may catch it."""


def test_death_at_any_step_of_adding_days_leaves_the_dataset_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    days = [write_rows(tmp_path / f"day_{i}.tsv", make_rows(30, seed=i)) for i in range(3)]
    _run(days[:2], tmp_path / "reference")
    old = Dataset.open(tmp_path / "reference").manifest
    _run(days[2:], tmp_path / "reference", vocabulary_from=tmp_path / "reference")
    reference = _files(tmp_path / "reference")
    real_replace, step = os.replace, 0
    while True:
        out = tmp_path / f"out{step}"
        _run(days[:2], out)
        calls = 0

        def dies(source: Any, target: Any, at: int = step) -> None:
            nonlocal calls
            calls += 1
            if calls > at:
                raise _DeathError
            real_replace(source, target)

        died = False
        with monkeypatch.context() as patch:
            patch.setattr(os, "replace", dies)
            try:
                _run(days[2:], out, vocabulary_from=out)
            except _DeathError:
                died = True
        if died:
            now = Dataset.open(out)
            now.verify()
            assert now.manifest in (old, Dataset.open(tmp_path / "reference").manifest)
            _run(days[2:], out, vocabulary_from=out)
        found = _files(out)
        assert {name: data for name, data in found.items() if name != "preprocess.json"} == {
            name: data for name, data in reference.items() if name != "preprocess.json"
        }
        assert _run(days[2:], out, vocabulary_from=out).up_to_date
        if not died:
            break
        step += 1
    assert step >= 5


def test_a_memory_limit_that_is_too_small_is_refused_with_what_it_takes(tmp_path: Path) -> None:
    file = write_rows(tmp_path / "x.tsv", make_rows(50))
    with pytest.raises(ConfigError, match=r"--memory-limit 64\.0 MiB is too little for --jobs 3: it takes at least"):
        _run(file, tmp_path / "out", memory_limit_bytes=64 << 20, jobs=3)
    assert not (tmp_path / "out").exists()


def test_the_dataset_does_not_depend_on_the_memory_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from dlrm_scale.data import preprocess as module
    from dlrm_scale.data.memory_plan import MemoryPlan

    files = [write_rows(tmp_path / f"day_{i}.tsv", make_rows(3000, seed=i, ids=2000)) for i in range(2)]
    _run(files, tmp_path / "reference")
    tiny = MemoryPlan(count_bytes=1 << 16, merge_bytes=1 << 16, vocabulary_bytes=None)
    monkeypatch.setattr(module, "plan_memory", lambda *_, **__: tiny)
    _run(files, tmp_path / "out", jobs=2)
    assert _files(tmp_path / "out") == _files(tmp_path / "reference")


def test_vocabularies_beyond_the_memory_limit_are_refused_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from dlrm_scale.data import preprocess as module
    from dlrm_scale.data.memory_plan import MemoryPlan

    rows = [make_row(i % 2, [], [*[1] * 25, i]) for i in range(5000)]
    file = write_rows(tmp_path / "x.tsv", rows)
    tight = MemoryPlan(count_bytes=1 << 24, merge_bytes=1 << 24, vocabulary_bytes=10_000)
    monkeypatch.setattr(module, "plan_memory", lambda *_, **__: tight)
    with pytest.raises(DatasetError, match=r"the vocabularies need .*largest: C26 .* for 5,00[0-9] rows") as caught:
        _run(file, tmp_path / "out", threshold=1, validation="none")
    assert "--threshold" in str(caught.value.remedy)
    monkeypatch.undo()
    _run(file, tmp_path / "out", threshold=2, validation="none", memory_limit_bytes=2 << 30)


def test_hashed_columns_report_distinct_ids_and_those_that_collide(tmp_path: Path) -> None:
    rows = [make_row(0, [], [i % 100] * 26) for i in range(400)]
    file = write_rows(tmp_path / "x.tsv", rows)
    manifest = _run(file, tmp_path / "out", vocabulary="modulo", max_rows_per_table=82, validation="none").manifest
    facts: Any = manifest.columns[0].statistics
    # 100 ids on 80 rows: ids 0 to 19 share their rows with 80 to 99.
    assert facts["unique_ids"] == 100
    assert facts["colliding_ids"] == 40
    assert facts["rows_looked_up"] == 80
    few = _run(file, tmp_path / "wide", vocabulary="modulo", max_rows_per_table=1002, validation="none").manifest
    assert few.columns[0].statistics["colliding_ids"] == 0


@pytest.mark.parametrize("vocabulary", ["frequency", "hash", "modulo"])
def test_single_columns_have_capacities_of_their_own(tmp_path: Path, vocabulary: str) -> None:
    rows = [make_row(0, [], [i % 100] * 26) for i in range(400)]
    file = write_rows(tmp_path / "x.tsv", rows)
    capacities = {"max_rows_per_table": 60, "max_rows": {"C2": 12, "C26": 90}}
    _run(file, tmp_path / "out", vocabulary=vocabulary, validation="none", **capacities)
    assert Dataset.open(tmp_path / "out").table_rows == {
        **{f"C{i}": 60 for i in range(1, 27)},
        "C2": 12,
        "C26": 90,
    }


def test_options_about_another_format_are_refused(tmp_path: Path) -> None:
    file = write_rows(tmp_path / "x.tsv", make_rows(5))
    for options, message in (
        ({"columns": {"C1": "user"}}, "--column names columns of Parquet files"),
        ({"max_rows": {"I1": 5}}, "--max-rows I1=5: there is no category column"),
        ({"max_rows": {"C1": 2}}, "--max-rows C1 must be between 3 and"),
        ({"vocabulary": "hash", "max_rows": {"C1": 9}}, "needs the number of rows of each table; C2, C3,"),
        ({"vocabulary_from": tmp_path, "max_rows": {"C1": 9}}, "--max-rows contradicts --vocabulary-from"),
        ({"columns": {"C27": "user"}}, "there is no column 'C27'"),
        ({"vocabulary": "given"}, "--vocabulary given is for .npy and Parquet"),
        ({"layout": TextLayout(multi_hot=("C27",))}, "--multi-hot names 'C27'"),
        ({"layout": TextLayout(multi_hot=("C1",), delimiter="comma")}, "contradicts --delimiter comma"),
    ):
        with pytest.raises(ConfigError, match=re.escape(message)):
            _run(file, tmp_path / "out", **options)
    assert not (tmp_path / "out" / MANIFEST_FILE).exists()
