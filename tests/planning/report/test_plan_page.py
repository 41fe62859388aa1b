"""Pages that need nothing but themselves, and tables for the terminal."""

import re
from xml.etree import ElementTree

import pytest

from dlrm_scale.planning.plan.analysis import Analysis, Effort, analyze
from dlrm_scale.planning.plan.cost_models import OurCosts
from dlrm_scale.planning.plan.simulate import Simulation, simulate
from dlrm_scale.planning.report.page import Section, render_page
from dlrm_scale.planning.report.plan_page import plan_page, simulation_page
from dlrm_scale.planning.report.plan_text import describe_analysis, describe_simulation, lay_out
from dlrm_scale.planning.report.plan_values import analysis_values, simulation_values
from dlrm_scale.units import GIB
from tests.planning.plan.small_requests import small_request

_EFFORT = Effort(of_default=0.02)


@pytest.fixture(scope="module")
def analysis() -> Analysis:
    return analyze(small_request(), {}, effort=_EFFORT, torchrec_costs=False)


@pytest.fixture(scope="module")
def simulation() -> Simulation:
    request = small_request(ranks=2, ranks_per_host=2, memory_bytes=3 * GIB)
    return simulate(request, [2, 4], OurCosts, _EFFORT.again)


def _loads_nothing(page: str) -> None:
    without_names = re.sub(r'xmlns(:\w+)?="[^"]*"|rdf:resource="[^"]*"|<dc:\w+>[^<]*</dc:\w+>', "", page)
    assert not re.findall(r'(?:src|href)="(?!#)[^"]*"|url\((?!#)|@import', without_names)
    assert "<script" not in page


def test_a_plans_page_holds_its_figures_and_loads_nothing(analysis: Analysis) -> None:
    page = plan_page(analysis)
    _loads_nothing(page)
    figures = re.findall(r"<svg.*?</svg>", page, re.DOTALL)
    assert len(figures) == 1 + 2 * len(analysis.comparison.proposals)
    for figure in figures:
        ElementTree.fromstring(figure)
    for words in ("Plans and their bounds", "What decides the step", "Time by rank", "Memory by rank", "large"):
        assert words in page


def test_ids_of_figures_on_one_page_do_not_meet(analysis: Analysis) -> None:
    figures = re.findall(r"<svg.*?</svg>", plan_page(analysis), re.DOTALL)
    clips = [set(re.findall(r'<clipPath id="([^"]+)"', figure)) for figure in figures]
    for index, first in enumerate(clips):
        for second in clips[index + 1 :]:
            assert not first & second


def test_equal_plans_have_equal_pages(analysis: Analysis) -> None:
    again = analyze(small_request(), {}, effort=_EFFORT, torchrec_costs=False)
    assert plan_page(analysis) == plan_page(again)


def test_a_simulations_page_and_text_tell_what_does_not_fit_and_the_knee(simulation: Simulation) -> None:
    page = simulation_page(simulation)
    _loads_nothing(page)
    assert "knee: 4 devices (the knee is" in page
    text = describe_simulation(simulation)
    assert re.search(r"^ +2 +- +no sharding plan fits", text, re.MULTILINE)
    assert re.search(r"^ +4 +\d+\.\d{3} +", text, re.MULTILINE)
    assert "knee: 4 devices" in text


def test_the_text_of_a_plan_has_each_table_where_it_lies_and_what_memory_forces(analysis: Analysis) -> None:
    text = describe_analysis(analysis)
    assert "5 tables, " in text
    for table in analysis.comparison.request.tables.tables:
        assert re.search(rf"^{table.name} +{table.rows:,} +{table.dim} ", text, re.MULTILINE)
    assert "tables may take" in text
    assert "types that cut columns" in text
    assert "takes longest" in text


def test_what_a_ranks_memory_counts_and_what_it_does_not_stands_beside_it(
    analysis: Analysis, simulation: Simulation
) -> None:
    note = "memory of a rank in our costs: tables, exchange and dense part; a process adds its libraries"
    for text in (describe_analysis(analysis), describe_simulation(simulation), simulation_page(simulation)):
        assert text.count(note) == 1
    assert re.search(rf"fullest rank(?:.*\n)+{re.escape(note)}", describe_analysis(analysis))
    assert plan_page(analysis).count(note) == len(analysis.comparison.proposals)
    for values in (analysis_values(analysis), simulation_values(simulation)):
        assert str(values["counted_memory"]).startswith("tables, exchange and dense part; a process adds")


def test_text_in_a_page_is_escaped() -> None:
    section = Section(title="<b>", texts=["a & b"], header=["<i>"], rows=[["<td>"]])
    page = render_page("<title>", "x < y", [section])
    assert "&lt;b&gt;" in page
    assert "a &amp; b" in page
    assert "<i>" not in page
    assert page.count("<td") == 1


def test_columns_are_laid_out_and_a_short_row_runs_over_the_others() -> None:
    text = lay_out(["name", "ms", "why"], [["a", "1.0", "x"], ["longer", "-", "y"], ["b", "a long reason"]], (0, 2))
    assert text.splitlines() == ["name     ms  why", "a       1.0  x", "longer    -  y", "b       a long reason"]
