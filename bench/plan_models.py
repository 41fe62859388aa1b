"""Table sets that no constant of time was fitted to: shapes and skews, and what follows from them for the planner."""

import random
from dataclasses import dataclass

import numpy as np

from dlrm_scale.planning.tables.table_set import TableSet, TableStats

__all__ = ["MODELS", "BenchModel"]

_CRITEO_ROWS = (
    1460, 583, 500_000, 400_000, 305, 24, 12_517, 633, 3, 93_145, 5683, 500_000, 3194,
    27, 14_992, 500_000, 10, 5652, 2173, 4, 500_000, 18, 15, 286_181, 105, 142_572,
)  # fmt: skip
_DRAWN = random.Random(11)
_SAMPLES = (256, 512, 1024, 2048, 4096, 8192)


@dataclass(frozen=True, kw_only=True)
class BenchModel:
    """A model.

    Attributes:
        rows: of each table.
        dims: columns of each.
        ids: in every bag of each.
        skews: of each: the hottest share x of a table's rows gets the share x^(1/skew) of its lookups.
        batch_size_per_rank: rows.
    """

    rows: tuple[int, ...]
    dims: tuple[int, ...]
    ids: tuple[int, ...]
    skews: tuple[float, ...]
    batch_size_per_rank: int

    def tables(self, name: str) -> TableSet:
        """Describe its tables."""
        described = zip(self.rows, self.dims, self.ids, self.skews, strict=True)
        return TableSet(
            name=name,
            tables=tuple(_table(f"t{index}", *table) for index, table in enumerate(described)),
            source="bench/plan_models.py",
        )


def _table(name: str, rows: int, dim: int, ids: int, skew: float) -> TableStats:
    shares = (np.arange(rows + 1) / rows) ** (1 / skew)
    chances = np.diff(shares)
    points = sorted({int(rows**power) for power in np.linspace(0.0, 1.0, 9)[:-1]} - {rows})
    return TableStats(
        name=name,
        rows=rows,
        dim=dim,
        lookups_per_sample=float(ids),
        unique_rows=tuple(
            (n, float(-np.expm1(n * ids * np.log1p(-chances)).sum()) if rows > 1 else 1.0) for n in _SAMPLES
        ),
        hot_rows=tuple((point, float(shares[point])) for point in points),
    )


MODELS = {
    # ten multi-hot tables of one width
    "A": BenchModel(
        rows=(500_000, 200_000, 100_000, 50_000, 25_000, 10_000, 5000, 300_000, 80_000, 1000),
        dims=(64,) * 10,
        ids=(10, 20, 5, 1, 12, 8, 2, 15, 3, 18),
        skews=(3.0,) * 10,
        batch_size_per_rank=1024,
    ),
    # Criteo's columns, one id each, and two multi-hot tables
    "B": BenchModel(
        rows=(*_CRITEO_ROWS, 100_000, 200_000),
        dims=(32,) * 28,
        ids=(1,) * 26 + (30, 50),
        skews=(3.0,) * 28,
        batch_size_per_rank=2048,
    ),
    # sixteen tables of mixed widths, bags and skews
    "C": BenchModel(
        rows=tuple(int(10 ** _DRAWN.uniform(3, 5.6)) for _ in range(16)),
        dims=tuple(_DRAWN.choice([16, 32, 64, 128]) for _ in range(16)),
        ids=tuple(_DRAWN.choice([1, 1, 2, 5, 10, 25]) for _ in range(16)),
        skews=tuple(_DRAWN.choice([1.0, 2.0, 4.0]) for _ in range(16)),
        batch_size_per_rank=512,
    ),
    # few wide tables with long bags and small ones with one id; added after all fits, those of memory too
    "D": BenchModel(
        rows=(300_000, 150_000, 40_000, *(10 ** (2 + n % 4) for n in range(9))),
        dims=(128,) * 3 + (32,) * 9,
        ids=(40, 12, 4) + (1,) * 9,
        skews=(2.0,) * 3 + (3.0,) * 9,
        batch_size_per_rank=1536,
    ),
}
