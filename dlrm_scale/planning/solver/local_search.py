"""Make a plan better by taking a few tables out and putting them back where they do the least harm."""

import random

import numpy as np

from dlrm_scale.planning.solver.loads import Loads

__all__ = ["improve"]

_STALL = 400
"""Tries without a new best plan before the search goes back to it."""


def improve(loads: Loads, tries: int, seed: int) -> float:
    """Search from the plan in `loads`, and leave the best one there.

    A try takes out one to three tables, the first most often from a rank that a phase waits for, and puts each back by
    its best option and place. Most tries that make it worse are undone; one in a hundred stays.

    Args:
        loads: with every table placed.
        tries: how many.
        seed: of the choices.

    Returns:
        The best plan's step in milliseconds.
    """
    flat = loads.flat
    rng = random.Random(seed)
    best_step, best_plan = loads.step_ms(), loads.copy_plan()
    smooth = loads.smooth_ms()
    options = [list(flat.options_of(t)) for t in range(flat.tables)]
    least = flat.least_step_ms
    stall = 0
    for _ in range(tries):
        tables = _pick(loads, rng)
        before = [loads.remove(t) for t in tables]
        rng.shuffle(tables)
        placed = []
        for table in tables:
            noise = 0.02 if len(tables) > 1 else 0.0
            choice = None
            for option in options[table]:
                if least[option] >= best_step:
                    continue
                found = loads.best_place(option)
                if found is not None:
                    harm = found[0] * (1 + noise * rng.random())
                    if choice is None or harm < choice[0]:
                        choice = (harm, option, found[1])
            if choice is None:
                break
            loads.add(choice[1], choice[2])
            placed.append(table)
        new = loads.smooth_ms() if len(placed) == len(tables) else np.inf
        stall += 1
        if np.isfinite(new) and (new < smooth * (1 - 1e-12) or rng.random() < 0.01):
            smooth = new
            step = loads.step_ms()
            if step < best_step * (1 - 1e-12):
                best_step, best_plan, stall = step, loads.copy_plan(), 0
        else:
            for table in placed:
                loads.remove(table)
            for option, where in before:
                loads.add(option, where)
        if stall >= _STALL:
            loads.set_plan(best_plan)
            smooth, stall = loads.smooth_ms(), 0
    loads.set_plan(best_plan)
    return best_step


def _pick(loads: Loads, rng: random.Random) -> list[int]:
    """Choose tables to take out, different ones."""
    load = loads.load
    if rng.random() < 0.7:
        phase = rng.choices(range(load.shape[0]), weights=load.max(axis=1) + 1e-12)[0]
        rank = int(np.argmax(load[phase]))
    else:
        rank = rng.randrange(load.shape[1])
    there = loads.tables_on(rank)
    first = rng.choice(there) if there and rng.random() < 0.8 else rng.randrange(loads.flat.tables)
    more = rng.choice((0, 0, 1, 2))
    return list(dict.fromkeys([first, *(rng.randrange(loads.flat.tables) for _ in range(more))]))
