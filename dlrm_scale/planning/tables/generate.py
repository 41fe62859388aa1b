"""Table sets made from a seed: production-like ones, and the synthetic ones of the planner's benchmark."""

import random
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
from scipy.special import pdtr

from dlrm_scale.planning.tables.locality import TRACES, USE_EDGES, Trace
from dlrm_scale.planning.tables.popularity import Popularity, rounded
from dlrm_scale.planning.tables.table_set import SparseOptimizer, TableSet, TableStats

__all__ = ["GENERATED", "generate_tables", "synthetic_tables"]

Float64s = npt.NDArray[np.float64]

GENERATED = ("synthetic", *TRACES)
"""What `generate_tables` makes."""

_CURVE_SAMPLES = tuple(4**k for k in range(4, 11))
"""Batch sizes of the curves of distinct rows: 256 to 1,048,576."""
_HOT_RANKS = tuple(2**k for k in range(31))
_ROUNDS = 300
_TILT_CHANGE = 8.0
"""Of one round, at most; tilts lie between 0 and 8."""
_HALVINGS = 30
_SEEN = 0.005
"""Shares of rows below this have too few digits to be fitted; the shares of lookups have them."""


def generate_tables(
    kind: str,
    *,
    tables: int = 800,
    seed: int = 0,
    dims: Sequence[int] = (64, 128),
    optimizer: SparseOptimizer = "rowwise_adagrad",
) -> TableSet:
    """Make a table set; equal arguments give equal sets.

    Args:
        kind: of `GENERATED`.
        tables: how many.
        seed: of sizes, pooling and dims.
        dims: one is chosen for each table.
        optimizer: of the set.
    """
    drawn = _draw_sizes(tables, seed, dims)
    about = f"{tables} tables, seed {seed}"
    if kind == "synthetic":
        made = tuple(
            TableStats(name=f"t{i}", rows=rows, dim=dim, lookups_per_sample=pooling)
            for i, (rows, dim, pooling) in enumerate(drawn)
        )
        source = f"generated: rows log-uniform in 1e3 to 1e7, pooling log-normal, lookups even; {about}"
    else:
        made = _production(TRACES[kind], drawn)
        source = f"generated: as synthetic, pooling and reuse of rows fitted to {TRACES[kind].source}; {about}"
    return TableSet(name=f"{kind}-{tables}", optimizer=optimizer, tables=made, source=source)


def synthetic_tables(
    tables: int = 800, seed: int = 0, dims: Sequence[int] = (64, 128), *, optimizer: SparseOptimizer = "rowwise_adagrad"
) -> TableSet:
    """Make the set that the planner's goals are stated for; lookups are even."""
    return generate_tables("synthetic", tables=tables, seed=seed, dims=dims, optimizer=optimizer)


def _draw_sizes(tables: int, seed: int, dims: Sequence[int]) -> list[tuple[int, int, float]]:
    """Rows, dim and pooling by table; the order of the calls is part of the result."""
    source = random.Random(seed)
    drawn = []
    for _ in range(tables):
        rows = int(10 ** source.uniform(3, 7.0))
        pooling = min(200.0, max(0.1, source.lognormvariate(1.2, 1.4)))
        drawn.append((rows, source.choice(dims), round(pooling, 2)))
    return drawn


def _production(trace: Trace, drawn: Sequence[tuple[int, int, float]]) -> tuple[TableStats, ...]:
    scale = trace.lookups_per_bag * len(drawn) / sum(pooling for _, _, pooling in drawn)
    poolings = [rounded(pooling * scale) for _, _, pooling in drawn]
    laws = _fit(trace, np.array([rows for rows, _, _ in drawn], np.float64), np.array(poolings))
    return tuple(
        TableStats(
            name=f"t{i}",
            rows=rows,
            dim=dim,
            lookups_per_sample=pooling,
            unique_rows=tuple((s, rounded(law.unique_rows(s * pooling))) for s in _CURVE_SAMPLES),
            hot_rows=tuple((k, round(law.share_of_hottest(k), 9)) for k in _HOT_RANKS if k < rows / 2),
        )
        for i, ((rows, dim, _), pooling, law) in enumerate(zip(drawn, poolings, laws, strict=True))
    )


def _fit(trace: Trace, rows: Float64s, poolings: Float64s) -> list[Popularity]:
    """Find each table's popularity, so that one batch of all tables together has the trace's histograms.

    A table's lookups are spread over rows of `mean` uses a batch as `weights * mean ** tilt`. The tilt is what its rows
    and lookups ask for: many rows for few lookups are looked up rarely. The weights are common to all tables; each
    round multiplies them by how much more the trace has of the bins that they lead to (expectation-maximization for
    Poisson mixtures; iterative proportional fitting).
    """
    lookups = poolings * trace.batch_size
    mean = np.geomspace(1e-4, 1e6, 60)
    logs = np.log(mean)
    of_rows, of_lookups = _bins(mean)
    rows_goal = np.array(trace.row_shares) / sum(trace.row_shares)
    lookups_goal = np.array(trace.lookup_shares) / sum(trace.lookup_shares)
    # No row has more than all lookups of its table.
    possible = mean[None, :] <= np.maximum(lookups[:, None], 1.0)
    log_weights = np.zeros_like(mean)
    tilts = np.ones(len(rows))
    for _ in range(_ROUNDS):
        tilts, spread = _tilt(log_weights, logs, possible, rows / lookups, tilts)
        together = lookups @ spread / lookups.sum()
        lookups_now = of_lookups @ together
        rows_now = of_rows @ (together / mean)
        rows_now /= rows_now.sum()
        step = (lookups_goal / np.maximum(lookups_now, 1e-12)) @ of_lookups
        known = np.where(rows_goal > _SEEN, rows_goal / np.maximum(rows_now, 1e-12), 1.0)
        step *= np.sqrt(known @ of_rows / of_rows.sum(axis=0))
        log_weights += np.log(step)
        log_weights -= log_weights.max()
    tilts, spread = _tilt(log_weights, logs, possible, rows / lookups, tilts)
    result = []
    for table_rows, table_lookups, mine in zip(rows, lookups, spread, strict=True):
        kept = mine > 0
        of_class = (mine[kept] / mean[kept])[::-1]
        result.append(Popularity(rows=table_rows * of_class / of_class.sum(), share=mean[kept][::-1] / table_lookups))
    return result


def _bins(mean: Float64s) -> tuple[Float64s, Float64s]:
    """Which bins of uses rows and lookups fall into, `[17, G]` each.

    A class stands for rows whose uses lie half way to the next classes: a hot row's uses are so sure that classes at
    one value each would be fitted to the edges of bins.
    """
    half = np.log(mean[1] / mean[0]) / 2
    of_rows, of_lookups = np.zeros((2, len(USE_EDGES), len(mean)))
    for shift in np.linspace(-half, half, 9):
        near = mean * np.exp(shift)
        at_most = np.stack([*(pdtr(edge, near) for edge in USE_EDGES), np.ones_like(near)])
        # n Poisson(n; m) = m Poisson(n - 1; m)
        before = [np.zeros_like(near) if edge == 0 else pdtr(edge - 1, near) for edge in USE_EDGES]
        of_rows += np.diff(at_most, axis=0) / 9
        of_lookups += np.diff([*before, np.ones_like(near)], axis=0) / 9
    return of_rows, of_lookups


def _tilt(
    log_weights: Float64s, logs: Float64s, possible: npt.NDArray[np.bool_], rows_a_lookup: Float64s, start: Float64s
) -> tuple[Float64s, Float64s]:
    """Find tilts that give each table its rows.

    Args:
        log_weights: `[G]`.
        logs: `[G]`, logarithm of the uses.
        possible: `[T, G]`, uses that a table's rows may have.
        rows_a_lookup: `[T]`.
        start: `[T]`, the last round's tilts.

    Returns:
        `[T]` tilts; `[T, G]` lookups of each table by the row's uses, with sum 1.
    """
    base = np.where(possible, log_weights[None, :], -np.inf)

    def spread(tilts: Float64s) -> Float64s:
        powers = base + tilts[:, None] * logs[None, :]
        shares: Float64s = np.exp(powers - powers.max(axis=1, keepdims=True))
        shares /= shares.sum(axis=1, keepdims=True)
        return shares

    uses = np.exp(-logs)
    low, high = start - _TILT_CHANGE, start + _TILT_CHANGE
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        # More tilt, hotter rows, fewer of them.
        too_many = spread(middle) @ uses > rows_a_lookup
        low, high = np.where(too_many, middle, low), np.where(too_many, high, middle)
    return (low + high) / 2, spread((low + high) / 2)
