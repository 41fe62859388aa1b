"""An answer of the planner for the terminal."""

from collections import Counter
from collections.abc import Sequence

from dlrm_scale.planning.costs.step_setting import COUNTED_MEMORY
from dlrm_scale.planning.plan.analysis import Analysis
from dlrm_scale.planning.plan.compare import PlanDifference
from dlrm_scale.planning.plan.explain import describe_bottleneck
from dlrm_scale.planning.plan.memory_caps import describe_memory_caps
from dlrm_scale.planning.plan.proposal import Proposal, Rating
from dlrm_scale.planning.plan.request import PlanRequest
from dlrm_scale.planning.plan.simulate import KNEE_RULE, WIDE_GAP, Simulation
from dlrm_scale.planning.report.cluster_source import describe_source
from dlrm_scale.sharding.plan_rows import state_bytes
from dlrm_scale.sharding.shard_shapes import HOST_TYPES, TableShape, table_layout
from dlrm_scale.units import format_bytes, format_count, format_seconds

__all__ = [
    "MEMORY_NOTE",
    "describe_analysis",
    "describe_difference",
    "describe_knee",
    "describe_request",
    "describe_simulation",
    "describe_wide",
    "lay_out",
    "rating_rows",
    "scale_rows",
    "table_rows",
]

_TABLES_SHOWN = 40
MEMORY_NOTE = f"memory of a rank in our costs: {COUNTED_MEMORY}"


def describe_analysis(analysis: Analysis) -> str:
    """Plans side by side, the bottleneck in words, what memory forces, and the tables of the chosen plan."""
    comparison = analysis.comparison
    request, chosen = comparison.request, comparison.chosen
    header, rows = rating_rows(analysis)
    parts = [
        f"{describe_request(request)}\n{describe_source(request.cluster)}",
        f"{lay_out(header, rows, left=(0, 1, header.index('fullest rank')))}\n{MEMORY_NOTE}",
    ]
    parts += [f"{name}: {reason}" for name, reason in comparison.failures.items()]
    for proposal in comparison.proposals:
        if proposal.planner in analysis.bottlenecks and "for the costs of" not in proposal.planner:
            told = describe_bottleneck(analysis.bottlenecks[proposal.planner], request.ranks, optimal=proposal.optimal)
            parts.append(f"{proposal.planner}, in our costs:\n{_indented(told)}")
    if analysis.memory_caps is not None:
        parts.append(describe_memory_caps(analysis.memory_caps))
    if analysis.wide is not None:
        parts.append(describe_wide(analysis))
    parts.append(f"the plan of {chosen.planner}:\n{_tables(chosen, request)}")
    return "\n\n".join(parts)


def describe_simulation(simulation: Simulation) -> str:
    """One line a number of devices, the knee, and whether the space is the limit there."""
    request = simulation.request
    about = (
        f"{request.tables.name} on {request.cluster.name}, {format_count(request.batch_size_per_rank)} rows a rank, "
        f"{request.space} space\n{describe_source(request.cluster)}"
    )
    rows = f"{lay_out(*scale_rows(simulation), left=(6, 7))}\n{MEMORY_NOTE}"
    return "\n\n".join([about, rows, *describe_knee(simulation)])


def describe_knee(simulation: Simulation) -> list[str]:
    """The knee with its rule, the wide space beside it, and what marked gaps mean."""
    knee = "nothing fits on any of them"
    if simulation.knee is not None:
        knee = f"knee: {format_count(simulation.knee)} devices"
    lines = [f"{knee} ({KNEE_RULE})"]
    ours, wide = simulation.at_knee, simulation.wide_at_knee
    if ours is not None and wide is not None and ours.step_ms is not None and wide.step_ms is not None:
        verdict = "the space isn't the limit"
        if simulation.space_limits:
            verdict = f"{1 - wide.step_ms / ours.step_ms:.1%} less: the space is the limit"
        lines.append(
            f"on {format_count(ours.ranks)} devices the default space takes {ours.step_ms:.3f} ms a step, types that "
            f"cut columns (--allow-split-row-state) {wide.step_ms:.3f} ms; {verdict}"
        )
    if any(scale.gap is not None and scale.gap > WIDE_GAP for scale in simulation.scales):
        lines.append(
            f"! more than {WIDE_GAP:.0%} above the bound: a better plan may exist, and the knee may lie elsewhere"
        )
    return lines


def scale_rows(simulation: Simulation) -> tuple[list[str], list[list[str]]]:
    """Header and cells: each number of devices; a reason in place of numbers where nothing fits."""
    rows = []
    for scale in simulation.scales:
        if scale.step_ms is None or scale.bound_ms is None:
            rows.append([format_count(scale.ranks), "-", scale.reason])
            continue
        assert scale.efficiency is not None
        assert scale.balance is not None
        assert scale.samples_per_second is not None
        rows.append(
            [
                format_count(scale.ranks),
                f"{scale.step_ms:.3f}",
                _gap_cell(scale.gap),
                format_count(scale.samples_per_second),
                f"{scale.efficiency:.0%}",
                f"{scale.balance:.0%}",
                f"{format_bytes(scale.memory_bytes or 0)} of {format_bytes(scale.memory_limit_bytes or 0)}",
                ", ".join(f"{count} {kind}" for kind, count in scale.types),
            ]
        )
    return ["devices", "step ms", "gap", "samples/s", "efficiency", "balance", "fullest rank", "tables"], rows


def _gap_cell(gap: float | None) -> str:
    if gap is None:
        return "-"
    return f"{gap:.1%}" + (" !" if gap > WIDE_GAP else "")


def describe_difference(found: PlanDifference) -> str:
    """Tables that moved, bytes, and the predicted change."""
    lines = [f"{name}: {before} -> {after}" for name, before, after in found.fields]
    lines += [f"only in the first: {', '.join(found.only_before)}"] if found.only_before else []
    lines += [f"only in the second: {', '.join(found.only_after)}"] if found.only_after else []
    if found.moves:
        rows = [[m.table, m.before, m.after, format_bytes(m.moved_bytes)] for m in found.moves[:_TABLES_SHOWN]]
        lines.append(lay_out(["table", "before", "after", "moved"], rows, left=(0, 1, 2)))
        if len(found.moves) > _TABLES_SHOWN:
            lines.append(f"and {len(found.moves) - _TABLES_SHOWN} more tables")
    moved = f"{len(found.moves)} tables lie elsewhere, {format_bytes(found.moved_bytes)} move; {found.same_tables} stay"
    lines.append("every shard stays where it is" if found.equal else moved)
    before, after = found.step_ms
    if before is not None and after is not None:
        change = f" ({after / before - 1:+.1%})" if before else ""
        lines.append(f"predicted step: {before:.3f} ms -> {after:.3f} ms{change}")
        lines += [f"  {name}: {a:.3f} ms -> {b:.3f} ms" for name, (a, b) in found.phases_ms.items() if a != b]
    if found.memory_bytes[0] is not None and found.memory_bytes[1] is not None:
        lines.append(f"fullest rank: {format_bytes(found.memory_bytes[0])} -> {format_bytes(found.memory_bytes[1])}")
    return "\n".join(lines)


def lay_out(header: Sequence[str], rows: Sequence[Sequence[str]], left: Sequence[int] = (0,)) -> str:
    """Columns of equal width; those of `left` begin at the left, the others end at the right.

    The last cell of a row that is shorter than the header runs over the other columns.
    """
    whole = [row for row in [header, *rows] if len(row) == len(header)]
    widths = [max(len(row[i]) for row in whole) for i in range(len(header))]
    for row in rows:
        for i, cell in enumerate(row[:-1]):
            widths[i] = max(widths[i], len(cell))

    def line(row: Sequence[str]) -> str:
        over = len(row) - 1 if len(row) < len(header) else len(header)
        cells = [
            cell if i == over else cell.ljust(widths[i]) if i in left else cell.rjust(widths[i])
            for i, cell in enumerate(row)
        ]
        return "  ".join(cells).rstrip()

    return "\n".join(map(line, [header, *rows]))


def describe_request(request: PlanRequest) -> str:
    """What was asked, in one line."""
    tables, cluster = request.tables, request.cluster
    size = sum(t.spec.weight_bytes for t in tables.tables)
    return (
        f"{tables.name}: {len(tables.tables)} tables, {format_bytes(size)} of weights, {tables.optimizer}; "
        f"{format_count(request.ranks)} ranks of {cluster.name}, {request.ranks_per_host} a host, "
        f"{format_bytes(cluster.memory_bytes)} each ({cluster.reserve:.0%} reserve); "
        f"{format_count(request.batch_size_per_rank)} rows a rank; {request.space} space"
    )


def rating_rows(analysis: Analysis, *, timing: bool = True) -> tuple[list[str], list[list[str]]]:
    """Header and cells: each plan by each model.

    Args:
        analysis: the plans.
        timing: with the time that planning took, which differs from call to call.
    """
    rows = []
    for proposal in analysis.comparison.proposals:
        for name, rating in proposal.ratings.items():
            fullest = max(rating.load.memory_by_rank)
            rows.append(
                [
                    proposal.planner,
                    "ours" if name == "dlrm_scale" else name,
                    f"{rating.bottleneck_ms:.3f}",
                    f"{rating.bound_ms:.3f}" if rating.bound_ms else "-",
                    _rating_gap(rating),
                    f"{format_bytes(fullest)} of {format_bytes(rating.load.memory_limit_bytes)}"
                    + ("" if rating.load.fits else ": doesn't fit"),
                ]
            )
            if timing:
                rows[-1].append("" if proposal.solve_seconds is None else format_seconds(proposal.solve_seconds))
    header = ["plan of", "costs", "bottleneck ms", "bound ms", "gap", "fullest rank"]
    return [*header, "planned in"] if timing else header, rows


def _rating_gap(rating: Rating) -> str:
    if not rating.bound_ms:
        return "-"
    # Only a plan that is proven to be the best has no gap.
    return "<0.01%" if 0 < rating.gap < 5e-5 and not rating.optimal else f"{rating.gap:.2%}"


def describe_wide(analysis: Analysis) -> str:
    """Say what types that cut columns would gain."""
    assert analysis.wide is not None
    ours = next(p for p in analysis.comparison.proposals if p.planner == "dlrm_scale")
    now = ours.ratings["dlrm_scale"].bottleneck_ms
    then = analysis.wide
    if then.step_ms < now * 0.995:
        return (
            f"types that cut columns (--allow-split-row-state) would take {then.step_ms:.3f} ms a step "
            f"({1 - then.step_ms / now:.1%} less); row-wise Adagrad then keeps a state for each column shard"
        )
    return f"types that cut columns (--allow-split-row-state) wouldn't help: {then.step_ms:.3f} ms a step"


def _tables(proposal: Proposal, request: PlanRequest) -> str:
    text = lay_out(*table_rows(proposal, request), left=(0, 4, 5))
    rest = len(proposal.shapes) - _TABLES_SHOWN
    if rest > 0:
        counts = Counter(shape.sharding_type for shape in proposal.shapes)
        kinds = ", ".join(f"{count} {kind}" for kind, count in sorted(counts.items()))
        text += f"\nand {rest} smaller tables; in all {kinds}"
    return text


def table_rows(
    proposal: Proposal, request: PlanRequest, *, most: int = _TABLES_SHOWN
) -> tuple[list[str], list[list[str]]]:
    """Header and cells: the largest tables, how they are cut and where they lie."""
    rows = []
    order = sorted(range(len(proposal.shapes)), key=lambda i: -request.tables.tables[i].spec.weight_bytes)
    for i in order[:most]:
        table, shape = request.tables.tables[i], proposal.shapes[i]
        rows.append(
            [
                table.name,
                format_count(table.rows),
                str(table.dim),
                f"{table.lookups_per_sample:g}",
                shape.sharding_type,
                _where(shape, request),
                format_bytes(_largest_shard_bytes(shape, request, i)),
            ]
        )
    return ["table", "rows", "dim", "ids a row", "type", "where", "largest shard"], rows


def _where(shape: TableShape, request: PlanRequest) -> str:
    if not shape.places:
        return "all ranks"
    unit = "host" if shape.sharding_type in HOST_TYPES else "rank"
    names = [str(place) for place in shape.places]
    shown = ",".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")
    width = f", {shape.columns} columns each" if len(names) > 1 else ""
    return f"{unit} {shown}{width}"


def _largest_shard_bytes(shape: TableShape, request: PlanRequest, index: int) -> int:
    spec = request.tables.tables[index].spec
    layout = table_layout(spec, shape, ranks=request.ranks, ranks_per_host=request.ranks_per_host)
    return max(
        4 * r.rows * r.columns + state_bytes(r.rows, r.columns, request.tables.optimizer) for r in layout.regions
    )


def _indented(text: str) -> str:
    return "\n".join(f"  {line}" for line in text.splitlines())
