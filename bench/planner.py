"""Our solver against TorchRec's planner, both in TorchRec's own costs: predicted bottleneck, bound, planning time.

MLPerf's DCNv2 tables (dim 128) and 800 synthetic ones, 8,192 samples a rank, 80 GB a device, 8 devices a host,
TorchRec's default bandwidths and its 15 % heuristic reservation. "same": the sharding types that TorchRec's planner
chooses from by default at these widths, of tables kept whole or cut by rows. "wide": every width of column shards and
grids besides, which TorchRec's planner tries at one width if it is told to.

Every plan is rated by the same function, which adds up TorchRec's cost of every shard on its rank, and must fit the
memory. Each case is a process of its own, whose peak memory is reported. Times are from the tables to the plan, costs
included, without imports and compiling; the goal is held against CPU time, since both planners use one thread. With
`--quick` each plan is made in two processes with other hash seeds and compared.

    python bench/planner.py --quick
    python bench/planner.py --save
    python bench/planner.py --torchrec-slow --save
"""

import argparse
import hashlib
import json
import os
import resource
import subprocess
import sys
import time
from dataclasses import asdict, dataclass

import stamp

from dlrm_scale.planning.costs.torchrec_problem import make_torchrec_problem
from dlrm_scale.planning.plan.shapes import assignment_of
from dlrm_scale.planning.solver.problem import Option, Problem
from dlrm_scale.planning.solver.rate import rate
from dlrm_scale.planning.solver.solve import solve
from dlrm_scale.planning.tables.built_in import built_in_tables
from dlrm_scale.planning.tables.generate import synthetic_tables
from dlrm_scale.planning.tables.table_set import TableSet
from dlrm_scale.sharding.torchrec_costs import TorchRecSetup
from dlrm_scale.sharding.torchrec_planner import plan_with_torchrec

Found = dict[str, object]


@dataclass(frozen=True, kw_only=True)
class Case:
    """One line of the table.

    Attributes:
        tables: `mlperf` or `synthetic`.
        ranks: devices.
        wide: see the module.
        goal_ms: that the plan must reach.
        goal_gap: over the bound.
        goal_seconds: to plan in.
        goal_gib: peak memory.
        torchrec: TorchRec's bottleneck and seconds where it takes minutes, measured once; None where it is run here.
    """

    tables: str
    ranks: int
    wide: bool = False
    goal_ms: float | None = None
    goal_gap: float | None = None
    goal_seconds: float | None = None
    goal_gib: float | None = None
    torchrec: str | None = None


QUICK = (
    Case(tables="mlperf", ranks=8, goal_ms=4.08, goal_seconds=10),
    Case(tables="mlperf", ranks=16, goal_ms=13.6, goal_seconds=10),
    Case(tables="mlperf", ranks=8, wide=True),
    Case(tables="mlperf", ranks=16, wide=True, goal_ms=12.6, goal_seconds=30),
)
FULL = (
    *QUICK,
    Case(tables="mlperf", ranks=64, goal_ms=18.9, goal_seconds=10),
    Case(tables="mlperf", ranks=64, wide=True, goal_ms=15.2, goal_seconds=30),
    Case(tables="mlperf", ranks=256, torchrec="71.874 in 144 s"),
    Case(tables="mlperf", ranks=256, wide=True, goal_ms=19.4, goal_seconds=30, torchrec="71.874 in 144 s"),
    Case(tables="mlperf", ranks=1024, torchrec="287.5 in 123 s"),
    Case(tables="mlperf", ranks=1024, wide=True, torchrec="287.5 in 123 s"),
    Case(tables="mlperf", ranks=4096, goal_seconds=60, goal_gib=4, torchrec="not known"),
    Case(tables="mlperf", ranks=4096, wide=True, goal_seconds=60, goal_gib=4, torchrec="not known"),
    Case(tables="synthetic", ranks=8, goal_gap=0.002, goal_seconds=10, torchrec="216.8 in 150 s"),
    Case(tables="synthetic", ranks=16, goal_gap=0.002, goal_seconds=10, torchrec="474.3 in 150 s"),
)


def main() -> None:
    """Run the cases, print a table, and save it if asked."""
    options = _options()
    if options.case is not None:
        print(json.dumps(_work(options.case, Case(**json.loads(options.of)))))
        return
    cases = QUICK if options.quick else FULL
    print(
        f"{'tables':>9} {'ranks':>5} {'space':>5} | {'TorchRec ms (s)':>24} | {'ours ms':>9} {'bound':>9} {'gap':>8}"
        f" {'CPU s':>6} {'wall s':>6} {'GiB':>4} | goal"
    )
    rows = []
    theirs: dict[tuple[str, int], Found] = {}
    for case in cases:
        ours = _process("ours", case, seed=1)
        if options.quick and _process("ours", case, seed=2)["plan"] != ours["plan"]:
            sys.exit(f"two processes made different plans for {case}")
        key = (case.tables, case.ranks)
        if key not in theirs and (case.torchrec is None or (options.torchrec_slow and case.torchrec != "not known")):
            theirs[key] = _process("torchrec", case, seed=1)
        row = {"case": asdict(case), "ours": ours, "torchrec": theirs.get(key), "missed": _missed(case, ours)}
        rows.append(row)
        print(_line(case, ours, theirs.get(key)), flush=True)
    missed = sum(bool(row["missed"]) for row in rows)
    print(f"\n{missed} of {sum(_has_goal(case) for case in cases)} goals missed")
    if options.save:
        name = "planner_quick" if options.quick else "planner"
        print(f"saved {stamp.save(name, {'stamp': stamp.stamp(), 'rows': rows})}")


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--quick", action="store_true", help="8 and 16 ranks, every plan made twice")
    parser.add_argument("--torchrec-slow", action="store_true", help="run TorchRec's planner where it takes minutes")
    parser.add_argument("--save", action="store_true", help="write the result to bench/results")
    parser.add_argument("--case", choices=("ours", "torchrec"), help=argparse.SUPPRESS)
    parser.add_argument("--of", help=argparse.SUPPRESS)
    return parser.parse_args()


def _process(planner: str, case: Case, *, seed: int) -> Found:
    """Plan in a process of its own."""
    command = [sys.executable, __file__, "--case", planner, "--of", json.dumps(asdict(case))]
    environment = {**os.environ, "PYTHONHASHSEED": str(seed)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{planner} failed on {case}:\n{done.stderr}")
    found: Found = json.loads(done.stdout.splitlines()[-1])
    return found


def _work(planner: str, case: Case) -> Found:
    tables = built_in_tables("mlperf_dcnv2") if case.tables == "mlperf" else synthetic_tables(800)
    setup = TorchRecSetup(
        ranks=case.ranks, ranks_per_host=8, batch_size_per_rank=8192, memory_bytes=80 * 1024**3, reserve=0.15
    )
    return _ours(tables, setup, wide=case.wide) if planner == "ours" else _torchrec(tables, setup)


def _ours(tables: TableSet, setup: TorchRecSetup, *, wide: bool) -> Found:
    compile_seconds = _compile()
    wall, cpu = time.perf_counter(), time.process_time()
    problem = make_torchrec_problem(tables, setup, wide=wide)
    solution = solve(problem)
    wall, cpu = time.perf_counter() - wall, time.process_time() - cpu
    rating = rate(problem, solution.assignment)
    if rating.memory_bytes.max() > problem.memory_bytes:
        sys.exit("our plan doesn't fit")
    return {
        "step_ms": rating.step_ms,
        "bound_ms": solution.bound_ms,
        "gap": solution.gap,
        "optimal": solution.optimal,
        "work_units": solution.work_units,
        "plan": hashlib.sha256(repr(solution.assignment).encode()).hexdigest()[:16],
        "wall_seconds": wall,
        "cpu_seconds": cpu,
        "compile_seconds": compile_seconds,
        "peak_gib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024**2,
    }


def _torchrec(tables: TableSet, setup: TorchRecSetup) -> Found:
    cpu = time.process_time()
    made = plan_with_torchrec([t.spec for t in tables.tables], [t.lookups_per_sample for t in tables.tables], setup)
    cpu = time.process_time() - cpu
    # In the wide space too, in case a table got a type that the same space leaves out.
    problem = make_torchrec_problem(tables, setup, wide=True)
    rating = rate(problem, assignment_of(problem, made.shapes))
    if rating.memory_bytes.max() > problem.memory_bytes:
        sys.exit("TorchRec's plan doesn't fit")
    return {"step_ms": rating.step_ms, "wall_seconds": made.seconds, "cpu_seconds": cpu}


def _compile() -> float:
    """Solve a small problem, so that compiled code is loaded; returns the seconds."""
    started = time.perf_counter()
    options = tuple(
        Option(
            sharding_type="table_wise",
            kernel="fused",
            placement="ranks",
            shards=1,
            columns=4,
            costs_ms=(cost,),
            memory_bytes=1,
        )
        for cost in (1.0, 2.0)
    )
    tables = tuple("abcde")
    solve(
        Problem(
            ranks=2, ranks_per_host=1, memory_bytes=9, phases=("step",), tables=tables, options=(options,) * len(tables)
        ),
        effort=0.01,
    )
    return time.perf_counter() - started


def _has_goal(case: Case) -> bool:
    return any(goal is not None for goal in (case.goal_ms, case.goal_gap, case.goal_seconds, case.goal_gib))


def _missed(case: Case, ours: Found) -> list[str]:
    held = (
        ("ms", case.goal_ms, ours["step_ms"]),
        ("gap", case.goal_gap, ours["gap"]),
        ("CPU s", case.goal_seconds, ours["cpu_seconds"]),
        ("GiB", case.goal_gib, ours["peak_gib"]),
    )
    return [f"{name} {value:.4g} > {goal:g}" for name, goal, value in held if goal is not None and value > goal]


def _line(case: Case, ours: Found, theirs: Found | None) -> str:
    if theirs is not None:
        other = f"{theirs['step_ms']:.3f} ({theirs['wall_seconds']:.1f})"
    else:
        other = f"{case.torchrec}, not run"
    goals = [
        f"{goal:{form}} {unit}"
        for goal, form, unit in (
            (case.goal_ms, "g", "ms"),
            (case.goal_gap, ".1%", "gap"),
            (case.goal_seconds, "g", "s"),
            (case.goal_gib, "g", "GiB"),
        )
        if goal is not None
    ]
    missed = _missed(case, ours)
    verdict = ("missed: " + ", ".join(missed) if missed else "met") if goals else "none"
    gap = "optimal" if ours["optimal"] else f"{ours['gap']:.3%}"
    space = "wide" if case.wide else "same"
    return (
        f"{case.tables:>9} {case.ranks:>5} {space:>5} | {other:>24} | {ours['step_ms']:>9.3f} "
        f"{ours['bound_ms']:>9.3f} {gap:>8} {ours['cpu_seconds']:>6.1f} {ours['wall_seconds']:>6.1f} "
        f"{ours['peak_gib']:>4.1f} | {', '.join(goals) or '-'}: {verdict}"
    )


if __name__ == "__main__":
    main()
