"""A bound that no plan's step can be under: a linear program over shares of options.

Every plan satisfies, with x the share of an option (0 or 1 in a plan), c its shard's cost and m its memory:

    a phase takes at least its average over ranks            T_p >= U_p + sum x shards c / W
    and at least what a rank with one of a table's shards    T_p >= U_p + sum over a table's options x stacked c
    memory in all, and of one rank                           the same two sums with m, at most the capacity
    charges of the types in use                              z >= sum over a table's charged options x

U_p is what options with a shard on every rank cost there. A plan with step V has no option whose shards alone cost
more than V, so that the program without those options is a bound too, and a higher one: the bound is the least V with
program(V) <= V.

Where an option's shards differ, the first line counts their mean, so that the sum over ranks is exact. The second
counts the largest of the table's own, which some rank has, and of those on every rank the smallest, for it isn't known
which meet. A line more, T_p >= sum of the first shards of options on every rank, is rank 0's load, where hot rows lie.
So the bound holds for plans that are rated shard by shard.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import Bounds, LinearConstraint, milp
from scipy.sparse import coo_array

from dlrm_scale.planning.solver.flat_problem import FlatProblem
from dlrm_scale.planning.solver.interruptible import interruptible

__all__ = ["Relaxation", "lower_bound", "relax"]

_SINGLE_TABLES = 64
"""For how many tables, those with the costliest shards, the second line above is written."""
_SLACK = 1e-9
"""The program's own tolerance is 1e-7 of scaled numbers; the bound is lowered by this share."""


_WHOLE_SLACK = 2e-6
"""With whole options the tolerance is 1e-6, in shares."""
_NODES = 5_000


@dataclass(frozen=True, kw_only=True)
class Relaxation:
    """A solved program.

    Attributes:
        step_ms: its least step.
        shares: `[O]` of the options.
    """

    step_ms: float
    shares: NDArray[np.float64]


def lower_bound(flat: FlatProblem) -> tuple[float, Relaxation] | None:
    """Find the bound and the program that gives it.

    Returns:
        None where the program has no solution, and so the problem has none.
    """
    least = flat.least_step_ms
    limits = np.unique(least)
    # Below this some table has no option left.
    start = max(float(least[flat.first[t] : flat.first[t + 1]].min()) for t in range(flat.tables))
    low = int(np.searchsorted(limits, start))
    whole = relax(flat, np.inf)
    if whole is None:
        return None
    high = len(limits) - 1
    solved: dict[int, Relaxation | None] = {high: whole}
    # The first limit from which on the program's step lies below the next limit.
    while low < high:
        middle = (low + high) // 2
        solved[middle] = relax(flat, limits[middle])
        found = solved[middle]
        if found is not None and found.step_ms <= limits[middle + 1]:
            high = middle
        else:
            low = middle + 1
    if low not in solved:
        solved[low] = relax(flat, limits[low])
    found = solved[low]
    assert found is not None
    return max(float(limits[low]), found.step_ms) * (1 - _SLACK), found


def relax(flat: FlatProblem, limit_ms: float, *, whole_options: bool = False) -> Relaxation | None:
    """Solve the program with some of the options.

    Args:
        flat: the problem.
        limit_ms: keep options whose least step is at most this. Plans with a step below it have no others, so that the
            result, or this, bounds every plan.
        whole_options: every table gets one option, not shares of several: a higher bound, by branch and bound over at
            most 5,000 nodes.

    Returns:
        None where it has no solution, or with `whole_options` none was found.
    """
    kept = np.flatnonzero(flat.least_step_ms <= limit_ms)
    tables, phases, charges = flat.tables, flat.costs_ms.shape[1], len(flat.charge_ms)
    if len(np.unique(flat.table[kept])) < tables:
        return None
    n = len(kept)
    uniform = flat.uniform[kept]
    # Variables: x [n], T [phases], U [phases], memory of uniform options, z [charges].
    t_at, u_at, m_at = n, n + phases, n + 2 * phases
    # Where shards differ, what is surely on every rank is less than the average: L [phases], and memory of it.
    l_at, s_at, z_at = (u_at, m_at, m_at + 1) if flat.alike else (m_at + 1, m_at + 1 + phases, m_at + 2 + phases)
    unit_ms = max(float(flat.costs_ms[kept].max()), 1e-12)
    costs, mean = flat.costs_ms[kept] / unit_ms, flat.mean_ms[kept] / unit_ms
    capacity = max(1, flat.capacity_bytes)
    memory, mean_memory = flat.memory_bytes[kept] / capacity, flat.mean_bytes[kept] / capacity
    rows = _Rows(z_at + charges)

    table = flat.table[kept]
    equal = _Rows(z_at + charges)
    for t in range(tables):
        equal.add(np.flatnonzero(table == t), 1.0, 1.0)
    everywhere, elsewhere = np.flatnonzero(uniform), np.flatnonzero(~uniform)
    for p in range(phases):
        equal.add(np.append(everywhere, u_at + p), np.append(mean[everywhere, p], -1.0), 0.0)
        average = mean[elsewhere, p] * flat.shards[kept][elsewhere] / flat.ranks
        rows.add(np.append(elsewhere, [u_at + p, t_at + p]), np.append(average, [1.0, -1.0]), 0.0)
    equal.add(np.append(everywhere, m_at), np.append(mean_memory[everywhere], -1.0), 0.0)
    average = mean_memory[elsewhere] * flat.shards[kept][elsewhere] / flat.ranks
    rows.add(np.append(elsewhere, m_at), np.append(average, 1.0), 1.0)
    if not flat.alike:
        least, first = flat.least_ms[kept] / unit_ms, flat.first_ms[kept] / unit_ms
        for p in range(phases):
            equal.add(np.append(everywhere, l_at + p), np.append(least[everywhere, p], -1.0), 0.0)
            rows.add(np.append(everywhere, t_at + p), np.append(first[everywhere, p], -1.0), 0.0)
        equal.add(np.append(everywhere, s_at), np.append(flat.least_bytes[kept][everywhere] / capacity, -1.0), 0.0)
    stacked_costs = costs * flat.stacked[kept][:, None]
    stacked_memory = memory * flat.stacked[kept]
    for t in _costliest_tables(table[elsewhere], stacked_costs[elsewhere].sum(axis=1), tables):
        own = elsewhere[table[elsewhere] == t]
        for p in range(phases):
            rows.add(np.append(own, [l_at + p, t_at + p]), np.append(stacked_costs[own, p], [1.0, -1.0]), 0.0)
        rows.add(np.append(own, s_at), np.append(stacked_memory[own], 1.0), 1.0)
    charged = flat.charged[kept]
    for c in range(charges):
        for t in np.unique(table[charged[:, c]]):
            own = np.flatnonzero(charged[:, c] & (table == t))
            rows.add(np.append(own, z_at + c), np.append(np.ones(len(own)), -1.0), 0.0)

    objective = np.zeros(z_at + charges)
    objective[t_at:u_at] = 1.0
    objective[z_at:] = flat.charge_ms / unit_ms
    upper = np.array([1.0] * n + [np.inf] * (z_at - n) + [1.0] * charges)
    whole = np.array([1] * n + [0] * (z_at - n + charges)) if whole_options else 0
    constraints = [
        LinearConstraint(rows.matrix(), -np.inf, rows.right),
        LinearConstraint(equal.matrix(), equal.right, equal.right),
    ]
    solved = interruptible(
        lambda: milp(
            objective,
            constraints=constraints,
            bounds=Bounds(0.0, upper),
            integrality=whole,
            options={"node_limit": _NODES, "mip_rel_gap": 1e-5} if whole_options else None,
        )
    )
    if solved.status == 2 or solved.x is None:
        return None
    assert whole_options or solved.status == 0, solved.message
    least = solved.mip_dual_bound * (1 - _WHOLE_SLACK) if whole_options else solved.fun
    shares = np.zeros(len(flat.table))
    shares[kept] = solved.x[:n]
    return Relaxation(step_ms=float(least) * unit_ms + flat.base_ms, shares=shares)


def _costliest_tables(table: NDArray[np.int64], cost: NDArray[np.float64], tables: int) -> list[int]:
    """Tables by the least cost of their options that aren't on every rank."""
    least = np.full(tables, np.inf)
    np.minimum.at(least, table, cost)
    found = [int(t) for t in np.argsort(-least, kind="stable") if np.isfinite(least[t])]
    return found[:_SINGLE_TABLES]


class _Rows:
    """Collects rows of a sparse matrix and their right sides."""

    def __init__(self, columns: int) -> None:
        self._columns = columns
        self._at: list[NDArray[np.int64]] = []
        self._values: list[NDArray[np.float64]] = []
        self.right: list[float] = []

    def add(self, at: NDArray[np.int64], values: NDArray[np.float64] | float, right: float) -> None:
        self._at.append(at)
        self._values.append(np.broadcast_to(np.asarray(values, dtype=np.float64), at.shape))
        self.right.append(right)

    def matrix(self) -> coo_array:
        row = np.repeat(np.arange(len(self._at)), [len(a) for a in self._at])
        shape = (len(self._at), self._columns)
        return coo_array((np.concatenate(self._values), (row, np.concatenate(self._at))), shape=shape).tocsr()
