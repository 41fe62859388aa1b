"""Datasets that torchrec's and MLPerf's scripts made: .npy trios and multi-hot .npz files."""

import gc
import os
import pickle
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from dlrm_scale.data.source import npy_source
from dlrm_scale.data.source.bad_rows import BadRow
from dlrm_scale.data.source.inputs import InputFile, find_inputs
from dlrm_scale.data.source.npy_source import NpySource
from dlrm_scale.data.source.raw_block import RawBlock
from dlrm_scale.data.source.row_layout import RowLayout, common_layout
from dlrm_scale.errors import DataError
from dlrm_scale.schema import CATEGORY_COLUMNS

# MLPerf's poolings are 3, 2, 1, 2, 6, …, 100, …; smaller ones here.
POOLINGS = (3, 2, 1, 2, 6, *(1,) * 20, 5)

Arrays = dict[str, Any]


def _arrays(rows: int, *, seed: int = 0, ids: str = "int32") -> Arrays:
    random = np.random.default_rng(seed)
    return {
        "dense": random.normal(size=(rows, 13)).astype(np.float32),
        "labels": random.integers(0, 2, (rows, 1)).astype(np.int32),
        "sparse": random.integers(0, 1000, (rows, 26)).astype(ids),
    }


def _multi_hot(rows: int, *, seed: int = 0, ids: str = "int32") -> Arrays:
    random = np.random.default_rng(seed)
    return {str(k): random.integers(0, 1000, (rows, p)).astype(ids) for k, p in enumerate(POOLINGS)}


def _store(folder: Path, arrays: Arrays, day: int = 0) -> InputFile:
    folder.mkdir(exist_ok=True)
    for role, array in arrays.items():
        if role == "sparse_multi_hot":
            np.savez(folder / f"day_{day}_{role}.npz", **array)
        else:
            np.save(folder / f"day_{day}_{role}.npy", array)
    return find_inputs([folder]).files[0]


def _blocks(file: InputFile, **options: Any) -> list[RawBlock]:
    with NpySource(file, **options) as source:
        return [source.parse(piece) for piece in source.pieces()]


def _bad_rows(file: InputFile, **options: Any) -> list[BadRow]:
    return [bad for block in _blocks(file, **options) for bad in block.bad_rows]


def _check(blocks: list[RawBlock], arrays: Arrays) -> None:
    """Compare all values with arrays of NumPy; `sparse` as raw ids."""
    rows = len(arrays["labels"])
    assert [block.first_line for block in blocks] == list(range(1, rows + 1, 8192))
    assert [block.rows for block in blocks] == [min(8192, rows - start) for start in range(0, rows, 8192)]
    for block in blocks:
        part = slice(block.first_line - 1, block.first_line - 1 + block.rows)
        assert block.labels.dtype == np.uint8
        assert np.array_equal(block.labels, arrays["labels"].reshape(-1)[part])
        assert block.features is not None
        assert (block.features.dtype, block.features.flags.c_contiguous) == (np.dtype("float32"), True)
        assert np.array_equal(block.features, arrays["dense"][part].T.astype(np.float32))
        assert block.integers.shape == (13, 0)
        assert block.missing.tolist() == [0] * block.rows
        assert (block.categories.dtype, block.categories.flags.c_contiguous) == (np.dtype("uint32"), True)
        assert block.categories.shape == (26, block.rows)
        for column in range(26):
            values = arrays["sparse_multi_hot"][str(column)] if "sparse_multi_hot" in arrays else None
            if values is None:
                assert np.array_equal(block.categories[column], arrays["sparse"][part, column].astype(np.uint32))
            elif values.ndim == 1 or values.shape[1] == 1:
                assert np.array_equal(block.categories[column], values.reshape(-1)[part].astype(np.uint32))
            else:
                bags = block.bags[column]
                assert (bags.values.dtype, bags.offsets.dtype) == (np.dtype("uint32"), np.dtype("int32"))
                assert bags.offsets.tolist() == [i * values.shape[1] for i in range(block.rows + 1)]
                assert np.array_equal(bags.values, values[part].reshape(-1).astype(np.uint32))


@pytest.mark.parametrize("rows", [0, 1, 8192, 20_000])
def test_a_trio_gives_the_values_of_its_arrays(tmp_path: Path, rows: int) -> None:
    arrays = _arrays(rows)
    file = _store(tmp_path, arrays)
    _check(_blocks(file), arrays)
    with NpySource(file) as source:
        assert source.layout == RowLayout(path=file.path, rows=rows, multi_hot=(), gives_features=True)
        assert source.gives_features
        assert source.position_bytes == 0
        for _ in source.pieces():
            pass
        assert source.position_bytes == (file.size_bytes if rows else 0)


@settings(max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_every_type_and_order_of_arrays_gives_their_values(tmp_path: Path, data: st.DataObject) -> None:
    rows = data.draw(st.integers(1, 40))
    arrays = _arrays(rows, ids=data.draw(st.sampled_from(["int32", "int64", "uint32", ">i4", ">i8"])))
    arrays["dense"] = arrays["dense"].astype(data.draw(st.sampled_from(["float32", "float16", ">f4"])))
    arrays["labels"] = arrays["labels"].astype(data.draw(st.sampled_from(["int32", "int64", "float32", "bool", "u1"])))
    if data.draw(st.booleans()):
        arrays["labels"] = arrays["labels"].reshape(-1)
    for role in ("dense", "sparse"):
        if data.draw(st.booleans()):
            arrays[role] = np.asfortranarray(arrays[role])
    for meaning in ("given", "raw"):
        _check(_blocks(_store(tmp_path, arrays), ids=meaning), arrays)


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_a_multi_hot_file_gives_the_values_of_its_arrays(tmp_path: Path, save: Callable[..., None]) -> None:
    arrays = {**_arrays(9000), "sparse_multi_hot": _multi_hot(9000)}
    del arrays["sparse"]
    file = _store(tmp_path, arrays)
    save(file.members[1], **arrays["sparse_multi_hot"])
    (file,) = find_inputs([tmp_path]).files
    _check(_blocks(file), arrays)
    with NpySource(file) as source:
        assert source.multi_hot == ("C1", "C2", "C4", "C5", "C26")


def test_very_long_bags_are_read_in_smaller_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(npy_source, "_PIECE_BYTES_MAX", 70_000)
    arrays = {**_arrays(300), "sparse_multi_hot": _multi_hot(300)}
    del arrays["sparse"]
    arrays["sparse_multi_hot"]["7"] = np.arange(300 * 200, dtype=np.int32).reshape(300, 200)
    blocks = _blocks(_store(tmp_path, arrays))
    assert [block.rows for block in blocks] == [73, 73, 73, 73, 8]
    values = np.concatenate([block.bags[7].values for block in blocks])
    assert np.array_equal(values, arrays["sparse_multi_hot"]["7"].reshape(-1))


@pytest.mark.filterwarnings("ignore:Local function is not supported by pickle", "ignore:unclosed file:ResourceWarning")
def test_arrays_of_torchrecs_own_script_are_read(tmp_path: Path) -> None:
    # Both are installed with the project: a test that is skipped would hide that they changed.
    from torchrec.datasets import criteo

    from tests.support.raw_rows import make_rows, slow_parse, write_rows

    raw = make_rows(50)
    write_rows(tmp_path / "day_0", raw)
    names = [str(tmp_path / f"day_0_{role}.npy") for role in ("dense", "sparse", "labels")]
    criteo.BinaryCriteoUtils.tsv_to_npys(str(tmp_path / "day_0"), *names)
    # The script leaves its input open.
    gc.collect()
    (file,) = find_inputs([Path(name) for name in names]).files
    (block,) = _blocks(file, ids="raw")
    rows = [row for _, row in slow_parse(b"\n".join(raw))[0]]
    assert block.labels.tolist() == [row.label for row in rows]
    # The script stores a missing id as 0.
    assert block.categories.T.tolist() == [[id or 0 for id in row.categories] for row in rows]
    least = min(x or 0 for row in rows for x in row.integers)
    dense = np.log(np.array([[(x or 0) - least + 2 for x in row.integers] for row in rows]))
    assert np.allclose(block.features.T, dense, rtol=1e-6)  # type: ignore[union-attr]


def test_raw_ids_stored_as_int32_are_their_32_bits(tmp_path: Path) -> None:
    arrays = _arrays(10)
    arrays["sparse"] = np.random.default_rng(1).integers(-(2**31), 2**31, (10, 26)).astype(np.int32)
    arrays["sparse"][3, :2] = [-1, -(2**31)]
    (block,) = _blocks(_store(tmp_path, arrays), ids="raw")
    assert block.categories.T.tolist() == [[int(id) % 2**32 for id in row] for row in arrays["sparse"]]
    assert block.categories[:2, 3].tolist() == [2**32 - 1, 2**31]


@pytest.mark.parametrize(
    ("value", "dtype"), [(-1, "int32"), (-1, "int64"), (2**31 - 1, "int32"), (2**32 - 1, "uint32")]
)
def test_an_id_that_can_be_no_row_names_file_row_column_and_remedy(tmp_path: Path, value: int, dtype: str) -> None:
    arrays = _arrays(9000, ids=dtype)
    arrays["sparse"][8500, 3] = value
    with pytest.raises(DataError) as caught:
        _blocks(_store(tmp_path, arrays))
    assert caught.value.message == (
        f"{tmp_path}/day_0_sparse.npy, row 8,501, column C4: expected the row of a table (--vocabulary given), "
        f"0 to 2,147,483,646, found {value:,}"
    )
    assert "--vocabulary frequency, hash or modulo" in str(caught.value.remedy)


def test_a_negative_id_in_a_bag_is_named_too(tmp_path: Path) -> None:
    arrays = {**_arrays(10), "sparse_multi_hot": _multi_hot(10)}
    del arrays["sparse"]
    arrays["sparse_multi_hot"]["4"][7, 5] = -3
    with pytest.raises(DataError, match=r"day_0_sparse_multi_hot\.npz, row 8, column C5: .* found -3"):
        _blocks(_store(tmp_path, arrays))


def test_bad_values_are_bad_rows_and_the_others_are_kept(tmp_path: Path) -> None:
    arrays = _arrays(9000, ids="int64")
    arrays["sparse"][:, 0] = np.arange(9000)
    arrays["labels"][1] = -1
    arrays["dense"][[1, 3], [4, 12]] = [np.nan, np.inf]
    arrays["sparse"][8191, 25] = 2**32
    arrays["sparse"][8999, 24] = -7
    arrays["sparse"][8998, 24] = 2**32 - 1
    blocks = _blocks(_store(tmp_path, arrays), ids="raw")
    bad = [bad for block in blocks for bad in block.bad_rows]
    assert [str(row) for row in bad] == [
        f"{tmp_path}/day_0_labels.npy, row 2, column label: expected 0 or 1, found -1",
        f"{tmp_path}/day_0_dense.npy, row 4, column I13: expected a finite number, found inf",
        f"{tmp_path}/day_0_sparse.npy, row 8,192, column C26: expected an id from 0 to 4294967295, found 4294967296",
        f"{tmp_path}/day_0_sparse.npy, row 9,000, column C25: expected an id from 0 to 4294967295, found -7",
    ]
    kept = [row for row in range(9000) if row not in (1, 3, 8191, 8999)]
    assert np.concatenate([block.categories[0] for block in blocks]).tolist() == kept
    assert np.array_equal(np.concatenate([b.features for b in blocks], 1), arrays["dense"][kept].T)  # type: ignore[misc]
    assert bad[1].row.decode().split("\t")[:2] == [str(arrays["labels"][3, 0]), str(arrays["dense"][3, 0])]
    assert len(bad[1].row.decode().split("\t")) == 40
    # Four training lines, of which two are bad.
    assert blocks[0].training_rows(4) == 2


def test_bad_rows_leave_bags_too(tmp_path: Path) -> None:
    arrays = {**_arrays(5), "sparse_multi_hot": _multi_hot(5)}
    del arrays["sparse"]
    arrays["labels"][2] = 2
    (block,) = _blocks(_store(tmp_path, arrays))
    values = arrays["sparse_multi_hot"]["4"][[0, 1, 3, 4]]
    assert block.bags[4].values.tolist() == values.reshape(-1).tolist()
    assert block.bags[4].offsets.tolist() == [0, 6, 12, 18, 24]


def test_labels_that_are_fractions_or_absent_are_bad_rows(tmp_path: Path) -> None:
    arrays = _arrays(3)
    arrays["labels"] = np.array([0.5, np.nan, 1.0], np.float32)
    assert [row.found for row in _bad_rows(_store(tmp_path, arrays))] == ["0.5", "nan"]


def _wrong(role: str, change: Callable[[Any], Any], told: str) -> Any:
    return pytest.param(role, change, told)


@pytest.mark.parametrize(
    ("role", "change", "told"),
    [
        _wrong(
            "dense",
            lambda a: a[:, :12],
            r"day_0_dense\.npy: expected dense features of shape \[rows, 13\], found \[20, 12\]",
        ),
        _wrong("dense", lambda a: a.reshape(-1), r"found \[260\] of float32"),
        _wrong("dense", lambda a: a.astype("f8"), r"expected dense features of float32 or float16, found .* float64"),
        _wrong("dense", lambda a: a.astype("i4"), r"expected dense features of float32 or float16, found .* int32"),
        _wrong(
            "labels", lambda a: np.hstack([a, a]), r"expected labels of shape \[rows\] or \[rows, 1\], found \[20, 2\]"
        ),
        _wrong("labels", lambda a: a.astype("S1"), r"expected labels of an integer or floating-point type, found .*S1"),
        _wrong(
            "sparse", lambda a: a[:, 1:], r"day_0_sparse\.npy: expected ids of shape \[rows, 26\], found \[20, 25\]"
        ),
        _wrong("sparse", lambda a: a.astype("f4"), r"column C1: expected ids of int32, int64 or uint32, found float32"),
        _wrong("sparse", lambda a: a.astype("i2"), r"expected ids of int32, int64 or uint32, found int16"),
        _wrong(
            "sparse",
            lambda a: a[:-1],
            r"differ in their rows: .*dense\.npy has 20, .*sparse\.npy has 19, .*labels\.npy has 20",
        ),
        _wrong("labels", lambda a: a.astype(object), r"day_0_labels\.npy: holds Python objects \(pickled\)"),
        _wrong(
            "dense",
            lambda a: a.view([("x", "f4"), ("y", "f4"), ("z", "f4", 11)]),
            r"expected dense features of shape .rows, 13., found .20, 1. of",
        ),
    ],
)
def test_arrays_that_are_something_else_are_refused(
    tmp_path: Path, role: str, change: Callable[[Any], Any], told: str
) -> None:
    arrays = _arrays(20)
    arrays[role] = change(arrays[role])
    with pytest.raises(DataError, match=told):
        NpySource(_store(tmp_path, arrays))


@pytest.mark.parametrize("role", ["dense", "sparse", "labels"])
def test_a_file_of_another_size_than_its_header_says_is_refused(tmp_path: Path, role: str) -> None:
    _store(tmp_path, _arrays(20))
    path = tmp_path / f"day_0_{role}.npy"
    whole = path.read_bytes()
    for size in [*range(0, len(whole), 11), len(whole) - 1]:
        path.write_bytes(whole[:size])
        (file,) = find_inputs([tmp_path]).files
        # Cut within the header it is no array, behind it one that is cut off.
        with pytest.raises(
            DataError, match=rf"day_0_{role}\.npy: (no readable \.npy array|is cut off: {size:,} bytes)"
        ):
            NpySource(file)
    path.write_bytes(whole + b"\0")
    with pytest.raises(DataError, match=r"has bytes after its last value"):
        NpySource(find_inputs([tmp_path]).files[0])


def test_what_is_no_array_is_refused_and_never_unpickled(tmp_path: Path) -> None:
    class Trap:
        def __reduce__(self) -> Any:
            return os.mkdir, (str(tmp_path / "sprung"),)

    _store(tmp_path, _arrays(3))
    (tmp_path / "day_0_labels.npy").write_bytes(pickle.dumps(Trap()))
    with pytest.raises(DataError, match=r"day_0_labels\.npy: no readable \.npy array"):
        NpySource(find_inputs([tmp_path]).files[0])
    np.save(tmp_path / "day_0_labels.npy", np.array([Trap()] * 3, object), allow_pickle=True)
    with pytest.raises(DataError, match="holds Python objects"):
        NpySource(find_inputs([tmp_path]).files[0])
    assert not (tmp_path / "sprung").exists()


def test_a_file_that_is_cut_off_while_it_is_read_is_named(tmp_path: Path) -> None:
    file = _store(tmp_path, _arrays(20_000))
    with NpySource(file) as source:
        pieces = source.pieces()
        next(pieces)
        os.truncate(tmp_path / "day_0_sparse.npy", 1_000_000)
        with pytest.raises(
            DataError, match=r"day_0_sparse\.npy: was cut off while it was read, after [\d,]+ of 2,080,128"
        ):
            for _ in pieces:
                pass


def _npz(tmp_path: Path, change: Callable[[Arrays], None], rows: int = 20) -> InputFile:
    ids = _multi_hot(rows)
    change(ids)
    arrays = {**_arrays(rows), "sparse_multi_hot": ids}
    del arrays["sparse"]
    return _store(tmp_path, arrays)


def _set(name: str, change: Callable[[Any], Any]) -> Callable[[Arrays], None]:
    return lambda ids: ids.update({name: change(ids[name])})


@pytest.mark.parametrize(
    ("change", "told"),
    [
        (lambda ids: ids.pop("9"), r"expected 26 arrays named 0 to 25, .* absent: 9; others: none"),
        (lambda ids: ids.update(X_cat=ids.pop("0")), r"absent: 0; others: X_cat"),
        (_set("3", lambda a: a[1:]), r"array 3 \(C4\): has 19 rows, array 0 has 20"),
        (_set("3", lambda a: a[:, :0]), r"array 3 \(C4\): expected ids of shape \[rows, pooling\], found \[20, 0\]"),
        (_set("4", np.asfortranarray), r"array 4: is stored column by column"),
        (_set("4", lambda a: a.astype(object)), r"array 4: holds Python objects"),
        (_set("4", lambda a: a.astype("f4")), r"column C5: expected ids of int32, int64 or uint32, found float32"),
    ],
)
def test_a_multi_hot_file_that_is_something_else_is_refused(
    tmp_path: Path, change: Callable[[Arrays], None], told: str
) -> None:
    file = _npz(tmp_path, change)
    with pytest.raises(DataError, match=rf"day_0_sparse_multi_hot\.npz.*{told}"):
        NpySource(file)


def test_a_multi_hot_array_may_have_one_dimension(tmp_path: Path) -> None:
    file = _npz(tmp_path, _set("2", lambda a: a.reshape(-1)))
    with NpySource(file) as source:
        assert "C3" not in source.multi_hot
        (block,) = map(source.parse, source.pieces())
    assert block.categories[2].tolist() == _multi_hot(20)["2"].reshape(-1).tolist()


@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_a_multi_hot_file_cut_or_changed_anywhere_is_refused(tmp_path: Path, save: Callable[..., None]) -> None:
    file = _npz(tmp_path, lambda ids: None)
    path = file.members[1]
    save(path, **_multi_hot(20))
    whole = path.read_bytes()
    for size in range(0, len(whole), 97):
        path.write_bytes(whole[:size])
        with pytest.raises(DataError, match=r"multi_hot\.npz: no \.npz file, or one that is cut off"):
            _blocks(file)
    # Within the values: only the checksum of the zip file can tell.
    path.write_bytes(whole)
    with zipfile.ZipFile(path) as archive:
        member = archive.getinfo("19.npy")
        middle = member.header_offset + 30 + len("19.npy") + member.compress_size - 10
    flipped = bytearray(whole)
    flipped[middle] ^= 1
    path.write_bytes(flipped)
    with pytest.raises(DataError, match=r"array 19: the \.npz file is cut off or damaged after row 0"):
        _blocks(file)


def _layout(name: str, multi_hot: tuple[str, ...] = (), gives_features: bool = True) -> RowLayout:
    return RowLayout(path=Path(name), rows=10, multi_hot=multi_hot, gives_features=gives_features)


def test_files_that_agree_have_the_rows_of_all(tmp_path: Path) -> None:
    assert common_layout([_layout("a", ("C1",)), _layout("b", ("C1",))]) == RowLayout(
        path=Path("a"), rows=20, multi_hot=("C1",), gives_features=True
    )


def test_the_file_that_is_unlike_the_others_is_named() -> None:
    with pytest.raises(DataError, match=r"^a has several ids a row in C1, C2, unlike b with one id a row in every"):
        common_layout([_layout("a", ("C1", "C2")), _layout("b"), _layout("c")])
    with pytest.raises(DataError, match=r"^c has I1..I13 as ready-made features \(floating point\) and a as integers"):
        common_layout([_layout("a", (), False), _layout("b", (), False), _layout("c")])
    with pytest.raises(DataError, match=r"^a has I1..I13 as ready-made features .* and b as integers") as caught:
        common_layout([_layout("a"), _layout("b", (), False)])
    assert "make b like the others" in str(caught.value.remedy)


def test_a_trio_of_one_hot_and_one_of_multi_hot_ids_dont_go_together(tmp_path: Path) -> None:
    first = _store(tmp_path / "one", _arrays(4))
    arrays = {**_arrays(4), "sparse_multi_hot": _multi_hot(4)}
    del arrays["sparse"]
    second = _store(tmp_path / "several", arrays, day=1)
    with NpySource(first) as one, NpySource(second) as several:
        with pytest.raises(DataError, match=r"day_1_dense\.npy has several ids a row in C1, C2, C4, C5, C26, unlike"):
            common_layout([one.layout, several.layout])
    assert CATEGORY_COLUMNS[25] in several.multi_hot
