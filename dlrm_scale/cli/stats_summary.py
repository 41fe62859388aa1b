"""A table set as `dlrm-scale stats` shows it."""

import math
from collections.abc import Sequence

from rich import box
from rich.console import Console
from rich.table import Table

from dlrm_scale.planning.tables.table_set import TableSet, TableStats
from dlrm_scale.units import format_bytes

__all__ = ["print_summary"]

_MOST_TABLES = 60
"""Of larger sets the tables with most bytes are shown."""
_SHOWN_OF_LARGE = 20


def print_summary(tables: TableSet, batch_sizes: Sequence[int]) -> None:
    """Print one line a table and their sums.

    Args:
        tables: what to show.
        batch_sizes: samples, for the distinct rows of a batch.
    """
    console = Console()
    shown = list(tables.tables)
    left_out = len(shown) > _MOST_TABLES
    if left_out:
        shown = sorted(shown, key=lambda t: -t.spec.weight_bytes)[:_SHOWN_OF_LARGE]
    console.print(f"{tables.name}: {tables.optimizer}, {tables.dtype}", highlight=False, markup=False)
    if tables.source:
        console.print(f"  {tables.source}", highlight=False, markup=False, soft_wrap=True)
    table = Table(box=box.SIMPLE_HEAD, padding=0, show_edge=False)
    table.add_column("table")
    headings = ["rows", "dim", "size", "ids a\nbag", "p99", *(f"distinct\nof {size:,}" for size in batch_sizes)]
    for heading in [*headings, "hottest\n1 % of\nrows, %"]:
        table.add_column(heading, justify="right", no_wrap=True)
    for one in shown:
        table.add_row(*_cells(one, batch_sizes))
    if left_out:
        table.add_row(f"… {len(tables.tables) - len(shown):,} more")
    table.add_section()
    table.add_row(*_sums(tables.tables, batch_sizes))
    console.print(table)


def _cells(table: TableStats, batch_sizes: Sequence[int]) -> list[str]:
    p99 = table.lookups_per_sample_p99
    return [
        table.name,
        f"{table.rows:,}",
        f"{table.dim}",
        format_bytes(table.spec.weight_bytes),
        f"{table.lookups_per_sample:.2f}",
        "–" if p99 is None else f"{p99:.0f}",  # noqa: RUF001
        *(f"{table.unique_rows_of(size):,.0f}" for size in batch_sizes),
        f"{100 * table.share_of_hottest(math.ceil(table.rows / 100)):.1f}",
    ]


def _sums(tables: Sequence[TableStats], batch_sizes: Sequence[int]) -> list[str]:
    lookups = math.fsum(t.lookups_per_sample for t in tables)
    hot = math.fsum(t.lookups_per_sample * t.share_of_hottest(math.ceil(t.rows / 100)) for t in tables)
    return [
        f"{len(tables):,} tables",
        f"{sum(t.rows for t in tables):,}",
        "",
        format_bytes(sum(t.spec.weight_bytes for t in tables)),
        f"{lookups:,.2f}",
        "",
        *(f"{math.fsum(t.unique_rows_of(size) for t in tables):,.0f}" for size in batch_sizes),
        f"{100 * hot / lookups:.1f}" if lookups else "–",  # noqa: RUF001
    ]
