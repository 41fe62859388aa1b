"""Figures as SVG text. Equal values give equal text: no date, no random ids."""

import io
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from dlrm_scale.planning.plan.simulate import Scale
from dlrm_scale.units import GIB

__all__ = ["gap_figure", "memory_figure", "phases_figure", "scaling_figure", "svg_figure"]

_COLORS = ("#4c78a8", "#f58518", "#54a24b", "#b8b8b8", "#e45756", "#72b7b2", "#eeca3b", "#9d755d", "#b279a2", "#ff9da6")


@contextmanager
def svg_figure(name: str, width: float, height: float, written: list[str], columns: int = 1) -> Iterator[Any]:
    """Give matplotlib axes; at the end of the block their SVG text is in `written`.

    Args:
        name: of the figure; keeps the ids of several on one page apart.
        width: inches.
        height: inches.
        written: gets the text.
        columns: axes beside one another; more than one are given as an array.
    """
    import matplotlib
    from matplotlib.figure import Figure

    with warnings.catch_warnings(), matplotlib.rc_context({"svg.hashsalt": name, "svg.fonttype": "none"}):
        figure = Figure(figsize=(width, height), layout="constrained")
        axes = figure.subplots(1, columns)
        yield axes
        text = io.StringIO()
        figure.savefig(text, format="svg", metadata={"Date": None})
    svg = text.getvalue()
    written.append(svg[svg.index("<svg") :])


def phases_figure(name: str, phases_ms: Mapping[str, Sequence[float]]) -> str:
    """Phase times by rank, one on the other."""
    return _stacked(name, phases_ms, "ms", "time by rank and phase", limit=None)


def memory_figure(name: str, memory_bytes: Mapping[str, Sequence[int]], limit_bytes: int) -> str:
    """Memory by rank and part, and what there is."""
    parts = {part: [size / GIB for size in sizes] for part, sizes in memory_bytes.items()}
    return _stacked(name, parts, "GiB", "memory by rank and part", limit=limit_bytes / GIB)


def gap_figure(name: str, plans: Sequence[tuple[str, float, float]]) -> str:
    """Bottlenecks beside their bounds.

    Args:
        name: of the figure.
        plans: (words, bottleneck in ms, bound in ms or 0 where there is none).
    """
    written: list[str] = []
    with svg_figure(name, 9, 0.7 + 0.42 * len(plans), written) as axes:
        places = np.arange(len(plans))[::-1]
        axes.barh(places, [plan[1] for plan in plans], height=0.6, color=_COLORS[0])
        for place, (_, bottleneck, bound) in zip(places, plans, strict=True):
            gap = f"  {bottleneck:.3f} ms" + (f", {bottleneck / bound - 1:.1%} above its bound" if bound else "")
            axes.text(bottleneck, place, gap, va="center", fontsize=8)
            if bound:
                axes.plot([bound, bound], [place - 0.4, place + 0.4], color=_COLORS[4], linewidth=2)
        axes.set_yticks(places, [plan[0] for plan in plans], fontsize=8)
        axes.set_xlim(0, 1.35 * max(plan[1] for plan in plans))
        axes.set_xlabel("predicted step in ms; the line is the bound")
        _plain(axes)
    return written[0]


def scaling_figure(name: str, scales: Sequence[Scale], knee: int | None) -> str:
    """Samples a second and efficiency by number of devices."""
    fitting = [scale for scale in scales if scale.samples_per_second is not None]
    written: list[str] = []
    with svg_figure(name, 10, 3.6, written, columns=2) as (speed, share):
        ranks = [scale.ranks for scale in fitting]
        rates = [float(scale.samples_per_second or 0) for scale in fitting]
        if fitting:
            speed.plot(ranks, rates, marker="o", color=_COLORS[0], label="predicted")
            speed.plot(ranks, [rates[0] * r / ranks[0] for r in ranks], "--", color=_COLORS[3], label="in proportion")
            share.plot(
                ranks,
                [100 * float(s.efficiency or 0) for s in fitting],
                marker="o",
                color=_COLORS[0],
                label="efficiency",
            )
            share.plot(
                ranks, [100 * float(s.balance or 0) for s in fitting], marker="s", color=_COLORS[1], label="balance"
            )
            speed.set_yscale("log")
        for axes in (speed, share):
            axes.set_xscale("log", base=2)
            if fitting:
                axes.set_xticks(ranks, [str(r) for r in ranks], fontsize=8)
            axes.minorticks_off()
            axes.set_xlabel("devices")
            if knee is not None:
                axes.axvline(knee, color=_COLORS[4], linewidth=1, label=f"knee: {knee}")
            if fitting:
                axes.legend(fontsize=8, frameon=False)
            _plain(axes)
        speed.set_ylabel("samples a second")
        share.set_ylabel("%")
        share.set_ylim(0, 105)
    return written[0]


def _stacked(name: str, parts: Mapping[str, Sequence[float]], unit: str, title: str, limit: float | None) -> str:
    values = np.array(list(parts.values()), dtype=float)
    ranks = values.shape[1]
    # Points only where something changes: 4,096 ranks that are alike take as few as 8.
    changes = np.flatnonzero((np.diff(values, axis=1) != 0).any(axis=0)) + 1
    edges = np.concatenate([[0], changes, [ranks]])
    steps = values[:, np.append(edges[:-1], ranks - 1)]
    written: list[str] = []
    with svg_figure(name, 10, 3.4, written) as axes:
        base = np.zeros(len(edges))
        for index, (part, heights) in enumerate(zip(parts, steps, strict=True)):
            if heights.any():
                axes.fill_between(
                    edges,
                    base,
                    base + heights,
                    step="post",
                    label=part,
                    color=_COLORS[index % len(_COLORS)],
                    linewidth=0,
                )
            base = base + heights
        if limit is not None:
            axes.axhline(limit, color="#1c1c1c", linewidth=1.2, linestyle="--", label="capacity")
        axes.set_xlim(0, ranks)
        axes.set_ylim(0, 1.08 * max(float(base.max()), limit or 0.0, 1e-9))
        if ranks <= 16:
            axes.set_xticks(np.arange(ranks) + 0.5, [str(r) for r in range(ranks)])
        axes.set_xlabel("rank")
        axes.set_ylabel(unit)
        axes.set_title(title, fontsize=10, loc="left")
        axes.legend(fontsize=8, frameon=False, loc="center left", bbox_to_anchor=(1.0, 0.5))
        _plain(axes)
    return written[0]


def _plain(axes: Any) -> None:
    axes.spines[["top", "right"]].set_visible(False)
