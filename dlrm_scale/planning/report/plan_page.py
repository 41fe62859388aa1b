"""Pages of plans and simulations."""

from dlrm_scale.planning.plan.analysis import Analysis
from dlrm_scale.planning.plan.explain import describe_bottleneck
from dlrm_scale.planning.plan.memory_caps import describe_memory_caps
from dlrm_scale.planning.plan.simulate import Simulation
from dlrm_scale.planning.report.cluster_source import describe_source
from dlrm_scale.planning.report.figures import gap_figure, memory_figure, phases_figure, scaling_figure
from dlrm_scale.planning.report.page import Section, render_page
from dlrm_scale.planning.report.plan_text import (
    MEMORY_NOTE,
    describe_knee,
    describe_request,
    describe_wide,
    rating_rows,
    scale_rows,
    table_rows,
)

__all__ = ["plan_page", "plan_sections", "simulation_page", "simulation_sections"]


def plan_page(analysis: Analysis) -> str:
    """Render the page of a plan."""
    request = analysis.comparison.request
    about = f"{describe_request(request)}. {describe_source(request.cluster)}"
    return render_page(f"Sharding plan: {request.tables.name}", about, plan_sections(analysis))


def simulation_page(simulation: Simulation) -> str:
    """Render the page of a simulation."""
    request = simulation.request
    about = f"{describe_request(request)}. {describe_source(request.cluster)}"
    return render_page(f"Devices for {request.tables.name}", about, simulation_sections(simulation))


def plan_sections(analysis: Analysis) -> list[Section]:
    """Gap to the bound, the bottleneck in words, phases and memory by rank, tables."""
    comparison = analysis.comparison
    request, chosen = comparison.request, comparison.chosen
    header, rows = rating_rows(analysis, timing=False)
    bars = [
        (f"{p.planner}, {'our' if name == 'dlrm_scale' else name} costs", r.bottleneck_ms, r.bound_ms)
        for p in comparison.proposals
        for name, r in p.ratings.items()
    ]
    notes = [f"{name}: {reason}" for name, reason in comparison.failures.items()]
    sections = [
        Section(
            title="Plans and their bounds",
            texts=notes,
            figure=gap_figure("gap", bars),
            header=header,
            rows=rows,
            words=(0, 1, header.index("fullest rank")),
        )
    ]
    told = []
    if chosen.planner in analysis.bottlenecks:
        told.append(describe_bottleneck(analysis.bottlenecks[chosen.planner], request.ranks, optimal=chosen.optimal))
    if analysis.memory_caps is not None:
        told.append(describe_memory_caps(analysis.memory_caps))
    if analysis.wide is not None:
        told.append(describe_wide(analysis))
    if told:
        sections.append(Section(title="What decides the step", texts=told))
    for index, proposal in enumerate(comparison.proposals):
        load = proposal.ratings["dlrm_scale"].load
        sections.append(
            Section(title=f"Time by rank: {proposal.planner}", figure=phases_figure(f"phases{index}", load.phases_ms))
        )
        sections.append(
            Section(
                title=f"Memory by rank: {proposal.planner}",
                texts=[MEMORY_NOTE],
                figure=memory_figure(f"memory{index}", load.memory_bytes, load.memory_limit_bytes),
            )
        )
    header, rows = table_rows(chosen, request, most=len(chosen.shapes))
    sections.append(Section(title=f"Tables of {chosen.planner}'s plan", header=header, rows=rows, words=(0, 4, 5)))
    return sections


def simulation_sections(simulation: Simulation) -> list[Section]:
    """Speed and efficiency by number of devices, and the knee."""
    header, rows = scale_rows(simulation)
    figure = scaling_figure("scaling", simulation.scales, simulation.knee)
    texts = [*describe_knee(simulation), MEMORY_NOTE]
    return [Section(title="By number of devices", texts=texts, figure=figure, header=header, rows=rows, words=(6, 7))]
