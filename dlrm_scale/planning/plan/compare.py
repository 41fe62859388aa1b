"""Two plan files side by side: which tables moved, how many bytes, and what is predicted to change."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass

import numpy as np

from dlrm_scale.layout import ShardRegion, TableLayout
from dlrm_scale.sharding.plan_file import PlanFile, by_rank
from dlrm_scale.sharding.plan_rows import state_bytes

__all__ = ["PlanDifference", "TableMove", "compare_plans"]


@dataclass(frozen=True, kw_only=True, slots=True)
class TableMove:
    """One table that lies elsewhere.

    Attributes:
        table: its name.
        before: its sharding type, with the number of shards.
        after: likewise.
        moved_bytes: rows and state that a rank holds after and didn't before, over all ranks.
    """

    table: str
    before: str
    after: str
    moved_bytes: int


@dataclass(frozen=True, kw_only=True)
class PlanDifference:
    """What changes from one plan to another.

    Attributes:
        fields: (name, before, after) of what the plans are for and who made them.
        moves: tables that lie elsewhere, most bytes first.
        same_tables: number of tables that stay.
        moved_bytes: over all tables.
        only_before: tables that only the first plan has.
        only_after: tables that only the second has, or that have another size there.
        step_ms: predicted, before and after; None where it isn't.
        phases_ms: the slowest rank's by phase, before and after.
        memory_bytes: the fullest rank's, before and after.
    """

    fields: tuple[tuple[str, object, object], ...]
    moves: tuple[TableMove, ...]
    same_tables: int
    moved_bytes: int
    only_before: tuple[str, ...]
    only_after: tuple[str, ...]
    step_ms: tuple[float | None, float | None]
    phases_ms: Mapping[str, tuple[float, float]]
    memory_bytes: tuple[float | None, float | None]

    @property
    def equal(self) -> bool:
        """Whether every shard stays where it is."""
        return not (self.moves or self.only_before or self.only_after)

    def as_dict(self) -> dict[str, object]:
        """JSON-ready values by name."""
        return asdict(self) | {"equal": self.equal}


def compare_plans(before: PlanFile, after: PlanFile) -> PlanDifference:
    """Compare shard by shard; the optimizer of the second plan decides the bytes of state."""
    first = {t.spec.name: t for t in before.layout().tables}
    second = {t.spec.name: t for t in after.layout().tables}
    kept = [name for name in first if name in second and first[name].spec == second[name].spec]
    ranks = max(before.ranks, after.ranks)
    moves = []
    for name in kept:
        moved = _moved_bytes(first[name], second[name], ranks, before.ranks, after)
        if moved or _words(first[name]) != _words(second[name]):
            moves.append(
                TableMove(table=name, before=_words(first[name]), after=_words(second[name]), moved_bytes=moved)
            )
    moves.sort(key=lambda move: (-move.moved_bytes, move.table))
    names = ("planner", "ranks", "ranks_per_host", "optimizer", "batch_size_per_rank", "inputs", "versions")
    return PlanDifference(
        fields=tuple(
            (name, getattr(before, name), getattr(after, name))
            for name in names
            if getattr(before, name) != getattr(after, name)
        ),
        moves=tuple(moves),
        same_tables=len(kept) - len(moves),
        moved_bytes=sum(move.moved_bytes for move in moves),
        only_before=tuple(name for name in first if name not in kept),
        only_after=tuple(name for name in second if name not in kept),
        step_ms=(_step(before), _step(after)),
        phases_ms=_phases(before, after),
        memory_bytes=(_fullest(before), _fullest(after)),
    )


def _words(table: TableLayout) -> str:
    if table.replicated or len(table.regions) == 1:
        return table.sharding_type
    return f"{table.sharding_type} of {len(table.regions)}"


def _moved_bytes(first: TableLayout, second: TableLayout, ranks: int, ranks_before: int, after: PlanFile) -> int:
    """Bytes that ranks hold after and didn't hold before."""
    held = _by_rank(first, ranks_before)
    moved = 0
    for rank, regions in _by_rank(second, after.ranks).items():
        for region in regions:
            size = _bytes(region.rows, region.columns, after.optimizer)
            kept = sum(_overlap_bytes(region, old, after.optimizer) for old in held.get(rank, ()))
            moved += max(0, size - kept)
    return moved


def _by_rank(table: TableLayout, ranks: int) -> dict[int, list[ShardRegion]]:
    if table.replicated:
        return {rank: list(table.regions) for rank in range(ranks)}
    found: dict[int, list[ShardRegion]] = {}
    for region in table.regions:
        if region.rows:
            found.setdefault(region.rank, []).append(region)
    return found


def _overlap_bytes(a: ShardRegion, b: ShardRegion, optimizer: str) -> int:
    rows = min(a.row_end, b.row_end) - max(a.row_start, b.row_start)
    columns = min(a.column_end, b.column_end) - max(a.column_start, b.column_start)
    return _bytes(rows, columns, optimizer) if rows > 0 and columns > 0 else 0


def _bytes(rows: int, columns: int, optimizer: str) -> int:
    return 4 * rows * columns + state_bytes(rows, columns, optimizer)


def _step(plan: PlanFile) -> float | None:
    return None if plan.prediction is None else float(plan.prediction.step_ms)


def _phases(before: PlanFile, after: PlanFile) -> dict[str, tuple[float, float]]:
    if before.prediction is None or after.prediction is None:
        return {}
    first, second = before.prediction.phases_ms, after.prediction.phases_ms
    return {
        name: (max(by_rank(first.get(name, ())), default=0.0), max(by_rank(second.get(name, ())), default=0.0))
        for name in dict.fromkeys([*first, *second])
    }


def _fullest(plan: PlanFile) -> float | None:
    if plan.prediction is None or not plan.prediction.memory_bytes:
        return None
    parts = [np.asarray(by_rank(runs)) for runs in plan.prediction.memory_bytes.values()]
    return float(np.sum(parts, axis=0).max())
