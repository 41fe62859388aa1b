"""A benchmark of plans for the terminal."""

from collections.abc import Sequence

from dlrm_scale.planning.measuring.bench_summary import BenchSummary, PlanRow
from dlrm_scale.planning.measuring.ranking import Agreement
from dlrm_scale.planning.report.plan_text import lay_out
from dlrm_scale.units import format_bytes

__all__ = ["agreement_rows", "describe_bench", "measured_rows", "refused_rows", "verdict"]


def describe_bench(summary: BenchSummary, about: str) -> str:
    """Plans fastest first, those that weren't measured with the reason, and how good the predictions were."""
    parts = [about, lay_out(*measured_rows(summary), left=(0, 9))]
    refused = refused_rows(summary)
    if refused:
        parts.append("not measured:\n" + "\n".join(f"  {name}: {reason}" for name, reason in refused))
    parts.append(lay_out(*agreement_rows(summary), left=(0,)))
    parts.append("\n".join(verdict(summary)))
    return "\n\n".join(parts)


def measured_rows(summary: BenchSummary) -> tuple[list[str], list[list[str]]]:
    """Header and cells of the plans that were measured; = marks those that tie with the fastest."""
    clock = "wall" if summary.clock == "elapsed" else "CPU"
    other = "CPU" if summary.clock == "elapsed" else "wall"
    rows = []
    for row in summary.rows:
        if row.time is None:
            continue
        time = row.time
        rows.append(
            [
                row.name,
                f"{time.median_ms:.2f}",
                f"{time.low_ms:.2f}-{time.high_ms:.2f}",
                "=" if time.ties_with_best else "",
                _ms(row.cpu_ms if summary.clock == "elapsed" else row.wall_ms),
                _ms(row.ours_ms),
                "-" if row.ours_ms is None else f"{row.ours_ms / time.median_ms - 1:+.0%}",
                _ms(row.torchrec_ms),
                _memory(row),
                f"as {row.same_as}" if row.same_as else _types(row),
            ]
        )
    header = ["plan", f"{clock} ms", "95 %", "tie", f"{other} ms", "ours", "error", "torchrec's"]
    return [*header, "peak (predicted)", "tables"], rows


def refused_rows(summary: BenchSummary) -> list[tuple[str, str]]:
    """Name and reason of each plan that wasn't measured."""
    return [(row.name, row.reason) for row in summary.rows if row.time is None]


def agreement_rows(summary: BenchSummary) -> tuple[list[str], list[list[str]]]:
    """Header and cells: our predictions, TorchRec's, and what one half of the rounds says of the other."""
    rows = [_agreement("our costs", summary.ours), _agreement("TorchRec's costs", summary.torchrec)]
    noise = summary.noise
    if noise is not None:
        rows.append(
            ["half of the rounds", f"{noise.tau:.2f}", _share(noise.pairs_right), f"{noise.difference:.1%}"] + ["-"] * 3
        )
    header = ["predicted by", "tau", "pairs >10 % apart right", "error", f"after {summary.anchor}", "regret"]
    return [*header, "top-3 regret"], rows


def verdict(summary: BenchSummary) -> list[str]:
    """What a reader must know, a line each."""
    lines = []
    best = summary.best
    if best is not None and best.time is not None:
        ties = [r.name for r in summary.rows[1:] if r.time is not None and r.time.ties_with_best and not r.same_as]
        lines.append(f"fastest: {best.name}" + (f"; can't be told from {', '.join(ties)}" if ties else ""))
    if summary.memory_error is not None:
        lines.append(
            f"memory of the fullest rank, predicted against measured: {summary.memory_error:.1%} off on average"
        )
    lines.append(
        f"{summary.rounds} rounds of shuffled order; losses of all plans agree to {summary.loss_difference:.1g}"
    )
    if summary.groups > 1:
        lines.append(
            f"plans didn't fit together: {summary.groups} groups, brought together by {summary.anchor}'s times"
        )
    if summary.stopped:
        lines.append("a signal ended it early: finished rounds count")
    least, middle, most = summary.loads
    load = f"load average {middle:.1f} ({least:.1f} to {most:.1f}) on {summary.cores} cores"
    if summary.busy:
        means = "elapsed times are mostly other programs'" if summary.clock == "elapsed" else "CPU times are compared"
        load = f"BUSY MACHINE: {load}: {means}"
    return [*lines, load]


def _agreement(name: str, found: Agreement | None) -> list[str]:
    if found is None:
        return [name, *["-"] * 6]
    return [
        name,
        f"{found.tau:.2f}",
        f"{_share(found.pairs_right)} of {found.pairs}",
        f"{found.error:.1%}",
        "-" if found.anchored_error is None else f"{found.anchored_error:.1%}",
        f"{found.regret:.1%}",
        f"{found.top3_regret:.1%}",
    ]


def _share(share: float | None) -> str:
    return "-" if share is None else f"{share:.0%}"


def _ms(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}"


def _memory(row: PlanRow) -> str:
    if not row.peak_bytes:
        return "-"
    error = row.memory_error
    return f"{format_bytes(max(row.peak_bytes))}" + ("" if error is None else f" ({error:+.0%})")


def _types(row: PlanRow) -> str:
    return ", ".join(f"{count} {kind}" for kind, count in _few(row.types))


def _few(types: Sequence[tuple[str, int]]) -> Sequence[tuple[str, int]]:
    return types[:4]
