"""Which rank holds which rectangle of which table: what sharding tells the checkpoint engine.

A table is `rows x dim`. A plan cuts it into rectangles; each rectangle lives on one rank:

        columns 0        dim/2        dim
    row 0    +------------+------------+
             |  rank 0    |  rank 1    |      table-wise  one rectangle
             +------------+------------+      row-wise    full-width stripes
             |  rank 2    |  rank 3    |      column-wise full-height stripes
    rows     +------------+------------+      grid        both

A data-parallel table is replicated: one rectangle that every rank holds and rank 0 writes.
"""

import hashlib
import json
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING

from dlrm_scale.schema import TableSpec

if TYPE_CHECKING:  # planning for a described cluster needs layouts and no torch
    import torch

__all__ = ["LocalShard", "ShardLayout", "ShardRegion", "TableLayout"]


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardRegion:
    """Rows `[row_start, row_end)` and columns `[column_start, column_end)` of a table, on one rank.

    All bounds are global. A region may be empty (fewer rows than ranks).
    """

    table: str
    row_start: int
    row_end: int
    column_start: int
    column_end: int
    rank: int

    @property
    def rows(self) -> int:
        """Number of rows."""
        return self.row_end - self.row_start

    @property
    def columns(self) -> int:
        """Number of columns."""
        return self.column_end - self.column_start


@dataclass(frozen=True, kw_only=True, slots=True)
class TableLayout:
    """One table and how it is cut.

    Attributes:
        spec: the whole table.
        sharding_type: TorchRec's name, as in `row_wise`.
        regions: the rectangles, in global order (rows, then columns). A replicated table has one, of rank 0.
        replicated: every rank holds the whole table (`data_parallel`).
    """

    spec: TableSpec
    sharding_type: str
    regions: tuple[ShardRegion, ...]
    replicated: bool = False

    @property
    def column_splits(self) -> tuple[tuple[int, int], ...]:
        """The distinct column ranges, in order."""
        return tuple(sorted({(r.column_start, r.column_end) for r in self.regions if r.rows and r.columns}))


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardLayout:
    """Every table's layout on `ranks` ranks."""

    ranks: int
    tables: tuple[TableLayout, ...]

    def table(self, name: str) -> TableLayout:
        """Find a table's layout by name."""
        return next(t for t in self.tables if t.spec.name == name)

    def regions_of_rank(self, rank: int) -> list[ShardRegion]:
        """List what `rank` holds, replicated tables included."""
        return [r for t in self.tables for r in t.regions if t.replicated or r.rank == rank]

    def fingerprint(self) -> str:
        """Hash of the whole layout; equal on all ranks, and equal plans have equal fingerprints."""
        return hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode()).hexdigest()[:32]


@dataclass(kw_only=True, slots=True)
class LocalShard:
    """One rectangle with its live tensors on this rank.

    Attributes:
        region: where it lies in the table.
        weight: `[rows, columns]` float32; a view of the trained storage, not a copy.
        state: optimizer state by name, as in `momentum1`; each `[rows]` (one value a row) or
            `[rows, columns]`, views too. Empty for SGD.
        replicated: every rank holds this whole table; rank 0 writes it.
    """

    region: ShardRegion
    weight: "torch.Tensor"
    state: "dict[str, torch.Tensor]" = field(default_factory=dict)
    replicated: bool = False
