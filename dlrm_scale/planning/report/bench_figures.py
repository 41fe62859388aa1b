"""Figures of a benchmark as SVG text."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from dlrm_scale.planning.measuring.ranking import Measured
from dlrm_scale.planning.report.figures import svg_figure
from dlrm_scale.units import MIB

__all__ = ["memory_against_figure", "plan_phases_figure", "times_against_figure"]

_COLORS = ("#4c78a8", "#f58518", "#54a24b", "#b8b8b8", "#e45756", "#72b7b2", "#eeca3b", "#9d755d")


def times_against_figure(name: str, plans: Sequence[tuple[str, Measured, float | None, float | None]]) -> str:
    """Predicted over measured milliseconds of each plan: ours and, beside it, TorchRec's.

    Args:
        name: of the figure.
        plans: (name, measured, ours, TorchRec's).
    """
    written: list[str] = []
    with svg_figure(name, 12, 4.6, written, columns=2) as (left, right):
        for axes, index, title in ((left, 2, "our costs"), (right, 3, "TorchRec's costs")):
            known = [(n, *plan) for n, plan in enumerate(plans, 1) if plan[index] is not None]
            for number, label, time, *predicted in known:
                assert isinstance(time, Measured)
                guess = float(str(predicted[index - 2]))
                error = [[time.median_ms - time.low_ms], [time.high_ms - time.median_ms]]
                axes.errorbar(time.median_ms, guess, xerr=error, color=_COLORS[0], linewidth=0.8, zorder=1)
                # Numbers instead of names: plans of nearly the same speed lie over one another.
                mark = {"marker": "o", "s": 150, "color": "white", "edgecolors": _COLORS[0], "zorder": 2}
                axes.scatter(time.median_ms, guess, label=f"{number}  {label}", **mark)
                axes.annotate(str(number), (time.median_ms, guess), ha="center", va="center", fontsize=7, zorder=3)
            if known:
                _fit_axes(axes, [plan[2].median_ms for plan in known], [float(str(plan[index + 1])) for plan in known])
            axes.set_title(title, fontsize=10, loc="left")
            axes.set_xlabel("measured ms")
            axes.set_ylabel("predicted ms")
            axes.spines[["top", "right"]].set_visible(False)
        right.legend(
            fontsize=7, frameon=False, loc="center left", bbox_to_anchor=(1.0, 0.5), handlelength=0, markerscale=0
        )
    return written[0]


def plan_phases_figure(name: str, plans: Sequence[tuple[str, float, Mapping[str, float]]]) -> str:
    """Predicted phases of each plan, one after the other, and a mark where the measured step ended.

    Args:
        name: of the figure.
        plans: (name, measured ms, predicted ms by phase).
    """
    written: list[str] = []
    phases = list(dict.fromkeys(phase for _, _, parts in plans for phase in parts))
    with svg_figure(name, 10, 1.0 + 0.34 * len(plans), written) as axes:
        places = np.arange(len(plans))[::-1]
        starts = np.zeros(len(plans))
        for index, phase in enumerate(phases):
            widths = np.array([parts.get(phase, 0.0) for _, _, parts in plans])
            axes.barh(places, widths, left=starts, height=0.62, label=phase, color=_COLORS[index % len(_COLORS)])
            starts = starts + widths
        measured = [ms for _, ms, _ in plans]
        axes.scatter(measured, places, marker="|", s=160, color="#1c1c1c", zorder=3, label="measured")
        axes.set_yticks(places, [plan for plan, _, _ in plans], fontsize=8)
        axes.set_xlabel("ms")
        axes.legend(fontsize=8, frameon=False, loc="center left", bbox_to_anchor=(1.0, 0.5))
        axes.spines[["top", "right"]].set_visible(False)
    return written[0]


def memory_against_figure(name: str, plans: Sequence[tuple[str, Sequence[int], Sequence[int]]]) -> str:
    """Predicted over measured peak of every rank under each plan.

    Args:
        name: of the figure.
        plans: (name, predicted bytes by rank, measured bytes by rank).
    """
    written: list[str] = []
    with svg_figure(name, 6, 4.4, written) as axes:
        everything: list[float] = []
        for index, (label, predicted, taken) in enumerate(plans):
            x, y = np.array(taken) / MIB, np.array(predicted) / MIB
            everything += x.tolist()
            marker = "os^Dv"[index // len(_COLORS) % 5]
            axes.scatter(x, y, s=18, color=_COLORS[index % len(_COLORS)], marker=marker, label=label)
        _diagonal(axes, everything)
        axes.set_xlabel("measured MiB")
        axes.set_ylabel("predicted MiB")
        axes.legend(fontsize=7, frameon=False, loc="center left", bbox_to_anchor=(1.0, 0.5))
        axes.spines[["top", "right"]].set_visible(False)
    return written[0]


def _fit_axes(axes: Any, measured: Sequence[float], predicted: Sequence[float]) -> None:
    """Show the points, and the diagonal as far as it passes them."""
    _diagonal(axes, [max(*measured, *predicted)])
    axes.set_xlim(0.95 * min(measured), 1.05 * max(measured))
    axes.set_ylim(0.9 * min(predicted), 1.1 * max(predicted))


def _diagonal(axes: Any, values: Sequence[float]) -> None:
    """Where both are equal, and 10 % beside it."""
    if not values:
        return
    ends = np.array([0.0, 1.1 * max(values)])
    axes.plot(ends, ends, color="#888", linewidth=1)
    axes.fill_between(ends, 0.9 * ends, 1.1 * ends, color="#eeeeee", zorder=0)
