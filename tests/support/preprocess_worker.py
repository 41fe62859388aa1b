"""Preprocess in a process that dies or pauses at a chosen event, so that tests needn't guess moments.

    python -m tests.support.preprocess_worker '{"inputs": […], "out": "…", "options": {…}, "at": 7, "action": "kill"}'

Events are what touches a path in the dataset's folder (open, rename, remove, mkdir, as Python's audit hooks see them)
and every report of progress; other threads are anywhere when one comes. At event number `at` the process kills itself
with SIGKILL, or says "paused" and waits for a line. One that ends prints how many events there were.
"""

import json
import os
import signal
import sys
import threading
from pathlib import Path

from dlrm_scale.data.preprocess.preprocess import PreprocessOptions, preprocess

__all__ = ["main"]


def main() -> None:
    """Do what the argument says."""
    request = json.loads(sys.argv[1])
    out, at, kills = request["out"], request["at"], request["action"] == "kill"
    lock, events = threading.Lock(), 0

    def happened() -> None:
        nonlocal events
        with lock:
            events += 1
            now = events == at
        if now and kills:
            os.kill(os.getpid(), signal.SIGKILL)
        if now:
            sys.stdout.write("paused\n")
            sys.stdout.flush()
            sys.stdin.readline()

    def hook(event: str, arguments: tuple[object, ...]) -> None:
        if event.startswith(("open", "os.", "shutil.")) and any(str(found).startswith(out) for found in arguments):
            happened()

    sys.addaudithook(hook)
    inputs = [Path(path) for path in request["inputs"]]
    preprocess(inputs, Path(out), PreprocessOptions(**request["options"]), on_progress=lambda _: happened())
    sys.stdout.write(f"{events}\n")


if __name__ == "__main__":
    main()
