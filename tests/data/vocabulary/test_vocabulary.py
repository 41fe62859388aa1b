"""Which ids get a row, and mapping ids to table rows."""

import resource
from collections import Counter
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dlrm_scale.data.source.raw_block import FIRST_CATEGORY_BIT
from dlrm_scale.data.vocabulary import id_index
from dlrm_scale.data.vocabulary.count_runs import CountChunk
from dlrm_scale.data.vocabulary.id_hash import id_hashes
from dlrm_scale.data.vocabulary.vocabulary import (
    Vocabulary,
    frequency_vocabulary,
    given_vocabulary,
    hashed_vocabulary,
    mapping_fingerprint,
    predicted_memory_bytes,
)
from dlrm_scale.data.vocabulary.vocabulary_file import (
    load_vocabulary,
    read_counts,
    save_vocabulary,
    stored_vocabulary_bytes,
    vocabulary_file,
)
from dlrm_scale.errors import DataError, DatasetError

MASK = 2**64 - 1


def _slow_mix(value: int) -> int:
    value = (value + 0x9E3779B97F4A7C15) & MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & MASK
    return value ^ (value >> 31)


def _missing(flags: npt.NDArray[np.bool_], column: int = 0) -> npt.NDArray[np.uint64]:
    # The other bits are set: they belong to other columns and must not matter.
    bit = np.uint64(1) << np.uint64(FIRST_CATEGORY_BIT + column)
    return np.where(flags, np.uint64(MASK), ~bit).astype(np.uint64)


def _map(vocabulary: Vocabulary, ids: list[int], missing: list[bool] | None = None) -> list[int]:
    rows = np.full(len(ids), -7, np.int32)
    column = int(vocabulary.column[1:]) - 1
    flags = np.array(missing if missing is not None else [False] * len(ids), bool)
    vocabulary.map(np.array(ids, np.uint32), _missing(flags, column), rows)
    return rows.tolist()


def _map_ids(vocabulary: Vocabulary, ids: list[int]) -> list[int]:
    rows = np.full(len(ids), -7, np.int32)
    vocabulary.map_ids(np.array(ids, np.uint32), rows)
    return rows.tolist()


def _chunks(counts: dict[int, int], rows: int = 7) -> list[CountChunk]:
    ids = sorted(counts, key=_slow_mix)
    return [
        (np.array(some, np.uint32), np.array([counts[id] for id in some], np.int64))
        for some in (ids[start : start + rows] for start in range(0, len(ids), rows))
    ]


def _vocabulary(counts: dict[int, int], *, threshold: int = 1, max_rows: int | None = None) -> Vocabulary:
    return frequency_vocabulary("C1", _chunks(counts), threshold=threshold, max_rows=max_rows)


def test_no_ids_make_a_vocabulary_of_two_rows() -> None:
    vocabulary = _vocabulary({})
    assert vocabulary.table_rows == 2
    assert _map(vocabulary, [0, 5], [True, False]) == [0, 1]


@settings(max_examples=150, deadline=None)
@given(
    counts=st.dictionaries(st.integers(0, 2**32 - 1), st.integers(1, 5), max_size=60),
    threshold=st.integers(1, 6),
    max_rows=st.none() | st.integers(3, 40),
    others=st.lists(st.integers(0, 2**32 - 1), max_size=20),
    chunk=st.integers(1, 61),
)
def test_frequent_ids_get_rows_in_hash_order_and_the_rest_share_row_1(
    counts: dict[int, int], threshold: int, max_rows: int | None, others: list[int], chunk: int
) -> None:
    vocabulary = frequency_vocabulary("C1", _chunks(counts, chunk), threshold=threshold, max_rows=max_rows)
    kept = sorted((id for id in counts if counts[id] >= threshold), key=lambda id: (-counts[id], _slow_mix(id)))
    kept = sorted(kept if max_rows is None else kept[: max_rows - 2], key=_slow_mix)
    expected = {id: 2 + i for i, id in enumerate(kept)}
    asked = [*counts, *others]
    assert vocabulary.table_rows == 2 + len(kept)
    assert _map(vocabulary, asked) == [expected.get(id, 1) for id in asked]
    assert _map_ids(vocabulary, asked) == [expected.get(id, 1) for id in asked]
    assert _map(vocabulary, asked, [True] * len(asked)) == [0] * len(asked)


def test_ids_beyond_two_to_the_31_and_the_real_id_zero_are_ids_like_others() -> None:
    ids = [0, 1, 2**31 - 1, 2**31, 2**31 + 1, 2**32 - 1]
    rows = _map(_vocabulary(dict.fromkeys(ids, 1)), ids)
    assert sorted(rows) == [2, 3, 4, 5, 6, 7]
    assert _map(_vocabulary({0: 1}), [0, 0], [False, True]) == [2, 0]


def test_hash_order_spreads_frequent_ids_over_the_table() -> None:
    # Zipf counts on ids that ascend with their rank: a table in order of frequency gives its first quarter 87 %.
    counts = {id: 1 + 1_000_000 // (id + 1) for id in range(20_000)}
    lookups = np.array([counts[id] for id in _vocabulary(counts).ids.tolist()])
    quarters = np.add.reduceat(lookups, np.arange(0, 20_000, 5_000)) / lookups.sum()
    assert np.sort(list(counts.values()))[::-1][:5_000].sum() / lookups.sum() > 0.8
    assert quarters.max() < 0.4


def test_hash_and_modulo_stay_within_the_table_and_follow_their_formulas() -> None:
    ids = [0, 1, 997, 998, 2**31, 2**32 - 1]
    assert _map(hashed_vocabulary("C4", "modulo", rows=1000), ids) == [2 + id % 998 for id in ids]
    salt = _slow_mix(4)
    expected = [2 + _slow_mix(id ^ salt) % 998 for id in ids]
    assert _map(hashed_vocabulary("C4", "hash", rows=1000), ids) == expected
    assert _map_ids(hashed_vocabulary("C4", "hash", rows=1000), ids) == expected
    assert _map(hashed_vocabulary("C4", "hash", rows=3), ids, [True, *[False] * 5]) == [0, 2, 2, 2, 2, 2]


def test_the_hash_is_salted_by_column() -> None:
    ids = list(range(1000))
    a, b = (_map(hashed_vocabulary(column, "hash", rows=100), ids) for column in ("C1", "C2"))
    together = Counter(zip(a, b, strict=True))
    assert max(together.values()) < 10
    assert len(set(a)) == 98


def test_given_ids_are_rows_and_one_beyond_the_table_is_named() -> None:
    vocabulary = given_vocabulary("C3", 10)
    assert _map(vocabulary, [0, 1, 9]) == [0, 1, 9]
    assert _map_ids(vocabulary, [9, 0, 4]) == [9, 0, 4]
    for map_some in (_map, _map_ids):
        with pytest.raises(DataError, match=r"column C3: id 2147483648 isn't a row of its table of 10 rows"):
            map_some(vocabulary, [3, 2**31, 11])


def test_the_fingerprint_tells_vocabularies_of_equal_size_apart_and_stays_what_it_was() -> None:
    made = [_vocabulary({5: 1, 6: 1}), hashed_vocabulary("C2", "hash", rows=9)]
    # Written down from an earlier version: a dataset of then must not look like another one now.
    assert mapping_fingerprint(made) == "52c89345e2641fcd6589247053fdc82c"
    assert mapping_fingerprint([_vocabulary({5: 1, 7: 1}), made[1]]) != mapping_fingerprint(made)


@pytest.mark.parametrize("kept", [0, 1, 2, 3, 1000, 70_000, 1 << 20, (1 << 20) + 1])
def test_a_vocabulary_takes_the_memory_that_was_predicted(kept: int) -> None:
    vocabulary = _vocabulary(dict.fromkeys(range(kept), 1))
    assert vocabulary.memory_bytes == predicted_memory_bytes(kept)
    assert vocabulary.memory_bytes <= (8 if kept > 1 << 20 else 36) * kept + 16


@pytest.mark.parametrize("kept", [0, 1, 2, 3, 700, 5000])
def test_both_layouts_of_the_index_find_every_kept_id_and_no_other(kept: int, monkeypatch: pytest.MonkeyPatch) -> None:
    random = np.random.default_rng(kept)
    ids = np.unique(random.integers(0, 2**32, 2 * kept + 8, np.uint32))
    ids = ids[np.argsort(id_hashes(ids))]
    kept_ids = ids[np.sort(random.permutation(len(ids))[:kept])]
    expected = {int(id): 2 + i for i, id in enumerate(kept_ids)}
    for most in (1 << 20, -1):
        monkeypatch.setattr(id_index, "_TABLE_IDS_MAX", most)
        rows = np.empty(len(ids), np.int32)
        index = id_index.id_index(kept_ids)
        assert index.dtype == (np.uint64 if most > 0 else np.int32)
        id_index.find_rows(index, kept_ids, ids, rows)
        assert rows.tolist() == [expected.get(int(id), 1) for id in ids]


@pytest.mark.parametrize("method", ["frequency", "hash", "modulo", "given"])
def test_a_saved_vocabulary_maps_as_before(tmp_path: Path, method: str) -> None:
    random = np.random.default_rng(2)
    ids = random.integers(0, 2**32, 3000, np.uint32).tolist()
    counts = _chunks(dict(zip(ids, random.integers(1, 9, 3000).tolist(), strict=True)))
    if method == "frequency":
        made = frequency_vocabulary("C7", counts, threshold=2)
        save_vocabulary(tmp_path, made, counts)
    else:
        made = given_vocabulary("C7", 500) if method == "given" else hashed_vocabulary("C7", method, rows=500)
        save_vocabulary(tmp_path, made)
    loaded = load_vocabulary(tmp_path, "C7")
    asked = [*(ids if method != "given" else []), *range(100)]
    assert _map(loaded, asked) == _map(made, asked)
    assert (loaded.method, loaded.table_rows, loaded.column) == (method, made.table_rows, "C7")
    assert mapping_fingerprint([loaded]) == mapping_fingerprint([made])
    table_rows, memory_bytes = stored_vocabulary_bytes(tmp_path, "C7")
    assert (table_rows, memory_bytes) == (loaded.table_rows, loaded.memory_bytes)


def test_a_saved_vocabulary_opens_as_plain_parquet(tmp_path: Path) -> None:
    counts = {2**32 - 1: 4, 7: 2}
    save_vocabulary(tmp_path, _vocabulary(counts), _chunks(counts))
    table = pq.read_table(tmp_path / vocabulary_file("C1")).to_pydict()
    assert sorted(zip(table["id"], table["count"], strict=True)) == [(7, 2), (2**32 - 1, 4)]
    assert table["row"] == [2, 3]


def test_the_counts_of_kept_ids_can_be_read_back_and_saved_again(tmp_path: Path) -> None:
    counts = {id: 1 + id % 5 for id in range(1000)}
    vocabulary = _vocabulary(counts, threshold=3)
    save_vocabulary(tmp_path, vocabulary, _chunks(counts))
    found = {int(id): int(n) for ids, ns in read_counts(tmp_path, "C1") for id, n in zip(ids, ns, strict=True)}
    assert found == {id: n for id, n in counts.items() if n >= 3}
    other = tmp_path / "other"
    other.mkdir()
    save_vocabulary(other, load_vocabulary(tmp_path, "C1"), read_counts(tmp_path, "C1"))
    assert (other / vocabulary_file("C1")).read_bytes() == (tmp_path / vocabulary_file("C1")).read_bytes()


def test_row_groups_do_not_change_with_chunks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dlrm_scale.data.vocabulary.vocabulary_file._ROWS_PER_ROW_GROUP", 100)
    counts = {id: 1 + id % 5 for id in range(1234)}
    contents = set()
    for rows in (1, 33, 100, 2000):
        save_vocabulary(tmp_path, _vocabulary(counts, threshold=2), _chunks(counts, rows))
        contents.add((tmp_path / vocabulary_file("C1")).read_bytes())
    assert len(contents) == 1
    assert pq.ParquetFile(tmp_path / vocabulary_file("C1")).num_row_groups == 10
    assert load_vocabulary(tmp_path, "C1").table_rows == 2 + sum(n >= 2 for n in counts.values())


def test_more_ids_than_a_table_has_rows_are_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dlrm_scale.data.vocabulary.vocabulary._MOST_KEPT", 10)
    with pytest.raises(DataError, match=r"column C1 has 11 ids that occur at least 2 times"):
        _vocabulary(dict.fromkeys(range(11), 2), threshold=2)
    assert _vocabulary(dict.fromkeys(range(11), 2), threshold=2, max_rows=12).table_rows == 12


def test_a_full_disk_while_saving_is_a_named_error(tmp_path: Path) -> None:
    counts = dict.fromkeys(range(50_000), 2)
    vocabulary = _vocabulary(counts)
    old = resource.getrlimit(resource.RLIMIT_FSIZE)
    # Python ignores SIGXFSZ, so that a write beyond the limit is an error as on a full disk.
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, old[1]))
    try:
        with pytest.raises(DatasetError, match=r"vocabulary-C1\.parquet can't be written"):
            save_vocabulary(tmp_path, vocabulary, _chunks(counts, 10_000))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, old)


def test_an_absent_damaged_or_foreign_vocabulary_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DatasetError, match=r"vocabulary-C1\.parquet is absent"):
        load_vocabulary(tmp_path, "C1")
    file = tmp_path / vocabulary_file("C1")
    counts = {5: 1, 6: 1, 7: 1}
    save_vocabulary(tmp_path, _vocabulary(counts), _chunks(counts))
    whole = file.read_bytes()
    file.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(DatasetError, match=r"vocabulary-C1\.parquet can't be read"):
        load_vocabulary(tmp_path, "C1")
    # The footer is whole, the pages are not.
    file.write_bytes(whole[:4] + bytes(60) + whole[64:])
    with pytest.raises(DatasetError, match=r"vocabulary-C1\.parquet"):
        load_vocabulary(tmp_path, "C1")
    file.write_bytes(whole)
    file.rename(tmp_path / vocabulary_file("C2"))
    with pytest.raises(DatasetError, match="says column C1"):
        load_vocabulary(tmp_path, "C2")
    table = pq.read_table(tmp_path / vocabulary_file("C2"))
    pq.write_table(table.take([2, 1, 0]), file)
    with pytest.raises(DatasetError, match="aren't in hash order"):
        load_vocabulary(tmp_path, "C1")
    pq.write_table(table.set_column(0, "id", table["id"].take([2, 1, 0])), file)
    with pytest.raises(DatasetError, match="aren't in hash order"):
        load_vocabulary(tmp_path, "C1")
