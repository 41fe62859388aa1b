"""The search's inner loops, compiled: where an option's shards do the least harm, and tries with one to three tables.

A try at 16 ranks takes 20 microseconds instead of a millisecond in numpy, and the search finds what only many tries do.

P phases, W ranks, H hosts of L ranks, O options, T tables, S the most shards of an option that isn't on every rank.
"""

from typing import NamedTuple

import numba
import numpy as np
from numpy.typing import NDArray

__all__ = [
    "ALL_RANKS",
    "HOSTS",
    "ONE_HOST",
    "RANKS",
    "Costs",
    "Progress",
    "State",
    "begin_search",
    "best_place",
    "change",
    "end_search",
    "search",
    "step_ms",
]

ALL_RANKS, HOSTS, ONE_HOST, RANKS = 0, 1, 2, 3

_STALL = 400
"""Tries without a new best plan before the search goes back to it."""


class Costs(NamedTuple):
    """The problem; names as in `FlatProblem`.

    Attributes:
        placement: `[O]`, one of the constants above.
        least_step_ms: `[O]`.
        floor: `[P]`: eighth power of what a phase takes about; until it is reached, phases count by it.
    """

    ranks_per_host: int
    capacity_bytes: int
    first: NDArray[np.int64]
    placement: NDArray[np.int64]
    shards: NDArray[np.int64]
    costs_ms: NDArray[np.float64]
    memory_bytes: NDArray[np.int64]
    charged: NDArray[np.bool_]
    charge_ms: NDArray[np.float64]
    base_ms: float
    least_step_ms: NDArray[np.float64]
    floor: NDArray[np.float64]


class State(NamedTuple):
    """A plan being built, changed in place.

    Attributes:
        load: `[P, W]` milliseconds.
        power: `[P, W]`: its eighth power.
        total: `[P]`: sum of `power`.
        memory: `[W]` bytes.
        chosen: `[T]` option, or -1.
        where: `[T, S]` ranks of its shards, unless they are on every rank.
        charges: `[C]`: tables that each charge is due for.
    """

    load: NDArray[np.float64]
    power: NDArray[np.float64]
    total: NDArray[np.float64]
    memory: NDArray[np.int64]
    chosen: NDArray[np.int64]
    where: NDArray[np.int64]
    charges: NDArray[np.int64]


@numba.njit(cache=True, inline="always")
def _eighth(x: float) -> float:
    x = x * x
    x = x * x
    return x * x


@numba.njit(cache=True)
def change(costs: Costs, state: State, table: int, option: int, sign: int) -> None:
    """Add (1) or take away (-1) a table's shards by `state.where`, and note the choice."""
    phases, ranks = state.load.shape
    state.chosen[table] = option if sign > 0 else -1
    for c in range(len(costs.charge_ms)):
        if costs.charged[option, c]:
            state.charges[c] += sign
    everywhere = costs.placement[option] == ALL_RANKS
    for i in range(ranks if everywhere else costs.shards[option]):
        rank = i if everywhere else state.where[table, i]
        state.memory[rank] += sign * costs.memory_bytes[option]
        for p in range(phases):
            # A rank that holds nothing has exactly no load, whatever was added and taken away before.
            load = max(0.0, state.load[p, rank] + sign * costs.costs_ms[option, p])
            power = _eighth(load)
            state.total[p] += power - state.power[p, rank]
            state.load[p, rank] = load
            state.power[p, rank] = power


@numba.njit(cache=True)
def step_ms(costs: Costs, state: State) -> float:
    """Sum over phases of the slowest rank, with charges and base."""
    step: float = costs.base_ms + _charges_ms(costs, state)
    for p in range(len(state.total)):
        step += state.load[p].max()
    return step


@numba.njit(cache=True)
def best_place(costs: Costs, state: State, option: int, harm: NDArray[np.float64], out: NDArray[np.int64]) -> float:
    """Find where an option's shards raise the stand-in for the step least.

    The stand-in is the sum over phases of the 8-norm of the ranks' loads.

    Args:
        costs: the problem.
        state: what is placed; isn't changed.
        option: to be placed.
        harm: `[W]`, overwritten.
        out: `[S]`: gets the ranks, unless the option is on every rank.

    Returns:
        By how much about it rises, to first order; infinite where the shards fit nowhere.
    """
    phases, ranks = state.load.shape
    shards, size = costs.shards[option], costs.memory_bytes[option]
    placement, per_host = costs.placement[option], costs.ranks_per_host
    weight = np.empty(phases)
    for p in range(phases):
        weight[p] = 0.125 * max(state.total[p], costs.floor[p]) ** -0.875
    total: float = 0.0
    for c in range(len(costs.charge_ms)):
        if costs.charged[option, c] and state.charges[c] == 0:
            total += costs.charge_ms[c]
    for rank in range(ranks):
        harm[rank] = np.inf
        if state.memory[rank] + size <= costs.capacity_bytes:
            harm[rank] = 0.0
            for p in range(phases):
                grown = _eighth(state.load[p, rank] + costs.costs_ms[option, p])
                harm[rank] += weight[p] * (grown - state.power[p, rank])
    if placement == ALL_RANKS:
        total += harm.sum()
        return total
    if placement == HOSTS:
        return total + _best_hosts(harm, per_host, shards // per_host, out)
    begin, end = 0, ranks
    if placement == ONE_HOST:
        begin = _best_host(harm, per_host, shards) * per_host
        end = begin + per_host
    for shard in range(shards):
        rank = begin
        for other in range(begin + 1, end):
            if harm[other] < harm[rank]:
                rank = other
        if harm[rank] == np.inf:
            return np.inf
        total += harm[rank]
        out[shard] = rank
        # What one more shard of the table does there.
        here = 1
        for i in range(shard):
            here += out[i] == rank
        if state.memory[rank] + (here + 1) * size > costs.capacity_bytes:
            harm[rank] = np.inf
        else:
            harm[rank] = 0.0
            for p in range(phases):
                load = state.load[p, rank] + here * costs.costs_ms[option, p]
                harm[rank] += weight[p] * (_eighth(load + costs.costs_ms[option, p]) - _eighth(load))
    out[:shards].sort()
    return total


class Progress(NamedTuple):
    """Where a search stands between two of its slices, changed in place.

    Attributes:
        chosen: `[T]` of the best plan so far.
        where: `[T, S]` of it.
        times: `[2]`: its step, and the stand-in of the plan in hand.
        stall: `[1]`: tries since it was found.
    """

    chosen: NDArray[np.int64]
    where: NDArray[np.int64]
    times: NDArray[np.float64]
    stall: NDArray[np.int64]


@numba.njit(cache=True)
def begin_search(costs: Costs, state: State, seed: int) -> Progress:
    """Start from a whole plan; choices follow from `seed` as long as no other search begins."""
    np.random.seed(seed)
    times = np.array([step_ms(costs, state), _smooth_ms(costs, state)])
    return Progress(state.chosen.copy(), state.where.copy(), times, np.zeros(1, np.int64))


@numba.njit(cache=True)
def search(costs: Costs, state: State, progress: Progress, tries: int, target_ms: float) -> float:
    """Take one to three tables out and put them back where they do the least harm, many times.

    The first table is most often one on a rank that a phase waits for. Tries that make the stand-in worse are undone,
    but for one in a hundred. Slices of a search give what all its tries at once give.

    Args:
        costs: the problem.
        state: a whole plan; see `end_search`.
        progress: from `begin_search`.
        tries: how many now.
        target_ms: stop at a step as short as this.

    Returns:
        The best plan's step.
    """
    ranks = len(state.memory)
    tables = len(state.chosen)
    harm = np.empty(ranks)
    out, best_out = np.empty(state.where.shape[1], np.int64), np.empty(state.where.shape[1], np.int64)
    there = np.empty(tables, np.int64)
    picked, old, old_where = np.empty(3, np.int64), np.empty(3, np.int64), np.empty((3, state.where.shape[1]), np.int64)
    best_step: float = progress.times[0]
    smooth, stall = progress.times[1], progress.stall[0]
    for _ in range(tries):
        if best_step <= target_ms:
            break
        count = _pick(costs, state, there, picked)
        for i in range(count):
            old[i] = state.chosen[picked[i]]
            old_where[i] = state.where[picked[i]]
            change(costs, state, picked[i], old[i], -1)
        placed = 0
        for i in range(count):
            table = picked[i]
            least, best = np.inf, -1
            for option in range(costs.first[table], costs.first[table + 1]):
                if costs.least_step_ms[option] < best_step:
                    found = best_place(costs, state, option, harm, out)
                    if count > 1:
                        found *= 1 + 0.02 * np.random.random()
                    if found < least:
                        least, best = found, option
                        best_out[:] = out
            if best < 0:
                break
            state.where[table] = best_out
            change(costs, state, table, best, 1)
            placed += 1
        new = _smooth_ms(costs, state) if placed == count else np.inf
        stall += 1
        if new < smooth * (1 - 1e-12) or (new < np.inf and np.random.random() < 0.01):
            smooth = new
            step = step_ms(costs, state)
            if step < best_step * (1 - 1e-12):
                best_step, stall = step, 0
                progress.chosen[:] = state.chosen
                progress.where[:] = state.where
        else:
            for i in range(placed):
                change(costs, state, picked[i], state.chosen[picked[i]], -1)
            for i in range(count):
                state.where[picked[i]] = old_where[i]
                change(costs, state, picked[i], old[i], 1)
        if stall >= _STALL:
            _set_plan(costs, state, progress.chosen, progress.where)
            smooth, stall = _smooth_ms(costs, state), 0
    progress.times[0], progress.times[1], progress.stall[0] = best_step, smooth, stall
    return best_step


@numba.njit(cache=True)
def end_search(costs: Costs, state: State, progress: Progress) -> None:
    """Place the best plan that the search found."""
    _set_plan(costs, state, progress.chosen, progress.where)


@numba.njit(cache=True)
def _set_plan(costs: Costs, state: State, chosen: NDArray[np.int64], where: NDArray[np.int64]) -> None:
    state.load[:] = 0
    state.power[:] = 0
    state.total[:] = 0
    state.memory[:] = 0
    state.charges[:] = 0
    state.where[:] = where
    for table in range(len(chosen)):
        change(costs, state, table, chosen[table], 1)


@numba.njit(cache=True)
def _smooth_ms(costs: Costs, state: State) -> float:
    smooth = _charges_ms(costs, state)
    for p in range(len(state.total)):
        smooth += max(state.total[p], 0.0) ** 0.125
    return smooth


@numba.njit(cache=True)
def _charges_ms(costs: Costs, state: State) -> float:
    due = 0.0
    for c in range(len(costs.charge_ms)):
        if state.charges[c] > 0:
            due += costs.charge_ms[c]
    return due


@numba.njit(cache=True)
def _pick(costs: Costs, state: State, there: NDArray[np.int64], picked: NDArray[np.int64]) -> int:
    """Choose tables to take out, different ones, in random order; returns how many."""
    phases, ranks = state.load.shape
    tables = len(state.chosen)
    rank = np.random.randint(ranks)
    if np.random.random() < 0.7:
        slowest = np.empty(phases)
        for p in range(phases):
            slowest[p] = state.load[p].max()
        at, phase = np.random.random() * slowest.sum(), 0
        while phase < phases - 1 and at >= slowest[phase]:
            at -= slowest[phase]
            phase += 1
        rank = int(np.argmax(state.load[phase]))
    found = 0
    for table in range(tables):
        option = state.chosen[table]
        here = costs.placement[option] == ALL_RANKS
        if not here:
            for i in range(costs.shards[option]):
                here |= state.where[table, i] == rank
        if here:
            there[found] = table
            found += 1
    picked[0] = np.random.randint(tables)
    if found > 0 and np.random.random() < 0.8:
        picked[0] = there[np.random.randint(found)]
    count = 1
    for _ in range((0, 0, 1, 2)[np.random.randint(4)]):
        table = np.random.randint(tables)
        new = True
        for i in range(count):
            new &= picked[i] != table
        if new:
            picked[count] = table
            count += 1
    for i in range(count - 1, 0, -1):
        j = np.random.randint(i + 1)
        picked[i], picked[j] = picked[j], picked[i]
    return count


@numba.njit(cache=True)
def _best_hosts(harm: NDArray[np.float64], per_host: int, count: int, out: NDArray[np.int64]) -> float:
    """Write all ranks of the `count` hosts with the least harm, host by host."""
    hosts = len(harm) // per_host
    of_host = np.empty(hosts)
    for h in range(hosts):
        of_host[h] = harm[h * per_host : (h + 1) * per_host].sum()
    total = 0.0
    taken = np.zeros(hosts, np.bool_)
    for _ in range(count):
        best = -1
        for h in range(hosts):
            if not taken[h] and (best < 0 or of_host[h] < of_host[best]):
                best = h
        total += of_host[best]
        taken[best] = True
    at = 0
    for h in range(hosts):
        if taken[h]:
            for r in range(per_host):
                out[at] = h * per_host + r
                at += 1
    return total


@numba.njit(cache=True)
def _best_host(harm: NDArray[np.float64], per_host: int, shards: int) -> int:
    """Find the host whose ranks would take one shard each with the least harm."""
    best, least = 0, np.inf
    for h in range(len(harm) // per_host):
        own = np.sort(harm[h * per_host : (h + 1) * per_host])
        total = own[: min(shards, per_host)].sum()
        if total < least:
            best, least = h, total
    return best
