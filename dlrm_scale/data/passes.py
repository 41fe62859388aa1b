"""Runs one piece of work for each input file, several at a time, with progress and one first error.

Threads suffice: the parser, the vocabularies, decompression and writing all release the GIL.
"""

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import dataclass
from typing import TypeVar

from dlrm_scale.data.inputs import InputFile

__all__ = ["OnProgress", "PassProgress", "ProgressReport", "run_over_files"]

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True, slots=True)
class ProgressReport:
    """How far a pass over the input is.

    Attributes:
        name: what the pass does.
        step: its number, from 1.
        steps: number of passes.
        done_bytes: stored input bytes read.
        total_bytes: stored input bytes of all files.
        rows: rows parsed; 0 in a pass that counts lines.
        bad_rows: rows left out.
    """

    name: str
    step: int
    steps: int
    done_bytes: int
    total_bytes: int
    rows: int
    bad_rows: int


OnProgress = Callable[[ProgressReport], None]


class _StoppedError(Exception):
    """Another file failed."""


class PassProgress:
    """Adds up what the threads of one pass have done.

    Args:
        name: what the pass does.
        step: its number, from 1.
        steps: number of passes.
        files: all input files.
        on_progress: called after each block, from the threads, one at a time; None: nobody is told.
    """

    def __init__(
        self, name: str, step: int, steps: int, files: Sequence[InputFile], on_progress: OnProgress | None
    ) -> None:
        self._about = (name, step, steps)
        self._total_bytes = sum(file.size_bytes for file in files)
        self._done_bytes = [0] * len(files)
        self._on_progress = on_progress
        self._lock = threading.Lock()
        self._stop = threading.Event()
        self.rows = 0
        self.bad_rows = 0

    def tick(self, index: int, position_bytes: int, *, rows: int = 0, bad_rows: int = 0) -> None:
        """Report that file `index` has been read up to a position, with that many more rows."""
        if self._stop.is_set():
            raise _StoppedError
        with self._lock:
            self._done_bytes[index] = position_bytes
            self.rows += rows
            self.bad_rows += bad_rows
            if self._on_progress is not None:
                name, step, steps = self._about
                self._on_progress(
                    ProgressReport(
                        name=name,
                        step=step,
                        steps=steps,
                        done_bytes=sum(self._done_bytes),
                        total_bytes=self._total_bytes,
                        rows=self.rows,
                        bad_rows=self.bad_rows,
                    )
                )

    def stop(self) -> None:
        """Make every thread end at its next tick."""
        self._stop.set()


def run_over_files(work: Callable[[int], T], files: int, *, jobs: int, progress: PassProgress) -> list[T]:
    """Call `work(i)` for each file in up to `jobs` threads.

    Returns:
        The results in file order.

    Raises:
        Exception: the error of the first file, in order, that failed by itself; the others are stopped.
    """
    with ThreadPoolExecutor(max_workers=jobs, thread_name_prefix="preprocess") as pool:
        futures = [pool.submit(work, i) for i in range(files)]
        try:
            wait(futures, return_when=FIRST_EXCEPTION)
        finally:
            # Also on KeyboardInterrupt; harmless when all are done.
            progress.stop()
            for future in futures:
                future.cancel()
    errors = [future.exception() for future in futures if not future.cancelled()]
    for error in errors:
        if error is not None and not isinstance(error, _StoppedError):
            raise error
    return [future.result() for future in futures]
