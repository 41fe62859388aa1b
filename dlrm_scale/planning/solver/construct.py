"""First plans: every table's option is chosen, then the costliest shards are placed first (Graham's longest first)."""

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from dlrm_scale.planning.solver.loads import Loads

__all__ = ["construct", "construct_small", "longest_first"]

_ORDER = {"all_ranks": 0, "hosts": 1, "one_host": 2, "ranks": 3}


def longest_first(loads: Loads, options: NDArray[np.int64]) -> bool:
    """Place one option of every table: on all ranks first, then on hosts, then single shards, the costliest first.

    Args:
        loads: is cleared.
        options: `[tables]`.

    Returns:
        False where a shard found no room; `loads` then holds what was placed before.
    """
    flat = loads.flat
    loads.clear()
    cost = flat.costs_ms.sum(axis=1)
    for option in sorted((int(o) for o in options), key=lambda o: (_ORDER[flat.placement[o]], -cost[o], o)):
        found = loads.best_place(option)
        if found is None:
            return False
        loads.add(option, found)
    return True


def construct(loads: Loads, options: NDArray[np.int64]) -> bool:
    """As `longest_first`, but a table that finds no room gets the option that takes the least of all memory.

    Returns:
        False where that finds no room either.
    """
    flat = loads.flat
    loads.clear()
    cost = flat.costs_ms.sum(axis=1)
    total = flat.memory_bytes * flat.shards
    for option in sorted((int(o) for o in options), key=lambda o: (_ORDER[flat.placement[o]], -cost[o], o)):
        found = loads.best_place(option)
        if found is None:
            others = sorted(flat.options_of(int(flat.table[option])), key=lambda o: (total[o], cost[o], o))
            for other in others:
                found = loads.best_place(other)
                if found is not None:
                    option = other
                    break
            else:
                return False
        loads.add(option, found)
    return True


def construct_small(loads: Loads) -> bool:
    """Fit memory alone: every table by the option that takes the least of all memory, the largest shards first."""
    flat = loads.flat
    total = flat.memory_bytes * flat.shards
    least = [min(flat.options_of(t), key=lambda o: (total[o], flat.memory_bytes[o], o)) for t in range(flat.tables)]
    share = flat.memory_bytes[:, None] / max(1, flat.capacity_bytes)
    by_memory = Loads(replace(flat, costs_ms=share), np.zeros(1))
    if not construct(by_memory, np.array(least)):
        return False
    loads.set_plan(by_memory.plan())
    return True
