"""A plan being built: load and memory of every rank, and where the next shards do the least harm.

What is made small is a smooth stand-in for the step: sum over phases of the 8-norm of the ranks' loads. Unlike the
slowest rank alone it also sees the second slowest, so that a search has a slope to go down.

P phases, W ranks, H hosts of L ranks.
"""

import numpy as np
from numpy.typing import NDArray

from dlrm_scale.planning.solver.flat_problem import FlatProblem

__all__ = ["Loads"]


class Loads:
    """See the module.

    Args:
        flat: the problem.
        scale_ms: `[P]`: what a phase takes about; until it is reached, phases count by it.
    """

    def __init__(self, flat: FlatProblem, scale_ms: NDArray[np.float64]) -> None:
        """Start with nothing placed; see the class."""
        self.flat = flat
        self._floor = np.maximum(_eighth(scale_ms), 1e-200)
        self._ranks = np.arange(flat.ranks)
        self._host_start = np.arange(flat.hosts) * flat.ranks_per_host
        self.clear()

    def clear(self) -> None:
        """Place nothing."""
        flat = self.flat
        self.load = np.zeros((flat.costs_ms.shape[1], flat.ranks))
        self._power = np.zeros_like(self.load)
        self.memory = np.zeros(flat.ranks, dtype=np.int64)
        self.chosen = [-1] * flat.tables
        self.where: list[NDArray[np.int64]] = [np.empty(0, dtype=np.int64)] * flat.tables
        self._charges = np.zeros(len(flat.charge_ms), dtype=np.int64)

    def copy_plan(self) -> tuple[list[int], list[NDArray[np.int64]]]:
        """Option and ranks of every table. Arrays are shared and never changed."""
        return list(self.chosen), list(self.where)

    def set_plan(self, plan: tuple[list[int], list[NDArray[np.int64]]]) -> None:
        """Place as `copy_plan` gave it, computing the sums anew."""
        self.clear()
        for option, where in zip(*plan, strict=True):
            if option >= 0:
                self.add(option, where)

    def step_ms(self) -> float:
        """Sum over phases of the slowest rank, with charges and base."""
        return float(self.load.max(axis=1).sum() + self._charged_ms() + self.flat.base_ms)

    def smooth_ms(self) -> float:
        """The stand-in; see the module."""
        return float((self._power.sum(axis=1) ** 0.125).sum() + self._charged_ms())

    def add(self, option: int, where: NDArray[np.int64]) -> None:
        """Place a table's option on ranks; the table must have none."""
        self._change(option, where, 1)
        table = int(self.flat.table[option])
        self.chosen[table], self.where[table] = option, where

    def remove(self, table: int) -> tuple[int, NDArray[np.int64]]:
        """Take a table off its ranks."""
        option, where = self.chosen[table], self.where[table]
        self._change(option, where, -1)
        self.chosen[table] = -1
        return option, where

    def tables_on(self, rank: int) -> list[int]:
        """Tables with a shard on a rank."""
        return [t for t, where in enumerate(self.where) if self.chosen[t] >= 0 and (where == rank).any()]

    def best_place(self, option: int) -> tuple[float, NDArray[np.int64]] | None:
        """Where an option's shards raise the stand-in least.

        Returns:
            By how much about (its first order), and the ranks; None where they fit nowhere.
        """
        flat = self.flat
        cost = flat.costs_ms[option]
        size = int(flat.memory_bytes[option])
        weight = np.maximum(self._power.sum(axis=1), self._floor) ** -0.875
        harm = weight @ (_eighth(self.load + cost[:, None]) - self._power)
        room = self.memory + size <= flat.capacity_bytes
        placement, shards = flat.placement[option], int(flat.shards[option])
        charged = self._new_charge_ms(option)
        if placement == "all_ranks":
            return (float(harm.sum()) * 0.125 + charged, self._ranks) if room.all() else None
        harm[~room] = np.inf
        if placement == "hosts":
            of_host = np.add.reduceat(harm, self._host_start)
            count = shards // flat.ranks_per_host
            hosts = np.argsort(of_host, kind="stable")[:count]
            if not np.isfinite(of_host[hosts]).all():
                return None
            where = (np.sort(hosts)[:, None] * flat.ranks_per_host + np.arange(flat.ranks_per_host)).ravel()
            return float(of_host[hosts].sum()) * 0.125 + charged, where
        begin, end = 0, flat.ranks
        if placement == "one_host":
            begin = self._best_host(harm, shards) * flat.ranks_per_host
            end = begin + flat.ranks_per_host
        found = self._one_by_one(option, harm[begin:end], weight, begin, shards)
        return None if found is None else (found[0] * 0.125 + charged, found[1])

    def _best_host(self, harm: NDArray[np.float64], shards: int) -> int:
        by_host = harm.reshape(self.flat.hosts, self.flat.ranks_per_host)
        fewest = min(shards, self.flat.ranks_per_host)
        return int(np.argmin(np.sort(by_host, axis=1)[:, :fewest].sum(axis=1)))

    def _one_by_one(
        self, option: int, harm: NDArray[np.float64], weight: NDArray[np.float64], begin: int, shards: int
    ) -> tuple[float, NDArray[np.int64]] | None:
        """Place shard by shard; one rank may get several."""
        flat = self.flat
        cost, size = flat.costs_ms[option], int(flat.memory_bytes[option])
        if shards == 1:
            local = int(harm.argmin())
            return (float(harm[local]), np.array([begin + local])) if np.isfinite(harm[local]) else None
        if shards <= len(harm):
            order = np.argsort(harm, kind="stable")[:shards]
            last = harm[order[-1]]
            if np.isfinite(last):
                load = self.load[:, begin + order[0]] + cost
                if weight @ (_eighth(load + cost) - _eighth(load)) >= last:
                    return float(harm[order].sum()), np.sort(begin + order)
        total, where = 0.0, np.empty(shards, dtype=np.int64)
        placed: dict[int, int] = {}
        for shard in range(shards):
            local = int(np.argmin(harm))
            if not np.isfinite(harm[local]):
                return None
            total += float(harm[local])
            rank = begin + local
            where[shard] = rank
            if shard + 1 < shards:
                placed[rank] = placed.get(rank, 0) + 1
                load = self.load[:, rank] + cost * placed[rank]
                fits = int(self.memory[rank]) + size * (placed[rank] + 1) <= flat.capacity_bytes
                harm[local] = weight @ (_eighth(load + cost) - _eighth(load)) if fits else np.inf
        return total, where

    def _change(self, option: int, where: NDArray[np.int64], sign: int) -> None:
        flat = self.flat
        cost, size = sign * flat.costs_ms[option], sign * int(flat.memory_bytes[option])
        self._charges += sign * flat.charged[option]
        if flat.placement[option] == "all_ranks":
            self.load += cost[:, None]
            self.memory += size
            self._power = _eighth(self.load)
        elif len(where) == 1:
            rank = where[0]
            self.load[:, rank] += cost
            self.memory[rank] += size
            self._power[:, rank] = _eighth(self.load[:, rank])
        else:
            shards = np.bincount(where, minlength=flat.ranks)
            self.load += cost[:, None] * shards
            self.memory += size * shards
            self._power = _eighth(self.load)

    def _charged_ms(self) -> float:
        return float(self.flat.charge_ms @ (self._charges > 0))

    def _new_charge_ms(self, option: int) -> float:
        return float(self.flat.charge_ms @ (self.flat.charged[option] & (self._charges == 0)))


def _eighth(x: NDArray[np.float64]) -> NDArray[np.float64]:
    x = x * x
    x = x * x
    return x * x
