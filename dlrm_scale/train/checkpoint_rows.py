"""What a run's checkpoints held and cost, for the table at its end."""

from collections.abc import Mapping
from typing import Any

from dlrm_scale.units import format_bytes, format_count, format_seconds

__all__ = ["checkpoint_rows"]


def checkpoint_rows(checkpoints: Mapping[str, Any], ranks: int) -> list[tuple[str, str]]:
    """Names and values of `of_slowest_rank`."""
    baselines, deltas, failed = checkpoints["baselines"], checkpoints["deltas"], checkpoints["failed"]
    rows = [
        ("checkpoints", f"{baselines + deltas} committed, {failed} failed"),
        (
            "written to checkpoints",
            f"{baselines} baselines and {deltas} deltas ({checkpoints['policy']}), "
            f"{format_bytes(checkpoints['bytes'])}, {format_count(checkpoints['rows'])} table rows",
        ),
    ]
    if checkpoints["most_steps_between"] is not None:
        rows.append(("checkpoint interval", _interval(checkpoints)))
    if checkpoints["measured_overhead"] is not None:
        rows.append(("cost of checkpoints", _cost(checkpoints, ranks)))
    return rows


def _interval(checkpoints: Mapping[str, Any]) -> str:
    fewest, most = checkpoints["fewest_steps_between"], checkpoints["most_steps_between"]
    text = f"{fewest:,} steps" if fewest == most else f"{fewest:,} to {most:,} steps"
    chosen = checkpoints["chosen_intervals"]
    if chosen:
        text += f"; chosen (auto): {', '.join(f'{steps:,}' for _, steps in chosen[-5:])}"
    return text


def _cost(checkpoints: Mapping[str, Any], ranks: int) -> str:
    stalls, slower = checkpoints["stall_seconds"], checkpoints["interference_seconds"]
    stall_share, share = checkpoints["stall_share"], checkpoints["measured_overhead"]
    text = f"{share:.2%} of the training time"
    if ranks > 1:
        text += f" on rank {checkpoints['slowest_rank']}, which lost most"
    text += f": stalls {stall_share:.2%} ({format_seconds(stalls)})"
    text += f", slower steps {share - stall_share:.2%} ({format_seconds(slower)})"
    if checkpoints["too_noisy_to_predict"]:
        return text + "; too noisy to predict"
    predicted = checkpoints["predicted_overhead"]
    return text + ("" if predicted is None else f"; predicted {predicted:.2%}")
