"""Counting ids and mapping them to table rows."""

import threading
from collections import Counter
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pyarrow.parquet as pq
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dlrm_scale.data.id_counts import IdCounter
from dlrm_scale.data.tsv import FIRST_CATEGORY_BIT
from dlrm_scale.data.vocabulary import (
    Vocabulary,
    frequency_vocabulary,
    hashed_vocabulary,
    load_vocabulary,
    save_vocabulary,
    vocabulary_file,
)
from dlrm_scale.errors import DatasetError

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


def _vocabulary(counts: dict[int, int], **options: int) -> Vocabulary:
    ids = np.array(list(counts), np.uint32)
    return frequency_vocabulary("C1", ids, np.array(list(counts.values()), np.int64), **{"threshold": 1, **options})


def test_counts_equal_a_slow_count_through_full_tables_and_merged_runs() -> None:
    random = np.random.default_rng(0)
    ids = np.concatenate(
        [random.integers(0, 2**32, 150_000, np.uint32), (random.zipf(1.3, 150_000) % 2**32).astype(np.uint32)]
    )
    random.shuffle(ids)
    flags = random.random(len(ids)) < 0.1
    counter = IdCounter()
    for start in range(0, len(ids), 17_000):
        stop = start + 17_000
        counter.add(ids[start:stop], _missing(flags[start:stop]), FIRST_CATEGORY_BIT)
    found, counts = counter.result()
    expected, expected_counts = np.unique(ids[~flags], return_counts=True)
    assert np.array_equal(found, expected)
    assert np.array_equal(counts, expected_counts)
    assert (found.dtype, counts.dtype) == (np.uint32, np.int64)


def test_counts_do_not_depend_on_threads() -> None:
    random = np.random.default_rng(1)
    blocks = [random.integers(0, 90_000, 20_000).astype(np.uint32) for _ in range(8)]
    counter = IdCounter()

    def work(part: int) -> None:
        for block in blocks[part::2]:
            counter.add(block, _missing(np.zeros(len(block), bool)), FIRST_CATEGORY_BIT)

    threads = [threading.Thread(target=work, args=(part,)) for part in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    found, counts = counter.result()
    expected, expected_counts = np.unique(np.concatenate(blocks), return_counts=True)
    assert np.array_equal(found, expected)
    assert np.array_equal(counts, expected_counts)


def test_no_ids_make_empty_counts() -> None:
    ids, counts = IdCounter().result()
    assert (len(ids), len(counts)) == (0, 0)
    vocabulary = frequency_vocabulary("C1", ids, counts, threshold=1)
    assert vocabulary.table_rows == 2
    assert _map(vocabulary, [0, 5], [True, False]) == [0, 1]


@settings(max_examples=100, deadline=None)
@given(
    counts=st.dictionaries(st.integers(0, 2**32 - 1), st.integers(1, 5), max_size=60),
    threshold=st.integers(1, 6),
    max_rows=st.none() | st.integers(3, 40),
    others=st.lists(st.integers(0, 2**32 - 1), max_size=20),
)
def test_frequent_ids_get_rows_in_hash_order_and_the_rest_share_row_1(
    counts: dict[int, int], threshold: int, max_rows: int | None, others: list[int]
) -> None:
    vocabulary = _vocabulary(counts, threshold=threshold) if max_rows is None else None
    if vocabulary is None:
        assert max_rows is not None
        vocabulary = _vocabulary(counts, threshold=threshold, max_rows=max_rows)
    kept = sorted((id for id in counts if counts[id] >= threshold), key=lambda id: (-counts[id], _slow_mix(id)))
    kept = sorted(kept if max_rows is None else kept[: max_rows - 2], key=_slow_mix)
    expected = {id: 2 + i for i, id in enumerate(kept)}
    asked = [*counts, *others]
    assert vocabulary.table_rows == 2 + len(kept)
    assert _map(vocabulary, asked) == [expected.get(id, 1) for id in asked]
    assert _map(vocabulary, asked, [True] * len(asked)) == [0] * len(asked)
    assert vocabulary.counts.tolist() == [counts[id] for id in kept]


def test_ids_beyond_two_to_the_31_and_the_real_id_zero_are_ids_like_others() -> None:
    ids = [0, 1, 2**31 - 1, 2**31, 2**31 + 1, 2**32 - 1]
    rows = _map(_vocabulary(dict.fromkeys(ids, 1)), ids)
    assert sorted(rows) == [2, 3, 4, 5, 6, 7]
    assert _map(_vocabulary({0: 1}), [0, 0], [False, True]) == [2, 0]


def test_hash_order_spreads_frequent_ids_over_the_table() -> None:
    # Zipf counts on ids that ascend with their rank: a table in order of frequency gives its first quarter 87 %.
    counts = {id: 1 + 1_000_000 // (id + 1) for id in range(20_000)}
    lookups = _vocabulary(counts).counts
    quarters = np.add.reduceat(lookups, np.arange(0, 20_000, 5_000)) / lookups.sum()
    assert np.sort(list(counts.values()))[::-1][:5_000].sum() / lookups.sum() > 0.8
    assert quarters.max() < 0.4


def test_hash_and_modulo_stay_within_the_table_and_follow_their_formulas() -> None:
    ids = [0, 1, 997, 998, 2**31, 2**32 - 1]
    assert _map(hashed_vocabulary("C4", "modulo", rows=1000), ids) == [2 + id % 998 for id in ids]
    salt = _slow_mix(4)
    assert _map(hashed_vocabulary("C4", "hash", rows=1000), ids) == [2 + _slow_mix(id ^ salt) % 998 for id in ids]
    assert _map(hashed_vocabulary("C4", "hash", rows=3), ids, [True, *[False] * 5]) == [0, 2, 2, 2, 2, 2]


def test_the_hash_is_salted_by_column() -> None:
    ids = list(range(1000))
    a, b = (_map(hashed_vocabulary(column, "hash", rows=100), ids) for column in ("C1", "C2"))
    together = Counter(zip(a, b, strict=True))
    assert max(together.values()) < 10
    assert len(set(a)) == 98


@pytest.mark.parametrize("method", ["frequency", "hash", "modulo"])
def test_a_saved_vocabulary_maps_as_before(tmp_path: Path, method: str) -> None:
    random = np.random.default_rng(2)
    ids = random.integers(0, 2**32, 3000, np.uint32)
    if method == "frequency":
        made = frequency_vocabulary("C7", ids, random.integers(1, 9, 3000), threshold=2)
    else:
        made = hashed_vocabulary("C7", method, rows=500)
    save_vocabulary(tmp_path, made)
    loaded = load_vocabulary(tmp_path, "C7")
    asked = [*ids.tolist(), *range(100)]
    assert _map(loaded, asked) == _map(made, asked)
    assert (loaded.method, loaded.table_rows, loaded.column) == (method, made.table_rows, "C7")
    assert np.array_equal(loaded.counts, made.counts)


def test_a_saved_vocabulary_opens_as_plain_parquet(tmp_path: Path) -> None:
    save_vocabulary(tmp_path, _vocabulary({2**32 - 1: 4, 7: 2}))
    table = pq.read_table(tmp_path / vocabulary_file("C1")).to_pydict()
    assert sorted(zip(table["id"], table["count"], strict=True)) == [(7, 2), (2**32 - 1, 4)]
    assert table["row"] == [2, 3]


def test_an_absent_damaged_or_foreign_vocabulary_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DatasetError, match=r"vocabulary-C1\.parquet is absent"):
        load_vocabulary(tmp_path, "C1")
    file = tmp_path / vocabulary_file("C1")
    save_vocabulary(tmp_path, _vocabulary({5: 1, 6: 1, 7: 1}))
    whole = file.read_bytes()
    file.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(DatasetError, match=r"vocabulary-C1\.parquet can't be read"):
        load_vocabulary(tmp_path, "C1")
    file.write_bytes(whole)
    file.rename(tmp_path / vocabulary_file("C2"))
    with pytest.raises(DatasetError, match="says column C1"):
        load_vocabulary(tmp_path, "C2")
    table = pq.read_table(tmp_path / vocabulary_file("C2"))
    pq.write_table(table.take([2, 1, 0]), file)
    with pytest.raises(DatasetError, match="aren't in hash order"):
        load_vocabulary(tmp_path, "C1")
