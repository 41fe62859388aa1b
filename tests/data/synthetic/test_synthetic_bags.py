"""Multi-hot columns of synthetic sets: bag sizes, the ids in a bag, and what they mean to the label."""

import json
import math
from collections import Counter
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from sklearn.metrics import roc_auc_score

from dlrm_scale.data.synthetic.bags import MLPERF_MEAN_IDS, bag_law, parse_multi_hot
from dlrm_scale.data.synthetic.model import EFFECT_SLOTS, PAIR_SLOTS, category_shares
from dlrm_scale.data.synthetic.rows import Rows, RowSource
from dlrm_scale.data.synthetic.synthetic import SyntheticParameters, generate, row_source
from dlrm_scale.errors import ConfigError

SOME = {"C3": 5, "C7": 3, "C14": 6, "C20": 12, "C23": 10}


def _parameters(**changes: object) -> SyntheticParameters:
    return SyntheticParameters(**{"rows": 4000, "days": 2, "seed": 5, "multi_hot": SOME, **changes})


def _bag(rows: Rows, row: int, column: int) -> list[int]:
    """The ids of one field, said again from how `Rows` stores them."""
    if not rows.ids_present[row, column]:
        return []
    counts = rows.more_counts.ravel().astype(np.int64)
    start = int(counts[: 26 * row + column].sum())
    return [int(rows.ids[row, column]), *map(int, rows.more_ids[start : start + counts[26 * row + column]])]


def _mix32(x: int) -> int:
    for shift, factor in ((16, 0x85EBCA6B), (13, 0xC2B2AE35)):
        x = (x ^ x >> shift) * factor % 2**32
    return x ^ x >> 16


def _id(column: int, value: int) -> int:
    salt = 0x3C6EF372 * (column + 1) % 2**32
    return _mix32(value ^ salt) ^ (_mix32(2 ^ salt) if column == 6 else 0)


@pytest.mark.parametrize("preset", ["kaggle", "terabyte"])
def test_without_multi_hot_columns_the_files_are_what_they_always_were(preset: str, tmp_path: Path) -> None:
    """Checksums that were taken before there were multi-hot columns."""
    first = {"kaggle": "8f483a08c941404130a0c503fb810c39", "terabyte": "b288f8c876cf0bf4a6c38d957ca997fb"}
    rows, days = (24_000, 3) if preset == "kaggle" else (12_000, 2)
    document, _ = generate(tmp_path, SyntheticParameters(preset=preset, rows=rows, days=days, seed=5))
    assert document["files"][0]["xxh3_128"] == first[preset]
    assert document["generator_version"] == 2
    assert set(document["parameters"]) == {"preset", "rows", "days", "seed", "scale", "gzip"}
    assert not {"multi_hot", "preprocess_flag"} & set(document)


def test_a_multi_hot_set_is_the_one_hot_set_with_more_ids() -> None:
    bags, single = row_source(_parameters()).draw(0, 1500, 0), row_source(_parameters(multi_hot={})).draw(0, 1500, 0)
    assert (bags.integers == single.integers).all()
    assert (bags.ids == single.ids).all()
    assert (bags.ids_present == single.ids_present).all()
    assert (bags.logits != single.logits).mean() > 0.99
    columns = [int(name[1:]) - 1 for name in SOME]
    others = [c for c in range(26) if c not in columns]
    assert bags.more_counts[:, others].sum() == single.more_counts.sum() == len(single.more_ids) == 0
    assert (bags.more_counts[bags.ids_present == 0] == 0).all()
    assert bags.more_counts.sum() == len(bags.more_ids) > 0


def test_the_text_holds_the_bags_with_commas_between(tmp_path: Path) -> None:
    generate(tmp_path, _parameters(rows=300, days=1))
    drawn = row_source(_parameters(rows=300, days=1)).draw(0, 300, 0)
    lines = (tmp_path / "day_0.tsv").read_text().splitlines()
    assert len(lines) == 300
    for i, line in enumerate(lines):
        fields = line.split("\t")
        assert len(fields) == 40
        for c, field in enumerate(fields[14:]):
            assert field == ",".join(f"{x:08x}" for x in _bag(drawn, i, c))


def test_any_chunk_size_gives_the_same_bytes(tmp_path: Path) -> None:
    parameters = _parameters(rows=900, days=2)
    generate(tmp_path / "a", parameters)
    generate(tmp_path / "b", parameters, chunk_rows=77)
    for name in ("day_0.tsv", "day_1.tsv"):
        assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()


@pytest.mark.parametrize("mean", [2, 3, 12, 100, 1000])
def test_a_bag_law_has_its_mean_exactly_and_falls_geometrically(mean: int) -> None:
    law = bag_law(mean)
    sizes = np.arange(1, law.most + 1)
    weights = law.ratio ** (sizes - 1)
    assert law.most == 4 * mean
    assert (weights @ sizes) / weights.sum() == pytest.approx(mean, rel=1e-4)


def test_bag_sizes_follow_their_law() -> None:
    rows = row_source(_parameters(rows=60_000)).draw(0, 60_000, 0)
    for name, mean in SOME.items():
        column, law = int(name[1:]) - 1, bag_law(mean)
        sizes = rows.more_counts[rows.ids_present[:, column] == 1, column].astype(np.int64) + 1
        share = law.ratio ** np.arange(law.most)
        share /= share.sum()
        assert abs(sizes.mean() - mean) < 5 * sizes.std() / math.sqrt(len(sizes))
        assert sizes.max() <= law.most
        for size in (1, 2, mean, 2 * mean):
            error = math.sqrt(share[size - 1] / len(sizes))
            assert abs((sizes == size).mean() - share[size - 1]) < 5 * error


def test_every_place_of_a_bag_follows_the_column_s_law() -> None:
    source = row_source(_parameters(rows=20_000))
    rows = source.draw(0, 20_000, 1)
    for column in (2, 6, 19):
        law = source.preset.categories[column]
        shares = category_shares(law, 0.0, EFFECT_SLOTS)
        mask = np.zeros(rows.more_counts.shape, bool)
        mask[:, column] = True
        more = rows.more_ids[np.repeat(mask.ravel(), rows.more_counts.ravel().astype(np.int64))]
        counts = Counter(more.tolist())
        for rank in range(4):
            expected = shares[1 + rank]
            assert abs(counts[_id(column, rank)] / len(more) - expected) < 5 * math.sqrt(expected / len(more))
        fresh = {_id(column, law.ids + law.fresh_ids + k) for k in range(law.fresh_ids)}
        share = sum(counts[x] for x in fresh) / len(more)
        assert abs(share - law.fresh_rate) < 5 * math.sqrt(law.fresh_rate / len(more)) + 1e-12


@cache
def _slot_of(column: int) -> dict[int, int]:
    return {_id(column, rank): 1 + rank for rank in range(EFFECT_SLOTS - 2)}


def _functional(source: RowSource, rows: Rows, row: int, column: int) -> np.ndarray:
    """Weights [K] over effect slots with which a column enters the logit, as `synthetic_model` states it in words."""
    weights = np.zeros(EFFECT_SLOTS)
    bag = _bag(rows, row, column)
    if not bag:
        weights[0] = 1.0
        return weights
    slot_of = _slot_of(column)
    root = math.sqrt(source.mean_ids[column])
    for x in bag:
        weights[slot_of.get(x, EFFECT_SLOTS - 1)] += 1.0 / root
    present = source.model.id_expected_share[column].copy()
    present[0] = 0.0
    present /= 1.0 - source.model.id_expected_share[column, 0]
    return weights + (1.0 - len(bag) / root) * present


@pytest.mark.parametrize("preset", ["kaggle", "terabyte"])
def test_a_logit_is_the_sum_over_all_ids_of_each_bag(preset: str) -> None:
    multi_hot = {**SOME, "C4": 2, "C9": 3}
    source = row_source(_parameters(preset=preset, multi_hot=multi_hot))
    model, rows = source.model, source.draw(0, 25, 1)
    for i in range(25):
        logit = model.intercept
        for c in range(13):
            centre, width, slope, bend = model.integer_curves[c]
            t = max(-3.0, min(3.0, (math.log1p(max(int(rows.integers[i, c]), 0)) - centre) / width))
            logit += slope * t + bend * t * t
        weights = [_functional(source, rows, i, c) for c in range(26)]
        logit += sum(float(weights[c] @ model.id_effects[c]) for c in range(26))
        for effects, (a, b) in zip(model.pair_effects, model.pair_columns, strict=True):
            # All slots from the last pair slot on have no effect.
            sides = [np.append(weights[c][: PAIR_SLOTS - 1], 0.0) for c in (a, b)]
            logit += float(sides[0] @ effects @ sides[1])
        assert rows.logits[i] == pytest.approx(logit, abs=1e-9)


@pytest.mark.parametrize(("preset", "rate"), [("kaggle", 0.256), ("terabyte", 0.033)])
def test_mlperf_bags_keep_the_click_rate_and_the_signal(preset: str, rate: float) -> None:
    parameters = SyntheticParameters(preset=preset, rows=1_000_000, days=2, multi_hot=MLPERF_MEAN_IDS)
    bags = row_source(parameters).draw(0, 16_384, 0)
    single = row_source(SyntheticParameters(preset=preset, rows=1_000_000, days=2)).draw(0, 16_384, 0)
    assert abs(bags.labels.mean() - rate) < 5 * math.sqrt(rate / 16_384)
    assert bags.logits.var() == pytest.approx(single.logits.var(), rel=0.1)
    # The other ids of a bag matter: who reads the first ones alone ranks clicks worse.
    attainable = roc_auc_score(bags.labels, bags.logits)
    assert attainable > 0.77
    assert roc_auc_score(bags.labels, single.logits) < attainable - 0.02
    lookups = (bags.more_counts + 1.0)[bags.ids_present == 1].sum() / 16_384
    assert lookups == pytest.approx(
        sum(MLPERF_MEAN_IDS.get(f"C{c + 1}", 1) * bags.ids_present[:, c].mean() for c in range(26)), rel=0.02
    )


def test_synthetic_json_names_the_columns_and_the_flag_that_reads_them(tmp_path: Path) -> None:
    document, _ = generate(tmp_path, _parameters(rows=200, multi_hot={"C20": 12, "C3": 5}))
    assert document["multi_hot"] == {"C3": {"mean_ids": 5, "most_ids": 20}, "C20": {"mean_ids": 12, "most_ids": 48}}
    assert document["preprocess_flag"] == "--multi-hot C3,C20"
    assert document["parameters"]["multi_hot"] == {"C3": 5, "C20": 12}
    assert json.loads((tmp_path / "synthetic.json").read_text()) == document
    assert generate(tmp_path, _parameters(rows=200, multi_hot={"C3": 5, "C20": 12}))[1] is False
    assert generate(tmp_path, _parameters(rows=200, multi_hot={"C3": 5}), force=True)[1] is True


def test_multi_hot_is_parsed_by_name_or_by_column() -> None:
    assert parse_multi_hot(None) == {}
    assert parse_multi_hot("MLPerf") == MLPERF_MEAN_IDS
    assert sum(MLPERF_MEAN_IDS.values()) + 26 - len(MLPERF_MEAN_IDS) == 214
    assert parse_multi_hot("C20=12, C3=5") == {"C20": 12, "C3": 5}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "'' is no COLUMN=MEAN"),
        ("all", "'all' is no COLUMN=MEAN"),
        ("C3=5,C20", "'C20' is no COLUMN=MEAN"),
        ("C3=5,C3=6", "names C3 twice"),
        ("C27=5", "multi-hot column C27: there is no such"),
        ("C3=1", "C3 has a mean of 1 ids(.|\n)*leave out columns of one id a row"),
        ("C3=1001", "C3 has a mean of 1001 ids; it must be from 2 to 1000"),
    ],
)
def test_a_wrong_multi_hot_is_named(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_multi_hot(text)


def test_wrong_columns_are_refused_by_the_parameters_too() -> None:
    with pytest.raises(ConfigError, match="multi-hot column I3: there is no such category column"):
        row_source(_parameters(multi_hot={"I3": 4}))
