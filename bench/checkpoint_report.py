"""What `checkpoint.py` prints of its result: tables, goals met and missed, and the plot."""

from pathlib import Path
from typing import Any

from checkpoint_parts import BATCH_ROWS, CHAIN_DELTAS
from rounds import show_spread

from dlrm_scale.units import MIB

__all__ = ["goals", "plot", "show"]

# Goal, and how it is written.
GOALS = {
    "bytes of a delta to a full copy": (1 / 15, "1/{:.1f}"),
    "bytes of a delta with int8 rows to a full copy": (1 / 45, "1/{:.1f}"),
    "seconds of a baseline to dcp.save": (0.6, "{:.2f}"),
    f"seconds to restore a baseline and {CHAIN_DELTAS} deltas to dcp.load": (0.7, "{:.2f}"),
    "seconds to restore a long, merged chain to dcp.load": (0.7, "{:.2f}"),
    f"the same with a baseline and {CHAIN_DELTAS} deltas, nothing in the page cache": (0.7, "{:.2f}"),
    "the same with a long, merged chain, nothing in the page cache": (0.7, "{:.2f}"),
    "memory of a merge to its stated bound": (1.0, "{:.2f}"),
    "stall, share of an interval": (0.01, "{:.2%}"),
    "tracking, share of a step": (0.0025, "{:.3%}"),
    "overhead of an interval": (0.02, "{:.2%}"),
}


def goals(result: dict[str, Any]) -> list[dict[str, Any]]:
    """Compare each goal with the median that was measured."""
    write, restore, training = result["write"], result["restore"], result["training"]
    measured = (
        write["delta"]["bytes_to_dcp"]["median"],
        write["delta, int8 rows"]["bytes_to_dcp"]["median"],
        write["baseline"]["seconds_to_dcp"]["median"],
        restore["sides"]["chain"]["to_dcp"]["median"],
        result["long_chain"]["sides"]["chain"]["to_dcp"]["median"],
        restore["sides"]["chain, cold"]["to_dcp"]["median"],
        result["long_chain"]["sides"]["chain, cold"]["to_dcp"]["median"],
        restore["merge"]["memory_bytes"] / restore["merge"]["memory_bound_bytes"],
        training["delta"]["stall_share"]["median"],
        training["tracking_share"]["median"],
        training["delta"]["overhead"]["median"],
    )
    return [
        {"goal": name, "at_most": most, "measured": value, "met": value <= most}
        for (name, (most, _)), value in zip(GOALS.items(), measured, strict=True)
    ]


def show(result: dict[str, Any]) -> None:
    """Print the tables."""
    shape = result["shape"]
    print(f"{shape['rows']:,} rows x {shape['dim']} with row-wise Adagrad state; {result['rounds']} rounds")
    _show_writing(result["write"])
    _show_restoring(result["restore"], result["long_chain"])
    training = result["training"]
    without = show_spread(training["seconds_without"], ".2f")
    print(f"\na checkpoint every {shape['interval_steps']} steps ({without} s without):")
    for name in ("delta", "dcp.async_save"):
        one = training[name]
        print(
            f"{name}: overhead {show_spread(one['overhead'], '+.1%')}, stall {show_spread(one['stall_share'], '.2%')}"
        )
    print(f"tracking: {show_spread(training['tracking_share'], '.3%')} of a step")
    print("\n| skew | steps | rows touched | bytes to a baseline | int8 |\n|---|---|---|---|---|")
    for point in result["curves"]:
        print(
            f"| {point['skew']} | {point['interval_steps']} | {point['rows_share']:.2%} "
            f"| 1/{1 / point['bytes_share']:.1f} | 1/{1 / point['int8_bytes_share']:.1f} |"
        )
    if result["quick"]:
        print("\nThese tables are too small for the goals: the dense part is half of a delta.")
    print("\n| goal | at most | measured | |\n|---|---|---|---|")
    for one in result["goals"]:
        form = GOALS[one["goal"]][1]
        most, measured = (form.format(1 / v if form.startswith("1/") else v) for v in (one["at_most"], one["measured"]))
        print(f"| {one['goal']} | {most} | {measured} | {'met' if one['met'] else 'missed'} |")
    print(f"\nload average {result['stamp']['load_average'][0]}")


def _show_writing(write: dict[str, Any]) -> None:
    print("\n| write | stall, s | until durable, s | CPU s | MiB | seconds to dcp.save | CPU to it | bytes to it |")
    print("|---|---|---|---|---|---|---|---|")
    for name, one in write.items():
        print(
            f"| {name} | {show_spread(one['stall_seconds'], '.2f')} | {show_spread(one['seconds'], '.2f')} "
            f"| {one['cpu_seconds']['median']:.2f} | {one['bytes']['median'] / MIB:.1f} "
            f"| {show_spread(one['seconds_to_dcp'], '.2f')} | {one['cpu_to_dcp']['median']:.2f} "
            f"| 1/{1 / one['bytes_to_dcp']['median']:.1f} |"
        )
    for name, one in write.items():
        if one["parts_bytes"] is not None:
            print(f"{name}, MiB: " + ", ".join(f"{part} {size / MIB:.2f}" for part, size in one["parts_bytes"].items()))


def _show_restoring(restore: dict[str, Any], long: dict[str, Any]) -> None:
    print("\n| restore | s | to dcp.load | bytes to dcp's |\n|---|---|---|---|")
    merged = f"{long['deltas']:,} deltas, merged: {long['manifests_restored']} manifests"
    for sides, chain in ((restore["sides"], f"a baseline and {CHAIN_DELTAS} deltas"), (long["sides"], merged)):
        for name, one in sides.items():
            print(
                f"| {name.replace('chain', chain)} | {show_spread(one['seconds'], '.2f')} "
                f"| {show_spread(one['to_dcp'], '.2f')} | {one['bytes_to_dcp']:.2f} |"
            )
    print(
        f"{long['deltas']:,} deltas of {long['steps_a_delta']} steps, {long['delta_bytes'] / MIB:,.0f} MiB, saved in "
        f"{long['saving_seconds']:.0f} s beside the merger: {long['merges']} merges, {long['new_baselines']} of them "
        f"new baselines, wrote {long['merged_bytes_to_deltas']:.1f} times the deltas' bytes; at most "
        f"{long['most_manifests']} manifests; on disk {long['disk_bytes_to_baseline']:.1f} times a baseline"
    )
    merge = restore["merge"]
    print(
        f"merging {merge['manifests']} into a baseline: {merge['memory_bytes'] / MIB:.0f} MiB of memory above the "
        f"start, {merge['memory_bound_bytes'] / MIB:.0f} stated, {merge['process_bytes'] / MIB:.0f} the whole process; "
        f"read {merge['read_bytes'] / merge['source_bytes']:.3f} times the files, wrote "
        f"{merge['written_bytes'] / merge['result_bytes']:.3f} times the result; {merge['seconds']:.1f} s, "
        f"{merge['cpu_seconds']:.1f} CPU s"
    )


def plot(result: dict[str, Any], path: Path) -> None:
    """Draw the curves."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        print("no plot: install matplotlib")
        return
    axes = (figure := Figure(figsize=(7, 4.5))).subplots()
    for skew in dict.fromkeys(point["skew"] for point in result["curves"]):
        points = [point for point in result["curves"] if point["skew"] == skew]
        steps = [point["interval_steps"] for point in points]
        line = axes.plot(steps, [100 * p["rows_share"] for p in points], "o-", label=f"rows touched, skew {skew}")
        int8 = [100 * p["int8_bytes_share"] for p in points]
        axes.plot(steps, int8, "--", color=line[0].get_color(), label=f"bytes with int8 rows, skew {skew}")
    axes.set(
        xscale="log", yscale="log", xlabel=f"steps of {BATCH_ROWS} rows between checkpoints", ylabel="% of a baseline"
    )
    axes.grid(visible=True, which="both", alpha=0.3)
    axes.legend(fontsize=7)
    figure.savefig(path, bbox_inches="tight")
    print("plot:", path)
