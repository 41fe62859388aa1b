"""The page of a benchmark: predicted against measured time, phases of each plan, predicted against measured memory."""

from dlrm_scale.planning.measuring.bench_summary import BenchSummary
from dlrm_scale.planning.report.bench_figures import memory_against_figure, plan_phases_figure, times_against_figure
from dlrm_scale.planning.report.bench_text import agreement_rows, measured_rows, refused_rows, verdict
from dlrm_scale.planning.report.page import Section, render_page

__all__ = ["bench_page"]


def bench_page(summary: BenchSummary, title: str, about: str) -> str:
    """Render it."""
    rows = [row for row in summary.rows if row.time is not None and not row.same_as]
    header, cells = measured_rows(summary)
    sections = [
        Section(title="Measured steps", texts=verdict(summary), header=header, rows=cells, words=(0, 9)),
        Section(
            title="Predicted against measured",
            figure=times_against_figure(
                "times", [(r.name, r.time, r.ours_ms, r.torchrec_ms) for r in rows if r.time is not None]
            ),
            header=agreement_rows(summary)[0],
            rows=agreement_rows(summary)[1],
        ),
        Section(
            title="Phases of each plan, predicted, beside what was measured",
            figure=plan_phases_figure(
                "phases", [(r.name, r.time.median_ms, r.slowest_ms or {}) for r in rows if r.time is not None]
            ),
        ),
    ]
    known = [r for r in rows if r.peak_bytes]
    if known:
        sections.append(
            Section(
                title="Memory by rank, predicted against measured",
                figure=memory_against_figure("memory", [(r.name, r.predicted_bytes, r.peak_bytes) for r in known]),
            )
        )
    refused = refused_rows(summary)
    if refused:
        sections.append(
            Section(
                title="Not measured", header=["plan", "reason"], rows=[list(pair) for pair in refused], words=(0, 1)
            )
        )
    return render_page(title, about, sections)
