"""The whole problem as a constraint program (OR-tools CP-SAT), for sizes where it can improve or prove a plan.

Costs are whole numbers of a unit, rounded down, so that the program's bound is a bound of the problem; memory is in
bytes, exact. Where an option's shards differ each counts as the largest: then neither the program's bound nor its proof
that nothing fits holds for plans rated shard by shard. CP-SAT runs on one thread with a fixed seed and stops on its own
count of work, so that equal problems give equal answers.
"""

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from ortools.sat.python import cp_model

from dlrm_scale.planning.solver.flat_problem import FlatProblem
from dlrm_scale.planning.solver.interruptible import interruptible
from dlrm_scale.planning.solver.loads import Plan

__all__ = ["Exact", "placement_variables", "solve_exactly"]

_UNITS = 1_000_000
"""The known plan's step is as many units of cost; 26 tables round off less than 3e-5 of it."""


@dataclass(frozen=True, kw_only=True)
class Exact:
    """What the program found.

    Attributes:
        plan: option and ranks of every table; None where it found none.
        bound_ms: no plan has a shorter step.
        proven: `plan` is the best up to rounding, or, where it is None, there is none.
        work_units: milliseconds of CP-SAT's deterministic time.
    """

    plan: Plan | None
    bound_ms: float
    proven: bool
    work_units: int


def placement_variables(flat: FlatProblem, below_ms: float) -> int:
    """Count what the program would have to decide, with options whose least step is below `below_ms`."""
    count = {"all_ranks": 1, "hosts": flat.hosts, "one_host": flat.ranks + flat.hosts, "ranks": flat.ranks}
    return sum(count[flat.placement[o]] for o in np.flatnonzero(flat.least_step_ms < below_ms))


def solve_exactly(flat: FlatProblem, known: Plan | None, known_ms: float, *, bound_ms: float, work: float) -> Exact:
    """Look for a shorter step than a known one.

    Args:
        flat: the problem.
        known: a plan to start from; None to look for any.
        known_ms: its step; without a plan, one that some plan is surely under.
        bound_ms: known bound.
        work: CP-SAT's deterministic time to spend, about seconds.
    """
    program = _Program(flat, known_ms)
    if known is not None:
        program.hint(known)
    solver = cp_model.CpSolver()
    solver.parameters.num_workers = 1
    solver.parameters.interleave_search = True
    solver.parameters.random_seed = 1
    solver.parameters.max_deterministic_time = work
    # OR-tools would take Ctrl-C for itself: the search would end, and the planning go on.
    solver.parameters.catch_sigint_signal = False
    status = interruptible(lambda: solver.solve(program.model), solver.stop_search)
    spent = round(solver.deterministic_time * 1000)
    if status == cp_model.INFEASIBLE:
        return Exact(plan=None, bound_ms=known_ms, proven=True, work_units=spent)
    bound = max(bound_ms, program.milliseconds(solver.best_objective_bound))
    if status not in (cp_model.OPTIMAL, cp_model.FEASIBLE):
        return Exact(plan=None, bound_ms=bound, proven=False, work_units=spent)
    return Exact(plan=program.plan(solver), bound_ms=bound, proven=status == cp_model.OPTIMAL, work_units=spent)


class _Program:
    """The model with its variables.

    Args:
        flat: the problem.
        known_ms: options that alone take longer are left out.
    """

    def __init__(self, flat: FlatProblem, known_ms: float) -> None:
        self.model = cp_model.CpModel()
        self._flat = flat
        self._unit_ms = known_ms / _UNITS
        self._options = [int(o) for o in np.flatnonzero(flat.least_step_ms <= known_ms)]
        self._used: dict[int, cp_model.IntVar] = {}
        self._on_hosts: dict[int, list[cp_model.IntVar]] = {}
        self._on_ranks: dict[int, list[cp_model.IntVar]] = {}
        self._units = np.floor(flat.costs_ms / self._unit_ms).astype(np.int64)
        self._place()
        self._limit()

    def milliseconds(self, units: float) -> float:
        return units * self._unit_ms + self._flat.base_ms

    def hint(self, plan: Plan) -> None:
        flat, model = self._flat, self.model
        chosen, where = plan
        for option in self._options:
            table = int(flat.table[option])
            ours = chosen[table] == option
            model.add_hint(self._used[option], int(ours))
            ranks = where[table] if ours else np.empty(0, dtype=np.int64)
            hosts = np.unique(ranks // flat.ranks_per_host)
            for host, variable in enumerate(self._on_hosts.get(option, [])):
                model.add_hint(variable, int(host in hosts))
            counts = np.bincount(ranks, minlength=flat.ranks)
            for rank, variable in enumerate(self._on_ranks.get(option, [])):
                model.add_hint(variable, int(counts[rank]))

    def plan(self, solver: cp_model.CpSolver) -> Plan:
        flat = self._flat
        chosen = [-1] * flat.tables
        where: list[NDArray[np.int64]] = [np.empty(0, dtype=np.int64)] * flat.tables
        for option in self._options:
            if not solver.value(self._used[option]):
                continue
            table = int(flat.table[option])
            chosen[table] = option
            if flat.placement[option] == "all_ranks":
                where[table] = np.arange(flat.ranks)
            elif flat.placement[option] == "hosts":
                hosts = np.flatnonzero([solver.value(v) for v in self._on_hosts[option]])
                where[table] = flat.ranks_of(hosts)
            else:
                counts = [solver.value(v) for v in self._on_ranks[option]]
                where[table] = np.repeat(np.arange(flat.ranks), counts)
        return chosen, where

    def _place(self) -> None:
        flat, model = self._flat, self.model
        for table in range(flat.tables):
            used = []
            for option in self._options:
                if flat.table[option] == table:
                    self._used[option] = model.new_bool_var("")
                    used.append(self._used[option])
                    self._place_option(option)
            model.add_exactly_one(used)

    def _place_option(self, option: int) -> None:
        flat, model = self._flat, self.model
        used, placement, shards = self._used[option], flat.placement[option], int(flat.shards[option])
        if placement == "all_ranks":
            return
        if placement == "hosts":
            hosts = [model.new_bool_var("") for _ in range(flat.hosts)]
            model.add(sum(hosts) == shards // flat.ranks_per_host * used)
            self._on_hosts[option] = hosts
            return
        ranks = [model.new_bool_var("") if shards == 1 else model.new_int_var(0, shards, "") for _ in range(flat.ranks)]
        model.add(sum(ranks) == shards * used)
        self._on_ranks[option] = ranks
        if placement == "one_host":
            hosts = [model.new_bool_var("") for _ in range(flat.hosts)]
            for host, variable in enumerate(hosts):
                begin = host * flat.ranks_per_host
                model.add(sum(ranks[begin : begin + flat.ranks_per_host]) == shards * variable)
            self._on_hosts[option] = hosts

    def _limit(self) -> None:
        flat, model = self._flat, self.model
        phases = flat.costs_ms.shape[1]
        size = [int(m) for m in flat.memory_bytes]
        everywhere = [o for o in self._options if flat.placement[o] == "all_ranks"]
        by_rank = [[(v, o) for o, v in self._of_rank(rank)] for rank in range(flat.ranks)]
        top = 2 * _UNITS
        slowest = [model.new_int_var(0, top, "") for _ in range(phases)]
        for phase in range(phases):
            units = self._units[:, phase]
            shared = model.new_int_var(0, top, "")
            model.add(shared == sum(int(units[o]) * self._used[o] for o in everywhere))
            for own in by_rank:
                model.add(shared + sum(int(units[o]) * v for v, o in own) <= slowest[phase])
        shared = model.new_int_var(0, flat.capacity_bytes, "")
        model.add(shared == sum(size[o] * self._used[o] for o in everywhere))
        for own in by_rank:
            model.add(shared + sum(size[o] * v for v, o in own) <= flat.capacity_bytes)
        charges = []
        for charge, milliseconds in enumerate(flat.charge_ms):
            due = model.new_bool_var("")
            for option in self._options:
                if flat.charged[option, charge]:
                    model.add_implication(self._used[option], due)
            charges.append(int(milliseconds / self._unit_ms) * due)
        model.minimize(sum(slowest) + sum(charges))

    def _of_rank(self, rank: int) -> list[tuple[int, cp_model.IntVar]]:
        flat = self._flat
        found = []
        for option in self._options:
            if option in self._on_ranks:
                found.append((option, self._on_ranks[option][rank]))
            elif option in self._on_hosts:
                found.append((option, self._on_hosts[option][rank // flat.ranks_per_host]))
        return found
