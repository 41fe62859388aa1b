"""Whether a checkpoint's tables fit the model's, and today's column splits the stored row-wise state."""

from collections.abc import Sequence

from dlrm_scale.checkpoint.manifest import Manifest, TableRecord
from dlrm_scale.checkpoint.snapshot import table_records
from dlrm_scale.errors import CheckpointError
from dlrm_scale.layout import LocalShard, ShardLayout

__all__ = ["can_continue", "check_row_state", "check_schema"]


def check_schema(manifest: Manifest, layout: ShardLayout, shards: Sequence[LocalShard], optimizer: str) -> None:
    """Compare tables, and the optimizer state of those that this rank holds.

    Raises:
        CheckpointError: listing every missing, unexpected and mis-shaped table and state by name.
    """
    stored = manifest.table_schema()
    wanted = {table.spec.name: table.spec for table in layout.tables}
    faults = [f"table {name} is missing in the checkpoint" for name in wanted if name not in stored]
    faults += [f"table {name} is unexpected: the model has none" for name in stored if name not in wanted]
    for name, spec in wanted.items():
        record = stored.get(name)
        if record is not None and (record.rows, record.dim) != (spec.rows, spec.dim):
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
            remedy="use the dataset, model and optimizer that it was trained with, or start a new run",
        )


def check_row_state(manifests: Sequence[Manifest], layout: ShardLayout, *, allowed: bool) -> list[str]:
    """Find the tables whose row-wise state was kept under another column split than today's.

    Returns:
        Their names, if `allowed`.

    Raises:
        CheckpointError: there are some and they aren't allowed.
    """
    changed = []
    for name, record in manifests[-1].table_schema().items():
        if not any(state.per == "row" for state in record.state.values()):
            continue
        today = layout.table(name).column_splits
        if any(manifest.column_splits(name) != today for manifest in manifests):
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
