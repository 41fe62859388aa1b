"""Facts about columns, compared with slow counts over the same rows."""

import json
import math
from collections import Counter
from itertools import chain
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dlrm_scale.data.preprocess.column_statistics import (
    HOT_SHARES,
    FileStatistics,
    category_statistics,
    hot_row_curve,
    integer_statistics,
)
from dlrm_scale.data.source.bad_rows import BadRow
from dlrm_scale.data.source.raw_block import FIRST_CATEGORY_BIT, FIRST_INTEGER_BIT, Bags, RawBlock
from dlrm_scale.data.vocabulary.count_histogram import CountHistogram
from dlrm_scale.data.vocabulary.count_runs import CountChunk
from dlrm_scale.data.vocabulary.id_facts import id_facts
from dlrm_scale.data.vocabulary.id_hash import id_hashes
from dlrm_scale.data.vocabulary.vocabulary import Vocabulary, frequency_vocabulary, given_vocabulary, hashed_vocabulary

ROWS = 500
BAG_COLUMN = 4


def _counts(ids: npt.NDArray[np.uint32]) -> list[CountChunk]:
    unique, counts = np.unique(ids, return_counts=True)
    order = np.argsort(id_hashes(unique))
    ids, counts = unique[order], counts[order].astype(np.int64)
    return [(ids[start : start + 13], counts[start : start + 13]) for start in range(0, len(ids), 13)]


def _block(seed: int, *, features: bool = False) -> RawBlock:
    random = np.random.default_rng(seed)
    flags = random.random((40, ROWS)) < 0.2
    flags[0] = False
    lengths = random.integers(0, 4, ROWS)
    flags[FIRST_CATEGORY_BIT + BAG_COLUMN] = False
    if features:
        flags[FIRST_INTEGER_BIT:FIRST_CATEGORY_BIT] = False
    integers = np.where(flags[1:14], 0, random.integers(-5, 1000, (13, ROWS))).astype(np.int32)
    categories = np.where(flags[14:], 0, random.integers(0, 60, (26, ROWS))).astype(np.uint32)
    offsets = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
    missing = (flags.astype(np.uint64) << np.arange(40, dtype=np.uint64)[:, None]).sum(axis=0, dtype=np.uint64)
    return RawBlock(
        first_line=1,
        labels=random.integers(0, 2, ROWS).astype(np.uint8),
        integers=np.empty((13, 0), np.int32) if features else integers,
        categories=categories,
        missing=missing,
        bags={BAG_COLUMN: Bags(random.integers(0, 60, offsets[-1]).astype(np.uint32), offsets)},
        features=np.zeros((13, ROWS), np.float32) if features else None,
        padded_rows=3,
        bad_rows=[BadRow(path=Path("a"), line=7, column="C1", expected="x", found="y", row=b"")],
    )


def _missing(block: RawBlock, column: int) -> npt.NDArray[np.bool_]:
    return (block.missing >> np.uint64(FIRST_CATEGORY_BIT + column)) & np.uint64(1) == 1


def _mapped(block: RawBlock, vocabularies: list[Vocabulary]) -> tuple[npt.NDArray[np.int32], dict[int, Bags]]:
    """Map as the write pass does; a missing bag becomes [0]."""
    ids = np.full((26, block.rows), 1, np.int32)  # what stands at multi-hot columns must not matter
    for column, vocabulary in enumerate(vocabularies):
        if column != BAG_COLUMN:
            vocabulary.map(block.categories[column], block.missing, ids[column])
    raw = block.bags[BAG_COLUMN]
    rows = np.empty(len(raw.values), np.int32)
    vocabularies[BAG_COLUMN].map_ids(raw.values, rows)
    bags = [rows[a:b].tolist() or [0] for a, b in zip(raw.offsets[:-1], raw.offsets[1:], strict=True)]
    offsets = np.concatenate([[0], np.cumsum([len(bag) for bag in bags])]).astype(np.int32)
    return ids, {BAG_COLUMN: Bags(np.array([*chain(*bags)], np.int32), offsets)}


def _slice(block: RawBlock, start: int, end: int) -> RawBlock:
    bags = block.bags[BAG_COLUMN]
    first, last = bags.offsets[start], bags.offsets[end]
    return RawBlock(
        first_line=1 + start,
        labels=block.labels[start:end],
        integers=block.integers[:, start:end],
        categories=block.categories[:, start:end],
        missing=block.missing[start:end],
        bags={BAG_COLUMN: Bags(bags.values[first:last], bags.offsets[start : end + 1] - first)},
        features=None if block.features is None else block.features[:, start:end],
        padded_rows=block.padded_rows if start == 0 else 0,
        bad_rows=block.bad_rows if start == 0 else (),
    )


VOCABULARIES = [
    frequency_vocabulary(f"C{column + 1}", _counts(np.arange(20, dtype=np.uint32)), threshold=1) for column in range(26)
]


def test_sums_over_a_block_equal_slow_counts() -> None:
    block = _block(0)
    training = 300
    found = FileStatistics.of(block, *_mapped(block, VOCABULARIES), training)
    assert found.rows.tolist() == [300, 200]
    assert found.positives.tolist() == [block.labels[:300].sum(), block.labels[300:].sum()]
    assert (found.padded_rows, found.bad_rows, found.ready_rows) == (3, 1, 0)
    for part, rows in ((0, slice(0, 300)), (1, slice(300, ROWS))):
        for column in range(26):
            if column == BAG_COLUMN:
                continue
            missing = _missing(block, column)[rows]
            ids = block.categories[column, rows][~missing]
            assert found.missing[part, FIRST_CATEGORY_BIT + column] == missing.sum()
            assert found.present_ids[part, column] == len(ids)
            assert found.stored_ids[part, column] == len(missing)
            assert found.out_of_vocabulary[part, column] == (ids >= 20).sum()
        bags = block.bags[BAG_COLUMN]
        some = [bags.values[a:b].tolist() for a, b in zip(bags.offsets[:-1][rows], bags.offsets[1:][rows], strict=True)]
        empty = sum(bag == [] for bag in some)
        assert found.missing[part, FIRST_CATEGORY_BIT + BAG_COLUMN] == empty
        assert found.present_ids[part, BAG_COLUMN] == sum(map(len, some))
        assert found.stored_ids[part, BAG_COLUMN] == sum(map(len, some)) + empty
        assert found.out_of_vocabulary[part, BAG_COLUMN] == sum(id >= 20 for bag in some for id in bag)
    for k in range(13):
        present = (block.missing >> np.uint64(FIRST_INTEGER_BIT + k)) & np.uint64(1) == 0
        seen = block.integers[k][present]
        assert (found.low[k], found.high[k], found.negative[k]) == (seen.min(), seen.max(), (seen < 0).sum())
    assert found.largest_id[BAG_COLUMN] == block.bags[BAG_COLUMN].values.max()
    assert found.largest_id[0] == block.categories[0].max()


@settings(max_examples=25, deadline=None)
@given(cuts=st.lists(st.integers(0, ROWS), max_size=5), training=st.integers(0, ROWS))
def test_sums_do_not_depend_on_how_rows_are_cut_into_blocks(cuts: list[int], training: int) -> None:
    block = _block(1)
    whole = FileStatistics.of(block, *_mapped(block, VOCABULARIES), training)
    total = FileStatistics()
    for start, end in zip([0, *sorted(cuts)], [*sorted(cuts), ROWS], strict=True):
        some = _slice(block, start, end)
        total.merge(FileStatistics.of(some, *_mapped(some, VOCABULARIES), max(0, min(training - start, end - start))))
    expected = whole.to_json()
    if cuts and min(cuts) == 0:
        expected |= {"padded_rows": total.padded_rows, "bad_rows": total.bad_rows}
    assert total.to_json() == expected


def test_statistics_survive_json() -> None:
    block = _block(2)
    made = FileStatistics.of(block, *_mapped(block, VOCABULARIES), 100)
    again = FileStatistics.from_json(json.loads(json.dumps(made.to_json())))
    assert again.to_json() == made.to_json()
    assert again.missing.dtype == np.int64


def test_held_out_rows_can_become_training_rows() -> None:
    block = _block(3)
    mapped = _mapped(block, VOCABULARIES)
    assert FileStatistics.of(block, *mapped, 100).all_training().to_json() == (
        FileStatistics.of(block, *mapped, ROWS).to_json()
    )


def test_integers_are_unknown_where_features_came_ready_made() -> None:
    ready, raw = _block(4, features=True), _block(5)
    total = FileStatistics.of(ready, *_mapped(ready, VOCABULARIES), ROWS)
    nothing = {"missing_rate": None, "negative_rate": None, "min": None, "max": None}
    assert integer_statistics(total)["I3"] == nothing
    alone = FileStatistics.of(raw, *_mapped(raw, VOCABULARIES), ROWS)
    total.merge(alone)
    assert integer_statistics(total) == integer_statistics(alone)


def test_facts_of_a_frequency_column_equal_slow_counts() -> None:
    block = _block(6)
    column, training = 0, 350
    missing = _missing(block, column)
    ids = block.categories[column]
    train = ids[:training][~missing[:training]]
    vocabulary = frequency_vocabulary("C1", _counts(train), threshold=6)
    total = FileStatistics.of(block, *_mapped(block, [vocabulary, *VOCABULARIES[1:]]), training)
    facts = category_statistics(total, vocabulary, id_facts(vocabulary, _counts(train), memory_bytes=0))
    times = Counter(train.tolist())
    kept = {id for id in times if times[id] >= 6}
    assert 5 < len(kept) < len(times)
    held_out = ids[training:][~missing[training:]]
    assert facts["unique_ids"] == len(times)
    assert facts["kept_ids"] == len(kept)
    assert facts["coverage"] == sum(times[id] for id in kept) / len(train)
    assert facts["missing_rate"] == missing[:training].sum() / training
    assert facts["held_out_out_of_vocabulary_rate"] == sum(int(id) not in kept for id in held_out) / len(held_out)
    assert facts["held_out_missing_rate"] == missing[training:].mean()
    assert (facts["colliding_ids"], facts["collision_rate"]) == (None, None)
    assert facts["rows_looked_up"] == len(kept) + 2
    assert facts["pooling"] == 1.0
    unknown = len(train) - sum(times[id] for id in kept)
    lookups = sorted([missing[:training].sum(), unknown, *(times[id] for id in kept)], reverse=True)
    assert facts["hot_row_curve"] == {
        str(share): sum(lookups[: math.ceil(share * len(lookups))]) / training for share in HOT_SHARES
    }


@pytest.mark.parametrize("method", ["hash", "modulo"])
@pytest.mark.parametrize("memory_bytes", [0, 1 << 30])
def test_collisions_equal_a_slow_count(method: str, memory_bytes: int) -> None:
    ids = (np.random.default_rng(7).zipf(1.2, 30_000) % 2**32).astype(np.uint32)
    # More rows than fit the least memory at a time.
    vocabulary = hashed_vocabulary("C2", method, rows=130_000 if memory_bytes == 0 else 3_000)
    facts = id_facts(vocabulary, _counts(ids), memory_bytes=memory_bytes)
    unique = np.unique(ids)
    rows = np.empty(len(unique), np.int32)
    vocabulary.map_ids(unique, rows)
    ids_of_row = Counter(rows.tolist())
    assert facts.unique_ids == len(unique)
    assert facts.colliding_ids == sum(n for n in ids_of_row.values() if n > 1)
    assert 0 < facts.colliding_ids < len(unique)
    looked_up = np.empty(len(ids), np.int32)
    vocabulary.map_ids(ids, looked_up)
    lookups = sorted(Counter(looked_up.tolist()).values(), reverse=True)
    assert facts.lookups.at_least(1) == len(lookups)
    assert [facts.lookups.of_most_frequent(n) for n in (1, 10, 500)] == [sum(lookups[:n]) for n in (1, 10, 500)]


def test_given_rows_have_no_missing_or_unknown_ones() -> None:
    block = _block(8)
    block.missing[:] = 0
    vocabulary = given_vocabulary("C1", 60)
    total = FileStatistics.of(block, *_mapped(block, [vocabulary, *VOCABULARIES[1:]]), 400)
    train = block.categories[0, :400]
    facts = category_statistics(total, vocabulary, id_facts(vocabulary, _counts(train), memory_bytes=0))
    assert (facts["coverage"], facts["held_out_out_of_vocabulary_rate"]) == (1.0, 0.0)
    assert facts["kept_ids"] is None
    assert facts["rows_looked_up"] == facts["unique_ids"] == len(np.unique(train))
    assert facts["largest_id"] == block.categories[0].max()


def test_pooling_is_the_mean_number_of_ids_a_row() -> None:
    block = _block(9)
    vocabulary = VOCABULARIES[BAG_COLUMN]
    ids, bags = _mapped(block, VOCABULARIES)
    total = FileStatistics.of(block, ids, bags, ROWS)
    facts = category_statistics(
        total, vocabulary, id_facts(vocabulary, _counts(block.bags[BAG_COLUMN].values), memory_bytes=0)
    )
    assert facts["pooling"] == len(bags[BAG_COLUMN].values) / ROWS
    raw = block.bags[BAG_COLUMN].values
    assert facts["coverage"] == (raw < 20).sum() / len(raw)


def test_a_column_that_is_always_missing_has_facts_without_division_by_zero() -> None:
    block = _block(10)
    block.missing[:] |= np.uint64(1 << FIRST_CATEGORY_BIT)
    block.categories[0] = 0
    vocabulary = frequency_vocabulary("C1", [], threshold=1)
    total = FileStatistics.of(block, *_mapped(block, [vocabulary, *VOCABULARIES[1:]]), ROWS)
    facts = category_statistics(total, vocabulary, id_facts(vocabulary, [], memory_bytes=0))
    assert (facts["missing_rate"], facts["coverage"], facts["largest_id"]) == (1.0, None, None)
    assert facts["rows_looked_up"] == 1


@settings(max_examples=100, deadline=None)
@given(
    counts=st.lists(st.integers(0, 12) | st.integers((1 << 14) - 2, (1 << 14) + 3), max_size=60),
    most=st.integers(0, 70),
    cut=st.integers(0, 60),
)
def test_a_histogram_of_counts_knows_what_the_counts_know(counts: list[int], most: int, cut: int) -> None:
    histogram = CountHistogram()
    for some in (counts[:cut], counts[cut:]):
        histogram.add(np.array(some, np.int64))
    descending = sorted(counts, reverse=True)
    assert (histogram.total, histogram.occurrences) == (len(counts), sum(counts))
    assert histogram.of_most_frequent(most) == sum(descending[:most])
    for n in (*range(14), 1 << 14, (1 << 14) + 2):
        assert histogram.at_least(n) == sum(c >= n for c in counts)
    count, ties = histogram.cut_off(most)
    if len(counts) > most:
        assert sorted([c for c in counts if c > count] + [count] * ties, reverse=True) == descending[:most]
        assert ties < counts.count(count)


def test_a_hot_row_curve_counts_rows_that_nothing_looks_up() -> None:
    histogram = CountHistogram()
    histogram.add(np.array([90, 10]))
    assert hot_row_curve(histogram, 20) == {"0.001": 0.9, "0.01": 0.9, "0.1": 1.0, "0.5": 1.0}
    assert hot_row_curve(CountHistogram(), 20) == dict.fromkeys(("0.001", "0.01", "0.1", "0.5"))
