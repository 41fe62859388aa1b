"""The table of where the time went, for people."""

from typing import Any

from dlrm_scale.units import format_seconds

__all__ = ["attribution_lines"]

_EVEN = 1.05
"""An imbalance up to this is called even: two ranks on two cores of a busy machine differ by as much."""

_EXPLAINED = {
    "input_all_to_all": "input all-to-all",
    "output_all_to_all": "output all-to-all",
    "backward": "backward and update",
    "agreement": "ranks' agreement",
    "checkpoint": "saving, last wait included",
}


def attribution_lines(attribution: dict[str, Any]) -> list[str]:
    """Write `Attribution.as_dict()` as a table and the sentences that name a slow rank.

    Columns: mean seconds over ranks, share of the wall time, the rank with most of it, and its seconds over the mean.
    """
    ranks = len(attribution["compute_seconds_per_rank"])
    table = [["main thread", "seconds", "share", *(["slowest rank", "imbalance"] if ranks > 1 else [])]]
    for name, entry in attribution["intervals"].items():
        cells = [_name(name), f"{entry['seconds']:.2f}", f"{entry['share']:.1%}"]
        if ranks > 1:
            slowest = f"rank {entry['slowest_rank']}: {format_seconds(entry['slowest_rank_seconds'])}"
            cells += [slowest, f"{entry['imbalance']:.2f}"]
        table.append(cells)
    lines = _aligned(table)
    for where, seconds in (
        ("on the GPU's own timeline", attribution["gpu_seconds"]),
        ("hidden in other threads", attribution["hidden_seconds"]),
    ):
        if seconds:
            lines.append(f"{where}: " + ", ".join(f"{_name(name)} {format_seconds(s)}" for name, s in seconds.items()))
    if ranks > 1:
        lines.append(_balance(attribution))
    return lines


def _name(interval: str) -> str:
    return _EXPLAINED.get(interval, interval.replace("_", " "))


def _balance(attribution: dict[str, Any]) -> str:
    computed, exchanged = attribution["compute_seconds_per_rank"], attribution["exchange_seconds_per_rank"]
    imbalance, slowest = attribution["compute_imbalance"], attribution["slowest_rank"]
    waiting = exchanged.index(max(exchanged))
    share = exchanged[waiting] / attribution["wall_seconds"]
    if imbalance <= _EVEN:
        return f"ranks compute evenly (imbalance {imbalance:.2f}); exchanges take up to {share:.0%} (rank {waiting})"
    mean = sum(computed) / len(computed)
    return (
        f"rank {slowest} is the slowest: it computes for {format_seconds(computed[slowest])}, the mean is "
        f"{format_seconds(mean)} (imbalance {imbalance:.2f}); rank {waiting} spends {share:.0%} of the time in "
        "exchanges with the others, waiting included"
    )


def _aligned(table: list[list[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    return ["  ".join([row[0].ljust(widths[0]), *map(str.rjust, row[1:], widths[1:])]) for row in table]
