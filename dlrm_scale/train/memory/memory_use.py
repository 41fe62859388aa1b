"""Predicted and actual memory side by side, at the end of a run."""

from dataclasses import dataclass

from dlrm_scale.sharding.ranks import Ranks
from dlrm_scale.train.memory.estimate_peak import MemoryEstimate
from dlrm_scale.train.memory.process_memory import peak_device_bytes, peak_resident_bytes
from dlrm_scale.units import format_bytes

__all__ = ["memory_rows", "memory_use"]


@dataclass(frozen=True, kw_only=True)
class _RankUse:
    estimate: MemoryEstimate
    peak_bytes: int
    peak_device_bytes: int


def memory_use(estimate: MemoryEstimate, ranks: Ranks) -> dict[str, object]:
    """Bring all ranks' predictions and peaks together. A collective.

    Args:
        estimate: this rank's.
        ranks: the process group.

    Returns:
        JSON-ready, equal on all ranks: `ranks`, a dict each with `rank`, `predicted_bytes` and `peak_bytes` of main
        memory, `held_bytes` (before the tables, libraries included), on a GPU `predicted_device_bytes` and
        `peak_device_bytes`; and `items`, the predicted bytes by name on the rank with the highest prediction,
        `items_rank`.
    """
    mine = _RankUse(
        estimate=estimate, peak_bytes=peak_resident_bytes(), peak_device_bytes=peak_device_bytes(ranks.device)
    )
    uses = [use for use in ranks.gather_objects(mine) if isinstance(use, _RankUse)]
    fullest = max((use.estimate for use in uses), key=lambda e: (e.host_bytes + e.device_bytes, -e.rank))
    return {
        "ranks": [_of_rank(use) for use in uses],
        "items_rank": fullest.rank,
        "items": {item.name: item.size_bytes for item in fullest.items},
    }


def memory_rows(memory: dict[str, object]) -> list[tuple[str, str]]:
    """Names and values for the end-of-run table: the rank with the highest peak, and the largest items."""
    ranks, items = memory.get("ranks"), memory.get("items")
    if not isinstance(ranks, list) or not isinstance(items, dict) or not ranks:
        return []
    rows = []
    for where, predicted, peak in (
        ("memory", "predicted_bytes", "peak_bytes"),
        ("GPU memory", "predicted_device_bytes", "peak_device_bytes"),
    ):
        known = [rank for rank in ranks if peak in rank]
        if known:
            worst = max(known, key=lambda rank: int(rank[peak]))
            text = f"{format_bytes(worst[predicted])}, used {format_bytes(worst[peak])} (rank {worst['rank']})"
            rows.append((f"predicted {where}", text))
    largest = sorted(items.items(), key=lambda item: -int(item[1]))[:3]
    rows.append(("most of it for", ", ".join(f"{name} {format_bytes(size)}" for name, size in largest)))
    return rows


def _of_rank(use: _RankUse) -> dict[str, int]:
    values = {
        "rank": use.estimate.rank,
        "predicted_bytes": use.estimate.peak_bytes,
        "peak_bytes": use.peak_bytes,
        "held_bytes": use.estimate.held_bytes,
    }
    if use.peak_device_bytes:
        values["predicted_device_bytes"] = use.estimate.device_bytes
        values["peak_device_bytes"] = use.peak_device_bytes
    return values
