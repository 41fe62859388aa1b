"""The rectangles that a sharding type cuts a table into, and the few numbers that say where they lie.

TorchRec leaves no choice but the width of column shards and the places:

    type                places            shards (in the order of the places, rows first)
    data_parallel       -                 one copy on every rank
    table_wise          a rank            the table
    row_wise            -                 rows, b = ceil(rows / ranks) of them a rank; the last ranks have fewer or none
    table_row_wise      a host            the same over the host's ranks
    column_wise         a rank a shard    columns, all of one width
    table_column_wise   a rank a shard    the same, on the ranks of one host
    grid_shard          a host a shard    columns, each cut by rows over the ranks of its host; a host may have several

So a plan of 26 tables takes the same few numbers on 4,096 ranks as on 8.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from dlrm_scale.errors import PlanError
from dlrm_scale.layout import ShardRegion, TableLayout
from dlrm_scale.schema import TableSpec

__all__ = ["HOST_TYPES", "RANK_TYPES", "TableShape", "region_order", "shape_of", "table_layout"]

RANK_TYPES = ("table_wise", "column_wise", "table_column_wise")
"""Types whose places are ranks."""
HOST_TYPES = ("table_row_wise", "grid_shard")
"""Types whose places are hosts."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TableShape:
    """How one table is cut and where its parts lie.

    Attributes:
        sharding_type: TorchRec's name.
        columns: of a shard; the table's `dim` where columns aren't cut.
        places: ranks or hosts by column shard, see the module; () for row_wise and data_parallel.
    """

    sharding_type: str
    columns: int
    places: tuple[int, ...] = ()


def table_layout(table: TableSpec, shape: TableShape, *, ranks: int, ranks_per_host: int) -> TableLayout:
    """Spell a shape out.

    Args:
        table: the table.
        shape: how it is cut.
        ranks: all of them.
        ranks_per_host: divides `ranks`.

    Raises:
        PlanError: TorchRec can't cut the table like that; names the table.
    """
    fault = _fault(table, shape, ranks, ranks_per_host)
    if fault is not None:
        raise PlanError(f"table {table.name}: {shape.sharding_type} {fault}")
    kind = shape.sharding_type
    if kind == "data_parallel":
        return TableLayout(
            spec=table, sharding_type=kind, regions=(_region(table, 0, table.rows, 0, table.dim, 0),), replicated=True
        )
    regions = []
    if kind == "row_wise":
        regions = _rows_over(table, range(ranks), 0, table.dim)
    else:
        for index, place in enumerate(shape.places):
            start, end = index * shape.columns, (index + 1) * shape.columns
            if kind in HOST_TYPES:
                host = range(place * ranks_per_host, (place + 1) * ranks_per_host)
                regions += _rows_over(table, host, start, end)
            else:
                regions.append(_region(table, 0, table.rows, start, end, place))
    return TableLayout(spec=table, sharding_type=kind, regions=tuple(sorted(regions, key=region_order)))


def shape_of(table: TableLayout, *, ranks: int, ranks_per_host: int) -> TableShape:
    """Find the shape of a table that is spelt out; `table_layout` gives the same table back.

    Raises:
        PlanError: its regions aren't what its type cuts; names the table.
    """
    kind, dim = table.sharding_type, table.spec.dim
    shape = TableShape(sharding_type=kind, columns=dim)
    if kind not in ("row_wise", "data_parallel"):
        by_columns = sorted(table.regions, key=lambda r: (r.column_start, r.row_start, r.rank))
        if kind in HOST_TYPES:
            places = tuple(r.rank // ranks_per_host for r in by_columns[::ranks_per_host])
        else:
            places = tuple(r.rank for r in by_columns)
        shape = TableShape(sharding_type=kind, columns=by_columns[0].columns, places=places)
    spelt_out = table_layout(table.spec, shape, ranks=ranks, ranks_per_host=ranks_per_host)
    if spelt_out != table:
        raise PlanError(
            f"table {table.spec.name}: its {len(table.regions)} shards aren't those of {kind} on {ranks} ranks, "
            f"{ranks_per_host} a host"
        )
    return shape


def region_order(region: ShardRegion) -> tuple[int, ...]:
    """Key for the order of a table's regions: by rows, then columns."""
    return (region.row_start, region.column_start, region.row_end, region.rank)


def _rows_over(table: TableSpec, ranks: Sequence[int], start: int, end: int) -> list[ShardRegion]:
    block = -(-table.rows // len(ranks))
    cuts = [min(index * block, table.rows) for index in range(len(ranks) + 1)]
    return [_region(table, cuts[i], cuts[i + 1], start, end, rank) for i, rank in enumerate(ranks)]


def _region(
    table: TableSpec, row_start: int, row_end: int, column_start: int, column_end: int, rank: int
) -> ShardRegion:
    return ShardRegion(
        table=table.name,
        row_start=row_start,
        row_end=row_end,
        column_start=column_start,
        column_end=column_end,
        rank=rank,
    )


def _fault(table: TableSpec, shape: TableShape, ranks: int, ranks_per_host: int) -> str | None:
    """Why TorchRec can't make these shards; None if it can."""
    kind, width, places = shape.sharding_type, shape.columns, shape.places
    if kind in ("row_wise", "data_parallel"):
        return "has no choice of places, and some are given" if places or width != table.dim else None
    if kind not in (*RANK_TYPES, *HOST_TYPES):
        return "is no sharding type"
    if kind in ("table_wise", "table_row_wise"):
        if len(places) != 1 or width != table.dim:
            return f"keeps its {table.dim} columns in one place, and {len(places)} places of {width} columns are given"
    elif width < 4 or width % 4 or table.dim % width or table.dim // width != len(places):
        return (
            f"cuts {table.dim} columns into equal shards of a multiple of 4, and {len(places)} shards of {width} "
            "columns are given"
        )
    unit, count = ("host", ranks // ranks_per_host) if kind in HOST_TYPES else ("rank", ranks)
    outside = [place for place in places if not 0 <= place < count]
    if outside:
        return f"names {unit} {outside[0]} of {count}"
    if kind == "table_column_wise" and len({place // ranks_per_host for place in places}) > 1:
        return f"stays on one host, and ranks {', '.join(map(str, places))} are on several"
    return None
