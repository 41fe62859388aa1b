"""Ctrl-C ends a solver within two seconds, whatever it is in."""

import os
import signal
import subprocess
import sys
import threading
import time

import numpy as np
import pytest

from dlrm_scale.planning.solver.flat_problem import flatten
from dlrm_scale.planning.solver.interruptible import interruptible
from dlrm_scale.planning.solver.loads import Loads
from dlrm_scale.planning.solver.solve import _first_plans
from tests.planning.solver.test_solve import _random_problem


def test_the_call_gives_its_result_or_its_error() -> None:
    assert interruptible(lambda: 7) == 7
    with pytest.raises(ZeroDivisionError):
        interruptible(lambda: 1 / 0)


def test_an_interrupt_stops_the_library_and_goes_on_at_once() -> None:
    ended = threading.Event()
    threading.Timer(0.2, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
    started = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        interruptible(lambda: ended.wait(60), ended.set)
    assert time.monotonic() - started < 5
    assert ended.is_set()


def test_a_search_in_slices_is_the_search_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    flat = flatten(_random_problem(12, 8, 4, 1))
    for slice_costs in (1, 10**12):
        monkeypatch.setattr("dlrm_scale.planning.solver.loads._SLICE_COSTS", slice_costs)
        loads = Loads(flat, np.ones(3))
        loads.set_plan(_first_plans(flat, loads, 1.0)[0][1])
        step_ms = loads.search(900, 3, 0.0)
        chosen, where = loads.plan()
        found.append((step_ms, chosen, [ranks.tolist() for ranks in where]))
    assert found[0] == found[1]


_SOLVE = """
from tests.planning.solver.test_solve import _random_problem
from dlrm_scale.planning.solver.solve import solve
solve(_random_problem(8, 4, 2, 0), effort=0.01)
print("ready", flush=True)
try:
    solve(_random_problem({tables}, {ranks}, 8, 1), effort=500)
except KeyboardInterrupt:
    print("interrupted", flush=True)
"""


@pytest.mark.parametrize(("tables", "ranks"), [(20, 8), (60, 64)])
def test_ctrl_c_ends_a_long_solve_in_two_seconds(tables: int, ranks: int) -> None:
    with subprocess.Popen(
        [sys.executable, "-c", _SOLVE.format(tables=tables, ranks=ranks)],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
    ) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == b"ready\n"
            time.sleep(1.0)
            assert process.poll() is None, "it was to take minutes"
            asked = time.monotonic()
            process.send_signal(signal.SIGINT)
            assert process.stdout.readline() == b"interrupted\n"
            assert time.monotonic() - asked < 2.0
        finally:
            process.kill()


_COMMAND = """
import atexit, os, signal, threading, time
import typer
from dlrm_scale.cli import app as command_line
from dlrm_scale.planning.solver.interruptible import interruptible

def solve():
    atexit.register(os.abort)
    threading.Timer(0.2, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
    interruptible(lambda: time.sleep(60))

command_line.app = typer.Typer()
command_line.app.command()(solve)
command_line.main([])
"""


def test_an_interrupted_command_ends_with_130_beside_a_library_that_would_abort_its_orderly_end() -> None:
    asked = time.monotonic()
    done = subprocess.run([sys.executable, "-c", _COMMAND], capture_output=True, text=True, timeout=50, check=False)
    assert (done.returncode, "Traceback" in done.stderr) == (130, False), done.stderr
    assert time.monotonic() - asked < 30
