"""Which files are read, and in which order."""

import os
import random
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from dlrm_scale.data.source.inputs import find_inputs
from dlrm_scale.errors import DataError


def _touch(folder: Path, *names: str) -> list[Path]:
    folder.mkdir(exist_ok=True, parents=True)
    for name in names:
        (folder / name).write_bytes(name.encode())
    return [folder / name for name in names]


def _trio(folder: Path, stem: str, sparse: str = "sparse.npy") -> list[Path]:
    return _touch(folder, f"{stem}_dense.npy", f"{stem}_{sparse}", f"{stem}_labels.npy")


def _names(paths: Sequence[Path]) -> list[str]:
    return [file.path.name for file in find_inputs(paths).files]


def test_a_text_file_is_its_only_member(tmp_path: Path) -> None:
    (path,) = _touch(tmp_path, "train.txt")
    inputs = find_inputs([path])
    (file,) = inputs.files
    assert (inputs.format, file.format, file.members, file.day) == ("text", "text", (path,), None)
    assert (file.size_bytes, file.modified_ns) == (9, path.stat().st_mtime_ns)


def test_trios_of_a_folder_are_put_together_and_sorted_by_day(tmp_path: Path) -> None:
    for day in (10, 2, 9):
        _trio(tmp_path, f"day_{day}")
    _touch(tmp_path, "README", "day_2_dense_sample.npy", "other_dense.npy")
    inputs = find_inputs([tmp_path])
    assert inputs.format == "npy"
    assert [file.day for file in inputs.files] == [2, 9, 10]
    assert [path.name for path in inputs.files[0].members] == [
        "day_2_dense.npy",
        "day_2_sparse.npy",
        "day_2_labels.npy",
    ]
    assert all(file.path == file.members[0] for file in inputs.files)
    assert inputs.files[0].size_bytes == len("day_2_dense.npyday_2_sparse.npyday_2_labels.npy")
    assert "days 3 to 8 are absent between day 2 and day 9" in inputs.notes
    assert any(
        "3 other entries were left out (README, day_2_dense_sample.npy, other_dense.npy)" in n for n in inputs.notes
    )


@pytest.mark.parametrize("sparse", ["sparse_multi_hot.npz", "sparse_contig_freq.npy"])
def test_ids_may_be_multi_hot_or_contiguous_and_lie_in_another_folder(tmp_path: Path, sparse: str) -> None:
    _touch(tmp_path / "a", "day_0_dense.npy", "day_0_labels.npy", "day_1_dense.npy", "day_1_labels.npy")
    _touch(tmp_path / "b", f"day_1_{sparse}", f"day_0_{sparse}")
    files = find_inputs([tmp_path / "a", tmp_path / "b"]).files
    assert [file.members[1] for file in files] == [tmp_path / "b" / f"day_{day}_{sparse}" for day in (0, 1)]


def test_a_named_trio_may_have_any_stem(tmp_path: Path) -> None:
    (file,) = find_inputs(_trio(tmp_path, "train")).files
    assert (file.path.name, file.day) == ("train_dense.npy", None)


@pytest.mark.parametrize(
    ("missing", "told"),
    [
        (
            "day_1_dense.npy",
            r"day_1_dense\.npy is missing: the rows of day_1 need three files, given: .*day_1_sparse\.npy",
        ),
        ("day_1_sparse.npy", r"day_1_sparse\.npy \(or _sparse_multi_hot\.npz\) is missing"),
        ("day_1_labels.npy", r"day_1_labels\.npy is missing: .*given: .*day_1_dense\.npy, .*day_1_sparse\.npy"),
    ],
)
def test_an_incomplete_trio_is_refused_naming_the_missing_file(tmp_path: Path, missing: str, told: str) -> None:
    _trio(tmp_path, "day_0")
    named = _trio(tmp_path, "day_1")
    # It lies beside the others but wasn't named.
    with pytest.raises(DataError, match=told) as caught:
        find_inputs([path for path in named if path.name != missing])
    assert f"name {tmp_path / missing} too" in str(caught.value.remedy)
    (tmp_path / missing).unlink()
    with pytest.raises(DataError, match=told) as caught:
        find_inputs([tmp_path])
    assert "put it into the same folder" in str(caught.value.remedy)


def test_two_files_of_ids_for_one_day_are_refused(tmp_path: Path) -> None:
    _trio(tmp_path, "day_0")
    _touch(tmp_path, "day_0_sparse_multi_hot.npz")
    with pytest.raises(DataError, match=r"day_0_sparse\.npy and .*multi_hot\.npz are both the sparse file of day_0"):
        find_inputs([tmp_path])


def test_an_array_of_another_name_is_refused(tmp_path: Path) -> None:
    (path,) = _touch(tmp_path, "terabyte_processed.npz")
    with pytest.raises(DataError, match=r"terabyte_processed\.npz: the name doesn't say what the file holds") as caught:
        find_inputs([path])
    assert "NAME_sparse_multi_hot.npz" in str(caught.value.remedy)


def test_parquet_files_of_a_folder_are_sorted_by_number(tmp_path: Path) -> None:
    _touch(tmp_path, "day_10.parquet", "day_9.snappy.parquet", "_SUCCESS")
    inputs = find_inputs([tmp_path])
    assert [(file.path.name, file.day, file.format) for file in inputs.files] == [
        ("day_9.snappy.parquet", 9, "parquet"),
        ("day_10.parquet", 10, "parquet"),
    ]


def test_parquet_names_without_a_day_are_sorted_naturally(tmp_path: Path) -> None:
    names = ["part-2-ab.parquet", "part-10-aa.parquet"]
    _touch(tmp_path / "spark", *reversed(names))
    assert _names([tmp_path / "spark"]) == names
    assert "rows keep the order of their names" in find_inputs([tmp_path / "spark"]).notes[0]
    # The last number is how many files there are.
    names = [f"train-{i:05d}-of-00003.parquet" for i in range(3)]
    _touch(tmp_path / "hub", *reversed(names))
    assert _names([tmp_path / "hub"]) == names
    assert [file.day for file in find_inputs([tmp_path / "hub"]).files] == [None] * 3


def test_mixed_formats_are_refused(tmp_path: Path) -> None:
    text, parquet = _touch(tmp_path, "day_0.tsv", "day_1.parquet")
    with pytest.raises(
        DataError, match=r"day_0\.tsv is text and .*day_1\.parquet is Parquet; one command reads one format"
    ):
        find_inputs([text, parquet])
    with pytest.raises(DataError, match="one command reads one format"):
        find_inputs([tmp_path])
    parquet.unlink()
    trio = _trio(tmp_path, "day_2")
    with pytest.raises(DataError, match=r"is text and .* is \.npy"):
        find_inputs([text, *trio])


def test_a_folder_without_input_and_a_dataset_are_refused(tmp_path: Path) -> None:
    _touch(tmp_path, "notes.md")
    with pytest.raises(
        DataError, match=r"holds no files named day_0, .* no day_0_dense\.npy, .* and no \.parquet files"
    ):
        find_inputs([tmp_path])
    _touch(tmp_path, "dataset.json", "vocabulary-C1.parquet")
    with pytest.raises(DataError, match="is a dataset that was preprocessed already"):
        find_inputs([tmp_path])


@pytest.mark.parametrize("changed", [0, 1, 2])
def test_a_change_of_any_member_is_seen_and_named(tmp_path: Path, changed: int) -> None:
    (before,) = find_inputs(_trio(tmp_path, "day_0")).files
    before.check_unchanged()
    path = before.members[changed]
    # An older file of the same size in its place: neither size nor the newest time tells.
    status = path.stat()
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns - 5_000_000_000))
    with pytest.raises(DataError, match=f"{path.name} was changed while it was read"):
        before.check_unchanged()
    (after,) = find_inputs(list(before.members)).files
    assert (after.size_bytes, after.modified_ns) != (before.size_bytes, before.modified_ns)
    path.unlink()
    with pytest.raises(DataError, match="No such file"):
        before.check_unchanged()


@given(st.sets(st.integers(0, 2000), min_size=1, max_size=12), st.sampled_from(["{}", "day_{}.tsv.gz", "d{}.parquet"]))
def test_numbered_files_come_in_the_order_of_their_numbers(
    tmp_path_factory: pytest.TempPathFactory, days: set[int], name: str
) -> None:
    folder = tmp_path_factory.mktemp("days")
    paths = _touch(folder, *(name.format(day) for day in days))
    random.Random(len(days)).shuffle(paths)
    assert [file.day for file in find_inputs(paths).files] == sorted(days)
