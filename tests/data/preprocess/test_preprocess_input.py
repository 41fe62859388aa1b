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

from dlrm_scale.data.dataset.dataset import MANIFEST_FILE, Dataset
from dlrm_scale.data.preprocess.memory_plan import MemoryPlan
from dlrm_scale.data.preprocess.preprocess import PreprocessOptions, PreprocessResult, preprocess
from dlrm_scale.data.preprocess.staging import Staging
from dlrm_scale.data.source.text_layout import TextLayout
from dlrm_scale.data.vocabulary.id_counts import FileIdCounts
from dlrm_scale.data.vocabulary.vocabulary_file import load_vocabulary
from dlrm_scale.errors import ConfigError, DataError, DatasetError
from dlrm_scale.schema import CATEGORY_COLUMNS
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
    command = [sys.executable, "-m", "dlrm_scale", "preprocess", "-", "--out", str(tmp_path / "plain")]
    done = subprocess.run(command, input=data, capture_output=True, timeout=120)
    assert done.returncode == 0, done.stderr.decode()

    def run_from_stdin(content: bytes, out: Path) -> None:
        (tmp_path / "stdin").write_bytes(content)
        with (tmp_path / "stdin").open() as file, monkeypatch.context() as patch:
            patch.setattr(sys, "stdin", file)
            _run(Path("-"), out)

    run_from_stdin(gzip.compress(data), tmp_path / "gzip")
    for name in ("plain", "gzip"):
        assert _data_files(tmp_path / name) == _data_files(tmp_path / "reference")
        assert not (tmp_path / name / ".building").exists()
    with pytest.raises(ConfigError, match="stands beside other input"):
        _run([Path("-"), tmp_path / "x.tsv"], tmp_path / "both")
    with pytest.raises(DataError, match="stdin, line 301, column row: expected 40 tab-separated fields"):
        run_from_stdin(data + b"broken\n", tmp_path / "bad")
    assert not (tmp_path / "bad").exists()


def test_a_memory_limit_that_is_too_small_is_refused_with_what_it_takes(tmp_path: Path) -> None:
    file = write_rows(tmp_path / "x.tsv", make_rows(50))
    with pytest.raises(ConfigError, match=r"--memory-limit 64\.0 MiB is too little for --jobs 3: it takes at least"):
        _run(file, tmp_path / "out", memory_limit_bytes=64 << 20, jobs=3)
    assert not (tmp_path / "out").exists()


def test_the_dataset_does_not_depend_on_the_memory_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from dlrm_scale.data.preprocess import preprocess as module

    files = [write_rows(tmp_path / f"day_{i}.tsv", make_rows(3000, seed=i, ids=2000)) for i in range(2)]
    _run(files, tmp_path / "reference")
    tiny = MemoryPlan(count_bytes=1 << 16, merge_bytes=1 << 16, vocabulary_bytes=None)
    monkeypatch.setattr(module, "plan_memory", lambda *_, **__: tiny)
    _run(files, tmp_path / "out", jobs=2)
    assert _files(tmp_path / "out") == _files(tmp_path / "reference")


def test_vocabularies_beyond_the_memory_limit_are_refused_by_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from dlrm_scale.data.preprocess import preprocess as module

    rows = [make_row(i % 2, [], [*[1] * 25, i]) for i in range(5000)]
    file = write_rows(tmp_path / "x.tsv", rows)
    tight = MemoryPlan(count_bytes=1 << 24, merge_bytes=1 << 24, vocabulary_bytes=10_000)
    monkeypatch.setattr(module, "plan_memory", lambda *_, **__: tight)
    with pytest.raises(DatasetError, match=r"the vocabularies need .*largest: C26 .* for 5,00[0-9] rows") as caught:
        _run(file, tmp_path / "out", threshold=1, validation="none")
    assert "--threshold" in str(caught.value.remedy)
    monkeypatch.undo()
    _run(file, tmp_path / "out", threshold=2, validation="none", memory_limit_bytes=2 << 30)


def test_counts_get_what_the_vocabularies_of_another_dataset_leave(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows = [make_row(i % 2, [], [*[1] * 25, i]) for i in range(5000)]
    file = write_rows(tmp_path / "x.tsv", rows)
    _run(file, tmp_path / "source", threshold=1, validation="none")
    reference = _run(file, tmp_path / "reference", vocabulary_from=tmp_path / "source", validation="none")
    used = sum(load_vocabulary(tmp_path / "source", column).memory_bytes for column in CATEGORY_COLUMNS)
    budgets: list[int] = []

    def counts(path: Path, *, memory_bytes: int) -> FileIdCounts:
        budgets.append(memory_bytes)
        return FileIdCounts(path, memory_bytes=memory_bytes)

    monkeypatch.setattr("dlrm_scale.data.preprocess.write_pass.FileIdCounts", counts)

    def limited(left: int) -> PreprocessResult:
        plan = MemoryPlan(count_bytes=32 << 20, merge_bytes=32 << 20, vocabulary_bytes=used + left, counted_files=2)
        monkeypatch.setattr("dlrm_scale.data.preprocess.preprocess.plan_memory", lambda *_, **__: plan)
        return _run(file, tmp_path / f"out-{left}", vocabulary_from=tmp_path / "source", validation="none")

    assert limited(100 << 20).manifest == limited(20 << 20).manifest == reference.manifest
    assert budgets == [32 << 20, 10 << 20]
    with pytest.raises(DatasetError, match=r"leaves 2\.0 MiB beside them to count the ids of 2 files(.|\n)*--jobs"):
        limited(2 << 20)
    # Before any of them is loaded.
    monkeypatch.setattr("dlrm_scale.data.preprocess.make_vocabularies.load_vocabulary", None)
    with pytest.raises(DatasetError, match="the vocabularies need"):
        limited(-1)


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


def test_a_header_is_no_row_of_the_fraction_that_validates(tmp_path: Path) -> None:
    rows = make_rows(13)
    _run(write_rows(tmp_path / "x.tsv", rows), tmp_path / "plain")
    manifest = _run(
        write_rows(tmp_path / "h.tsv", [HEADER, *rows]), tmp_path / "h", layout=TextLayout(header=True)
    ).manifest
    assert manifest.split == Dataset.open(tmp_path / "plain").manifest.split


def test_another_threshold_or_limit_of_bad_rows_uses_the_counts_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    files = [write_rows(tmp_path / f"day_{i}.tsv", [*make_rows(50, seed=i), b"bad"]) for i in range(2)]
    _run(files, tmp_path / "reference", threshold=3, max_bad_rows=2)
    with pytest.raises(DataError, match="more than 1 bad rows"):
        _run(files, tmp_path / "out", max_bad_rows=1)
    counted = tmp_path / "out" / ".building" / "counts-00000.bin"
    before = counted.stat().st_ino
    monkeypatch.setattr(Staging, "publish", lambda *_: (_ for _ in ()).throw(OSError(5, "Input/output error")))
    with pytest.raises(DatasetError, match="Input/output error"):
        _run(files, tmp_path / "out", max_bad_rows=2)
    assert counted.stat().st_ino == before
    monkeypatch.undo()
    _run(files, tmp_path / "out", threshold=3, max_bad_rows=2)
    assert _data_files(tmp_path / "out") == _data_files(tmp_path / "reference")
    with pytest.raises(DatasetError, match="was made without 2 bad rows, --max-bad-rows 0 allows fewer"):
        _run(files, tmp_path / "out", threshold=3)


def test_bad_rows_of_a_file_with_an_odd_name_are_put_aside(tmp_path: Path) -> None:
    path = Path(os.fsdecode(bytes(tmp_path) + b"/r\xff\t.tsv"))
    write_rows(path, [*make_rows(20), b"bad"])
    _run(path, tmp_path / "out", max_bad_rows=1)
    assert (tmp_path / "out" / "rejected.tsv").read_text().splitlines()[1].split("\t")[:2] == ["r\\udcff\\t.tsv", "21"]


def test_an_error_leaves_a_folder_that_was_there(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    with pytest.raises(DataError):
        _run(write_rows(tmp_path / "x.tsv", [b"bad"]), tmp_path / "out")
    assert list((tmp_path / "out").iterdir()) == []


def test_an_interrupted_run_from_standard_input_leaves_nothing(tmp_path: Path) -> None:
    code = (
        "import os, sys\n"
        "from dlrm_scale.data.preprocess import write_pass\n"
        "def fails(*_): raise OSError(5, 'Input/output error')\n"
        "write_pass.PartWriter.write = fails\n"
        "from dlrm_scale.cli import main\n"
        "main(sys.argv[1:])"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, "preprocess", "-", "--out", str(tmp_path / "out")],
        input=b"\n".join(make_rows(30)) + b"\n",
        capture_output=True,
        timeout=120,
    )
    assert done.returncode == 1
    assert b"Input/output error" in done.stderr
    assert not (tmp_path / "out").exists()
