"""The columns of Criteo-format rows and the description of an embedding table."""

from dataclasses import dataclass
from typing import Literal

__all__ = [
    "CATEGORY_COLUMNS",
    "INTEGER_COLUMNS",
    "LABEL_COLUMN",
    "MISSING_ROW",
    "OUT_OF_VOCABULARY_ROW",
    "RAW_COLUMNS",
    "Pooling",
    "TableSpec",
]

LABEL_COLUMN = "label"
INTEGER_COLUMNS: tuple[str, ...] = tuple(f"I{i}" for i in range(1, 14))
CATEGORY_COLUMNS: tuple[str, ...] = tuple(f"C{i}" for i in range(1, 27))
RAW_COLUMNS: tuple[str, ...] = (LABEL_COLUMN, *INTEGER_COLUMNS, *CATEGORY_COLUMNS)

MISSING_ROW = 0
"""Table row of an empty category; `00000000` is a real category and never this row."""
OUT_OF_VOCABULARY_ROW = 1
"""Table row shared by the ids that the vocabulary doesn't hold."""

Pooling = Literal["sum", "mean"]


@dataclass(frozen=True, kw_only=True, slots=True)
class TableSpec:
    """One embedding table, whole and independent of any sharding plan.

    Attributes:
        name: the table's name; also the name of the category column that it embeds.
        rows: number of rows; ids are in `[0, rows)`.
        dim: number of columns (float32).
        pooling: how the rows of one sample's bag become one vector.
    """

    name: str
    rows: int
    dim: int
    pooling: Pooling = "sum"

    @property
    def weight_bytes(self) -> int:
        """Bytes of the float32 weights."""
        return 4 * self.rows * self.dim
