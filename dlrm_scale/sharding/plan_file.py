"""A sharding plan as people read it: rows of a table, and `plan.json` in the run folder."""

import json
from dataclasses import asdict
from pathlib import Path

from dlrm_scale.errors import PlanError
from dlrm_scale.layout import ShardLayout, ShardRegion, TableLayout
from dlrm_scale.schema import TableSpec

__all__ = ["load_plan", "plan_rows", "save_plan", "state_bytes"]

_VERSION = 1


def state_bytes(rows: int, columns: int, optimizer: str) -> int:
    """Bytes of optimizer state of a shard: one float32 a row, or two a weight, or none."""
    return {"rowwise_adagrad": 4 * rows, "adam": 8 * rows * columns}.get(optimizer, 0)


def plan_rows(layout: ShardLayout, optimizer: str) -> list[dict[str, object]]:
    """Describe a layout, one row a table.

    Keys: table, rows, dim, type, shards, ranks (those that hold a non-empty shard), bytes_per_rank (weights and
    state on the fullest rank).
    """
    return [_row(table, layout.ranks, optimizer) for table in layout.tables]


def save_plan(path: Path, layout: ShardLayout) -> None:
    """Write a layout as JSON. For reading; a run plans anew when it starts."""
    content = {"version": _VERSION, "fingerprint": layout.fingerprint(), **asdict(layout)}
    path.write_text(json.dumps(content, indent=1) + "\n")


def load_plan(path: Path) -> ShardLayout:
    """Read what `save_plan` wrote.

    Raises:
        PlanError: the file can't be read, is of a newer version, or was changed by hand.
    """
    try:
        content = json.loads(path.read_text())
        version = content["version"]
        tables = tuple(_table(t) for t in content["tables"]) if version == _VERSION else ()
        layout = ShardLayout(ranks=content["ranks"], tables=tables)
        fingerprint = content["fingerprint"]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise PlanError(f"{path}: not a sharding plan: {error!r}") from error
    if version != _VERSION:
        raise PlanError(f"{path}: version {version}; this release reads {_VERSION}")
    if layout.fingerprint() != fingerprint:
        raise PlanError(f"{path}: its fingerprint doesn't match its tables; it was changed after it was written")
    return layout


def _table(content: dict[str, object]) -> TableLayout:
    fields = dict(content)
    spec, regions = fields.pop("spec"), fields.pop("regions")
    return TableLayout(
        spec=TableSpec(**spec),  # type: ignore[arg-type]
        regions=tuple(ShardRegion(**r) for r in regions),  # type: ignore[attr-defined]
        **fields,  # type: ignore[arg-type]
    )


def _row(table: TableLayout, ranks: int, optimizer: str) -> dict[str, object]:
    held = [0] * ranks
    for region in table.regions:
        size_bytes = 4 * region.rows * region.columns + state_bytes(region.rows, region.columns, optimizer)
        for rank in range(ranks) if table.replicated else (region.rank,):
            held[rank] += size_bytes
    return {
        "table": table.spec.name,
        "rows": table.spec.rows,
        "dim": table.spec.dim,
        "type": table.sharding_type,
        "shards": len(table.regions),
        "ranks": [rank for rank, size_bytes in enumerate(held) if size_bytes],
        "bytes_per_rank": max(held),
    }
