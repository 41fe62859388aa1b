"""Adding days to a dataset, and using its vocabularies for other input."""

import os
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from dlrm_scale.data.dataset.dataset import Dataset
from dlrm_scale.data.export.export import export_dataset
from dlrm_scale.data.preprocess.preprocess import PreprocessOptions, PreprocessResult, preprocess
from dlrm_scale.data.preprocess.staging import Staging
from dlrm_scale.data.source.text_layout import TextLayout
from dlrm_scale.errors import ConfigError, DataError, DatasetError
from tests.support.raw_rows import make_row, make_rows, write_rows


def _run(paths: Path | list[Path], out: Path, **options: Any) -> PreprocessResult:
    return preprocess([paths] if isinstance(paths, Path) else paths, out, PreprocessOptions(**options))


def _data_files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.glob("*")) if path.suffix in (".arrow", ".parquet")}


def _files(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir()) if path.is_file()}


def _days(folder: Path, numbers: range, rows: int = 30) -> list[Path]:
    return [write_rows(folder / f"day_{i}.tsv", make_rows(rows + i, seed=i)) for i in numbers]


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


def _parquet(path: Path, dense: Any, ids: Any) -> Path:
    columns: dict[str, Any] = {"label": np.zeros(20, np.int8)}
    columns |= {f"I{i}": dense for i in range(1, 14)}
    columns |= {f"C{i}": ids for i in range(1, 27)}
    pq.write_table(pa.table(columns), path)
    return path


def test_input_of_another_kind_may_not_use_the_vocabularies(tmp_path: Path) -> None:
    days = _days(tmp_path, range(2))
    out = tmp_path / "out"
    _run(days, out)
    integers, floats, ids = np.arange(20), np.full(20, 7.0), np.arange(20)
    (tmp_path / "p").mkdir()
    ready = _parquet(tmp_path / "p" / "day_2.parquet", floats, ids)
    given = tmp_path / "given"
    _run(ready, given, vocabulary="given", validation="none")
    decimal = write_rows(tmp_path / "day_5.tsv", [make_row(0, [], ["12345678"] * 26)] * 40)
    _run(decimal, tmp_path / "decimal", layout=TextLayout(decimal_ids=True), validation="none")
    lists = write_rows(tmp_path / "day_6.tsv", make_rows(9))
    unlabeled = write_rows(tmp_path / "day_7.tsv", [row[2:] for row in make_rows(9)])
    for target in (out, tmp_path / "elsewhere"):
        for error, message, path, options in (
            (ConfigError, "are ready-made features, .* was made of integers", ready, {"vocabulary_from": out}),
            (ConfigError, "are read as decimal, those of .* were hexadecimal", days[1], {
                "vocabulary_from": out, "layout": TextLayout(decimal_ids=True),
            }),
        ):  # fmt: skip
            path = path if path is ready else write_rows(tmp_path / "day_9.tsv", make_rows(5))
            with pytest.raises(error, match=message):
                _run(path, target, validation="none", **options)
    for error, message, path, target, options in (
        (ConfigError, "is text with raw ids|are integers, .* of ready-made", lists, given, {}),
        (ConfigError, "are read as hexadecimal, those of .* were decimal", lists, tmp_path / "decimal", {}),
        (ConfigError, "several ids a row in C3", lists, out, {"layout": TextLayout(multi_hot=("C3",))}),
        (ConfigError, "with labels, the input is unlabeled", unlabeled, out, {"layout": TextLayout(labeled=False)}),
        (ConfigError, "--force contradicts adding days", lists, out, {"force": True}),
    ):
        with pytest.raises(error, match=message):
            _run(path, target, vocabulary_from=target, **options)
    integer = _parquet(tmp_path / "p" / "day_3.parquet", integers, ids)
    assert any("aren't in the vocabularies" in note for note in _run(integer, out, vocabulary_from=out).notes)


def test_days_are_added_in_order(tmp_path: Path) -> None:
    days = _days(tmp_path, range(4))
    _run(days[1:3], tmp_path / "out")
    with pytest.raises(DataError, match=r"is day 0, .* has days up to 2"):
        _run(days[0], tmp_path / "out", vocabulary_from=tmp_path / "out")
    _run(days[3], tmp_path / "out", vocabulary_from=tmp_path / "out")


def test_a_day_that_another_process_added_meanwhile_is_not_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    days = _days(tmp_path, range(4))
    out = tmp_path / "out"
    _run(days[:2], out)
    enter = Staging.__enter__

    def late(self: Staging) -> Staging:
        monkeypatch.undo()
        _run(days[2], out, vocabulary_from=out)
        return enter(self)

    monkeypatch.setattr(Staging, "__enter__", late)
    with pytest.raises(DatasetError, match="was changed by another process"):
        _run(days[3], out, vocabulary_from=out)
    assert [part.source for part in Dataset.open(out).manifest.parts] == ["day_0.tsv", "day_1.tsv", "day_2.tsv"]
    _run(days[3], out, vocabulary_from=out)


def test_vocabularies_that_are_not_the_datasets_are_refused(tmp_path: Path) -> None:
    days = _days(tmp_path, range(3))
    _run(days[:2], tmp_path / "out")
    _run(days[2], tmp_path / "other")
    (tmp_path / "out" / "vocabulary-C1.parquet").write_bytes(
        (tmp_path / "other" / "vocabulary-C1.parquet").read_bytes()
    )
    with pytest.raises(DatasetError, match="the vocabularies are not those that the dataset was made with"):
        _run(days[2], tmp_path / "out", vocabulary_from=tmp_path / "out")


def test_what_a_dead_process_left_of_other_days_does_not_stay(tmp_path: Path) -> None:
    days = _days(tmp_path, range(3))
    out = tmp_path / "out"
    _run(days[:2], out)
    (out / "part-00002.arrow").write_bytes(b"stray")
    (out / "part-00003.arrow").write_bytes(b"stray")
    (out / "rejected-00002.tsv").write_bytes(b"stray")
    _run(days[2], out, vocabulary_from=out)
    assert not (out / "part-00003.arrow").exists()
    assert not (out / "rejected-00002.tsv").exists()
    Dataset.open(out).verify()


def test_the_record_of_many_added_days_stays_small(tmp_path: Path) -> None:
    days = _days(tmp_path, range(9), rows=3)
    out = tmp_path / "out"
    _run(days[:2], out, threshold=1)
    for day in days[2:]:
        _run(day, out, vocabulary_from=out)
    assert (out / "preprocess.json").stat().st_size < 8000
    assert _run(days[2:], out, vocabulary_from=out).up_to_date


@pytest.mark.parametrize("kind", ["fresh", "forced"])
def test_death_at_any_step_after_the_manifest_is_made_good_by_a_rerun(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    days = _days(tmp_path, range(2))
    options: dict[str, Any] = {"force": True} if kind == "forced" else {}
    _run(days, tmp_path / "reference")
    real_remove = Staging.remove
    for dies_at in ("before", "request", "half"):
        out = tmp_path / dies_at

        def dies(self: Staging, at: str = dies_at) -> None:
            if at != "before":
                (self.path / "request.json").unlink()
            if at == "half":
                for path in sorted(self.path.glob("*"))[::2]:
                    path.unlink()
            raise _DeathError

        with monkeypatch.context() as patch:
            patch.setattr(Staging, "remove", dies)
            with pytest.raises(_DeathError):
                _run(days, out, **options)
        assert (out / ".building").exists()
        _run(days, out, **options)
        assert not (out / ".building").exists()
        assert _files(out) == _files(tmp_path / "reference")
    assert Staging.remove is real_remove


def test_rows_without_labels_are_exported_without_labels(tmp_path: Path) -> None:
    days = _days(tmp_path, range(2))
    _run(days, tmp_path / "train")
    unlabeled = write_rows(tmp_path / "test.tsv", [row[2:] for row in make_rows(9)])
    layout = TextLayout(labeled=False)
    _run(unlabeled, tmp_path / "out", layout=layout, vocabulary_from=tmp_path / "train")
    dataset = Dataset.open(tmp_path / "out")
    with pytest.raises(ConfigError, match="its rows have no labels"):
        export_dataset(dataset, tmp_path / "npy", to="npy")
    export_dataset(dataset, tmp_path / "parquet", to="parquet")
    assert pq.read_table(next((tmp_path / "parquet").glob("part-*"))).column_names[0] == "I1"
    with pytest.raises(DataError, match="label"):
        _run(tmp_path / "parquet", tmp_path / "again", vocabulary="given")


def test_integers_that_pandas_made_floats_are_not_taken_for_features(tmp_path: Path) -> None:
    dense = pa.array([1.0, None, *[3.0] * 18], pa.float64())
    path = _parquet(tmp_path / "day_0.parquet", dense, np.arange(20))
    with pytest.raises(DataError, match="is floating point with nulls and whole numbers") as caught:
        _run(path, tmp_path / "out", validation="none")
    assert "Int64" in str(caught.value.remedy)


def test_a_damaged_vocabulary_is_not_up_to_date(tmp_path: Path) -> None:
    days = _days(tmp_path, range(2))
    _run(days, tmp_path / "out")
    with (tmp_path / "out" / "vocabulary-C3.parquet").open("ab") as file:
        file.write(b"x")
    with pytest.raises(DatasetError, match=r"vocabulary-C3\.parquet can't be read"):
        _run(days, tmp_path / "out")
