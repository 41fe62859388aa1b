"""The sharding plan as text."""

from collections import Counter
from collections.abc import Mapping, Sequence

from dlrm_scale.units import format_bytes, format_count

__all__ = ["describe_plan"]


def describe_plan(rows: Sequence[Mapping[str, object]], owners: Mapping[str, str] | None = None) -> str:
    """Lay a plan out as a table, with a line for the optimizers if they are known.

    Args:
        rows: a table each: table, rows, dim, type, shards, ranks, bytes a rank.
        owners: optimizer of each parameter.
    """
    header = ("table", "rows", "dim", "type", "shards", "ranks", "bytes a rank")
    lines = [
        (
            str(row["table"]),
            format_count(int(str(row["rows"]))),
            str(row["dim"]),
            str(row["type"]),
            str(row["shards"]),
            _compact(row["ranks"]),
            format_bytes(int(str(row["bytes_per_rank"]))),
        )
        for row in rows
    ]
    widths = [max(len(line[i]) for line in [header, *lines]) for i in range(len(header))]
    text = "\n".join(
        "  ".join(cell.ljust(w) for cell, w in zip(line, widths, strict=True)).rstrip() for line in [header, *lines]
    )
    if owners is None:
        return text
    counts = Counter(owners.values())
    return (
        text + "\noptimizers: " + ", ".join(f"{name} owns {count} parameters" for name, count in sorted(counts.items()))
    )


def _compact(ranks: object) -> str:
    assert isinstance(ranks, list)
    if len(ranks) > 2 and ranks == list(range(ranks[0], ranks[-1] + 1)):
        return f"{ranks[0]}-{ranks[-1]}"
    return ",".join(map(str, ranks)) or "-"
