"""The live shards of a rank as a manifest describes their tables."""

from collections.abc import Sequence

from dlrm_scale.checkpoint.files.format import DTYPE_NAMES
from dlrm_scale.checkpoint.files.manifest import StateRecord, TableRecord
from dlrm_scale.layout import LocalShard, ShardLayout, ShardRegion

__all__ = ["check_regions", "state_records", "table_records"]


def state_records(shard: LocalShard) -> dict[str, StateRecord]:
    """Schema of a shard's optimizer state, equal for every shard of its table."""
    records = {}
    for name, tensor in shard.state.items():
        expected = {1: (shard.region.rows,), 2: (shard.region.rows, shard.region.columns)}.get(tensor.dim())
        if tuple(tensor.shape) != expected:
            raise ValueError(f"state {name} of {shard.region} has shape {tuple(tensor.shape)}")
        dtype = DTYPE_NAMES[tensor.dtype]
        records[name] = StateRecord(per="row" if tensor.dim() == 1 else "element", dtype=dtype)  # type: ignore[arg-type]
    return records


def table_records(layout: ShardLayout, shards: Sequence[LocalShard]) -> list[TableRecord]:
    """Schema of the tables that have a non-empty shard in `shards`."""
    specs = {table.spec.name: table.spec for table in layout.tables}
    records: dict[str, TableRecord] = {}
    for shard in shards:
        if not (shard.region.rows and shard.region.columns):
            continue
        spec = specs[shard.region.table]
        if tuple(shard.weight.shape) != (shard.region.rows, shard.region.columns):
            raise ValueError(f"weight of {shard.region} has shape {tuple(shard.weight.shape)}")
        record = TableRecord(
            name=spec.name, rows=spec.rows, dim=spec.dim, pooling=spec.pooling, state=state_records(shard)
        )
        if records.setdefault(spec.name, record) != record:
            raise ValueError(f"shards of table {spec.name} have different optimizer state")
    return list(records.values())


def check_regions(layout: ShardLayout, shards: Sequence[LocalShard], rank: int) -> None:
    """Check that a rank's shards are those that the layout gives it.

    Raises:
        ValueError: they are not.
    """

    def filled(regions: Sequence[ShardRegion]) -> list[tuple[str, int, int, int, int]]:
        return sorted(
            (r.table, r.row_start, r.row_end, r.column_start, r.column_end) for r in regions if r.rows and r.columns
        )

    if filled([shard.region for shard in shards]) != filled(layout.regions_of_rank(rank)):
        raise ValueError(f"the shards of rank {rank} aren't those of the layout")
