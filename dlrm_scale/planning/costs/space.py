"""Every way to shard a table that the trainer can run, without what it costs."""

from collections.abc import Collection
from dataclasses import dataclass
from typing import Literal

from dlrm_scale.planning.solver.problem import Placement
from dlrm_scale.schema import TableSpec
from dlrm_scale.sharding.rules import COLUMN_SPLIT_TYPES, objection

__all__ = ["DEFAULT_TYPES", "WIDE_TYPES", "Candidate", "candidates", "column_widths"]

DEFAULT_TYPES = ("table_wise", "row_wise", "table_row_wise", "data_parallel")
"""Types that keep rows whole, in the order in which ties are broken."""

WIDE_TYPES = (*DEFAULT_TYPES, "column_wise", "table_column_wise", "grid_shard")
"""And those that cut columns."""

_PLACEMENTS: dict[str, Placement] = {
    "table_wise": "ranks",
    "row_wise": "all_ranks",
    "table_row_wise": "hosts",
    "data_parallel": "all_ranks",
    "column_wise": "ranks",
    "table_column_wise": "one_host",
    "grid_shard": "hosts",
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Candidate:
    """One way to shard one table, without costs.

    Attributes:
        sharding_type: TorchRec's name.
        kernel: `fused`, or `dense` for data-parallel tables.
        placement: where the shards may go; see `Placement`.
        shards: how many; a data-parallel table counts one a rank. Their order is by columns, then rows.
        columns: of one shard.
        row_parts: into how many the rows are cut. A shard has `ceil(rows / row_parts)` of them; TorchRec leaves the
            last ones fewer or none.
    """

    sharding_type: str
    kernel: Literal["fused", "dense"]
    placement: Placement
    shards: int
    columns: int
    row_parts: int


def candidates(
    table: TableSpec,
    *,
    optimizer: str,
    ranks: int,
    ranks_per_host: int,
    wide: bool,
    types: Collection[str] | None = None,
    widths: Collection[int] | None = None,
) -> tuple[Candidate, ...]:
    """List how a table may be sharded, in a fixed order.

    On one rank without `types` that is table_wise: there is nothing to spread, and the others cost more.

    Args:
        table: to be sharded.
        optimizer: of the tables: `sgd`, `rowwise_adagrad` or `adam`.
        ranks: all of them.
        ranks_per_host: divides `ranks`.
        wide: types that cut columns too, with row-wise Adagrad as well, whose state then is split with the row
            (`sharding.allow_split_row_state`). Without it, row-wise Adagrad keeps rows whole, and other optimizers
            keep to the same types unless `types` asks for more.
        types: only these; None for all.
        widths: only these widths of column shards; None for every legal one.

    Returns:
        Possibly nothing, where `types` or `widths` leave nothing legal; `dlrm_scale.sharding.rules.objection` says why.
    """
    if types is None:
        offered: tuple[str, ...] = (WIDE_TYPES if wide else DEFAULT_TYPES) if ranks > 1 else WIDE_TYPES[:1]
    else:
        offered = tuple(t for t in WIDE_TYPES if t in types)
    found: list[Candidate] = []
    for kind in offered:
        if objection(kind, table, optimizer=optimizer, allow_split_row_state=wide) is None:
            wanted = [w for w in column_widths(table.dim) if widths is None or w in widths]
            found += _of_type(kind, table.dim, ranks, ranks_per_host, wanted)
    return tuple(found)


def column_widths(dim: int) -> tuple[int, ...]:
    """Widths of equal column shards that the trainer can make of `dim` columns, widest first.

    fbgemm takes multiples of 4. TorchRec asks for a least width and takes the next divisor, which is the width itself.
    """
    return tuple(w for w in range(dim // 2 // 4 * 4, 0, -4) if dim % w == 0)


def _of_type(kind: str, dim: int, ranks: int, ranks_per_host: int, widths: list[int]) -> list[Candidate]:
    if kind not in COLUMN_SPLIT_TYPES:
        return [_candidate(kind, dim, ranks, ranks_per_host, dim)]
    # A grid puts each column shard on a host of its own.
    hosts = ranks // ranks_per_host
    return [
        _candidate(kind, dim, ranks, ranks_per_host, width)
        for width in widths
        if kind != "grid_shard" or dim // width <= hosts
    ]


def _candidate(kind: str, dim: int, ranks: int, ranks_per_host: int, width: int) -> Candidate:
    row_parts = {"row_wise": ranks, "table_row_wise": ranks_per_host, "grid_shard": ranks_per_host}.get(kind, 1)
    shards = ranks if kind == "data_parallel" else row_parts * (dim // width)
    return Candidate(
        sharding_type=kind,
        kernel="dense" if kind == "data_parallel" else "fused",
        placement=_PLACEMENTS[kind],
        shards=shards,
        columns=width,
        row_parts=row_parts,
    )
