"""A plan being built: load and memory of every rank, and where the next shards do the least harm.

What is made small is a smooth stand-in for the step: sum over phases of the 8-norm of the ranks' loads. Unlike the
slowest rank alone it also sees the second slowest, so that a search has a slope to go down.
"""

import numpy as np
from numpy.typing import NDArray

from dlrm_scale.planning.solver import kernels
from dlrm_scale.planning.solver.flat_problem import FlatProblem

__all__ = ["Loads", "Plan"]

_SLICE_COSTS = 4_000_000
"""Costs that the search may look at before Python gets its turn: some hundredths of a second."""

Plan = tuple[list[int], list[NDArray[np.int64]]]
"""Option of every table, counted over all tables, and ranks of its shards."""

_PLACEMENTS = {
    "all_ranks": kernels.ALL_RANKS,
    "hosts": kernels.HOSTS,
    "one_host": kernels.ONE_HOST,
    "ranks": kernels.RANKS,
}


class Loads:
    """See the module.

    Args:
        flat: the problem.
        scale_ms: `[phases]`: what a phase takes about; until it is reached, phases count by it.
    """

    def __init__(self, flat: FlatProblem, scale_ms: NDArray[np.float64]) -> None:
        """Start with nothing placed; see the class."""
        self.flat = flat
        listed = ~flat.uniform
        self._costs = kernels.Costs(
            ranks_per_host=flat.ranks_per_host,
            capacity_bytes=flat.capacity_bytes,
            first=flat.first,
            placement=np.array([_PLACEMENTS[p] for p in flat.placement]),
            shards=flat.shards,
            costs_ms=flat.costs_ms,
            memory_bytes=flat.memory_bytes,
            charged=flat.charged,
            charge_ms=flat.charge_ms,
            base_ms=flat.base_ms,
            least_step_ms=flat.least_step_ms,
            floor=np.maximum(scale_ms**8, 1e-200),
        )
        self._most_shards = int(flat.shards[listed].max()) if listed.any() else 1
        self._harm = np.empty(flat.ranks)
        self._out = np.empty(self._most_shards, dtype=np.int64)
        self._everywhere = np.arange(flat.ranks)
        self.clear()

    def clear(self) -> None:
        """Place nothing."""
        flat = self.flat
        phases = flat.costs_ms.shape[1]
        self._state = kernels.State(
            load=np.zeros((phases, flat.ranks)),
            power=np.zeros((phases, flat.ranks)),
            total=np.zeros(phases),
            memory=np.zeros(flat.ranks, dtype=np.int64),
            chosen=np.full(flat.tables, -1),
            where=np.zeros((flat.tables, self._most_shards), dtype=np.int64),
            charges=np.zeros(len(flat.charge_ms), dtype=np.int64),
        )

    def plan(self) -> Plan:
        """Copy what is placed; every table must be."""
        chosen = [int(o) for o in self._state.chosen]
        return chosen, [self._ranks_of(table, option) for table, option in enumerate(chosen)]

    def set_plan(self, plan: Plan) -> None:
        """Place a whole plan, computing the sums anew."""
        self.clear()
        for option, where in zip(*plan, strict=True):
            self.add(option, where)

    def step_ms(self) -> float:
        """Sum over phases of the slowest rank, with charges and base."""
        return float(kernels.step_ms(self._costs, self._state))

    def add(self, option: int, where: NDArray[np.int64]) -> None:
        """Place a table's option on ranks; the table must have none."""
        table = int(self.flat.table[option])
        if self.flat.placement[option] != "all_ranks":
            self._state.where[table, : len(where)] = where
        kernels.change(self._costs, self._state, table, option, 1)

    def best_place(self, option: int) -> NDArray[np.int64] | None:
        """Where an option's shards raise the stand-in least; None where they fit nowhere."""
        harm = kernels.best_place(self._costs, self._state, option, self._harm, self._out)
        if not np.isfinite(harm):
            return None
        if self.flat.placement[option] == "all_ranks":
            return self._everywhere
        return self._out[: self.flat.shards[option]].copy()

    def search(self, tries: int, seed: int, target_ms: float) -> float:
        """Improve the whole plan that is placed, in slices between which Ctrl-C counts; see `kernels.search`."""
        costs_a_try = 2 * len(self.flat.table) / self.flat.tables * self._state.load.size
        slice_tries = max(1, round(_SLICE_COSTS / costs_a_try))
        progress = kernels.begin_search(self._costs, self._state, seed)
        left, best_ms = tries, float(progress.times[0])
        while left > 0 and best_ms > target_ms:
            now = min(slice_tries, left)
            best_ms = float(kernels.search(self._costs, self._state, progress, now, target_ms))
            left -= now
        kernels.end_search(self._costs, self._state, progress)
        return best_ms

    def _ranks_of(self, table: int, option: int) -> NDArray[np.int64]:
        if self.flat.placement[option] == "all_ranks":
            return self._everywhere
        return self._state.where[table, : self.flat.shards[option]].copy()
