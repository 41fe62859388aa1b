"""Generated and built-in table sets are the ones that they are said to be."""

import hashlib
from pathlib import Path

import pytest

from dlrm_scale.planning.tables.built_in import BUILT_IN, built_in_tables
from dlrm_scale.planning.tables.generate import generate_tables, synthetic_tables
from dlrm_scale.planning.tables.locality import TRACES, USE_EDGES
from dlrm_scale.planning.tables.popularity import fit_popularity
from dlrm_scale.planning.tables.tables_file import format_tables
from tests.planning.tables.uses_of_rows import total_variation, uses_of_all


def test_the_synthetic_set_is_the_one_that_the_goals_are_stated_for() -> None:
    made = synthetic_tables()
    drawn = [(t.rows, t.dim, t.lookups_per_sample) for t in made.tables]
    assert drawn[0] == (2386093, 128, 9.67)
    assert sum(rows for rows, _, _ in drawn) == 897_151_216
    # of the list of all 800 as the prototype of the planner printed it
    assert hashlib.sha256(repr(drawn).encode()).hexdigest()[:16] == "8a62c37cd7ac1758"
    assert [made.tables[0].name, made.tables[-1].name] == ["t0", "t799"]


@pytest.mark.parametrize(
    ("count", "most_rows", "most_lookups"),
    [(200, 0.015, 0.045), pytest.param(800, 0.01, 0.035, marks=pytest.mark.slow)],
)
@pytest.mark.parametrize("kind", list(TRACES))
def test_a_production_set_uses_its_rows_as_often_as_the_trace_does(
    kind: str, count: int, most_rows: float, most_lookups: float
) -> None:
    trace, made = TRACES[kind], generate_tables(kind, tables=count)
    lookups = [t.lookups_per_sample * trace.batch_size for t in made.tables]
    rows, of_rows = uses_of_all(((fit_popularity(t), n) for t, n in zip(made.tables, lookups, strict=True)), USE_EDGES)
    assert sum(lookups) / (count * trace.batch_size) == pytest.approx(trace.lookups_per_bag, rel=1e-4)
    assert of_rows.sum() / rows.sum() == pytest.approx(trace.lookups / trace.unique_rows, rel=0.01)
    # Measured, by trace: rows 0.008, 0.003, lookups 0.029, 0.029 with 800 tables; 0.011, 0.004, 0.039, 0.034 with 200.
    assert total_variation(rows, trace.row_shares) < most_rows
    assert total_variation(of_rows, trace.lookup_shares) < most_lookups
    even = generate_tables("synthetic", tables=count)
    even_rows, _ = uses_of_all(
        ((fit_popularity(t), t.lookups_per_sample * trace.batch_size) for t in even.tables), USE_EDGES
    )
    assert total_variation(even_rows, trace.row_shares) > 0.2


def test_traces_are_the_published_figures(shared_data: Path) -> None:
    for name, year in (("production", 2022), ("production-2021", 2021)):
        trace = TRACES[name]
        text = (shared_data / f"meta_embedding_locality_stats_{year}.txt").read_text()
        block = text[text.index(trace.source.split(": ")[1]) :].split("\n\n")[0].splitlines()
        values = [float(line.split(": ")[1]) for line in block if line.startswith("(")]
        assert tuple(values[:17]) == trace.row_shares
        assert tuple(values[17:]) == trace.lookup_shares
        assert f"Avg # of indices: {trace.lookups}" in block
        assert f"Avg # of unique cols: {trace.unique_rows}" in block
        assert f"t{trace.tables}_bs{trace.batch_size}" in block[0]
        assert len(USE_EDGES) == len(trace.row_shares)


@pytest.mark.parametrize("kind", ["production", "synthetic"])
def test_equal_arguments_give_equal_bytes_and_another_seed_others(kind: str) -> None:
    texts = [format_tables(generate_tables(kind, tables=20, seed=seed, dims=(32,)), ".toml") for seed in (1, 1, 2)]
    assert texts[0] == texts[1] != texts[2]
    assert all(t.dim == 32 for t in generate_tables(kind, tables=5, dims=(32,)).tables)


def test_built_in_sets_have_their_published_sums() -> None:
    sets = {name: built_in_tables(name) for name in BUILT_IN}
    rows = {name: sum(t.rows for t in made.tables) for name, made in sets.items()}
    assert rows["criteo_kaggle"] == 33_762_577
    assert rows["mlperf_dcnv2"] == 204_184_588
    assert rows["criteo_terabyte"] == 204_184_604
    assert rows["criteo_terabyte_uncapped"] == 882_774_575
    assert sum(t.lookups_per_sample for t in sets["mlperf_dcnv2"].tables) == 214
    assert {t.dim for t in sets["mlperf_dcnv2"].tables} == {128}
    assert all(made.source and len(made.tables) == 26 for made in sets.values())
