"""Synthetic day files: their text, their statistics, and what synthetic.json claims about them."""

import gzip
import json
import math
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
from sklearn.metrics import log_loss, roc_auc_score

from dlrm_scale.data.synthetic import synthetic
from dlrm_scale.data.synthetic.columns import PRESETS
from dlrm_scale.data.synthetic.model import EFFECT_SLOTS, PAIR_SLOTS, category_shares
from dlrm_scale.data.synthetic.scores import TruthScores
from dlrm_scale.data.synthetic.synthetic import SyntheticParameters, day_rows, generate, row_source
from dlrm_scale.errors import ConfigError, DataError
from tests.support.raw_rows import Row, slow_parse

REPOSITORY = Path(__file__).resolve().parents[3]
KAGGLE = SyntheticParameters(preset="kaggle", rows=24_000, days=3, seed=5)
TERABYTE = SyntheticParameters(preset="terabyte", rows=12_000, days=2, seed=5)


@pytest.fixture(scope="module")
def kaggle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("synthetic") / "kaggle"
    generate(folder, KAGGLE)
    return folder


@pytest.fixture(scope="module")
def terabyte(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("synthetic") / "terabyte"
    generate(folder, TERABYTE)
    return folder


@pytest.fixture(scope="module")
def kaggle_days(kaggle: Path) -> list[list[Row]]:
    return _days(kaggle, 3)


@pytest.fixture(scope="module")
def terabyte_days(terabyte: Path) -> list[list[Row]]:
    return _days(terabyte, 2)


def _days(folder: Path, days: int) -> list[list[Row]]:
    parsed = []
    for day in range(days):
        good, bad = slow_parse((folder / f"day_{day}.tsv").read_bytes())
        assert bad == []
        parsed.append([row for _, row in good])
    return parsed


def _document(folder: Path) -> dict:
    return json.loads((folder / "synthetic.json").read_text())


def _all(days: list[list[Row]]) -> list[Row]:
    return [row for day in days for row in day]


def _near(observed: float, expected: float, rows: int) -> bool:
    """Whether a share of `rows` rows is within five standard deviations."""
    return abs(observed - expected) <= 5 * math.sqrt(expected * (1 - expected) / rows) + 1e-12


def _mix32(x: int) -> int:
    x ^= x >> 16
    x = x * 0x85EBCA6B % 2**32
    x ^= x >> 13
    x = x * 0xC2B2AE35 % 2**32
    return x ^ x >> 16


def _id(column: int, value: int) -> int:
    """Say again which id a column (0..25) gives its value: rank, or number of a fresh id."""
    salt = 0x3C6EF372 * (column + 1) % 2**32
    return _mix32(value ^ salt) ^ (_mix32(2 ^ salt) if column == 6 else 0)


def test_every_line_has_40_fields_in_criteo_s_form(kaggle: Path) -> None:
    data = (kaggle / "day_0.tsv").read_bytes()
    assert data.endswith(b"\n")
    for line in data.splitlines():
        fields = line.decode().split("\t")
        assert len(fields) == 40
        assert fields[0] in ("0", "1")
        assert all(field == "" or str(int(field)) == field for field in fields[1:14])
        assert all(field == "" or (len(field) == 8 and f"{int(field, 16):08x}" == field) for field in fields[14:])


def test_the_text_is_the_drawn_rows(kaggle_days: list[list[Row]]) -> None:
    source = row_source(KAGGLE)
    first = 0
    for day, rows in enumerate(kaggle_days):
        drawn = source.draw(first, len(rows), day)
        assert [row.label for row in rows] == drawn.labels.tolist()
        for i in range(0, len(rows), 97):
            integers = tuple(None if x == -(2**31) else x for x in drawn.integers[i].tolist())
            ids = tuple(x if p else None for x, p in zip(drawn.ids[i].tolist(), drawn.ids_present[i], strict=True))
            assert (rows[i].integers, rows[i].categories) == (integers, ids)
        first += len(rows)


def test_the_same_arguments_give_the_same_bytes_for_any_chunk_size(kaggle: Path, tmp_path: Path) -> None:
    document, written = generate(tmp_path / "again", KAGGLE, chunk_rows=777)
    assert written
    for entry in document["files"]:
        assert (tmp_path / "again" / entry["file"]).read_bytes() == (kaggle / entry["file"]).read_bytes()
    original = _document(kaggle)
    assert [e["xxh3_128"] for e in document["files"]] == [e["xxh3_128"] for e in original["files"]]
    assert document["all_days"]["attainable"]["auc"] == original["all_days"]["attainable"]["auc"]


def test_another_seed_gives_other_rows_of_the_same_world(kaggle_days: list[list[Row]], tmp_path: Path) -> None:
    generate(tmp_path, SyntheticParameters(rows=2000, days=1, seed=6, scale=row_scale()))
    rows = _days(tmp_path, 1)[0]
    assert rows[:100] != kaggle_days[0][:100]
    assert {row.categories[8] for row in rows} <= {row.categories[8] for row in _all(kaggle_days)}


def row_scale() -> float:
    scale = KAGGLE.resolved().scale
    assert scale is not None
    return scale


def test_gzip_holds_the_plain_content(kaggle: Path, tmp_path: Path) -> None:
    document, _ = generate(tmp_path, SyntheticParameters(rows=24_000, days=3, seed=5, gzip=True))
    plain = _document(kaggle)
    for entry, other in zip(document["files"], plain["files"], strict=True):
        packed = (tmp_path / entry["file"]).read_bytes()
        assert len(packed) == entry["size_bytes"] < other["size_bytes"] / 2
        assert gzip.decompress(packed) == (kaggle / other["file"]).read_bytes()
        assert entry["content_xxh3_128"] == other["xxh3_128"]


def test_ids_take_the_whole_unsigned_range(kaggle_days: list[list[Row]], terabyte_days: list[list[Row]]) -> None:
    for days in (kaggle_days, terabyte_days):
        distinct = {(c, x) for row in _all(days) for c, x in enumerate(row.categories) if x is not None}
        high = sum(x >= 2**31 for _, x in distinct) / len(distinct)
        assert 0.48 < high < 0.52
        assert max(x for _, x in distinct) > 2**32 - 2**22
        assert min(x for c, x in distinct if x) < 2**22


def test_the_id_00000000_is_a_real_value_of_c7(kaggle: Path, kaggle_days: list[list[Row]]) -> None:
    share = sum(row.categories[6] == 0 for row in _all(kaggle_days)) / KAGGLE.rows
    assert 0.005 < share < 0.03
    assert b"\t00000000\t" in (kaggle / "day_0.tsv").read_bytes()


@pytest.mark.parametrize("name", ["kaggle", "terabyte"])
def test_columns_of_a_group_are_missing_together_at_the_published_rates(
    name: str, request: pytest.FixtureRequest
) -> None:
    rows = _all(request.getfixturevalue(f"{name}_days"))
    absent = np.array([[x is None for x in (*row.integers, *row.categories)] for row in rows])
    grouped: set[int] = set()
    for columns, rate in PRESETS[name].missing_groups:
        for column in columns:
            assert (absent[:, column] == absent[:, columns[0]]).all()
        assert _near(absent[:, columns[0]].mean(), rate, len(rows))
        grouped |= set(columns)
    assert not absent[:, [c for c in range(39) if c not in grouped]].any()
    # Groups are independent of one another.
    (first, _), (second, _) = PRESETS[name].missing_groups[:2]
    together = (absent[:, first[0]] & absent[:, second[0]]).mean()
    assert _near(together, absent[:, first[0]].mean() * absent[:, second[0]].mean(), len(rows))


def test_only_the_published_column_is_negative(kaggle_days: list[list[Row]], terabyte_days: list[list[Row]]) -> None:
    for days, column, rates in ((kaggle_days, 1, {-1: 0.129, -2: 0.0009}), (terabyte_days, 7, {-1: 0.0599})):
        rows = _all(days)
        assert {c for row in rows for c, x in enumerate(row.integers) if x is not None and x < 0} == {column}
        for value, rate in rates.items():
            assert _near(sum(row.integers[column] == value for row in rows) / len(rows), rate, len(rows))


def test_integers_have_heavy_tails_and_the_measured_zeros(
    kaggle_days: list[list[Row]], terabyte_days: list[list[Row]]
) -> None:
    for days, column, median, name in ((kaggle_days, 4, 1032, "kaggle"), (terabyte_days, 11, 1384, "terabyte")):
        present = [row.integers for row in _all(days)]
        values = np.array([row[column] for row in present if row[column] is not None])
        assert 0.8 * median < np.median(values) < 1.25 * median
        assert np.quantile(values, 0.99) > 100 * np.median(values)
        assert values.max() > 65_504  # beyond float16
        for c, law in enumerate(PRESETS[name].integers):
            shown = [row[c] for row in present if row[c] is not None]
            assert _near(sum(x == 0 for x in shown) / len(shown), law.zero, len(shown))
            assert max(shown) <= law.highest < 2**31


@pytest.mark.parametrize(("name", "rate"), [("kaggle", 0.256), ("terabyte", 0.033)])
def test_the_click_rate_is_the_published_one(name: str, rate: float, request: pytest.FixtureRequest) -> None:
    rows = _all(request.getfixturevalue(f"{name}_days"))
    assert _near(sum(row.label for row in rows) / len(rows), rate, len(rows))


def test_the_commonest_id_of_a_column_takes_its_measured_share(kaggle_days: list[list[Row]]) -> None:
    rows = _all(kaggle_days)
    for column in (0, 4, 8, 9, 18, 20):
        values = [row.categories[column] for row in rows if row.categories[column] is not None]
        law = row_source(KAGGLE).preset.categories[column]
        top = values.count(_id(column, 0)) / len(values)
        assert _near(top, law.top * (1 - law.fresh_rate), len(values))
        assert top == max(values.count(x) for x in set(values[:500])) / len(values)


def test_ranks_follow_the_stated_shares(kaggle_days: list[list[Row]]) -> None:
    rows = _all(kaggle_days)
    law = row_source(KAGGLE).preset.categories[25]
    shares = category_shares(law, 0.459, EFFECT_SLOTS)
    values = [row.categories[25] for row in rows]
    for rank in range(8):
        assert _near(values.count(_id(25, rank)) / len(rows), shares[1 + rank], len(rows))
    assert shares.sum() <= 1.0 - 0.541 * law.fresh_rate + 1e-9


def test_each_day_has_ids_that_no_other_day_has(kaggle_days: list[list[Row]]) -> None:
    laws = row_source(KAGGLE).preset.categories
    fresh_columns = [c for c, law in enumerate(laws) if law.fresh_ids]
    assert [c + 1 for c in fresh_columns] == [3, 4, 10, 12, 16, 21, 24, 26]
    for column in fresh_columns:
        law = laws[column]
        seen = [[row.categories[column] for row in day if row.categories[column] is not None] for day in kaggle_days]
        pools = [
            {_id(column, law.ids + day * law.fresh_ids + k) for k in range(law.fresh_ids)} for day in range(len(seen))
        ]
        for day, values in enumerate(seen):
            assert _near(sum(x in pools[day] for x in values) / len(values), 0.03, len(values))
            assert not any(pools[other] & set(values) for other in range(len(seen)) if other != day)


def test_days_are_uneven_and_sum_to_the_rows() -> None:
    for rows, days, seed in ((1_000_000, 4, 0), (1000, 24, 3), (4, 4, 0), (9, 2, 1), (5, 1, 0)):
        counts = day_rows(rows, days, seed)
        assert (len(counts), sum(counts)) == (days, rows)
        assert min(counts) >= 1
    counts = day_rows(1_000_000, 4, 0)
    assert max(counts) / min(counts) == pytest.approx(1.35, abs=0.001)
    assert all(a != b for a, b in pairwise(counts))


@pytest.mark.parametrize(("name", "parameters"), [("kaggle", KAGGLE), ("terabyte", TERABYTE)])
def test_attainable_scores_equal_scikit_learn_s_on_the_true_probabilities(
    name: str, parameters: SyntheticParameters, request: pytest.FixtureRequest
) -> None:
    document = _document(request.getfixturevalue(name))
    source = row_source(parameters)
    logits, labels = [], []
    for day, (entry, rows) in enumerate(zip(document["files"], request.getfixturevalue(f"{name}_days"), strict=True)):
        logits.append(source.draw(entry["first_row"], entry["rows"], day).logits)
        labels.append(np.array([row.label for row in rows]))
        _check_scores(entry, logits[-1], labels[-1])
    _check_scores(document["all_days"], np.concatenate(logits), np.concatenate(labels))
    assert document["validation"]["attainable"] == document["files"][-1]["attainable"]
    assert document["validation"]["file"] == document["files"][-1]["file"]
    assert 0.77 < document["all_days"]["attainable"]["auc"] < 0.84


def _check_scores(entry: dict, logits: np.ndarray, labels: np.ndarray) -> None:
    probabilities = 1 / (1 + np.exp(-logits))
    assert (entry["rows"], entry["clicks"]) == (len(labels), labels.sum())
    assert entry["attainable"]["auc"] == pytest.approx(roc_auc_score(labels, logits), abs=2e-5)
    assert entry["attainable"]["logloss"] == pytest.approx(log_loss(labels, probabilities), abs=1e-9)
    base = log_loss(labels, np.full(len(labels), labels.mean()))
    assert entry["base_rate_logloss"] == pytest.approx(base, abs=1e-9)
    assert entry["attainable"]["normalized_entropy"] == pytest.approx(entry["attainable"]["logloss"] / base)


def test_labels_come_up_as_often_as_their_probabilities_say() -> None:
    rows = row_source(KAGGLE).draw(0, 100_000, 0)
    probabilities = 1 / (1 + np.exp(-rows.logits))
    for part in np.array_split(np.argsort(probabilities), 10):
        assert _near(rows.labels[part].mean(), probabilities[part].mean(), len(part))


@pytest.mark.parametrize("parameters", [KAGGLE, TERABYTE])
def test_a_logit_is_the_sum_of_the_planted_effects(parameters: SyntheticParameters) -> None:
    source = row_source(parameters)
    model, rows = source.model, source.draw(0, 40, 1)
    slot_of = [{_id(c, rank): 1 + rank for rank in range(EFFECT_SLOTS - 2)} for c in range(26)]
    for i in range(40):
        logit = model.intercept
        for c in range(13):
            centre, width, slope, bend = model.integer_curves[c]
            t = max(-3.0, min(3.0, (math.log1p(max(int(rows.integers[i, c]), 0)) - centre) / width))
            logit += slope * t + bend * t * t
        slots = [
            slot_of[c].get(int(rows.ids[i, c]), EFFECT_SLOTS - 1) if rows.ids_present[i, c] else 0 for c in range(26)
        ]
        logit += sum(model.id_effects[c, slots[c]] for c in range(26))
        for effects, (a, b) in zip(model.pair_effects, model.pair_columns, strict=True):
            logit += effects[min(slots[a], PAIR_SLOTS - 1), min(slots[b], PAIR_SLOTS - 1)]
        assert rows.logits[i] == pytest.approx(logit, abs=1e-9)


def test_rare_and_fresh_ids_have_next_to_no_effect() -> None:
    model = row_source(KAGGLE).model
    rare = model.id_expected_share < 1e-4
    assert np.abs(model.id_effects[rare]).max() < 0.02
    assert (model.id_effects[:, -1] == 0).all()
    assert np.abs(model.id_effects[model.id_expected_share > 0.05]).max() > 0.3
    kept, _ = model.kept(1e-4)
    assert (kept[rare] == 0).all()
    assert (kept[~rare] == model.id_effects[~rare]).all()


def test_scores_are_undefined_where_only_one_label_occurs(tmp_path: Path) -> None:
    scores = TruthScores()
    assert (scores.auc, scores.logloss, scores.base_rate_logloss) == (None, None, None)
    scores.add(np.zeros(3), np.zeros(3, np.uint8))
    assert scores.summary() == {"auc": None, "logloss": pytest.approx(math.log(2)), "normalized_entropy": None}
    document, _ = generate(tmp_path, SyntheticParameters(preset="terabyte", rows=4, days=4))
    assert [entry["rows"] for entry in document["files"]] == [1, 1, 1, 1]
    assert document["validation"]["attainable"]["auc"] is None


def test_a_second_run_writes_nothing(tmp_path: Path) -> None:
    parameters = SyntheticParameters(rows=300, days=2)
    first, _ = generate(tmp_path, parameters)
    before = {path.name: path.stat().st_mtime_ns for path in tmp_path.iterdir()}
    second, written = generate(tmp_path, parameters)
    assert (second, written) == (first, False)
    assert {path.name: path.stat().st_mtime_ns for path in tmp_path.iterdir()} == before
    assert sorted(before) == ["day_0.tsv", "day_1.tsv", "synthetic.json"]


def test_a_cut_file_or_another_version_is_generated_anew_and_other_parameters_with_force(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    parameters = SyntheticParameters(rows=300, days=2)
    generate(tmp_path, parameters)
    whole = (tmp_path / "day_1.tsv").read_bytes()
    (tmp_path / "day_1.tsv").write_bytes(whole[:-5])
    assert generate(tmp_path, parameters)[1]
    assert (tmp_path / "day_1.tsv").read_bytes() == whole
    monkeypatch.setattr(synthetic, "GENERATOR_VERSION", synthetic.GENERATOR_VERSION + 1)
    assert generate(tmp_path, parameters)[1]
    other = SyntheticParameters(rows=300, days=1, seed=2)
    with pytest.raises(ConfigError, match="holds a set that was made with other arguments"):
        generate(tmp_path, other)
    assert (tmp_path / "day_1.tsv").read_bytes() == whole
    assert generate(tmp_path, other, force=True)[1]
    assert sorted(path.name for path in tmp_path.iterdir()) == ["day_0.tsv", "synthetic.json"]


def test_a_folder_of_other_making_is_refused_unless_forced(tmp_path: Path) -> None:
    (tmp_path / "day_7.tsv").write_text("mine")
    parameters = SyntheticParameters(rows=10, days=1)
    with pytest.raises(ConfigError, match=r"isn't empty and wasn't made by synth(.|\n)*--force"):
        generate(tmp_path, parameters)
    assert [path.name for path in tmp_path.iterdir()] == ["day_7.tsv"]
    generate(tmp_path, parameters, force=True)
    assert (tmp_path / "day_7.tsv").read_text() == "mine"
    assert (tmp_path / "day_0.tsv").exists()
    with pytest.raises(ConfigError, match="is a file, not a folder"):
        generate(tmp_path / "day_7.tsv", parameters)


def test_an_interrupted_run_leaves_no_half_file_and_is_run_again(tmp_path: Path) -> None:
    parameters = SyntheticParameters(rows=300, days=2)

    done: list[int] = []

    def stop_in_day_1(rows: int) -> None:
        done.append(rows)
        if sum(done) > 200:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        generate(tmp_path, parameters, on_rows=stop_in_day_1, chunk_rows=50)
    assert sorted(path.name for path in tmp_path.iterdir()) == [".synthetic-unfinished", "day_0.tsv"]
    document, written = generate(tmp_path, parameters)
    assert written
    assert document["all_days"]["rows"] == 300
    assert not (tmp_path / ".synthetic-unfinished").exists()


def _interrupt(folder: Path, parameters: SyntheticParameters, *, after_rows: int, force: bool = False) -> None:
    done: list[int] = []

    def stop(rows: int) -> None:
        done.append(rows)
        if sum(done) > after_rows:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        generate(folder, parameters, force=force, on_rows=stop, chunk_rows=50)


def test_files_of_other_making_outlive_an_interrupted_forced_run_and_the_next(tmp_path: Path) -> None:
    mine = {f"day_{day}.tsv": f"real rows of day {day}" for day in (5, 6, 7, 8)}
    for name, content in mine.items():
        (tmp_path / name).write_text(content)
    _interrupt(tmp_path, SyntheticParameters(rows=600, days=3), after_rows=450, force=True)
    assert {"day_0.tsv", "day_1.tsv"} <= {path.name for path in tmp_path.iterdir()}
    # Fewer days: those of the interrupted run go, the others stay.
    generate(tmp_path, SyntheticParameters(rows=100, days=1))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["day_0.tsv", *mine, "synthetic.json"]
    assert {name: (tmp_path / name).read_text() for name in mine} == mine


@pytest.mark.parametrize("after", ["an interrupted run", "a finished run"])
def test_files_of_other_making_are_written_over_by_force_alone(tmp_path: Path, after: str) -> None:
    (tmp_path / "day_2.tsv").write_text("mine")
    few, more = SyntheticParameters(rows=200, days=2), SyntheticParameters(rows=300, days=3)
    if after == "an interrupted run":
        # It would have replaced day 2, but ended before.
        _interrupt(tmp_path, more, after_rows=150, force=True)
    else:
        generate(tmp_path, few, force=True)
    with pytest.raises(ConfigError, match=r"(day_2\.tsv wasn't made by synth|other arguments)(.|\n)*--force"):
        generate(tmp_path, more)
    assert (tmp_path / "day_2.tsv").read_text() == "mine"
    generate(tmp_path, few)
    assert (tmp_path / "day_2.tsv").read_text() == "mine"
    assert generate(tmp_path, more, force=True)[1]
    assert (tmp_path / "day_2.tsv").read_text() != "mine"


def test_a_file_that_took_the_place_of_an_interrupted_run_s_stays(tmp_path: Path) -> None:
    _interrupt(tmp_path, SyntheticParameters(rows=300, days=3), after_rows=250)
    (tmp_path / "day_1.tsv").write_text("mine")
    generate(tmp_path, SyntheticParameters(rows=100, days=1))
    assert (tmp_path / "day_1.tsv").read_text() == "mine"


def test_a_disk_that_is_too_small_is_refused_before_writing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(synthetic.shutil, "disk_usage", lambda _: type("Usage", (), {"free": 1000}))
    with pytest.raises(DataError, match=r"10 rows need at least .* 1000 B are free"):
        generate(tmp_path, SyntheticParameters(rows=10, days=1))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"rows": 3, "days": 4}, "3 rows can't fill 4 days"),
        ({"rows": 3, "days": 0}, "days is 0"),
        ({"rows": 10, "days": 1, "seed": -1}, "seed is -1"),
        ({"rows": 10, "days": 1, "preset": "avazu"}, "'avazu'(.|\n)*kaggle, terabyte"),
        ({"rows": 10, "days": 1, "scale": 0.0}, "scale is 0"),
        ({"rows": 10, "days": 1, "scale": math.nan}, "scale is nan"),
        ({"rows": 100, "days": 24, "preset": "terabyte", "scale": 10.0}, r"C1 would need [\d,]+ distinct ids"),
    ],
)
def test_wrong_parameters_are_named(wrong: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        SyntheticParameters(**wrong).resolved()


def test_the_scale_sets_the_cardinalities_of_large_columns() -> None:
    source = row_source(SyntheticParameters(rows=10, days=1, scale=0.5))
    counts = [law.ids for law in source.preset.categories]
    assert (counts[2], counts[4], counts[8], counts[0]) == (5_065_614, 305, 3, 1000)
    assert row_source(SyntheticParameters(rows=10, days=1, scale=1.0)).preset.categories[2].ids == 10_131_227


def test_the_committed_sample_is_what_its_parameters_give(tmp_path: Path) -> None:
    sample = REPOSITORY / "data" / "sample"
    committed = _document(sample)
    document, _ = generate(tmp_path, SyntheticParameters(**committed["parameters"]))
    # Other rows from the same parameters need another GENERATOR_VERSION, or old folders pass for new ones.
    assert committed["generator_version"] == document["generator_version"]
    assert 1500 <= document["all_days"]["rows"] <= 3000
    for entry, again in zip(committed["files"], document["files"], strict=True):
        assert gzip.decompress((sample / entry["file"]).read_bytes()) == gzip.decompress(
            (tmp_path / again["file"]).read_bytes()
        )
        assert entry["content_xxh3_128"] == again["content_xxh3_128"]
    assert (REPOSITORY / "data" / "README.md").read_text().count("dlrm-scale synth data/sample") == 1


def test_an_interrupted_generation_leaves_no_days_to_a_shorter_one(tmp_path: Path) -> None:
    _interrupt(tmp_path, SyntheticParameters(rows=900, days=9), after_rows=500)
    assert {"day_0.tsv", "day_1.tsv", "day_2.tsv", "day_3.tsv"} <= {p.name for p in tmp_path.iterdir()}
    # As a killed process leaves it.
    (tmp_path / ".day_5.tsv.tmp").write_text("")
    assert (tmp_path / ".synthetic-unfinished").exists()
    generate(tmp_path, SyntheticParameters(rows=100, days=2))
    assert sorted(p.name for p in tmp_path.iterdir()) == ["day_0.tsv", "day_1.tsv", "synthetic.json"]


def test_two_processes_do_not_generate_into_one_folder(tmp_path: Path) -> None:
    def second(rows: int) -> None:
        with pytest.raises(DataError, match="another process is generating"):
            generate(tmp_path, SyntheticParameters(rows=100, days=2, seed=9))

    generate(tmp_path, SyntheticParameters(rows=100, days=2), on_rows=second)
