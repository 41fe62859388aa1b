"""Whether a checkpoint's tables fit the model's, and today's column splits the stored row-wise state."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from dlrm_scale.checkpoint.files.live_tables import table_records
from dlrm_scale.checkpoint.files.manifest import Manifest, TableRecord
from dlrm_scale.errors import CheckpointError
from dlrm_scale.layout import LocalShard, ShardLayout

__all__ = ["SchemaChanges", "can_continue", "check_row_state", "check_schema"]


@dataclass(frozen=True, kw_only=True)
class SchemaChanges:
    """How a model's tables differ from a checkpoint's, as far as that is allowed; equal on all ranks.

    Attributes:
        new: tables that the checkpoint hasn't.
        resized: rows before and after, by table. Row ids keep their meaning: rows are added or cut at the end.
    """

    new: tuple[str, ...] = ()
    resized: Mapping[str, tuple[int, int]] = field(default_factory=dict)

    def rows_before(self, table: str, rows: int) -> int:
        """How many of a table's `rows` the checkpoint gives values to."""
        return 0 if table in self.new else min(rows, self.resized.get(table, (rows, rows))[0])


def check_schema(
    manifest: Manifest,
    layout: ShardLayout,
    shards: Sequence[LocalShard],
    optimizer: str,
    *,
    allow_new_tables: bool = False,
    allow_resized_tables: bool = False,
) -> SchemaChanges:
    """Compare tables, and the optimizer state of those that this rank holds.

    Args:
        manifest: the checkpoint.
        layout: of the model.
        shards: of this rank.
        optimizer: of the model's tables.
        allow_new_tables: tables that are missing in the checkpoint are returned instead.
        allow_resized_tables: likewise those of another number of rows.

    Raises:
        CheckpointError: listing every missing, unexpected and mis-shaped table and state by name.
    """
    stored = manifest.table_schema()
    wanted = {table.spec.name: table.spec for table in layout.tables}
    new = tuple(name for name in wanted if name not in stored)
    resized: dict[str, tuple[int, int]] = {}
    faults = [] if allow_new_tables else [f"table {name} is missing in the checkpoint" for name in new]
    faults += [f"table {name} is unexpected: the model has none" for name in stored if name not in wanted]
    for name, spec in wanted.items():
        record = stored.get(name)
        if record is None:
            continue
        if allow_resized_tables and record.dim == spec.dim and record.rows != spec.rows:
            resized[name] = (record.rows, spec.rows)
        elif (record.rows, record.dim) != (spec.rows, spec.dim):
            faults.append(
                f"table {name} is {record.rows} x {record.dim} in the checkpoint, {spec.rows} x {spec.dim} in the model"
            )
    if manifest.optimizer != optimizer:
        faults.append(f"the tables' optimizer is {manifest.optimizer} in the checkpoint, {optimizer} in the model")
    else:
        faults += [fault for table in table_records(layout, shards) for fault in _state_faults(stored, table)]
    if faults:
        listed = "\n  ".join(faults)
        raise CheckpointError(
            f"checkpoint {manifest.name} (step {manifest.step}) doesn't fit the model:\n  {listed}",
            remedy="use the dataset, model and optimizer that it was trained with, or start a new run; one with "
            "--init-from may have new tables (--allow-new-tables) and other numbers of rows (--allow-resized-tables)",
        )
    return SchemaChanges(new=new, resized=resized)


def check_row_state(manifests: Sequence[Manifest], layout: ShardLayout, *, allowed: bool) -> list[str]:
    """Find the tables whose row-wise state was kept under another column split than today's.

    Returns:
        Their names, if `allowed`.

    Raises:
        CheckpointError: there are some and they aren't allowed.
    """
    today = {table.spec.name: table.column_splits for table in layout.tables}
    stored = [manifest.all_column_splits() for manifest in manifests]
    changed = []
    for name, record in manifests[-1].table_schema().items():
        by_row = any(state.per == "row" for state in record.state.values())
        if by_row and any(splits[name] != today[name] for splits in stored):
            changed.append(name)
    if changed and not allowed:
        raise CheckpointError(
            f"row-wise optimizer state can't be carried over to another column split exactly: {', '.join(changed)}",
            remedy="keep the column splits of these tables, or accept another algorithm with "
            "sharding.allow_split_row_state=true",
        )
    return changed


def can_continue(manifest: Manifest, layout: ShardLayout, tables: Sequence[TableRecord], optimizer: str) -> bool:
    """Say whether deltas of `layout` may follow `manifest`: same tables and state, and no row-wise state resplit.

    `tables` are the schemas known to this rank.
    """
    stored = manifest.table_schema()
    wanted = {t.spec.name: (t.spec.rows, t.spec.dim, t.spec.pooling) for t in layout.tables}
    same_tables = {name: (r.rows, r.dim, r.pooling) for name, r in stored.items()} == wanted
    if not same_tables or manifest.optimizer != optimizer or any(stored[t.name] != t for t in tables):
        return False
    return not check_row_state([manifest], layout, allowed=True)


def _state_faults(stored: dict[str, TableRecord], table: TableRecord) -> list[str]:
    record = stored.get(table.name)
    if record is None:
        return []
    faults = []
    for name in sorted(record.state.keys() | table.state.keys()):
        kept, wanted = record.state.get(name), table.state.get(name)
        if kept is None:
            faults.append(f"optimizer state {name} of table {table.name} is missing in the checkpoint")
        elif wanted is None:
            faults.append(f"optimizer state {name} of table {table.name} is unexpected")
        elif kept != wanted:
            faults.append(
                f"optimizer state {name} of table {table.name} is {kept.dtype} per {kept.per} in the checkpoint, "
                f"{wanted.dtype} per {wanted.per} in the model"
            )
    return faults
